"""``torch.compile`` on every block, before dedication: the numbers of eager, one graph, nothing recompiled
(behaviour 25 of docs/design).

Compiled blocks are entered through the ``OptimizedModule`` around them, so hooks run outside the graphs, and the
parameters a graph reads are views whose memory comes and goes.
"""

import os
import subprocess

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from tests.support.harness import (
    EVERY_ROUTE,
    TYPE_SPLIT,
    assert_same,
    build,
    data_rank,
    full_weights,
    sharded_parameters,
    train,
    weights_of,
)
from tests.support.oracle import Block, OracleMuon, ToyModel, batch, is_proj, train_one_process
from tests.support.pool import distributed
from tests.support.private import runtime_of

STEPS = 4


class CountingBackend:
    """``name``, counting the graphs that dynamo hands over."""

    def __init__(self, name):
        self.name = name
        self.graphs = 0

    def __call__(self, graph, inputs, **kwargs):
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs, **kwargs)


class CheckpointInside(Block):
    """Half of the block is recomputed; the checkpoint is part of the graph."""

    def forward(self, x):
        h = self.norm(x)
        h = h + torch.tanh(self.q_proj(h))
        return x + checkpoint(self.feed_forward, h, use_reentrant=False)

    def feed_forward(self, h):
        return self.down_proj(torch.nn.functional.silu(self.up_proj(h)))


class CheckpointAround(ToyModel):
    """Checkpoints outside the graphs."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.lm_head(self.norm(x))


def make(recompute):
    model = CheckpointAround() if recompute == "around" else ToyModel()
    for index, layer in enumerate(model.layers):
        if recompute == "inside":
            layer.__class__ = CheckpointInside
        elif recompute == "wrapper":  # as trainers do it: checkpoint wrapper, then compile
            model.layers[index] = checkpoint_wrapper(layer)
    return model


def compiled(model, backend):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend, fullgraph=True)
    return model


def plain_weights(model):
    """``full_weights`` under the names of the model without wrappers. Collective."""
    sharded_parameters(model)
    wrapped = list(model.layers)
    for index, layer in enumerate(wrapped):
        for attribute in ("_orig_mod", "_checkpoint_wrapped_module"):
            layer = getattr(layer, attribute, layer)
        model.layers[index] = layer
    weights = full_weights(model)
    for index, layer in enumerate(wrapped):
        model.layers[index] = layer
    return weights


def train_counting(model, optimizer, rank, backend, steps=STEPS, between=lambda step: None):
    """Number of graphs compiled up to each step."""
    graphs = []
    for step in range(steps):
        train(model, optimizer, 1, rank, start=step)
        graphs.append(backend.graphs)
        between(step)
    assert not torch._dynamo.utils.counters["graph_break"]
    return graphs


def check(rank, world, recompute="none", backend="aot_eager", steps=STEPS, **options):
    """Compiled equals eager and one process."""
    backend = CountingBackend(backend)
    model, optimizer = build(world, compiled(make(recompute), backend), **options)
    assert {unit.name for unit in runtime_of(model).units} == {"layers.0", "layers.1", "layers.2"}
    graphs = train_counting(model, optimizer, rank, backend, steps)
    assert graphs[0] == 1, f"one graph serves all blocks, not {graphs[0]}"
    assert graphs[1:] == graphs[:1] * (steps - 1), f"recompiled: graphs by step {graphs}"

    eager, eager_optimizer = build(world, make(recompute), **options)
    train(eager, eager_optimizer, steps, rank)
    assert_same(plain_weights(model), plain_weights(eager))
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), steps, world)
    assert_same(plain_weights(model), weights_of(oracle))


@pytest.mark.parametrize("mode", ["z2", "z3"])
@pytest.mark.parametrize("recompute", ["none", "inside", "wrapper", "around"])
@distributed(world=2)
def test_compiled_blocks_equal_eager(rank, world, recompute, mode):
    check(rank, world, recompute, mode=mode)


@distributed(world=4)
def test_compiled_blocks_under_hsdp(rank, world):
    check(rank, world, mesh=(2, 2, 1))


@pytest.mark.parametrize("routes", ["fsdp2", "dedicated"])
@distributed(world=2)
def test_compiled_blocks_under_tensor_parallelism(rank, world, routes):
    """What a graph reads are DTensors over views of one buffer."""
    mesh, options = (1, 1, 2), EVERY_ROUTE if routes == "dedicated" else {}
    model, optimizer = build(world, mesh=mesh, muon={"adamw_lr": 0.02}, **options)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    train(model, optimizer, STEPS, data_rank(rank, mesh))
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj, adamw_lr=0.02), STEPS, 1)
    assert_same(full_weights(model), weights_of(oracle))


@pytest.fixture(scope="module")
def inductor(tmp_path_factory):
    """Skips when no C++ compiler works here."""
    folder = tmp_path_factory.mktemp("cpp")
    source = folder / "try.cpp"
    source.write_text("#include <vector>\nint f() { return std::vector<int>{1}.size(); }\n")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(folder / "try.so")]
    try:
        subprocess.run(command, timeout=30, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"inductor needs a C++ compiler with OpenMP: {error}")
    return "inductor"


@distributed(world=2, timeout=150)
def test_inductor(rank, world, inductor):
    check(rank, world, "wrapper", backend=inductor)


@pytest.mark.parametrize("everything_dedicated", [False, True])
@distributed(world=2)
def test_one_compile_in_twenty_steps_of_a_changing_learning_rate(rank, world, everything_dedicated):
    """Known bug xtuner 1661: every step compiled again. Evaluation adds a forward without gradients, once."""
    options = {"weight_decay": 0.1}
    dedicate = {}
    if everything_dedicated:
        dedicate = {"predicate": lambda n, p: True, "shard": False, "param_policy": TYPE_SPLIT}
    backend = CountingBackend("aot_eager")
    model, optimizer = build(world, compiled(ToyModel(), backend), muon=options, **dedicate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_at)
    graphs = train_counting(model, optimizer, rank, backend, 20, lambda step: schedule.step())
    assert graphs == graphs[:1] * 20
    for step in range(3):
        with torch.no_grad():
            model(batch(90 + step, rank)[0])
        train(model, optimizer, 1, rank, start=20 + step)
    assert backend.graphs <= 2 * graphs[0]

    oracle = ToyModel()
    oracle_optimizer = OracleMuon(oracle, is_proj, **options)
    for step in range(23):
        factor = factor_at(min(step, 20))
        oracle_optimizer.lr = 0.02 * factor
        oracle_optimizer.adamw.param_groups[0]["lr"] = 1e-3 * factor
        train_one_process(oracle, oracle_optimizer, 1, world, start=step)
    assert_same(plain_weights(model), weights_of(oracle))


def factor_at(step):
    """Another one at every step: warm-up, then decay."""
    return (step + 1) / 5 if step < 5 else 1 / (step - 3)
