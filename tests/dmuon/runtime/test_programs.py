"""Whatever the forwards and backwards of a step are, in whatever models, the gradients are those of one process
(behaviour 9 of docs/design)."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dmuon
from tests.support.harness import DEVICE, assert_same, build, full_gradients
from tests.support.oracle import Block, ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed
from tests.support.private import runtime_of
from tests.support.programs import backward_that_raised, forward_that_raised, oracle_gradients, plain

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
    for dp in runtime_of(model).params:
        assert dp.param.isnan().all(), f"{dp.fqn} is readable outside forward and backward"
    runtime_of(model).schedule.invalidate_weights()


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
    kept = forward_that_raised(model, rank) if raised else model(batch(1, rank)[0])
    if rank == 0:
        del kept
    optimizer.zero_grad()
    plain(model, rank)
    expected = {n: g for n, g in oracle_gradients(ToyModel, plain, world, layers=6).items() if is_proj(n, g)}
    actual = full_gradients(model)
    assert_same({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_models(rank, world, mode):
    for model_class in MODELS:
        check_program(model_class, plain, rank, world, mode, fsdp2=False)
        check_program(model_class, two_forwards_one_backward, rank, world, mode, fsdp2=False)
        check_program(model_class, forward_forward_backward_backward, rank, world, mode, fsdp2=False)


class SharedMatrix(ToyModel):
    """One matrix used by two blocks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.layers[2].q_proj.weight = self.layers[0].q_proj.weight


@distributed(world=2)
def test_matrix_shared_by_two_blocks(rank, world):
    check_program(SharedMatrix, plain, rank, world, "z3", fsdp2=False)
