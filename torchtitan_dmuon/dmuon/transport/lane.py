"""Ordered asynchronous channels between ranks.

A lane is one process group used for one purpose, so that everything on it happens in the order in which it was
launched, on every rank, whatever else the trainer sends elsewhere. Collectives are asynchronous: on CUDA a launch
waits (on the device) for the work queued so far on the current stream and ``wait`` makes the current stream wait; on
CPU ``wait`` blocks the host.

What goes to or comes from several owners at once (``broadcast``, ``reduce``) is one all-gather or reduce-scatter of
uneven parts over NCCL, which so uses both directions of every link and reads and writes the owners' buffers itself.
Other backends have no uneven parts: there it is one broadcast or reduce after the other, and copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .torch_private import backend_name

Segment = tuple[torch.Tensor, int]  # and the rank, within the lane, that it comes from or goes to


class Pending:
    """Collectives in flight. ``wait`` may be called more than once.

    Args:
        works: the collectives.
        tensors: what they read and write, to be kept until they have finished.
        copies: (to, from), made when they have finished.
    """

    def __init__(
        self,
        works: list[dist.Work],
        tensors: Iterable[torch.Tensor] = (),
        copies: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self._works = works
        self._tensors = list(tensors)
        self._copies = list(copies)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for tensor in self._tensors:
            if tensor.is_cuda:  # it may have been made on another stream than this one, which knows when they are done
                tensor.record_stream(torch.cuda.current_stream())
        for to, origin in self._copies:
            to.copy_(origin)
        self._works, self._tensors, self._copies = [], [], []


@dataclass(frozen=True)
class Transfer:
    """One collective as it is planned.

    Attributes:
        lane: the name of its lane.
        payload_bytes: size of the buffer handed to it: the larger one where input and output differ, and what is sent
            in an exchange.
        sent_bytes: what leaves a rank. Of an exchange, this rank; else the average over the group.
    """

    lane: str
    payload_bytes: int
    sent_bytes: float


class Lane:
    """One purpose, one process group.

    Args:
        name: ``unshard``, ``reduce``, ...; used in messages.
        group: its members, this rank among them.
        device: where the tensors it carries live.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name = name
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._uneven = backend_name(group, device) == "nccl"

    def broadcast(self, segments: Iterable[Segment], own: Sequence[torch.Tensor] | None = None) -> Pending:
        """Collective. Each ``(tensor, source)`` is filled from the rank ``source`` of this group: there from the next
        tensor of ``own``, or it holds its values already."""
        segments, held, own = self._with_own(segments, own)
        if self.size > 1 and self._uneven:
            return Pending(
                [
                    dist.all_gather(parts, part, group=self.group, async_op=True)
                    if whole is None
                    else dist.all_gather_into_tensor(whole, part, group=self.group, async_op=True)
                    for parts, whole, part in self._rounds(segments, own)
                ],
                own,
            )
        for to, origin in zip(held, own, strict=True):
            if to is not origin:
                to.copy_(origin)
        if self.size == 1:
            return Pending([])
        return Pending(
            [dist.broadcast(t, group=self.group, group_src=rank, async_op=True) for t, rank in segments if t.numel()]
        )

    def reduce(self, segments: Iterable[Segment], own: Sequence[torch.Tensor] | None = None) -> Pending:
        """Collective. Each ``(tensor, destination)`` is summed onto the rank ``destination`` of this group: there into
        the next tensor of ``own``, or in place. All other tensors are undefined afterwards."""
        segments, held, own = self._with_own(segments, own)
        tensors = [*own, *(tensor for tensor, _ in segments)]
        if self.size > 1 and self._uneven:
            return Pending(
                [
                    dist.reduce_scatter(part, parts, group=self.group, async_op=True)
                    if whole is None
                    else dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True)
                    for parts, whole, part in self._rounds(segments, own)
                ],
                tensors,
            )
        works = []
        if self.size > 1:
            works = [dist.reduce(t, group=self.group, group_dst=r, async_op=True) for t, r in segments if t.numel()]
        copies = [(to, origin) for to, origin in zip(own, held, strict=True) if to is not origin]
        return Pending(works, tensors, copies)

    def _with_own(
        self, segments: Iterable[Segment], own: Sequence[torch.Tensor] | None
    ) -> tuple[list[Segment], list[torch.Tensor], Sequence[torch.Tensor]]:
        """(the segments, this rank's among them, ``own``, by default these)."""
        segments = list(segments)
        held = [tensor for tensor, rank in segments if rank == self.rank]
        return segments, held, held if own is None else own

    def _rounds(
        self, segments: Sequence[Segment], own: Sequence[torch.Tensor]
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]]:
        """The segments in as few rounds as there are of one rank: (every rank's part, all of them as one view where
        that is possible, this rank's of ``own``). Empty where a rank has none."""
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
        """Collective. Rank i gets the i-th of ``sent_sizes`` consecutive elements of ``sent``; what comes from rank i
        goes to the i-th of ``output_sizes``."""
        work = dist.all_to_all_single(output, sent, output_sizes, sent_sizes, group=self.group, async_op=True)
        return Pending([work], (sent,))

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending:
        """Collective. ``output`` [size * n] gets every rank's ``part`` [n], in rank order."""
        return Pending([dist.all_gather_into_tensor(output, part, group=self.group, async_op=True)])

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor) -> Pending:
        """Collective. ``output`` [n] gets the sum of this rank's part of ``parts`` [size * n]."""
        return Pending([dist.reduce_scatter_tensor(output, parts, group=self.group, async_op=True)], (output, parts))

    def launch_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Collective. Sum ``tensor`` in place over the group."""
        return Pending([dist.all_reduce(tensor, group=self.group, async_op=True)])

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Collective, in place; ordered after what was launched on this lane before. Returns ``tensor``."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def plan(self, payload_bytes: int, passes: int = 1) -> Transfer:
        """A collective at its least cost. Broadcast, reduce, all-gather and reduce-scatter move each byte to (or from)
        every other rank once; an all-reduce takes two ``passes``."""
        return Transfer(self.name, payload_bytes, passes * payload_bytes * (self.size - 1) / self.size)

    def plan_exchange(self, sent_bytes: list[int]) -> Transfer:
        """An ``exchange`` that sends so many bytes to each rank."""
        return Transfer(self.name, sum(sent_bytes), sum(sent_bytes) - sent_bytes[self.rank])


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of parts of one size that follow each other in one storage, or ``None``. The same on every rank, since
    it looks at offsets and not at addresses."""
    first, size = parts[0], parts[0].numel()
    storage = first.untyped_storage().data_ptr()
    for index, part in enumerate(parts):
        place = (part.numel(), part.untyped_storage().data_ptr(), part.storage_offset())
        if place != (size, storage, first.storage_offset() + index * size):
            return None
    return first.as_strided((size * len(parts),), (1,))


def _unlike(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts, of which not all have one shape: those PyTorch would first copy into a tensor of its own, which nobody
    could keep until the stream that waits has passed the collective."""
    return [parts[0].view(1, parts[0].numel()), *parts[1:]]
