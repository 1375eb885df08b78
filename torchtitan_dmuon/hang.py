"""Which rank holds up the others when a step takes too long."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from torchtitan_dmuon.logging import logger

# Shares of the timeout of collectives: when a step is taken to hang, and for how long the ranks then wait for each
# other's answers. Together less than 1, for NCCL ends the process at its timeout.
_SUSPECT, _ANSWER = 0.7, 0.2
_MAX_RANKS_NAMED = 8


class Place:
    """Where this rank is. Every rank goes through the same parts of a step in the same order."""

    def __init__(self) -> None:
        self._paused = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """``step`` begins."""
        self.step = step
        self.parts = 0
        self.part = "at the begin"
        self._since = time.monotonic()

    def enter(self, part: str) -> None:
        """What follows belongs to ``part``, as ``in forward``."""
        self.parts += 1
        self.part = part

    def pause(self, paused: bool) -> None:
        """Whether the rank does what may take any time (checkpoint, validation)."""
        self._paused = paused
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the step takes already."""
        return 0.0 if self._paused else time.monotonic() - self._since


class HangWatch:
    """A thread that, when a step hangs, asks where each rank is and logs which ones are behind. Before anything goes
    wrong it communicates nothing. It has a connection of its own to the store under MASTER_ADDR and MASTER_PORT.

    An exception that leaves the block after a step hung is preceded by an error line that names those ranks.

    Args:
        place: of this rank.
        rank, world_size: of this process.
        timeout: seconds after which a collective fails.
    """

    def __init__(self, place: Place, rank: int, world_size: int, timeout: float) -> None:
        self._timeout = timeout
        self._place = place
        self._rank, self._world_size = rank, world_size
        self._told: tuple[int, str] | None = None  # step, and who is behind
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        if self._world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ended.set()
        if self._world_size > 1:
            self._thread.join()
        if isinstance(error, RuntimeError) and self._told is not None and self._told[0] == self._place.step:
            logger.error("error: %s", self._told[1])

    def set_timeout(self, seconds: float) -> None:
        """Another timeout of collectives, for what begins now."""
        self._place.pause(False)
        self._timeout = seconds

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout / 10)):
            step = self._place.step
            if self._place.seconds > _SUSPECT * self._timeout and (self._told is None or self._told[0] != step):
                took = self._place.seconds
                try:
                    behind = describe(self._ask(), self._world_size)
                except RuntimeError as error:  # the store is on a host that is gone
                    behind = f"the ranks cannot be asked where they are ({' '.join(str(error).split())[:200]})"
                self._told = step, f"step {step} has taken {took:.0f} s: {behind}"
                logger.warning("%s", self._told[1])

    def _ask(self) -> dict[int, tuple[int, int, str]]:
        """Tell the others where this rank is. Returns (step, parts before, part) of each rank that answers."""
        place, seconds = self._place, _ANSWER * self._timeout
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.PrefixStore(
            f"hang/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}",
            dist.TCPStore(address, port, timeout=timedelta(seconds=seconds), wait_for_workers=False),
        )
        here = (place.step, place.parts, place.part)
        store.set(str(self._rank), json.dumps(here))
        deadline = time.monotonic() + seconds
        found: dict[int, tuple[int, int, str]] = {}
        while len(found) < self._world_size and time.monotonic() < deadline and not self._ended.is_set():
            for rank in (rank for rank in range(self._world_size) if rank not in found):
                if store.check([str(rank)]):
                    answer = json.loads(store.get(str(rank)))
                    if answer[0] >= here[0] - 1:  # else it is of an earlier step that hung
                        found[rank] = tuple(answer)
            time.sleep(0.1)
        return found


def describe(places: dict[int, tuple[int, int, str]], world_size: int) -> str:
    """Who is behind, of what each rank that answers has told: (step, parts before, part)."""
    silent = [other for other in range(world_size) if other not in places]
    if silent:
        return f"{_names(silent)} did not answer: the process is stopped, or its host is gone"
    ranks: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for other, place in places.items():
        ranks[place].append(other)
    behind, *others = sorted(ranks)
    if not others:
        return (
            f"all ranks are {behind[2]}, so a device or the network hangs: after the timeout the flight recorder's "
            "files tell which collective, by torchfrtrace (comm.save_traces_folder; NCCL only)"
        )
    waiting = "; ".join(f"{_names(ranks[place])}: {place[2]} of step {place[0]}" for place in others)
    late = f"{_names(ranks[behind])} did not arrive: {behind[2]} of step {behind[0]}"
    return f"{late}, while others are further ({waiting})"


def _names(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - _MAX_RANKS_NAMED} more" if len(ranks) > _MAX_RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
