"""Signals to a running training: SIGTERM and SIGINT save and end it, SIGUSR1 saves and goes on.

A handler only notes the signal. The ranks sum their notes with the all-reduce that every step makes anyway, so that all
of them save after the same step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from types import FrameType

import torch

from torchtitan_dmuon.logging import logger

_STOP = (signal.SIGTERM, signal.SIGINT)
_SAVE = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (Linux). A rank whose launcher was killed
    would hold its GPU, which the ranks of the next launcher need."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class SignalWatch:
    """While entered, notes signals instead of ending the process. Only for the main thread; restores the handlers.

    Args:
        grace_seconds: when the process is still there this long after SIGTERM or SIGINT, it is ended with exit code 1.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace = grace_seconds
        self._previous: dict[int, object] = {}
        self._timer: threading.Timer | None = None
        self.stop = False
        self.save = False

    def __enter__(self) -> SignalWatch:
        for number in (*_STOP, _SAVE):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._timer is not None:
            self._timer.cancel()

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == _SAVE:
            self.save = True
            return
        self.stop = True
        if self._timer is None:
            self._timer = threading.Timer(self._grace, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        logger.error(
            "error: not finished %g s after the signal (checkpoint.grace_seconds), ending; the next run resumes from "
            "the last complete checkpoint",
            self._grace,
        )
        os._exit(1)


@dataclass(frozen=True)
class Asked:
    """What the ranks agreed on in one step."""

    stop: bool = False
    save: bool = False
    failed: bool = False

    @property
    def any(self) -> bool:
        return self.stop or self.save


class Requests:
    """The notes of all ranks, summed on the device and read without making the host wait for the step that runs.

    Args:
        signals: of this process.
        device: of the sums.
    """

    def __init__(self, signals: SignalWatch | None, device: torch.device) -> None:
        self._signals = signals
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(3, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def mine(self, failed: bool) -> tuple[float, float, float]:
        """What this rank adds to the sums: (stop, save, a save has failed). Clears the note of SIGUSR1."""
        if self._signals is None:
            return 0.0, 0.0, float(failed)
        save, self._signals.save = self._signals.save, False
        return float(self._signals.stop), float(save), float(failed)

    def agreed(self, sums: torch.Tensor) -> None:
        """Begin to copy the sums [3] of all ranks to the host."""
        self._host.copy_(sums, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> Asked:
        """What all ranks agreed on at the beginning of this step. The host waits until the device has begun the step,
        and a whole step of work is still queued then."""
        if self._copied is not None:
            self._copied.synchronize()
        return Asked(*(value > 0 for value in self._host.tolist()))
