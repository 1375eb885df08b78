"""Which rank is the slowest."""

import pytest
import torch
from torch import nn

from torchtitan_dmuon import clock
from torchtitan_dmuon.clock import RankTimes


class Takes(nn.Module):
    """A block whose forward takes some time of a clock that only it moves."""

    def __init__(self, now, seconds):
        super().__init__()
        self.now, self.seconds = now, seconds

    def forward(self, x):
        self.now[0] += self.seconds
        return x


def test_the_slowest_rank_and_its_share(monkeypatch):
    """Four ranks by turns in one process, with sums as the trainer makes them. Other time does not count."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    blocks = [[Takes(now, seconds), Takes(now, seconds)] for seconds in (1.0, 1.0, 1.5, 0.5)]
    ranks = [RankTimes(each, rank, 4, torch.device("cpu")) for rank, each in enumerate(blocks)]
    found = []
    for _ in range(5):
        sums = torch.tensor([times.mine() for times in ranks]).sum(0)
        for times, mine in zip(ranks, blocks, strict=True):
            times.add(sums)
            for block in mine:
                block(torch.ones(1))
            now[0] += 7
            for block in mine:
                block.eval()(torch.ones(1))
                block.train()
        found.append([times.take_slowest() for times in ranks])
    assert found[:2] == [[None] * 4] * 2  # a step's times travel two steps later
    assert found[2:] == [[(2, pytest.approx(0.5))] * 4] * 3


def test_one_rank_is_not_slow():
    times = RankTimes([block := Takes([0.0], 1.0)], 0, 1, torch.device("cpu"))
    for _ in range(4):
        times.add(torch.tensor(times.mine()))
        block(torch.ones(1))
    assert times.take_slowest() is None
