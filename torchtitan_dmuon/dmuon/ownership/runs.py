"""How the first dimension of a parameter is cut into the runs that ranks own, and what owning a run costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .assignment import MatrixCost
from .spec import ParamSpec, chunk_bounds


@dataclass(frozen=True)
class Run:
    """Indices ``start`` to ``stop`` of the first dimension, with one owner: the rank at ``slot`` where the layout fixes
    the owner; ``None`` where the assignment chooses it."""

    start: int
    stop: int
    slot: int | None = None

    def name_in(self, spec: ParamSpec) -> str:
        """The run's name in an assignment: ``layers.0.experts.w1[4:8]``, or the parameter's where it is all of it."""
        whole = not spec.shape or (self.start, self.stop) == (0, spec.shape[0])
        return spec.fqn if whole else f"{spec.fqn}[{self.start}:{self.stop}]"


def runs_of(spec: ParamSpec, tp_dim: int | None, grid_shape: tuple[int, int, int]) -> list[Run]:
    """The runs of one parameter: itself, even runs of the experts of a stack, or the rows that all ranks share.
    ``tp_dim`` is the dimension that tensor parallelism shards; ``grid_shape`` is (replicate, shard, tp). Raises
    ValueError for a stack whose experts tensor parallelism splits."""
    if spec.route == "sharded_adamw":
        return _shared_rows(spec.shape[0], tp_dim, grid_shape)
    if spec.route == "muon" and len(spec.shape) == 3:
        experts = spec.shape[0]
        if tp_dim == 0:
            raise ValueError(f"{spec.fqn}: tensor parallelism splits the experts themselves; shard another dimension")
        parts = min(experts, math.prod(grid_shape))
        return [Run(experts * part // parts, experts * (part + 1) // parts) for part in range(parts)]
    return [Run(0, spec.shape[0] if spec.shape else 1)]


def _shared_rows(rows: int, tp_dim: int | None, grid_shape: tuple[int, int, int]) -> list[Run]:
    """Equal runs of ``rows``, one for each slot; the last ones are shorter or missing.

    The runs of one shard follow each other: every shard then sends one equal part of a unit's weights. Where tensor
    parallelism cuts the rows, each column's ranks own the column's rows, so that all shards of the column send.
    """
    replicas, shards, columns = grid_shape  # slots are counted replicate-major
    slots = [
        [(replica * shards + shard) * columns + tp for shard in range(shards) for replica in range(replicas)]
        for tp in range(columns)
    ]
    if tp_dim == 0:
        groups = [(*chunk_bounds(rows, columns, tp), slots[tp]) for tp in range(columns)]
    else:
        groups = [(0, rows, [slot for place in zip(*slots, strict=True) for slot in place])]
    runs = []
    for first, size, owners in groups:
        for index, slot in enumerate(owners):
            start, count = chunk_bounds(size, len(owners), index)
            if count:
                runs.append(Run(first + start, first + start + count, slot))
    return runs


def cost_of(spec: ParamSpec, unit: str, run: Run, matrix_flops: Callable[[int, int], int]) -> MatrixCost:
    """The cost of owning a run. ``matrix_flops(m, n)`` is of the update of one matrix; AdamW costs memory only."""
    count, flops = run.stop - run.start, 0
    if spec.route == "muon" and spec.trainable:
        blocks = spec.blocks
        shapes = [spec.shape[-2:]] if blocks is None else [blocks.shape_of(each, spec.shape) for each in blocks.blocks]
        flops = sum(matrix_flops(*shape) for shape in shapes) * (count if len(spec.shape) == 3 else 1)
    return MatrixCost(run.name_in(spec), unit, flops, math.prod((count, *spec.shape[1:])) * spec.master_dtype.itemsize)
