"""torchrun for our runs: ``python -m torchtitan_dmuon.launch``, with its arguments.

- torchrun's own agent ends with an error when it gets SIGTERM, and kills the processes 30 s later. This launcher passes
  SIGTERM, SIGINT and SIGUSR1 on to the training processes and does nothing else: when they have saved and ended with
  exit code 0, it ends with 0 too.
- When a rank fails, the last thing on the console is the message of the rank that failed first.
- Exit code 1: a rank has failed, and no restart is left. Exit code 75: the other launchers of the run are gone, and
  `run_train.sh` may start this one again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
from argparse import Namespace
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# torchrun keeps these, and ends everything when one arrives.
_HANDLED_BY_TORCHRUN = "SIGHUP,SIGQUIT"
_PEERS_GONE = 75
# Sent by torchrun and by NCCL's watchdog to ranks that wait for one that has failed.
_FOLLOWS_A_FAILURE = (-signal.SIGTERM, -signal.SIGABRT)


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


def report(failures: dict[int, ProcessFailure], shown: set[int]) -> str:
    """What the rank that failed first says of it; empty if the console has its message already.

    Args:
        failures: of this node, by rank.
        shown: local ranks whose output is on the console.
    """
    host = socket.gethostname()
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode not in _FOLLOWS_A_FAILURE:  # such a rank tells nothing itself
            return f"error: rank {rank} on {host}: {failure.message}\n"
    recorded = {
        rank: Path(failure.error_file) for rank, failure in failures.items() if Path(failure.error_file).exists()
    }
    if recorded:
        # Ranks that lost a peer fail within milliseconds of it, and may end before it: all files of this attempt count.
        rank, file = next(iter(recorded.items()))
        first_rank = rank - failures[rank].local_rank
        attempt = file.parent.parent
        first = min(attempt.glob("*/error.json"), key=lambda path: path.stat().st_mtime_ns)
        told = json.loads(first.read_text())["message"]["extraInfo"]["py_callstack"]
        return f"error: rank {first_rank + int(first.parent.name)} on {host} failed, its log is {first.parent}:\n{told}"
    # Ranks that end with an exit code of their own have logged why.
    if any(failure.local_rank in shown for failure in failures.values()):
        return ""
    rank, failure = next(iter(failures.items()))
    return f"error: rank {rank} on {host} ended with exit code {failure.exitcode}; show its output with LOG_RANK\n"


def _run(arguments: Namespace) -> int:
    """Returns the exit code."""
    if arguments.max_restarts == 0:  # else its lines tell of the failures that a restart follows
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    else:
        # The ranks' own store instead of the launchers', in which they would find the addresses of those that failed.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ranks = arguments.local_ranks_filter
    try:
        run.run(arguments)
    except ChildFailedError as error:
        shown = {int(rank) for rank in ranks.split(",")} if ranks else set(range(len(error.failures)))
        sys.stderr.write(report(error.failures, shown))
        return 1
    except (RendezvousError, DistError) as error:
        sys.stderr.write(f"error: {socket.gethostname()} has lost the other nodes of the run: {error}\n")
        return _PEERS_GONE
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    for number in _PASSED_ON:
        signal.signal(number, _pass_on)
    return _run(run.parse_args([f"--signals-to-handle={_HANDLED_BY_TORCHRUN}", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
