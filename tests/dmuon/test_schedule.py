"""Control flow: whatever a training step does, the gradients are those of one process."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import dmuon
from tests.dmuon.harness import (
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
from tests.oracle import Block, OracleMuon, Skipping, ToyModel, batch, is_proj, loss_of, train_one_process
from tests.pool import distributed
from torchtitan_dmuon.dmuon.unit import Unit

# ------------------------------------------------------------------ programs: (model, rank) -> runs its own backward


def two_forwards_one_backward(model, rank):
    (t1, l1), (t2, l2) = batch(1, rank), batch(2, rank)
    (loss_of(model(t1), l1) + 2 * loss_of(model(t2), l2)).backward()


def forward_forward_backward_backward(model, rank):
    (t1, l1), (t2, l2) = batch(1, rank), batch(2, rank)
    first, second = loss_of(model(t1), l1), loss_of(model(t2), l2)
    second.backward()
    first.backward()


def three_forwards_two_backwards(model, rank):
    first, second, third = (loss_of(model(tokens), labels) for tokens, labels in (batch(i, rank) for i in (1, 2, 3)))
    second.backward()
    (first + third).backward()


def backward_that_raised(model, rank):
    """What came before it raised stays, as in plain PyTorch."""

    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("planned")

    tokens, labels = batch(4, rank)
    handle = model.layers[1].norm.register_forward_hook(lambda m, a, out: Breaking.apply(out))
    with pytest.raises(ArithmeticError):
        loss_of(model(tokens), labels).backward()
    handle.remove()


def backward_tried_again(model, rank):
    tokens, labels = batch(4, rank)
    loss = loss_of(model(tokens), labels)
    handle = model.layers[1].q_proj.weight.register_hook(raising)
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()


def raising(grad):
    raise ArithmeticError("planned")


def backward_after_one_that_raised(model, rank):
    """Nobody calls zero_grad in between."""
    backward_that_raised(model, rank)
    plain(model, rank)


def autocast_around_micro_batches(model, rank):
    """Autocast keeps what it has cast until its end."""
    (t1, l1), (t2, l2), (t3, l3) = (batch(i, rank) for i in (1, 2, 3))
    with torch.autocast(DEVICE, torch.bfloat16):
        loss_of(model(t1), l1).backward()
        first, second = loss_of(model(t2), l2), loss_of(model(t3), l3)
        first.backward()
        second.backward()


def eval_between(model, rank):
    (t1, l1), (t2, _) = batch(1, rank), batch(2, rank)
    loss = loss_of(model(t1), l1)
    with torch.no_grad():
        model(t2)
    loss.backward()
    with torch.no_grad():
        model(t2)


def retained_graph(model, rank):
    tokens, labels = batch(1, rank)
    loss = loss_of(model(tokens), labels)
    loss.backward(retain_graph=True)
    loss.backward()


def submodule_called_without_the_root(model, rank):
    tokens, labels = batch(1, rank)
    x = model.embed(tokens)
    for layer in model.layers:
        x = layer(x)
    loss_of(model.lm_head(model.norm(x)), labels).backward()


def out_of_order(model, rank):
    tokens, labels = batch(1, rank)
    x = model.embed(tokens)
    for index in (2, 0, 1):
        x = model.layers[index](x)
    loss_of(model.lm_head(model.norm(x)), labels).backward()


class Twice(ToyModel):
    """Its first layer runs three times: twice in a row, and again after the others."""

    def forward(self, tokens):
        x = self.layers[0](self.embed(tokens))
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
        return self.lm_head(self.norm(x))


class SomeCheckpointed(Twice):
    """Layers 0 and 2 under activation checkpointing; 0 is called three times."""

    reentrant = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in [self.layers[0], *self.layers, self.layers[0]]:
            if layer is self.layers[1]:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.lm_head(self.norm(x))


class SomeReentrant(SomeCheckpointed):
    reentrant = True


class PairCheckpointed(ToyModel):
    """One checkpoint around two units."""

    def forward(self, tokens):
        x = self.embed(tokens)
        x = checkpoint(lambda y: self.layers[1](self.layers[0](y)), x, use_reentrant=False)
        return self.lm_head(self.norm(self.layers[2](x)))


class ReentrantInside(ToyModel):
    """Every layer runs twice in a row and recomputes itself: each time its gradients come in a pass of their own."""

    class Recomputed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for layer in self.layers:
            layer.__class__ = self.Recomputed

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(layer(x))
        return self.lm_head(self.norm(x))


class CallsOthers(ToyModel):
    """The last layer runs the ones before it."""

    class Outer(Block):
        def forward(self, x):
            for other in self.others:
                x = other(x)
            return super().forward(x)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers[2].__class__ = self.Outer
        self.layers[2].others = [self.layers[i] for i in (0, 1, 0)]  # a list, so they are not its children

    def forward(self, tokens):
        return self.lm_head(self.norm(self.layers[2](self.embed(tokens))))


@dataclasses.dataclass
class Hidden:
    states: dict
    aux: tuple


class NestedOutputs(ToyModel):
    """Units exchange dataclasses, dicts and tuples; one output carries no gradient."""

    class Wrapped(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, hidden: Hidden) -> Hidden:
            x = self.block(hidden.states["x"])
            return Hidden({"x": x, "ids": hidden.states["ids"]}, (x.detach(), [x * 0.5]))

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers = nn.ModuleList(self.Wrapped(block) for block in self.layers)

    def forward(self, tokens):
        x = self.embed(tokens)
        hidden = Hidden({"x": x, "ids": tokens}, (x.detach(), [x]))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden.states["x"] + hidden.aux[1][0]))


def plain(model, rank):
    tokens, labels = batch(1, rank)
    loss_of(model(tokens), labels).backward()


PROGRAMS = [
    two_forwards_one_backward,
    forward_forward_backward_backward,
    three_forwards_two_backwards,
    eval_between,
    retained_graph,
    submodule_called_without_the_root,
    out_of_order,
]
# FSDP2 itself does not bear these.
OWN_PROGRAMS = [
    backward_that_raised,
    backward_tried_again,
    backward_after_one_that_raised,
    autocast_around_micro_batches,
]
MODELS = [Twice, SomeCheckpointed, SomeReentrant, PairCheckpointed, NestedOutputs, ReentrantInside, CallsOthers]


def oracle_gradients(model_class, program, world, **kwargs):
    """Mean over ranks of what ``program`` gives on one process."""
    model = model_class(**kwargs)
    for rank in range(world):
        program(model, rank)
    return {n: None if p.grad is None else p.grad / world for n, p in model.named_parameters()}


def check_program(model_class, program, rank, world, mode, fsdp2, **kwargs):
    """Gradients, one step, and gradients again (the next forward must see the new weights)."""
    predicate = is_proj if fsdp2 else (lambda n, p: p.ndim == 2 and "embed" not in n and "lm_head" not in n)
    model, optimizer = build(world, model_class(**kwargs), predicate=predicate, mode=mode, shard=fsdp2)
    for _ in range(2):
        program(model, rank)
        expected = oracle_gradients(model_class, program, world, **kwargs)
        actual = full_gradients(model)
        if not fsdp2:  # without FSDP2 nobody averages the gradients of the parameters that stay outside
            expected = {n: g for n, g in expected.items() if n in {dp.fqn for dp in dmuon.get_dedicated_params(model)}}
            actual = {n: g for n, g in actual.items() if n in expected}
        assert_same(actual, expected, atol=2e-6)
        optimizer.zero_grad()
    for dp in model._dmuon_runtime.params:
        assert dp.param.isnan().all(), f"{dp.fqn} is readable outside forward and backward"
    model._dmuon_runtime.schedule.invalidate_weights()


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_programs(rank, world, mode):
    for program in PROGRAMS:
        # FSDP2 itself does not support entering layers without the root.
        fsdp2 = program not in (submodule_called_without_the_root, out_of_order)
        check_program(ToyModel, program, rank, world, mode, fsdp2)
    for program in OWN_PROGRAMS:
        check_program(ToyModel, program, rank, world, mode, fsdp2=False)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_programs_of_a_looped_model(rank, world, mode):
    for program in (*PROGRAMS, *OWN_PROGRAMS):
        check_program(Twice, program, rank, world, mode, fsdp2=False)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_zero_grad_between_forward_and_backward(rank, world, mode):
    """It forgets gradients, not forwards."""
    for model_class in (ToyModel, Twice):
        model, optimizer = build(world, model_class(), mode=mode, shard=False)
        for _ in range(2):
            (t1, l1), (t2, l2) = batch(1, rank), batch(2, rank)
            plain(model, rank)
            loss = loss_of(model(t1), l1) + 2 * loss_of(model(t2), l2)
            optimizer.zero_grad()
            loss.backward()
            expected = oracle_gradients(model_class, two_forwards_one_backward, world)
            expected = {n: g for n, g in expected.items() if is_proj(n, g)}
            assert_same({n: g for n, g in full_gradients(model).items() if n in expected}, expected, atol=2e-6)
            optimizer.zero_grad()


class Uneven(ToyModel):
    """``dropped`` layers give back what they get; ``again`` runs the last one twice in a row."""

    class Droppable(Block):
        dropped = False

        def forward(self, x):
            return x if self.dropped else super().forward(x)

    def __init__(self, dropped=(), again=False, **kwargs):
        super().__init__(**kwargs)
        self.again = again
        for index, layer in enumerate(self.layers):
            layer.__class__ = self.Droppable
            layer.dropped = index in dropped

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in [*self.layers, *([self.layers[-1]] if self.again else [])]:
            x = layer(x)
        return self.lm_head(self.norm(x))


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_what_only_one_rank_does_inside_its_layers(rank, world, mode):
    """A layer dropped inside itself, or run twice in a row, on one rank only: nobody waits for ever."""
    for odd in ({"dropped": (1,)}, {"dropped": (5,)}, {"dropped": (0, 3)}, {"again": True}):
        model, optimizer = build(world, Uneven(layers=6, **(odd if rank else {})), mode=mode, shard=False)
        for step in range(2):
            tokens, labels = batch(step, rank)
            loss_of(model(tokens), labels).backward()
            expected = dict.fromkeys((n for n, p in model.named_parameters() if is_proj(n, p)), 0)
            for r in range(world):
                oracle = Uneven(layers=6, **(odd if r else {}))
                tokens, labels = batch(step, r)
                (loss_of(oracle(tokens), labels) / world).backward()
                for name in expected:
                    grad = oracle.get_parameter(name).grad
                    expected[name] += 0 if grad is None else grad
            actual = full_gradients(model)
            assert_same({name: actual[name] for name in expected}, expected, atol=2e-6)
            optimizer.zero_grad()


@pytest.mark.parametrize("raised", [False, True])
@distributed(world=2)
def test_what_only_one_rank_keeps(rank, world, raised):
    """A forward without backward, whose output (or whose exception, with all it holds) one rank keeps."""
    model, optimizer = build(world, ToyModel(layers=6), shard=False)
    tokens, _ = batch(1, rank)
    if raised:
        handle = model.layers[3].norm.register_forward_hook(lambda m, a, out: out.view(-1, 1000))
        with pytest.raises(RuntimeError, match="invalid for input of size") as kept:
            model(tokens)
        handle.remove()
    else:
        kept = model(tokens)
    if rank == 0:
        del kept
    optimizer.zero_grad()
    plain(model, rank)
    expected = {n: g for n, g in oracle_gradients(ToyModel, plain, world, layers=6).items() if is_proj(n, g)}
    actual = full_gradients(model)
    assert_same({name: actual[name] for name in expected}, expected)


@distributed(world=2)
def test_replicas_hear_of_the_last_micro_batch_only(rank, world):
    """Also of what is still on its way when the last one begins."""
    model, _ = build(world, ToyModel(layers=6), mesh=(2, 1, 1), optimizer=False, shard=False)
    sent = []
    for unit in model._dmuon_runtime.units:
        original = unit.launch_replicate_stage
        unit.launch_replicate_stage = lambda unit=unit, original=original: (
            sent.append(unit.name) if unit.travelling else None,
            original(),
        )
    for micro_batch in range(4):
        dmuon.set_requires_all_reduce(model, micro_batch == 3)
        tokens, labels = batch(micro_batch, rank)
        loss_of(model(tokens), labels).backward()
    model._dmuon_runtime.wait_gradients()
    assert sorted(sent) == sorted(unit.name for unit in model._dmuon_runtime.units)


@distributed(world=2)
def test_no_sync_inside_no_sync(rank, world):
    model, _ = build(world)
    with dmuon.no_sync(model):
        with dmuon.no_sync(model):
            plain(model, rank)
        plain(model, rank)
        assert not model._dmuon_runtime.schedule.has_gradients
    plain(model, rank)
    expected = oracle_gradients(ToyModel, plain, world)
    assert_same(full_gradients(model), {n: 3 * g for n, g in expected.items()}, atol=3e-6)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_models(rank, world, mode):
    for model_class in MODELS:
        check_program(model_class, plain, rank, world, mode, fsdp2=False)
        check_program(model_class, two_forwards_one_backward, rank, world, mode, fsdp2=False)
        check_program(model_class, forward_forward_backward_backward, rank, world, mode, fsdp2=False)


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


class SharedMatrix(ToyModel):
    """One matrix used by two blocks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers[2].q_proj.weight = self.layers[0].q_proj.weight


