"""Runs of kernel launches recorded as CUDA graphs and replayed, for when launching costs more than computing.

A graph holds addresses, not memory: whoever records allocates as usual and frees as usual, and a recording is replayed
only when the allocator has given the same addresses again, as it does from one training step to the next. So nothing
is kept between calls but the graphs themselves, which are small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

_RECORDINGS = 64


class Replay:
    """A bounded number of recordings by key. The least recently used goes first."""

    def __init__(self) -> None:
        # Key -> (the graph, or None after only one run; what the run returned).
        self._recordings: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph | None, int]] = OrderedDict()

    def run(self, key: Hashable, launch: Callable[[], int]) -> int:
        """What ``launch()`` returns, after its kernels have been issued on the current stream.

        The first run of a key is an ordinary one (kernels are compiled and loaded in it), the second is recorded, the
        next ones are replays.

        Args:
            key: everything the launches depend on, the addresses of all tensors included.
            launch: issues kernels on the current stream of the current device, allocates nothing, and does not wait.
        """
        if torch.cuda.is_current_stream_capturing():  # the caller records a graph of its own
            return launch()
        # A recording uses cuBLAS's workspace of its stream: one for each stream that replays.
        key = (torch.cuda.current_stream(), key)
        if key not in self._recordings:
            result = launch()
            self._recordings[key] = (None, result)
            if len(self._recordings) > _RECORDINGS:
                self._recordings.popitem(last=False)
            return result
        graph, result = self._recordings[key]
        self._recordings.move_to_end(key)
        if graph is None:
            graph = _record(launch)
            self._recordings[key] = (graph, result)
        graph.replay()
        return result


_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def _record(launch: Callable[[], int]) -> torch.cuda.CUDAGraph:
    """A graph of the launches. ``torch.cuda.graph`` would wait for the device and empty the allocator's cache."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_recording_stream(torch.cuda.current_stream())):
        # Other threads (NCCL's watchdog) and streams go on meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    return graph


def _recording_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream on which recordings for ``current`` are made; the default stream cannot be recorded."""
    if current not in _streams:
        stream = torch.cuda.Stream(current.device)
        with torch.cuda.stream(stream):
            # cuBLAS takes its workspace at the first product on a stream. It must not lie in a graph's own pool.
            one = torch.zeros(1, 16, 16, dtype=torch.float16, device=current.device)
            torch.bmm(one, one)
        current.wait_stream(stream)
        _streams[current] = stream
    return _streams[current]
