"""A fused weight (query, key and value; gate and up) seen as the matrices it holds: each block is the rows (of a weight
stored [in, out], the columns) of one matrix, which gets its own Newton-Schulz, scale and NorMuon statistics. Pure;
``fused_weights.py`` knows which weights of which models are fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .spec import AXIS_NAMES, ROWS, Block, BlockSplit


def split_sizes(sizes: Sequence[int], dim: int = ROWS) -> BlockSplit:
    """Consecutive blocks of these sizes: ``split_sizes((768, 256, 256))`` for [query, key, value]."""
    return split_interleaved(1, sizes, dim)


def split_equal(parts: int, dim: int = ROWS) -> Callable[[tuple[int, ...]], BlockSplit]:
    """A function of the shape: ``parts`` consecutive blocks of one size, as 2 for [gate, up]."""
    problem = f"do not split into {parts} equal blocks"
    return lambda shape: split_sizes([_divide(shape, dim, parts, problem)] * parts, dim)


def split_heads(head_dim: int, dim: int = ROWS) -> Callable[[tuple[int, ...]], BlockSplit]:
    """A function of the shape: one block for each head of ``head_dim`` rows (or columns)."""
    problem = f"are no multiple of head_dim {head_dim}"
    return lambda shape: split_sizes([head_dim] * _divide(shape, dim, head_dim, problem), dim)


def _divide(shape: tuple[int, ...], dim: int, divisor: int, problem: str) -> int:
    length = shape[-2:][dim]
    if length % divisor:
        raise ValueError(f"{length} {AXIS_NAMES[dim]} {problem}")
    return length // divisor


def split_interleaved(groups: int, sizes: Sequence[int], dim: int = ROWS) -> BlockSplit:
    """Blocks whose parts alternate: ``groups`` times ``sizes[0]`` rows of the first block, ``sizes[1]`` of the second,
    and so on. ``split_interleaved(12, (64, 64, 64))`` is for 12 heads of [query, key, value]."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    blocks = (Block(start, size, groups, sum(sizes)) for start, size in zip(starts, sizes, strict=True))
    return BlockSplit(tuple(blocks), dim)


def join_thin(split: BlockSplit, least: int) -> BlockSplit:
    """``split`` with a block of fewer than ``least`` rows (or columns) joined to the one before it, or after it."""
    joined: list[Block] = []
    for block in split.blocks:
        if joined and min(len(joined[-1]), len(block)) < least:
            joined[-1] = replace(joined[-1], size=joined[-1].size + block.size)
        else:
            joined.append(block)
    return BlockSplit(tuple(joined), split.dim)


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