@distributed(world=2)
def test_matrix_shared_by_two_blocks(rank, world):
    check_program(SharedMatrix, plain, rank, world, "z3", fsdp2=False)


# ------------------------------------------------------------------ accumulation (scenario 7)


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


# ------------------------------------------------------------------ checkpointing is bitwise (scenario 10)


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


# ------------------------------------------------------------------ unused parameters (scenario 11)


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


# ------------------------------------------------------------------ nothing leaks (scenario 13)


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
    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("planned")

    model, optimizer = build(world, shard=False, muon={"adamw_lr": 0.0})
    tokens, labels = batch(5, rank)
    handle = model.layers[1].norm.register_forward_hook(lambda m, a, out: Breaking.apply(out))
    loss = loss_of(model(tokens), labels)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    optimizer.zero_grad()
    handle = model.layers[1].norm.register_forward_hook(lambda m, a, out: out.view(-1, 1000))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(tokens)
    handle.remove()
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
    noted, original = {}, Unit._note_arrival

    def note(unit):
        original(unit)
        noted.update({piece: None if piece.grad is None else piece.grad.clone() for piece in unit.owned})

    Unit._note_arrival = note
    try:
        for step in range(2):
            tokens, labels = batch(step, data_rank(rank, mesh))
            loss_of(model(tokens), labels).backward()
        optimizer.runtime.collect_gradients()
    finally:
        Unit._note_arrival = original
    if DEVICE == "cuda":  # the copies were made on the stream of the reductions
        torch.cuda.synchronize()
    owned = optimizer.runtime.owned
    assert noted.keys() == set(owned)
    for piece in owned:
        assert torch.equal(noted[piece], piece.grad), piece
