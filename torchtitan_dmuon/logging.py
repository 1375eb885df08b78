"""The one logger of the stack and how a process prints it.

`torchtitan_dmuon.dmuon` and every other module logger below `torchtitan_dmuon` inherit its level and handler.
Metric lines are composed in `metrics`.
"""

import logging
import sys

logger = logging.getLogger("torchtitan_dmuon")

_RESET = "\x1b[0m"
_LEVEL_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}


class _RankFormatter(logging.Formatter):
    def __init__(self, rank: int, color: bool):
        super().__init__(f"[rank {rank}] %(asctime)s - %(levelname)s - %(message)s")
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        color = _LEVEL_COLORS.get(record.levelno) if self.color else None
        return f"{color}{text}{_RESET}" if color else text


def init_logger(rank: int, color: bool = True) -> None:
    """Print our log records of level INFO and above to stderr as `[rank R] time - level - message`.

    Calling it again replaces the handler of the call before. Records stop propagating to the root logger, so
    that a library that configures the root does not print them a second time.

    Args:
        color: print warnings and errors in ANSI colors.
    """
    for handler in logger.handlers[:]:
        if handler.name == logger.name:
            logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(logger.name)
    handler.setFormatter(_RankFormatter(rank, color))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
