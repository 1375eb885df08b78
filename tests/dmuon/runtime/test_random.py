"""Random programs: whatever mesh, routes, mode and training loop are drawn, the result is that of one process.

The seeds are fixed, so a failure is repeated by its seed; the draw is part of the message. To look further, run
``check(rank, world, draw_of(seed))`` with other seeds.
"""

import dataclasses
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dmuon
from tests.support.harness import (
    TYPE_SPLIT,
    CountingNewtonSchulz,
    assert_same,
    build,
    data_rank,
    full_gradients,
    full_weights,
    weights_of,
)
from tests.support.oracle import OracleMuon, ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed

STEPS = 3
MESHES = [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)]
# Chosen to cover what can be drawn; a test below says what that means.
SEEDS = [18, 46, 56, 61, 75, 113, 130, 141, 149, 166, 173, 187]
# How the micro-batches before the last one of a step are accumulated.
WAYS = ["reduce", "no_sync", "no all-reduce", "mixed"]

NOTHING = frozenset()


@dataclasses.dataclass(frozen=True)
class Draw:
    """One random program. ``skips`` maps (step, micro-batch) to the layers that every rank leaves out, ``alone`` to
    those that one data rank leaves out besides; ``evaluations`` come before the forward of a (step, micro-batch), where
    micro-batch ``accumulation`` is the optimizer's step."""

    seed: int
    mesh: tuple
    everything: bool  # all parameters dedicated, type-split; else matrices, and FSDP2 for the others
    mode: str
    prefetch: int
    replicate_async: bool
    dim: int
    hidden: int
    layers: int
    accumulation: int
    ways: tuple  # one for each micro-batch but the last
    checkpointed: frozenset
    skips: dict
    alone: dict
    evaluations: frozenset
    max_norm: float | None
    hyper: dict

    @property
    def data_ranks(self):
        return self.mesh[0] * self.mesh[1]

    def skipped(self, step, micro, on):
        lonely, layers = self.alone.get((step, micro), (None, NOTHING))
        return self.skips.get((step, micro), NOTHING) | (layers if on == lonely else NOTHING)


def draw_of(seed):
    source = random.Random(seed)
    mesh = source.choice(MESHES)
    everything = source.random() < 0.5
    layers = source.randint(2, 4)
    accumulation = source.randint(1, 3)
    way = source.choice(WAYS)
    ways = tuple(source.choice(WAYS[:3]) if way == "mixed" else way for _ in range(accumulation - 1))

    def subset(chance):
        return frozenset(index for index in range(layers) if source.random() < chance)

    times = [(step, micro) for step in range(STEPS) for micro in range(accumulation)]
    if everything:
        skips = {time: subset(0.4) for time in times if source.random() < 0.4}
        alone = {time: (source.randrange(mesh[0] * mesh[1]), subset(0.5)) for time in times if source.random() < 0.4}
    else:  # FSDP2 loses what it has reduced without all-reducing it when the layer is not used in the last micro-batch
        by_step = {step: subset(0.4) for step in range(STEPS) if source.random() < 0.5}
        skips, alone = {(step, micro): by_step[step] for step, micro in times if step in by_step}, {}
    return Draw(
        seed=seed,
        mesh=mesh,
        everything=everything,
        mode=source.choice(["z2", "z3"]),
        prefetch=source.randint(0, 2),
        replicate_async=source.random() < 0.7,
        dim=source.randint(18, 26),
        hidden=source.randint(30, 41),
        layers=layers,
        accumulation=accumulation,
        ways=ways,
        checkpointed=subset(0.5),
        skips={time: found for time, found in skips.items() if found},
        alone={time: found for time, found in alone.items() if found[1]},
        # FSDP2 itself keeps its root unsharded, and so stale, after a forward between the last backward and the step.
        evaluations=frozenset(
            (step, micro)
            for step in range(STEPS)
            for micro in range(accumulation + everything)
            if source.random() < 0.3
        ),
        max_norm=source.choice([None, 0.3, 100.0]),
        hyper={
            "lr": source.choice([0.01, 0.02]),
            "nesterov": source.random() < 0.7,
            "weight_decay": source.choice([0.0, 0.1]),
            "adamw_weight_decay": source.choice([0.0, 0.2]),
        },
    )


class Drawn(ToyModel):
    """``skip`` and ``checkpointed`` hold the layers that the next forward leaves out and recomputes."""

    skip = checkpointed = NOTHING

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index in self.checkpointed and torch.is_grad_enabled():
                x = x if index in self.skip else checkpoint(layer, x, use_reentrant=False)
            else:
                x = x if index in self.skip else layer(x)
        return self.lm_head(self.norm(x))


def make(draw):
    return Drawn(draw.layers, draw.dim, draw.hidden)


def loss_at(model, draw, step, micro, on):
    model.skip = draw.skipped(step, micro, on)
    tokens, labels = batch(step * draw.accumulation + micro, on)
    return loss_of(model(tokens), labels) / draw.accumulation


@torch.no_grad()
def evaluate(model, draw, step, micro, on):
    if (step, micro) in draw.evaluations:
        model.skip = draw.skipped(step, micro, on)
        model(batch(500 + step, on)[0])


def backward(model, loss, way):
    if way == "no_sync":
        with dmuon.no_sync(model):
            loss.backward()
    else:
        dmuon.set_requires_all_reduce(model, way != "no all-reduce")
        loss.backward()


