"""Records kernel launches as CUDA graphs and replays them, where launching takes longer than computing.

A graph holds addresses, not memory. The caller allocates and frees as usual, and a graph is replayed only when the
allocator gave the same addresses again, as it does from one training step to the next. Between calls only the graphs
stay, which are small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

_RECORDINGS = 64


class Replay:
    """At most ``_RECORDINGS`` graphs by key; the least recently used goes first."""

    def __init__(self) -> None:
        # Key -> (the graph, None after the first run; the result of the run).
        self._recordings: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph | None, int]] = OrderedDict()

    def run(self, key: Hashable, launch: Callable[[], int]) -> int:
        """Issue the kernels of ``launch`` on the current stream and return its result. The first call with a key runs
        it as it is (which compiles and loads kernels), the second records it, and later ones replay the recording.

        Args:
            key: everything the launches depend on, the addresses of all tensors included.
            launch: issues kernels on the current stream of the current device, allocates nothing, and does not wait.
        """
        if torch.cuda.is_current_stream_capturing():  # the caller records a graph of its own
            return launch()
        # A recording uses cuBLAS's workspace of one stream, so each stream that replays needs its own.
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
        # "thread_local": other threads, as NCCL's watchdog, may call CUDA meanwhile.
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
            # cuBLAS allocates its workspace at the first product on a stream: outside any graph's own pool.
            one = torch.zeros(1, 16, 16, dtype=torch.float16, device=current.device)
            torch.bmm(one, one)
        current.wait_stream(stream)
        _streams[current] = stream
    return _streams[current]
