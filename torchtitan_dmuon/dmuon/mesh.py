"""Where this rank stands in the data-parallel mesh, and the process groups of the lanes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .fsdp2 import group_like
from .lanes import Lane

GROUP_POLICIES = ("isolated", "shared")


@dataclass(frozen=True)
class Layout:
    """The ranks among which matrices are owned.

    Attributes:
        device: where masters, buffers and gradients live.
        ranks: global rank of every slot.
        slot: this rank's position in ``ranks``.
    """

    device: torch.device
    ranks: tuple[int, ...]
    slot: int

    @property
    def num_slots(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Lanes:
    """One lane per purpose: weights go out on ``unshard``, gradients come in on ``reduce``."""

    unshard: Lane
    reduce: Lane


def build_layout(mesh: DeviceMesh) -> Layout:
    """Read a 1-D mesh.

    Raises:
        ValueError: not a 1-D mesh, or this rank is not in it.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh must be 1-D (the dimension parameters are sharded over), got {mesh}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}")
    if mesh.device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device(mesh.device_type)
    return Layout(device, tuple(mesh.mesh.tolist()), mesh.get_local_rank())


def build_lanes(mesh: DeviceMesh, layout: Layout, policy: str) -> Lanes:
    """Collective over ``mesh`` when ``policy`` is ``isolated``: own groups with the same ranks, timeout and options,
    so that nothing the trainer sends on the mesh's group can get between. ``shared`` uses the mesh's group.

    Raises:
        ValueError: unknown policy.
    """
    if policy not in GROUP_POLICIES:
        raise ValueError(f"process_group_policy must be one of {GROUP_POLICIES}, got {policy!r}")
    group = mesh.get_group()
    if policy == "shared" or layout.num_slots == 1:
        return Lanes(Lane("unshard", group, layout.device), Lane("reduce", group, layout.device))
    return Lanes(
        *(
            Lane(name, group_like(group, layout.device, f"dmuon_{name}"), layout.device)
            for name in ("unshard", "reduce")
        )
    )
