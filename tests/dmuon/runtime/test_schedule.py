"""When units move: accumulation, recomputation, unused parameters, what a step leaves behind."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dmuon
from tests.support.harness import (
    DEVICE,
    EVERY_ROUTE,
    assert_same,
    build,
    data_rank,
    full_gradients,
    full_weights,
    train,
    weights_of,
)
from tests.support.oracle import OracleMuon, Skipping, ToyModel, batch, is_proj, loss_of, train_one_process
from tests.support.pool import distributed
from tests.support.private import after_arrival, runtime_of
from tests.support.programs import backward_that_raised, forward_that_raised, oracle_gradients, plain


@distributed(world=2)
def test_replicas_hear_of_the_last_micro_batch_only(rank, world):
    """Also of what is still on its way when the last one begins."""
    model, _ = build(world, ToyModel(layers=6), mesh=(2, 1, 1), optimizer=False, shard=False)
    sent = []
    for unit in runtime_of(model).units:
        original = unit.launch_replicate_stage
        unit.launch_replicate_stage = lambda unit=unit, original=original: (sent.append(unit.name), original())[1]
    for micro_batch in range(4):
        dmuon.set_requires_all_reduce(model, micro_batch == 3)
        tokens, labels = batch(micro_batch, rank)
        loss_of(model(tokens), labels).backward()
    runtime_of(model).wait_gradients()
    assert sorted(sent) == sorted(unit.name for unit in runtime_of(model).units)


@distributed(world=2)
def test_no_sync_inside_no_sync(rank, world):
    model, _ = build(world)
    with dmuon.no_sync(model):
        with dmuon.no_sync(model):
            plain(model, rank)
        plain(model, rank)
        assert not runtime_of(model).schedule.has_gradients
    plain(model, rank)
    expected = oracle_gradients(ToyModel, plain, world)
    assert_same(full_gradients(model), {n: 3 * g for n, g in expected.items()}, atol=3e-6)


@pytest.mark.parametrize("prefetch", [0, 2])
@distributed(world=2)
def test_prefetch_changes_nothing(rank, world, prefetch):
    weights = []
    for ahead in (1, prefetch):
        model, optimizer = build(world, ToyModel(layers=4), prefetch=ahead)
        train(model, optimizer, 2, rank)
        weights.append(full_weights(model))
    assert_same(weights[0], weights[1], atol=0, rtol=0)


@distributed(world=2)
def test_tied_embedding_and_head(rank, world):
    model, optimizer = build(world, ToyModel(tie=True))
    train(model, optimizer, 3, rank)
    oracle = ToyModel(tie=True)
    train_one_process(oracle, OracleMuon(oracle, is_proj), 3, world)
    assert_same(full_weights(model), weights_of(oracle))
    assert model.lm_head.weight is model.embed.weight


# ------------------------------------------------------------------ accumulation (behaviour 7 of docs/design)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@pytest.mark.parametrize("no_sync_steps", [0, 2, 3])
@distributed(world=2)
def test_accumulation(rank, world, mode, no_sync_steps):
    """3 micro-batches with the first ``no_sync_steps`` not reduced equal one batch; when none is reduced, nothing is
    on any owner."""
    model, optimizer = build(world, mode=mode)
    for micro in range(3):
        tokens, labels = batch(micro, rank)
        if micro < no_sync_steps:
            with dmuon.no_sync(model):
                (loss_of(model(tokens), labels) / 3).backward()
        else:
            (loss_of(model(tokens), labels) / 3).backward()
    if no_sync_steps == 3:
        assert all(piece.grad is None for piece in dmuon.get_owned_params(model))
        (0.0 * model(batch(3, rank)[0]).sum()).backward()
    optimizer.step()

    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 1, world, micro=3)
    assert_same(full_weights(model), weights_of(oracle), atol=2e-6)


# --------------------------------------------------------------- checkpointing is bitwise (behaviour 10 of docs/design)


class Recomputing(ToyModel):
    """Checkpointing switched by attributes, the same arithmetic either way."""

    layers_to_checkpoint = ()
    options = {"use_reentrant": False}  # noqa: RUF012

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, **self.options) if index in self.layers_to_checkpoint else layer(x)
        return self.lm_head(self.norm(x))


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_activation_checkpointing_is_bitwise(rank, world, mode):
    results = []
    for layers, options in [
        ((), {"use_reentrant": False}),
        ((0, 1, 2), {"use_reentrant": False}),
        ((0, 1, 2), {"use_reentrant": True}),
        ((1,), {"use_reentrant": False}),
        ((0, 2), {"use_reentrant": True}),
        ((0, 1, 2), {"use_reentrant": False, "early_stop": False}),
    ]:
        model, optimizer = build(world, Recomputing(), mode=mode)
        model.layers_to_checkpoint, model.options = layers, options
        train(model, optimizer, 2, rank)
        results.append(full_weights(model))
    for result in results[1:]:
        assert_same(result, results[0], atol=0, rtol=0)


# ------------------------------------------------------------------ unused parameters (behaviour 11 of docs/design)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=4, timeout=30)
def test_unused_on_every_rank_on_one_rank_and_used_again(rank, world, mode):
    """FSDP2 does not support a layer that only one rank skips, so the parameters outside are left alone here."""

    def plan(step, on_rank):
        if step == 1:
            return frozenset({1})  # everywhere
        return frozenset({0, 2}) if step == 2 and on_rank == 1 else frozenset()

    hyper = {"weight_decay": 0.1, "lr": 0.01}
    model, optimizer = build(world, Skipping(), mode=mode, shard=False, muon={**hyper, "adamw_lr": 0.0})
    oracle = Skipping()
    oracle_optimizer = OracleMuon(oracle, is_proj, **hyper, adamw_lr=0.0)
    for step in range(4):
        tokens, labels = batch(step, rank)
        model.skip = plan(step, rank)
        loss_of(model(tokens), labels).backward()
        optimizer.step()
        before = weights_of(oracle)
        for other in range(world):
            tokens, labels = batch(step, other)
            oracle.skip = plan(step, other)
            (loss_of(oracle(tokens), labels) / world).backward()
        oracle_optimizer.step()
        expected = weights_of(oracle)
        assert step != 1 or torch.equal(expected["layers.1.q_proj.weight"], before["layers.1.q_proj.weight"])
        actual = full_weights(model)
        assert_same({n: actual[n] for n in expected if "proj.weight" in n},
                    {n: w for n, w in expected.items() if "proj.weight" in n})  # fmt: skip


@distributed(world=2)
def test_parameter_never_used_has_no_momentum(rank, world):
    model, optimizer = build(world, Skipping(), shard=False, muon={"weight_decay": 0.5})
    model.skip = frozenset({1})
    before = full_weights(model)
    train(model, optimizer, 2, rank)
    after = full_weights(model)
    assert torch.equal(after["layers.1.q_proj.weight"], before["layers.1.q_proj.weight"])
    assert not torch.equal(after["layers.0.q_proj.weight"], before["layers.0.q_proj.weight"])
    for dp in dmuon.get_owned_params(model):
        assert optimizer.state[dp.param]["momentum_buffer"].any() == (not dp.fqn.startswith("layers.1."))


# ------------------------------------------------------------------ nothing leaks (behaviour 13 of docs/design)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_zero_grad_forgets_the_batch(rank, world, mode):
    results = []
    for forget in (None, "optimizer", "model"):
        model, optimizer = build(world, mode=mode)
        train(model, optimizer, 1, rank)
        if forget:
            tokens, labels = batch(77, rank)
            loss_of(model(tokens), labels).backward()
            (optimizer if forget == "optimizer" else model).zero_grad()
        tokens, labels = batch(1, rank)
        loss_of(model(tokens), labels).backward()
        optimizer.step()
        results.append(full_weights(model))
    assert_same(results[1], results[0], atol=0, rtol=0)
    assert_same(results[2], results[0], atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_second_step_does_nothing(rank, world, mode):
    model, optimizer = build(world, mode=mode, muon={"weight_decay": 0.1})
    train(model, optimizer, 2, rank)
    before = full_weights(model)
    optimizer.step()
    assert_same(full_weights(model), before, atol=0, rtol=0)
    train(model, optimizer, 1, rank, start=2)  # and the machinery still works
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj, weight_decay=0.1), 3, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_zero_grad_recovers_from_a_forward_and_a_backward_that_raised(rank, world):
    model, optimizer = build(world, shard=False, muon={"adamw_lr": 0.0})
    backward_that_raised(model, rank)
    optimizer.zero_grad()
    forward_that_raised(model, rank)
    optimizer.zero_grad()
    train(model, optimizer, 2, rank)
    dist.barrier()
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj, adamw_lr=0.0), 2, world)
    expected = {n: w for n, w in weights_of(oracle).items() if is_proj(n, w)}
    actual = full_weights(model)
    assert_same({n: actual[n] for n in expected}, expected)


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=["1-D", "2x2", "tp2"])
@distributed(world=4)
def test_arrival_is_noted_when_a_gradient_is_complete(rank, world, mesh):
    """What a piece's event would stand for: after the last note nothing is added any more, micro-batches or not."""
    model, optimizer = build(world, mesh=mesh, **EVERY_ROUTE)
    noted = {}

    def note(unit):
        noted.update({piece: None if piece.grad is None else piece.grad.clone() for piece in unit.owned})

    with after_arrival(note):
        for step in range(2):
            tokens, labels = batch(step, data_rank(rank, mesh))
            loss_of(model(tokens), labels).backward()
        optimizer.runtime.collect_gradients()
    if DEVICE == "cuda":  # the copies were made on the stream of the reductions
        torch.cuda.synchronize()
    owned = optimizer.runtime.owned
    assert noted.keys() == set(owned)
    for piece in owned:
        assert torch.equal(noted[piece], piece.grad), piece
