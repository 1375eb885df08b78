"""The prefix of log lines, alone and under torchrun."""

import logging
import re
import sys

import pytest

from torchtitan_dmuon.logging import init_logger, logger


@pytest.fixture(autouse=True)
def fresh_logger():
    """Each test starts with the logger that no one has initialised, and leaves it so."""
    level, handlers, propagate = logger.level, logger.handlers[:], logger.propagate
    logger.handlers.clear()
    logger.propagate = True
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


def test_log_lines(capsys):
    init_logger(rank=7, color=False)
    init_logger(rank=3, color=False)
    logger.info("hello %d", 5)
    logger.debug("not shown")
    logging.getLogger("torchtitan_dmuon.dmuon").info("from the runtime")
    captured = capsys.readouterr()
    time = r"\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"\[rank3\]:{time} hello 5\n\[rank3\]:{time} from the runtime\n", captured.err)
    assert captured.out == ""


def test_color_marks_warnings_and_errors_only(capsys):
    init_logger(rank=0, color=True)
    logger.info("a")
    logger.warning("b")
    logger.error("error: c")
    lines = [re.sub(r"\]:\d.*\d ", "]:", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == ["[rank0]:a", "\x1b[33m[rank0]:warning: b\x1b[0m", "\x1b[31m[rank0]:error: c\x1b[0m"]


def test_the_rank_is_not_told_twice(tmp_path, monkeypatch):
    """torchrun's --tee names the rank before each line that it copies from the log file of a process."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with (tmp_path / "stderr.log").open("w") as file, (tmp_path / "other.log").open("w") as other:
        for stream in (file, other):
            monkeypatch.setattr(sys, "stderr", stream)
            init_logger(rank=3, color=False)
            logger.info("hello")
    assert (tmp_path / "stderr.log").read_text()[0].isdigit()
    assert (tmp_path / "other.log").read_text().startswith("[rank3]:")
