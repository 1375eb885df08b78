"""Where a run is: how long it has taken and will take, and a bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtitan_dmuon.logging import logger


class Progress:
    """Counts steps ``first`` + 1 to ``steps``.

    Args:
        bar: show a bar: below the log lines where stderr is a terminal, else in each of them.
    """

    def __init__(self, first: int, steps: int, bar: bool) -> None:
        self._steps = steps
        self._begin = time.monotonic()
        self._measured: tuple[int, float] | None = None  # a step, and the time at its log line
        self._bar = None
        self._in_lines = bar and not sys.stderr.isatty()
        if bar and not self._in_lines:
            self._bar = tqdm(total=steps, initial=first, unit="step", mininterval=1.0, file=sys.stderr)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the steps."""
        if self._bar is None:
            yield
            return
        with logging_redirect_tqdm([logger]), self._bar:
            yield

    def count(self) -> None:
        """One more step."""
        if self._bar is not None:
            self._bar.update()

    def times(self, step: int) -> str:
        """Time since the start, and how long the steps after ``step`` will take if they go on as those since the first
        call. That one has no estimate: the first step is slower than others."""
        now = time.monotonic()
        text = f"elapsed: {_duration(now - self._begin)}"
        if self._measured is None:
            self._measured = (step, now)
            return text
        since, moment = self._measured
        return f"{text}  ETA: {_duration((now - moment) / (step - since) * (self._steps - step))}"

    def show(self, step: int, loss: float) -> list[str]:
        """Show ``loss`` beside the bar below the log lines. Returns what a log line begins with."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss: {loss:.4f}")
        shape = "{percentage:3.0f}%|{bar:20}|"
        return [tqdm.format_meter(step, self._steps, 0, bar_format=shape)] if self._in_lines else []


def _duration(seconds: float) -> str:
    """3:07, 2:03:07, or 1d 02:03:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
