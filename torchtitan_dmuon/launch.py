"""torchrun that lets the training processes answer signals: ``python -m torchtitan_dmuon.launch``, with its arguments.

torchrun's own agent ends with an error when it gets SIGTERM, and kills the processes 30 s later. This launcher passes
SIGTERM, SIGINT and SIGUSR1 on to the training processes and does nothing else: when they have saved and ended with exit
code 0, it ends with 0 too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed import run

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# torchrun keeps these, and ends everything when one arrives.
_HANDLED_BY_TORCHRUN = "SIGHUP,SIGQUIT"


def _children() -> set[int]:
    """The processes started by this one (Linux)."""
    found: set[int] = {process.pid for process in multiprocessing.active_children()}
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has just ended
            found |= {int(pid) for pid in children.read_text().split()}
    return found


def _pass_on(number: int, _: FrameType | None) -> None:
    children = _children()
    if not children and number != signal.SIGUSR1:
        sys.exit(128 + number)  # nothing runs yet
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main(arguments: list[str]) -> None:
    for number in _PASSED_ON:
        signal.signal(number, _pass_on)
    run.main([f"--signals-to-handle={_HANDLED_BY_TORCHRUN}", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
