"""The optimizer over ownership, against one process on the concatenated batch."""

from collections import Counter

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import dmuon
from tests.support.harness import EVERY_ROUTE, assert_same, build, full_weights, train, usable, weights_of
from tests.support.oracle import OracleMuon, ToyModel, batch, is_proj, loss_of, orthogonalize, train_one_process
from tests.support.pool import distributed
from tests.support.private import stacks_of
from torchtitan_dmuon.dmuon.state.pieces import parts_of


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=4)
def test_five_steps_equal_one_process(rank, world, mode):
    model, optimizer = build(world, mode=mode, muon={"weight_decay": 0.1})
    losses = train(model, optimizer, 5, rank)

    oracle = ToyModel()
    expected = train_one_process(oracle, OracleMuon(oracle, is_proj, weight_decay=0.1), 5, world)
    total = torch.tensor(losses)
    torch.distributed.all_reduce(total)
    assert_same({"losses": total / world}, {"losses": torch.tensor(expected)})
    assert_same(full_weights(model), weights_of(oracle))


SCALES = {
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "original": lambda m, n: max(1.0, m / n) ** 0.5,
    "spectral": lambda m, n: (m / n) ** 0.5,
    "unit": lambda m, n: 1.0,
}


@pytest.mark.parametrize("scale", SCALES)
@distributed(world=2)
def test_the_update_is_the_formula(rank, world, scale):
    """One step from zero momentum, against the scale's formula; nothing is scaled twice (known bug kozistr 371)."""
    lr, decay = 0.03, 0.1
    model, optimizer = build(world, muon={"scale": scale, "lr": lr, "weight_decay": decay})
    train(model, optimizer, 1, rank)
    oracle = ToyModel()
    for r in range(world):
        tokens, labels = batch(0, r)
        (loss_of(oracle(tokens), labels) / world).backward()
    expected = {}
    for name, p in oracle.named_parameters():
        if is_proj(name, p):
            update = orthogonalize(1.95 * p.grad)  # G + mu * M with M = G
            expected[name] = (p * (1 - lr * decay) - lr * SCALES[scale](*p.shape) * update).float()
    actual = full_weights(model)
    assert_same({name: actual[name] for name in expected}, expected, atol=2e-6)
    with pytest.raises(ValueError, match="scale must be one of"):
        dmuon.Muon(model, scale="rms")


def test_newton_schulz_function():
    matrices = torch.randn(2, 3, 8, 20, generator=torch.Generator("cpu").manual_seed(0))
    result = dmuon.newton_schulz(matrices, steps=3, backend="direct", coefficients="kj")
    x = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)).double()
    for _ in range(3):
        r = x @ x.mT
        x = 3.4445 * x + (-4.7750 * r + 2.0315 * r @ r) @ x
    torch.testing.assert_close(result, x.float(), atol=2e-6, rtol=1e-5)


@distributed(world=2)
def test_what_the_optimizer_refuses(rank, world):
    """Before anything moves."""
    model, _ = build(world, optimizer=False)
    with pytest.raises(ValueError, match=r"adamw_implementation must be one of .* got 'fuse'"):
        dmuon.Muon(model, adamw_implementation="fuse")
    optimizer = dmuon.Muon(model, adamw_implementation="foreach")
    with pytest.raises(RuntimeError, match="takes no further parameters: build it anew"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    before = full_weights(model)
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    with pytest.raises(ValueError, match="found_inf needs adamw_implementation='fused', this optimizer has 'foreach'"):
        optimizer.step(found_inf=torch.zeros(()))
    assert_same(full_weights(model), before, atol=0, rtol=0)


@distributed(world=2)
def test_the_step_begins_with_what_arrives_first(rank, world):
    """Backward reduces the last layer first: so do the parts of a stack; the largest stack comes first."""
    _, optimizer = build(world)
    sizes = []
    for stack in stacks_of(optimizer):
        layers = [int(view.piece.fqn.split(".")[1]) for view in stack.views]
        assert layers == sorted(layers, reverse=True)
        sizes.append(sum(view.piece.numel for view in stack.views))
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 1


@pytest.mark.parametrize("routes", ["fsdp2", "dedicated"])
@distributed(world=2)
def test_nothing_moves_whatever_the_flag_is_but_zero(rank, world, routes):
    """Weights, moments and step counts, on every route: a summed flag is 2 where both ranks found something."""
    options = EVERY_ROUTE if routes == "dedicated" else {}
    model, optimizer = build(world, **options)
    train(model, optimizer, 1, rank)
    before, state = full_weights(model), dmuon.get_optimizer_state_dict(model, optimizer, cpu_offload=True)
    for flag in (2.0, 0.5, -1.0, torch.nan, torch.inf):
        tokens, labels = batch(1, rank)
        loss_of(model(tokens), labels).backward()
        optimizer.step(found_inf=torch.tensor(flag))
        assert_same(full_weights(model), before, atol=0, rtol=0)
        for name, value in dmuon.get_optimizer_state_dict(model, optimizer, cpu_offload=True).items():
            for (now, _), (then, _) in zip(parts_of(value)[1], parts_of(state[name])[1], strict=True):
                assert torch.equal(now, then), (flag, name)
    tokens, labels = batch(1, rank)
    loss_of(model(tokens), labels).backward()
    optimizer.step(found_inf=torch.tensor(0.0))
    oracle = ToyModel()
    reference = OracleMuon(oracle, is_proj)
    train_one_process(oracle, reference, 2, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_every_update_is_a_range_of_the_profiler(rank, world):
    """Newton-Schulz by shape and number of matrices, AdamW by parameter."""
    model, optimizer = build(world, **EVERY_ROUTE)
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    names = {event.key for event in profiled.key_averages()}
    pieces = [piece for piece in dmuon.get_owned_params(model) if piece.numel]
    shapes = Counter("{}x{}".format(*piece.shape) for piece in pieces if piece.spec.route == "muon")
    expected = {f"dmuon/newton_schulz {shape} x{count}" for shape, count in shapes.items()}
    expected |= {f"dmuon/adamw {piece.fqn}" for piece in pieces if piece.spec.route != "muon"}
    assert {name for name in names if name.startswith(("dmuon/newton_schulz", "dmuon/adamw"))} == expected
    model, optimizer = build(world)
    loss_of(model(tokens), labels).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    assert "dmuon/adamw (FSDP2)" in {event.key for event in profiled.key_averages()}


@distributed(world=4)
def test_parameters_that_nobody_averages_are_refused(rank, world):
    """``fully_shard`` forgotten, alone, with replicas, and with tensor parallelism, whose DTensors are no shards of the
    data-parallel ranks. One rank of data, DDP and full dedication need none."""
    for mesh in usable([(1, 4, 1), (2, 2, 1), (1, 2, 2)]):
        model, _ = build(world, mesh=mesh, shard=False, optimizer=False)
        with pytest.raises(ValueError, match=r"embed\.weight among them, have no owner and no shards"):
            dmuon.Muon(model)
    if usable([(1, 1, 4)]):
        model, _ = build(world, mesh=(1, 1, 4), shard=False, optimizer=False)
        dmuon.Muon(model)
    dmuon.Muon(build(world, **EVERY_ROUTE, optimizer=False)[0])
    model, _ = build(world, shard=False, optimizer=False)
    for holder in (model, *model.layers):
        for name, child in list(holder.named_children()):
            if name in ("embed", "norm", "lm_head"):
                setattr(holder, name, DistributedDataParallel(child))
    with pytest.raises(ValueError, match=r"^3 trainable parameters, layers\.0\.down_proj\.bias among them"):
        dmuon.Muon(model)
