"""Ordered asynchronous channels between ranks.

A lane is one process group that serves one purpose. Every rank launches the same collectives on it in the same order,
whatever else the trainer sends elsewhere. Collectives are asynchronous. On CUDA a launch waits, on the device, for the
work queued so far on the current stream, and ``Pending.wait`` makes the current stream wait for the collective. On the
CPU ``Pending.wait`` blocks the host.

``broadcast`` and ``reduce`` carry segments of several owners at once. NCCL does this by one all-gather or
reduce-scatter of uneven parts, which uses both directions of every link and reads and writes the owners' own buffers.
Other backends have no uneven parts: there each segment is one broadcast or one reduce, and buffers are copied.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .grid import Grid
from .torch_private import backend_name, group_like

Segment = tuple[torch.Tensor, int]  # a tensor, and the rank within the lane that sends (or receives) it

GROUP_POLICIES = ("isolated", "shared")
LANES = ("unshard", "reduce", "reduce_replicate", "reduce_tp", "publish_replicate", "publish_tp")


class Pending:
    """Collectives in flight. ``wait`` may be called more than once.

    Args:
        works: the collectives.
        tensors: buffers that the collectives read and write; they are kept alive until ``wait``.
        copies: (to, from) pairs that ``wait`` copies once the collectives have finished.
    """

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        tensors: Iterable[torch.Tensor] = (),
        copies: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self._works = list(works)
        self._tensors = list(tensors)
        self._copies = list(copies)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for tensor in self._tensors:
            # The allocator knows only the stream that made a tensor; the current one uses it from here on.
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream())
        for to, origin in self._copies:
            to.copy_(origin)
        self._works, self._tensors, self._copies = [], [], []


class Lane:
    """One purpose, one process group.

    Args:
        name: ``unshard``, ``reduce``, ...; used in messages.
        group: its members; this rank is one of them.
        device: where the tensors live that the lane carries.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name = name
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._uneven = backend_name(group, device) == "nccl"

    def broadcast(self, segments: Iterable[Segment], own: Sequence[torch.Tensor] | None = None) -> Pending:
        """Collective. Rank r sends every segment ``(tensor, r)``; the tensor is filled on all other ranks. All ranks
        pass the same ranks and sizes in the same order. This rank's values are in ``own``, by default in its segments.
        """
        segments, mine, own = self._with_own(segments, own)
        if self.size > 1 and self._uneven:
            works = [
                dist.all_gather(parts, part, group=self.group, async_op=True)
                if whole is None
                else dist.all_gather_into_tensor(whole, part, group=self.group, async_op=True)
                for parts, whole, part in self._rounds(segments, own)
            ]
            return Pending(works, own)
        for to, origin in zip(mine, own, strict=True):
            if to is not origin:
                to.copy_(origin)
        sent = [(t, rank) for t, rank in segments if t.numel()] if self.size > 1 else []
        return Pending([dist.broadcast(t, group=self.group, group_src=rank, async_op=True) for t, rank in sent])

    def reduce(self, segments: Iterable[Segment], own: Sequence[torch.Tensor] | None = None) -> Pending:
        """Collective. Rank r receives the sum over the ranks of every segment ``(tensor, r)``, in ``own`` or by default
        in the segment. All other tensors are undefined afterwards. Ranks and order as in :meth:`broadcast`."""
        segments, mine, own = self._with_own(segments, own)
        used = [*own, *(tensor for tensor, _ in segments)]
        if self.size > 1 and self._uneven:
            works = [
                dist.reduce_scatter(part, parts, group=self.group, async_op=True)
                if whole is None
                else dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True)
                for parts, whole, part in self._rounds(segments, own)
            ]
            return Pending(works, used)
        sent = [(t, rank) for t, rank in segments if t.numel()] if self.size > 1 else []
        works = [dist.reduce(t, group=self.group, group_dst=rank, async_op=True) for t, rank in sent]
        return Pending(works, used, [(to, t) for to, t in zip(own, mine, strict=True) if to is not t])

    def _with_own(
        self, segments: Iterable[Segment], own: Sequence[torch.Tensor] | None
    ) -> tuple[list[Segment], list[torch.Tensor], Sequence[torch.Tensor]]:
        """(the segments, this rank's among them, ``own`` or its default)."""
        segments = list(segments)
        mine = [tensor for tensor, rank in segments if rank == self.rank]
        return segments, mine, mine if own is None else own

    def _rounds(
        self, segments: Sequence[Segment], own: Sequence[torch.Tensor]
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]]:
        """(one part of every rank, the parts as one view or None, this rank's part of ``own``) for each collective.

        A rank with three segments needs three rounds; a rank without a segment left gives an empty part.
        """
        of_rank: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor, rank in segments:
            of_rank[rank].append(tensor)
        for index in range(max(map(len, of_rank.values()), default=0)):
            empty = segments[0][0].new_empty(0)
            parts = [of_rank[rank][index] if index < len(of_rank[rank]) else empty for rank in range(self.size)]
            if any(part.numel() for part in parts):
                yield _unlike(parts), _adjacent(parts), own[index] if index < len(own) else empty

    def exchange(
        self, output: torch.Tensor, output_sizes: list[int], sent: torch.Tensor, sent_sizes: list[int]
    ) -> Pending:
        """Collective. Rank i receives the i-th run of ``sent_sizes`` elements of ``sent``; the elements that come from
        rank i fill the i-th run of ``output_sizes`` elements of ``output``."""
        work = dist.all_to_all_single(output, sent, output_sizes, sent_sizes, group=self.group, async_op=True)
        return Pending([work], (sent,))

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Collective, in place; ordered after the earlier launches on this lane. Returns ``tensor``."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view over parts of one size that follow each other in one storage, else None. All ranks decide alike, because
    offsets decide, and not addresses."""
    first, size = parts[0], parts[0].numel()
    storage = first.untyped_storage().data_ptr()
    for index, part in enumerate(parts):
        place = (part.numel(), part.untyped_storage().data_ptr(), part.storage_offset())
        if place != (size, storage, first.storage_offset() + index * size):
            return None
    return first.as_strided((size * len(parts),), (1,))


def _unlike(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts, the first with another shape than the rest. PyTorch copies parts of one shape into a tensor of its
    own, and nobody could keep that tensor alive until the waiting stream has passed the collective."""
    return [parts[0].view(1, parts[0].numel()), *parts[1:]]


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
