"""DTensor shards of a matrix and the whole of it: which part each tensor-parallel column holds. Pure.

The sharding is DTensor's own (``torch.chunk``): column t holds ``ceil(length / T)`` elements of the sharded dimension
from ``t * ceil(length / T)`` on, the last ones fewer or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def chunk_bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """(start, size) of each of ``parts`` chunks of ``length`` elements."""
    step = -(-length // parts)
    starts = [min(index * step, length) for index in range(parts)]
    return [(start, min(start + step, length) - start) for start in starts]


def sharded_dim(fqn: str, param: torch.Tensor, tp_mesh: DeviceMesh | None) -> int | None:
    """The dimension of ``param`` that ``tp_mesh`` shards; ``None`` when every column holds all of it.

    Raises:
        ValueError: a DTensor on another mesh, or one placed in a way an owner could not undo.
    """
    if not isinstance(param, DTensor):
        return None
    if tp_mesh is None or param.device_mesh != tp_mesh:
        raise ValueError(f"{fqn} is a DTensor over {param.device_mesh}; dedicate it with that mesh as tp_mesh")
    (placement,) = param.placements
    if placement.is_replicate():
        return None
    if not placement.is_shard():
        raise ValueError(f"{fqn} has placement {placement} on the tensor-parallel mesh; only Shard and Replicate work")
    return placement.dim % param.ndim


def local_shape(shape: Sequence[int], dim: int | None, column: int, columns: int) -> tuple[int, ...]:
    """Shape of what ``column`` holds of a tensor of ``shape``."""
    if dim is None:
        return tuple(shape)
    return (*shape[:dim], chunk_bounds(shape[dim], columns)[column][1], *shape[dim + 1 :])


def local_part(full: torch.Tensor, dim: int | None, column: int, columns: int) -> torch.Tensor:
    """View of what ``column`` holds of ``full``."""
    if dim is None:
        return full
    start, size = chunk_bounds(full.shape[dim], columns)[column]
    return full.narrow(dim, start, size)
