"""Blocks: a fused weight seen as the matrices it holds.

A projection that computes several things at once (query, key and value; gate and up) is several matrices stored
together, and Newton-Schulz, the scale and NorMuon's statistics are of each by itself. A block says which rows (or, for
weights stored [in, out], which columns) are one of them. Pure; which weights are fused is in ``fused.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Block:
    """``groups`` runs of ``size`` rows (or columns), the first at ``start``, one every ``period``. A head-interleaved
    query is one block of as many groups as there are heads."""

    start: int
    size: int
    groups: int = 1
    period: int = 0

    def __len__(self) -> int:
        return self.groups * self.size

    def indices(self) -> list[int]:
        """The rows (or columns), in the block's order."""
        runs = (self.start + group * self.period for group in range(self.groups))
        return [first + offset for first in runs for offset in range(self.size)]


@dataclass(frozen=True)
class BlockSplit:
    """A matrix [m, n] (or each of a stack [..., m, n]) cut along its rows (``dim`` 0) or columns (``dim`` 1)."""

    blocks: tuple[Block, ...]
    dim: int = ROWS

    def check(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless every row (or column) of a matrix of this shape is in exactly one block."""
        length = shape[-2:][self.dim]
        told = f"{'columns' if self.dim else 'rows'} of a matrix {list(shape)}"
        seen = sorted(index for block in self.blocks for index in block.indices())
        if seen != list(range(length)):
            raise ValueError(f"its blocks hold {len(seen)} of the {length} {told}; each must be in exactly one block")

    def shape_of(self, block: Block, shape: Sequence[int]) -> tuple[int, int]:
        """[m, n] of one block of a matrix of this shape."""
        m, n = shape[-2:]
        return (m, len(block)) if self.dim == COLUMNS else (len(block), n)

    def __str__(self) -> str:
        return f"{'x'.join(str(len(block)) for block in self.blocks)} {'columns' if self.dim else 'rows'}"


def split_sizes(sizes: Sequence[int], dim: int = ROWS) -> BlockSplit:
    """Consecutive blocks of these sizes: ``[query | key | value]``."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return BlockSplit(tuple(Block(start, size) for start, size in zip(starts, sizes, strict=True)), dim)


def split_equal(parts: int, dim: int = ROWS) -> Callable[[tuple[int, ...]], BlockSplit]:
    """A rule: ``parts`` consecutive blocks of one size, as ``[gate | up]``, or one block a head."""

    def rule(shape: tuple[int, ...]) -> BlockSplit:
        length = shape[-2:][dim]
        if length % parts:
            raise ValueError(f"{length} {'columns' if dim else 'rows'} do not split into {parts} equal blocks")
        return split_sizes([length // parts] * parts, dim)

    return rule


def split_heads(head_dim: int, dim: int = ROWS) -> Callable[[tuple[int, ...]], BlockSplit]:
    """A rule: one block for each head of ``head_dim`` rows (or columns)."""

    def rule(shape: tuple[int, ...]) -> BlockSplit:
        length = shape[-2:][dim]
        if length % head_dim:
            raise ValueError(f"{length} {'columns' if dim else 'rows'} are no multiple of head_dim {head_dim}")
        return split_sizes([head_dim] * (length // head_dim), dim)

    return rule


def split_interleaved(groups: int, sizes: Sequence[int], dim: int = ROWS) -> BlockSplit:
    """Blocks whose parts alternate: ``groups`` times ``sizes[0]`` rows of the first block, ``sizes[1]`` of the second,
    and so on, as ``[heads, (query, key, value), head_dim]``."""
    period = sum(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return BlockSplit(tuple(Block(start, size, groups, period) for start, size in zip(starts, sizes, strict=True)), dim)


def take(matrices: torch.Tensor, block: Block, dim: int) -> torch.Tensor:
    """The block of each of ``matrices`` [B, m, n]: a view where it is one run, a copy elsewhere."""
    if block.groups == 1:
        return matrices.narrow(1 + dim, block.start, block.size)
    return matrices.index_select(1 + dim, index_of(block, matrices.device))


def put(matrices: torch.Tensor, block: Block, dim: int, values: torch.Tensor) -> None:
    """Write back what :func:`take` gave; nothing to do where that was a view."""
    if block.groups > 1:
        matrices.index_copy_(1 + dim, index_of(block, matrices.device), values)


def index_of(block: Block, device: torch.device) -> torch.Tensor:
    """:meth:`Block.indices` as int64 on ``device``, made there: the host does not wait for a copy."""
    runs = torch.arange(block.groups, device=device) * block.period + block.start
    return (runs[:, None] + torch.arange(block.size, device=device)).flatten()
