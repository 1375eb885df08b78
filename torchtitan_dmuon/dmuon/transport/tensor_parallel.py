"""How tensor parallelism has placed a parameter."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def sharded_dim(fqn: str, param: torch.Tensor, tp_mesh: DeviceMesh | None) -> int | None:
    """The dimension of ``param`` that ``tp_mesh`` shards; ``None`` when every column holds the whole parameter.

    Raises:
        ValueError: a DTensor on another mesh, or one whose placement an owner cannot undo.
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
