"""The one logger of the stack and how a process prints it.

`torchtitan_dmuon.dmuon` and every other module logger below `torchtitan_dmuon` inherit its level and handler.
Metric lines are composed in `metrics`.
"""

import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger("torchtitan_dmuon")

_RESET = "\x1b[0m"
_LEVEL_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}


class _ShortFormatter(logging.Formatter):
    """`[rank3]:12-01 05:07:44 message`, with `warning: ` before a warning. Messages of errors begin with `error: `
    themselves, as those do that are written before there is a logger."""

    def __init__(self, rank: int | None, color: bool):
        prefix = "" if rank is None else f"[rank{rank}]:"
        super().__init__(f"{prefix}%(asctime)s %(message)s", "%m-%d %H:%M:%S")
        self.color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.WARNING:
            record.message = f"warning: {record.message}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        color = _LEVEL_COLORS.get(record.levelno) if self.color else None
        return f"{color}{text}{_RESET}" if color else text


def _torchrun_adds_rank() -> bool:
    """Whether stderr is a log file of torchrun's, which copies each line to the console with `[rank3]:` before it."""
    folder = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    try:
        return os.path.samestat(os.fstat(sys.stderr.fileno()), os.stat(folder / "stderr.log"))
    except (OSError, ValueError):  # no such file, or a stderr without one
        return False


def init_logger(rank: int, color: bool = True) -> None:
    """Print our log records of level INFO and above to stderr, a short prefix before each.

    Calling it again replaces the handler of the call before. Records stop propagating to the root logger, so
    that a library that configures the root does not print them a second time.

    Args:
        color: print warnings and errors in ANSI colors.
    """
    for handler in logger.handlers[:]:
        if handler.name == logger.name:
            logger.removeHandler(handler)
            if isinstance(handler, logging.FileHandler):
                handler.close()
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(logger.name)
    handler.setFormatter(_ShortFormatter(None if _torchrun_adds_rank() else rank, color))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to_file(path: Path) -> None:
    """Also append the records to ``path``, until the next :func:`init_logger`. Raises OSError."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.set_name(logger.name)
    handler.setFormatter(_ShortFormatter(None, color=False))
    logger.addHandler(handler)