def assert_each_matrix_once(model, numbers, layers):
    """This step's Newton-Schulz has seen every matrix once in the world: each rank as many as it owns, and the owned
    ones are all there are."""
    own = [piece.fqn for piece in dmuon.get_owned_params(model) if piece.spec.route == "muon"]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (own, sum(numbers)))
    for names, count in everyone:
        assert count == len(names), f"{count} orthogonalised by the owner of {names}"
    names = [name for names, _ in everyone for name in names]
    assert len(names) == len(set(names)) == 3 * layers
    numbers.clear()


def train_drawn(draw, rank, world):
    """(weights, gradient norms) of the distributed run."""
    policy = {"predicate": lambda n, p: True, "param_policy": TYPE_SPLIT} if draw.everything else {}
    counting = CountingNewtonSchulz()
    model, optimizer = build(
        world,
        make(draw),
        mesh=draw.mesh,
        shard=not draw.everything,
        muon={**draw.hyper, "ns_backend": counting, "replicate_async": draw.replicate_async},
        mode=draw.mode,
        prefetch=draw.prefetch,
        **policy,
    )
    model.checkpointed = draw.checkpointed
    numbers, norms, mine = counting.numbers, [], data_rank(rank, draw.mesh)
    for step in range(STEPS):
        for micro in range(draw.accumulation):
            evaluate(model, draw, step, micro, mine)
            loss = loss_at(model, draw, step, micro, mine)
            backward(model, loss, (*draw.ways, "reduce")[micro])
        evaluate(model, draw, step, draw.accumulation, mine)
        if draw.max_norm is not None:
            norms.append(dmuon.clip_total_grad_norm_(optimizer, draw.max_norm))
        optimizer.step()
        assert_each_matrix_once(model, numbers, draw.layers)
    return full_weights(model), norms


def train_alone(draw):
    """The same by plain PyTorch."""
    model = make(draw)
    optimizer, norms = OracleMuon(model, is_proj, **draw.hyper), []
    for step in range(STEPS):
        for micro in range(draw.accumulation):
            for on in range(draw.data_ranks):
                (loss_at(model, draw, step, micro, on) / draw.data_ranks).backward()
        if draw.max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), draw.max_norm))
        optimizer.step()
    return weights_of(model), norms


def check(rank, world, draw):
    try:
        actual, actual_norms = train_drawn(draw, rank, world)
        expected, expected_norms = train_alone(draw)
        torch.testing.assert_close(actual_norms, expected_norms, rtol=1e-5, atol=1e-6)
        assert_same(actual, expected)
    except Exception as error:
        raise AssertionError(f"{draw}") from error


@pytest.mark.parametrize("seed", SEEDS)
@distributed(world=4)
def test_a_random_program_equals_one_process(rank, world, seed):
    check(rank, world, draw_of(seed))


def test_the_seeds_cover_what_can_be_drawn():
    draws = [draw_of(seed) for seed in SEEDS]
    assert {(draw.mesh, draw.everything) for draw in draws} == {(m, e) for m in MESHES for e in (True, False)}
    assert {(draw.mode, draw.everything) for draw in draws} == {(m, e) for m in ("z2", "z3") for e in (True, False)}
    assert {draw.prefetch for draw in draws} == {0, 1, 2}
    assert {draw.accumulation for draw in draws} == {1, 2, 3}
    assert {way for draw in draws for way in draw.ways} == set(WAYS) - {"mixed"}
    assert {draw.max_norm for draw in draws} == {None, 0.3, 100.0}
    assert all(
        sum(bool(field(draw)) for draw in draws) >= 4
        for field in (lambda d: d.checkpointed, lambda d: d.skips, lambda d: d.alone, lambda d: d.evaluations)
    )


# ------------------------------------------------------------------ what random programs have found, by itself


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@distributed(world=2, timeout=60)
def test_one_rank_leaves_out_layers_of_a_deep_model(rank, world, prefetch):
    """A rank that never completes a unit must not keep the others from launching the weights it waits for, and a rank
    that uses no layer at all must launch the weights of the others before it waits for gradients (behaviour 11)."""
    for layers, left_out in ((8, {7}), (8, {4}), (4, {0, 1, 2, 3})):
        oracle = Drawn(layers)
        model, _ = build(world, Drawn(layers), shard=False, prefetch=prefetch)
        for trained, ranks, divide in ((model, [rank], 1), (oracle, range(world), world)):
            for on in ranks:
                trained.skip = frozenset(left_out if on == 1 else ())
                tokens, labels = batch(0, on)
                (loss_of(trained(tokens), labels) / divide).backward()
        expected = {n: p.grad for n, p in oracle.named_parameters() if is_proj(n, p)}
        actual = full_gradients(model)
        assert_same({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@distributed(world=4)
def test_fewer_units_than_reductions_in_flight(rank, world, layers):
    """Accumulation reduces a unit again while its last reduction is still on its way to the owner."""
    for mesh in MESHES:
        model, _ = build(world, Drawn(layers), mesh=mesh)
        oracle, ranks = Drawn(layers), mesh[0] * mesh[1]
        for micro in range(3):
            tokens, labels = batch(micro, data_rank(rank, mesh))
            loss_of(model(tokens), labels).backward()
            for on in range(ranks):
                tokens, labels = batch(micro, on)
                (loss_of(oracle(tokens), labels) / ranks).backward()
        assert_same(full_gradients(model), {n: p.grad for n, p in oracle.named_parameters()})
