"""Ordered asynchronous channels between ranks.

A lane is one process group used for one purpose, so that everything on it happens in the order in which it was
launched, on every rank, whatever else the trainer sends elsewhere. Collectives are asynchronous: on CUDA a launch
waits (on the device) for the work queued so far on the current stream and ``wait`` makes the current stream wait; on
CPU ``wait`` blocks the host. One code path serves gloo and NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


class Pending:
    """Collectives in flight. ``wait`` may be called more than once."""

    def __init__(self, works: list[dist.Work], inputs: tuple[torch.Tensor, ...] = ()) -> None:
        self._works = works
        self._inputs = inputs  # read until the collectives have finished

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._inputs = [], ()


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

    def broadcast(self, segments: Iterable[tuple[torch.Tensor, int]]) -> Pending:
        """Collective. Each ``(tensor, source)`` is filled, in place, from the rank ``source`` of this group."""
        if self.size == 1:
            return Pending([])
        return Pending(
            [dist.broadcast(tensor, group=self.group, group_src=source, async_op=True) for tensor, source in segments]
        )

    def reduce(self, segments: Iterable[tuple[torch.Tensor, int]]) -> Pending:
        """Collective. Each ``(tensor, destination)`` is summed, in place, onto the rank ``destination`` of this
        group; elsewhere its content is undefined afterwards."""
        if self.size == 1:
            return Pending([])
        return Pending(
            [dist.reduce(tensor, group=self.group, group_dst=dest, async_op=True) for tensor, dest in segments]
        )

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
        return Pending([dist.reduce_scatter_tensor(output, parts, group=self.group, async_op=True)], (parts,))

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
