"""The figures of a log line."""

import re
import time

import pytest
import torch

from torchtitan_dmuon.config.job_config import Metrics
from torchtitan_dmuon.metrics import MetricsLogger


@pytest.mark.parametrize("degree", [1, 4])
def test_rates_are_those_of_one_device(tmp_path, caplog, degree):
    """All ranks of a tensor-parallel group read the same tokens, and each does its share of their FLOPs."""
    flops = 10**9
    metrics = MetricsLogger(Metrics(), tmp_path, 0, torch.device("cpu"), flops, 0, degree)
    metrics.begin_window()
    with metrics.data.measure(), metrics.optimizer.measure():
        time.sleep(0.02)
    metrics.count_step(8_000_000)
    with caplog.at_level("INFO", logger="torchtitan_dmuon"):
        metrics.log(1, 1.0, 1.0, 1e-3)
    tokens, tflops, ms = re.search(r"tokens/s: ([\d,]+)  TFLOP/s: ([\d.]+) .*step: ([\d.]+) ms", caplog.text).groups()
    rate = float(tokens.replace(",", ""))
    assert rate * float(ms) / 1000 == pytest.approx(8_000_000 / degree, rel=0.01)
    assert float(tflops) == pytest.approx(rate * flops / 1e12, rel=0.01)
