"""The figures of a log line."""

import io
import re
import sys

import pytest
import torch

from torchtitan_dmuon import clock, metrics
from torchtitan_dmuon.config.job_config import Metrics
from torchtitan_dmuon.metrics import MetricsLogger, RunFacts


class Time:
    """Takes the place of ``time`` in the modules that measure."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (clock, metrics, metrics.progress):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


@pytest.mark.parametrize(("degree", "rate"), [(1, "1,600,000"), (4, "400,000")])
def test_log_line(caplog, monkeypatch, degree, rate):
    """Ten steps of 2 s on 4 ranks, a fifth of the time in the data loader, and a checkpoint that does not count. All
    ranks of a tensor-parallel group read the same tokens."""
    now = Time(monkeypatch)
    facts = RunFacts(0, 4, torch.device("cpu"), 0, 30, 10**6, degree)
    run = MetricsLogger(Metrics(peak_tflops=1.0), facts)
    caplog.set_level("INFO", logger="torchtitan_dmuon")
    for step in range(1, 12):
        with run.data.measure():
            now.now += 0.4
        with run.clip.measure():
            now.now += 0.1
        with run.step.measure():
            now.now += 0.4
        now.now += 1.1
        run.count_step(800_000)
        assert run.is_due(step) == (step in (1, 10))
        if step in (1, 11):
            run.log(step, 0, 1.0, 2.0, [1e-3])
            with run.paused():
                now.now += 10
    first, line = (re.sub(r"memory: \d+%", "memory: 9%", message) for message in caplog.messages)
    mfu = float(rate.replace(",", "")) * 10**6 / 4 / 1e12
    same = f"grad_norm: 2.0000  lr: 1.000e-03  tokens/s: {rate}  MFU: {mfu:.1%}  memory: 9%"
    assert first == f"step: 1/30  loss: 1.0000  {same}  elapsed: 0:02  data: 20.0%  optimizer: 500.0 ms"
    # What is to come is estimated with the checkpoint: (20 s + 10 s) / 10 steps, 19 times.
    assert line == f"step: 11/30  loss: 1.0000  {same}  elapsed: 0:32  ETA: 0:57  data: 20.0%  optimizer: 500.0 ms"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("terminal", [True, False])
def test_bar(caplog, monkeypatch, terminal, rank):
    """On a terminal below the log lines, else in them; of rank 0."""
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    caplog.set_level("INFO", logger="torchtitan_dmuon")
    run = MetricsLogger(
        Metrics(enable_progress_bar=True, peak_tflops=1.0), RunFacts(rank, 2, torch.device("cpu"), 5, 20, 1)
    )
    with run.progress.running():
        for step in range(6, 11):
            run.count_step(1)
            if step == 10:
                run.log(step, 0, 1.25, 1.0, [1e-3])
    (line,) = caplog.messages
    shown = stream.getvalue()
    assert ("10/20" in shown and "loss: 1.2500" in shown) == (terminal and rank == 0)
    assert line.startswith(" 50%|██████████          |  step: 10/20") == (not terminal and rank == 0)
