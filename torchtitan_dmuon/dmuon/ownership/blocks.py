"""Blocks: a fused weight seen as the matrices it holds.

A projection that computes several things at once (query, key and value; gate and up) stores several matrices in one
weight. Each of them gets its own Newton-Schulz, scale and NorMuon statistics. A block names the rows (of a weight
stored [in, out], the columns) of one of them. Pure; ``fused_weights.py`` knows which weights of which models are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROWS, COLUMNS = 0, 1
_WORDS = ("rows", "columns")


@dataclass(frozen=True)
class Block:
    """One matrix of a fused weight: ``groups`` runs of ``size`` rows (or columns), the first at ``start``, one every
    ``period``. Where 12 heads are stored as [query 64, key 64], all queries are ``Block(0, 64, 12, 128)``."""

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
        told = f"{_WORDS[self.dim]} of a matrix {list(shape)}"
        seen = sorted(index for block in self.blocks for index in block.indices())
        if seen != list(range(length)):
            raise ValueError(f"its blocks hold {len(seen)} of the {length} {told}; each must be in exactly one block")

    def shape_of(self, block: Block, shape: Sequence[int]) -> tuple[int, int]:
        """[m, n] of one block of a matrix of this shape."""
        m, n = shape[-2:]
        return (m, len(block)) if self.dim == COLUMNS else (len(block), n)

    def __str__(self) -> str:
        return f"{'x'.join(str(len(block)) for block in self.blocks)} {_WORDS[self.dim]}"


@dataclass(frozen=True)
class MatrixLayout:
    """How a weight holds its matrices.

    Attributes:
        transposed: stored [in, out], as ``Conv1D``'s; else [out, in], as ``nn.Linear``'s.
        blocks: the matrices of a fused weight; ``None`` for one.
    """

    transposed: bool = False
    blocks: BlockSplit | None = None


def split_sizes(sizes: Sequence[int], dim: int = ROWS) -> BlockSplit:
    """Consecutive blocks of these sizes: ``split_sizes((768, 256, 256))`` for [query, key, value]."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return BlockSplit(tuple(Block(start, size) for start, size in zip(starts, sizes, strict=True)), dim)


def split_equal(parts: int, dim: int = ROWS) -> Callable[[tuple[int, ...]], BlockSplit]:
    """A function of the shape: ``parts`` consecutive blocks of one size, as 2 for [gate, up]."""

    def split(shape: tuple[int, ...]) -> BlockSplit:
        size, rest = divmod(shape[-2:][dim], parts)
        if rest:
            raise ValueError(f"{shape[-2:][dim]} {_WORDS[dim]} do not split into {parts} equal blocks")
        return split_sizes([size] * parts, dim)

    return split


def split_heads(head_dim: int, dim: int = ROWS) -> Callable[[tuple[int, ...]], BlockSplit]:
    """A function of the shape: one block for each head of ``head_dim`` rows (or columns)."""

    def split(shape: tuple[int, ...]) -> BlockSplit:
        heads, rest = divmod(shape[-2:][dim], head_dim)
        if rest:
            raise ValueError(f"{shape[-2:][dim]} {_WORDS[dim]} are no multiple of head_dim {head_dim}")
        return split_sizes([head_dim] * heads, dim)

    return split


def split_interleaved(groups: int, sizes: Sequence[int], dim: int = ROWS) -> BlockSplit:
    """Blocks whose parts alternate: ``groups`` times ``sizes[0]`` rows of the first block, ``sizes[1]`` of the second,
    and so on. ``split_interleaved(12, (64, 64, 64))`` is for 12 heads of [query, key, value]."""
    period = sum(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return BlockSplit(tuple(Block(start, size, groups, period) for start, size in zip(starts, sizes, strict=True)), dim)


def take(matrices: torch.Tensor, block: Block, dim: int) -> torch.Tensor:
    """The block of each of ``matrices`` [B, m, n]: a view where the block is one run, else a copy."""
    if block.groups == 1:
        return matrices.narrow(1 + dim, block.start, block.size)
    return matrices.index_select(1 + dim, index_of(block, matrices.device))


def put(matrices: torch.Tensor, block: Block, dim: int, values: torch.Tensor) -> None:
    """Write back the result of :func:`take`; a view needs no writing."""
    if block.groups > 1:
        matrices.index_copy_(1 + dim, index_of(block, matrices.device), values)


def index_of(block: Block, device: torch.device) -> torch.Tensor:
    """:meth:`Block.indices` as int64 on ``device``, computed there: the host waits for no copy."""
    runs = torch.arange(block.groups, device=device) * block.period + block.start
    return (runs[:, None] + torch.arange(block.size, device=device)).flatten()
