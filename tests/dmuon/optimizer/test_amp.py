"""Scaled losses: ``torch.amp.GradScaler``, and gradients that are scaled after backward."""

import pytest
import torch

import dmuon
from tests.support.harness import (
    EVERY_ROUTE,
    assert_same,
    build,
    flat_mesh,
    full_gradients,
    full_weights,
    usable,
    weights_of,
)
from tests.support.meshes import DEVICE
from tests.support.oracle import OracleMuon, ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed

BAD_STEPS = (2, 4)
STEPS = 7
MAX_NORM = 0.5


def scaler():
    return torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)


def spoil(model, step, rank):
    """An infinity in the gradient of one matrix alone, on one rank alone."""
    if step in BAD_STEPS and rank == 1:
        handle = model.layers[1].q_proj.weight.register_hook(lambda grad: grad.clone().fill_(torch.inf))
        return handle.remove
    return lambda: None


def expected(world, clip):
    """One process, by the documented loop of GradScaler: (weights, scales)."""
    model, scaler_ = ToyModel(), scaler()
    optimizer = OracleMuon(model, is_proj)
    matrices = [p for n, p in model.named_parameters() if is_proj(n, p)]
    holder = torch.optim.SGD(model.parameters())  # only tells the scaler the parameters
    holder.step = lambda: optimizer.step()
    scales = []
    for step in range(STEPS):
        stop = spoil(model, step, 1)
        tokens, labels = (torch.cat(x) for x in zip(*(batch(step, r) for r in range(world)), strict=True))
        scaler_.scale(loss_of(model(tokens), labels)).backward()
        stop()
        scaler_.unscale_(holder)
        if clip:
            torch.nn.utils.clip_grad_norm_(matrices, MAX_NORM)
        scaler_.step(holder)
        scaler_.update()
        model.zero_grad()
        scales.append(scaler_.get_scale())
    return weights_of(model), scales


@distributed(world=4)
def test_a_scaled_run_equals_one_process(rank, world):
    """Growth, an overflow in one dedicated gradient, and back-off."""
    for clip in (False, True):
        weights, scales = expected(world, clip)
        assert max(scales) > scales[0] > min(scales)
        for options in ({}, {"mesh": (2, 2, 1)}, EVERY_ROUTE):
            if "mesh" in options and not usable([options["mesh"]]):
                continue
            model, optimizer = build(world, **options)
            mine, told = scaler(), []
            for step in range(STEPS):
                stop = spoil(model, step, rank)
                tokens, labels = batch(step, rank)
                mine.scale(loss_of(model(tokens), labels)).backward()
                stop()
                if clip:
                    dmuon.unscale_(mine, optimizer)
                    dmuon.clip_grad_norm_(optimizer, MAX_NORM)
                mine.step(optimizer)
                mine.update()
                told.append(mine.get_scale())
            assert told == scales, (options, told, scales)
            assert_same(full_weights(model), weights)


@distributed(world=2)
def test_parameters_in_float16(rank, world):
    """Dedicated alone, in the dtype for which losses are scaled: an overflow on one rank is known to all."""
    policy = {"defaults": {"route": "muon", "param_dtype": torch.float16, "cast_forward_inputs": False}}
    for call in (False, True):
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))
        dmuon.dedicate_params(model, flat_mesh(world), predicate=lambda n, p: True, param_policy=policy)
        optimizer, mine = dmuon.Muon(model), scaler()
        before = full_weights(model)
        x = torch.ones(2, 16, dtype=torch.float16)
        mine.scale(model(x).sum() * (1e4 if rank == 0 else 1.0)).backward()
        if call:
            dmuon.unscale_(mine, optimizer)
            with pytest.raises(RuntimeError, match="once is enough"):
                dmuon.unscale_(mine, optimizer)
        mine.step(optimizer)
        mine.update()
        assert mine.get_scale() == 2.0**9
        assert_same(full_weights(model), before, atol=0, rtol=0)


@distributed(world=2)
def test_half_an_unscaling_is_refused(rank, world):
    model, optimizer = build(world)
    before, mine = full_weights(model), scaler()
    tokens, labels = batch(0, rank)
    mine.scale(loss_of(model(tokens), labels)).backward()
    mine.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"dmuon\.unscale_"):
        mine.step(optimizer)
    assert_same(full_weights(model), before, atol=0, rtol=0)


@distributed(world=4)
def test_scale_gradients(rank, world):
    """A sum of losses over 4 ranks, divided by the number of labels after backward."""
    for options in ({}, EVERY_ROUTE, {"mesh": (2, 2, 1)}):
        if "mesh" in options and not usable([options["mesh"]]):
            continue
        model, optimizer = build(world, **options)
        dmuon.set_gradient_divide_factor(model, 1.0)
        oracle = ToyModel()
        tokens, labels = batch(0, rank)
        (loss_of(model(tokens), labels) * labels.numel()).backward()
        count = torch.tensor(float(labels.numel() * world))
        dmuon.scale_gradients_(optimizer, 1.0 / count)
        tokens, labels = (torch.cat(x) for x in zip(*(batch(0, r) for r in range(world)), strict=True))
        loss_of(oracle(tokens), labels).backward()
        assert_same(full_gradients(model), {name: p.grad for name, p in oracle.named_parameters()})


@distributed(world=2)
def test_gradients_that_nobody_has_reduced_are_not_missed(rank, world):
    model, optimizer = build(world)
    tokens, labels = batch(0, rank)
    with dmuon.no_sync(model):
        loss_of(model(tokens), labels).backward()
    for call in (dmuon.scale_gradients_, dmuon.clip_grad_norm_, dmuon.clip_total_grad_norm_):
        with pytest.raises(RuntimeError, match="no_sync"):
            call(optimizer, 1.0)
    loss_of(model(tokens), labels).backward()
    assert dmuon.clip_grad_norm_(optimizer, 1.0) > 0
