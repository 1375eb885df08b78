"""Time of the parts of a step, and of the ranks beside each other, without making the host wait for the device."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.profiler import record_function

from torchtitan_dmuon.hang import Place

Moment = float | torch.cuda.Event


class Clock:
    """Points in time: on CUDA events in the stream of the device, else the host's clock."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device

    def now(self) -> Moment:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, begin: Moment, end: Moment) -> float:
        """Milliseconds. The device must have passed both."""
        return begin.elapsed_time(end) if self._on_device else 1000 * (end - begin)


class Stopwatch:
    """Adds up the time of one part of the step. A window reads the sum at its end, where the log line has waited for
    the device already.

    Args:
        clock: by which it measures.
        name: of the range ``trainer/NAME`` in traces of the profiler.
        place: is told of the part, too.
    """

    def __init__(self, clock: Clock, name: str, place: Place | None = None) -> None:
        self._clock = clock
        self._name = name
        self._place = place
        self._spans: list[tuple[Moment, Moment]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._place is not None:
            self._place.enter(f"in {self._name}")
        begin = self._clock.now()
        with record_function(f"trainer/{self._name}"):
            yield
        self._spans.append((begin, self._clock.now()))
        if self._place is not None:
            self._place.enter(f"after {self._name}")

    def take_ms(self) -> float:
        """The sum since the last call, in milliseconds."""
        spans, self._spans = self._spans, []
        return sum(self._clock.ms_between(*span) for span in spans)


class RankTimes:
    """How long each rank computes, which shows the slowest one: the time of its blocks' forwards in training. No rank
    waits for another inside a block, except for those that share the layer by tensor parallelism.

    Every step sends one number for each rank through the all-reduce that the trainer makes anyway. A step sends the
    time of the step before the last: the device has passed that, since the host waits for each step to begin.

    Args:
        blocks: hooks are put on them.
        rank, world_size: place of this process, and number of places.
        device: of the sums.
    """

    def __init__(self, blocks: Sequence[nn.Module], rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size = rank, world_size
        self._clock = Clock(device.type == "cuda")
        self._spans: deque[list[tuple[Moment, Moment]]] = deque([[], []])  # of the last steps
        self._sums = torch.zeros(world_size, device=device)
        self._begin: Moment = 0.0
        if world_size > 1:
            for block in blocks:
                block.register_forward_pre_hook(self._enter)
                block.register_forward_hook(self._leave)

    def _enter(self, block: nn.Module, args: tuple) -> None:
        if block.training:
            self._begin = self._clock.now()

    def _leave(self, block: nn.Module, args: tuple, output: object) -> None:
        if block.training:
            self._spans[-1].append((self._begin, self._clock.now()))

    def mine(self) -> list[float]:
        """At the begin of a step: what this rank adds to the sums [world_size], in milliseconds."""
        self._spans.append([])
        slots = [0.0] * self._world_size
        slots[self._rank] = sum(self._clock.ms_between(*span) for span in self._spans.popleft())
        return slots

    def add(self, times: torch.Tensor) -> None:
        """The sums [world_size] of all ranks."""
        self._sums += times

    def take_slowest(self) -> tuple[int, float] | None:
        """(rank, share by which it needs more time than the median rank) since the last call. Waits for the device.
        None before there are times, and on one rank."""
        times = self._sums.tolist()
        self._sums.zero_()
        if self._world_size == 1 or min(times) <= 0:
            return None
        slowest = max(range(self._world_size), key=times.__getitem__)
        return slowest, times[slowest] / statistics.median(times) - 1
