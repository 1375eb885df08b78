"""The replicate x shard x tp grid of ranks, and the lanes between them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .lane import Lane
from .torch_private import group_like

GROUP_POLICIES = ("isolated", "shared")
LANES = ("unshard", "reduce", "reduce_replicate", "reduce_tp", "publish_replicate", "publish_tp")


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


@dataclass
class Lanes:
    """One lane for each purpose; ``None`` where the mesh has no such dimension. Weights travel over publish_tp,
    publish_replicate and unshard, gradients over reduce, reduce_replicate and reduce_tp."""

    unshard: Lane
    reduce: Lane
    reduce_replicate: Lane | None = None
    publish_replicate: Lane | None = None
    reduce_tp: Lane | None = None
    publish_tp: Lane | None = None
    _streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)

    @property
    def all(self) -> list[Lane]:
        return [lane for name, lane in vars(self).items() if name != "_streams" and lane is not None]

    @property
    def covering(self) -> list[Lane]:
        """Lanes whose all-reduces, one after the other, cover every slot once."""
        return [lane for lane in (self.reduce, self.reduce_replicate, self.reduce_tp) if lane is not None]

    @property
    def staged(self) -> bool:
        """Gradients and weights travel in more than one stage: there are replicas or tensor-parallel columns."""
        return self.reduce_replicate is not None or self.reduce_tp is not None

    @contextlib.contextmanager
    def side_stream(self, name: str) -> Iterator[None]:
        """Run the device work inside on a stream of its own, which first waits for the work that is queued now. Waiting
        for a collective there does not hold up computation. On the CPU this changes nothing."""
        if self.unshard.device.type != "cuda":
            yield
            return
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.unshard.device)
        stream = self._streams[name]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self, name: str) -> None:
        """Make the current stream wait for everything queued on the side stream ``name``."""
        if name in self._streams:
            torch.cuda.current_stream().wait_stream(self._streams[name])


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


def build_lanes(
    mesh: DeviceMesh,
    replicate_mesh: DeviceMesh | None,
    tp_mesh: DeviceMesh | None,
    grid: Grid,
    policy: str,
) -> Lanes:
    """The lanes over the meshes' ranks. With ``policy`` ``isolated`` (collective) every lane gets a process group of
    its own, with the ranks, timeout and options of the mesh's, so that nothing that the trainer sends can come between.
    ``shared`` uses the meshes' groups."""

    def lane(name: str, part: DeviceMesh | None) -> Lane | None:
        if part is None or (part is not mesh and part.size() == 1):
            return None
        group = part.get_group()
        if policy == "isolated" and part.size() > 1:
            group = group_like(group, grid.device, f"dmuon_{name}")
        return Lane(name, group, grid.device)

    return Lanes(
        unshard=lane("unshard", mesh),
        reduce=lane("reduce", mesh),
        reduce_replicate=lane("reduce_replicate", replicate_mesh),
        publish_replicate=lane("publish_replicate", replicate_mesh),
        reduce_tp=lane("reduce_tp", tp_mesh),
        publish_tp=lane("publish_tp", tp_mesh),
    )
