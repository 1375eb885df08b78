"""Random host delays on one rank change nothing: no buffer is read early or reused too soon."""

import time

import pytest
import torch

from tests.support.harness import assert_same, build, data_rank, full_weights
from tests.support.oracle import ToyModel, batch, loss_of
from tests.support.pool import distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train_with_delays(rank, world, mesh, mode, delays, steps=12):
    model, optimizer = build(world, ToyModel(layers=4, dim=96, hidden=160), mesh=mesh, mode=mode)
    draw = torch.Generator("cpu").manual_seed(17)

    def maybe_sleep(*_):
        if delays and rank == 1:
            time.sleep(0.01 * torch.rand((), generator=draw, device="cpu").item())

    for layer in model.layers:
        layer.norm.register_forward_hook(maybe_sleep)
        layer.up_proj.register_full_backward_hook(maybe_sleep)
    for step in range(steps):
        tokens, labels = batch(step, data_rank(rank, mesh))
        loss_of(model(tokens), labels).backward()
        optimizer.step()
    return full_weights(model)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=4, timeout=180)
def test_delays_on_four_ranks(rank, world, mode):
    for mesh in ((1, 4, 1), (2, 2, 1)):  # tensor parallelism needs NCCL: DTensor does not work over gloo on CUDA
        expected = train_with_delays(rank, world, mesh, mode, delays=False)
        actual = train_with_delays(rank, world, mesh, mode, delays=True)
        assert_same(actual, expected, atol=0, rtol=0)


def train_behind_slow_reductions(rank, world, mesh, slow, steps=3):
    """Two micro-batches a step, no clipping, and what is left of the reductions comes after the step has begun."""
    model, optimizer = build(world, ToyModel(layers=4, dim=96, hidden=160), mesh=mesh)
    for step in range(steps):
        for micro_batch in range(2):
            tokens, labels = batch(2 * step + micro_batch, data_rank(rank, mesh))
            loss_of(model(tokens), labels).backward()
        if slow:
            with optimizer.runtime.lanes.side_stream("reduce"):
                torch.cuda._sleep(100_000_000)  # cycles, some 50 ms
        optimizer.step()
    return full_weights(model)


def slow_reductions_change_nothing(rank, world, mesh):
    runs = [train_behind_slow_reductions(rank, world, mesh, slow) for slow in (False, True)]
    assert_same(runs[1], runs[0], atol=0, rtol=0)


@distributed(world=4, timeout=180)
def test_slow_reductions_on_four_ranks(rank, world):
    for mesh in ((1, 4, 1), (2, 2, 1)):
        slow_reductions_change_nothing(rank, world, mesh)
