"""The replicate x shard x tp grid of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Grid:
    """The ranks among which weights are owned: a grid of slots, counted replicate-major. In a (2, 4, 1) grid slot 5 is
    at replicate 1, shard 1, tp 0.

    Attributes:
        device: where masters, buffers and gradients live.
        shape: (replicate, shard, tp) sizes; 1 where the mesh has no such dimension.
        coordinate: this rank's place in the grid.
        ranks: global rank of every slot.
    """

    device: torch.device
    shape: tuple[int, int, int]
    coordinate: tuple[int, int, int]
    ranks: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return math.prod(self.shape)

    @property
    def slot(self) -> int:
        """This rank's slot."""
        return self.slot_at(*self.coordinate)

    def slot_at(self, replicate: int, shard: int, tp: int) -> int:
        return (replicate * self.shape[1] + shard) * self.shape[2] + tp

    def coordinate_of(self, slot: int) -> tuple[int, int, int]:
        rest, tp = divmod(slot, self.shape[2])
        replicate, shard = divmod(rest, self.shape[1])
        return replicate, shard, tp


def build_grid(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> Grid:
    """The grid of the 1-D meshes. Collective (small objects) when there is more than one mesh.

    Raises:
        ValueError: a mesh that is not 1-D, does not hold this rank, or is on another kind of device.
    """
    for name, part in (("mesh", mesh), ("replicate_mesh", replicate_mesh), ("tp_mesh", tp_mesh)):
        if part is None:
            continue
        if part.ndim != 1:
            raise ValueError(f"{name} must be 1-D, got {part}; pass one dimension, as in mesh['shard']")
        if part.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in {name} {part}")
        if part.device_type != mesh.device_type:
            raise ValueError(f"{name} is on {part.device_type}, mesh on {mesh.device_type}")
    cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
    parts = (replicate_mesh, mesh, tp_mesh)
    shape = tuple(1 if part is None else part.size() for part in parts)
    coordinate = tuple(0 if part is None else part.get_local_rank() for part in parts)
    ranks = [dist.get_rank()]
    for part in reversed(parts):
        if part is not None:
            gathered = [ranks] * part.size()
            if len(ranks) == 1:
                gathered = [[rank] for rank in part.mesh.tolist()]
            else:
                dist.all_gather_object(gathered, ranks, group=part.get_group())
            ranks = [rank for row in gathered for rank in row]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"mesh, replicate_mesh and tp_mesh overlap: their ranks are {ranks}")
    return Grid(device, shape, coordinate, tuple(ranks))
