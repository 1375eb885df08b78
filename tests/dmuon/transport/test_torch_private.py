"""Every private PyTorch name that ``torch_private.py`` uses, by what it is for."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard  # imported before anything is dedicated, as users do
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from tests.support.harness import assert_same, build, flat_mesh, full_gradients, full_weights, train, weights_of
from tests.support.oracle import OracleMuon, ToyModel, batch, is_proj, loss_of, train_one_process
from tests.support.pool import distributed
from tests.support.private import runtime_of
from torchtitan_dmuon.dmuon.transport.torch_private import (
    group_like,
    queue_end_of_backward,
    set_group_timeout,
    teach_fully_shard_to_skip_dedicated,
)

HOLDERS = [module for module in (_fsdp_init, _fully_shard) if hasattr(module, "_get_managed_states")]


@contextlib.contextmanager
def plain_torch():
    """``fully_shard`` as torch ships it, whatever ran in this process before; restored at the end."""
    patched = [(holder, holder._get_managed_states) for holder in HOLDERS]
    for holder, function in patched:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        holder._get_managed_states = function
    try:
        yield
    finally:
        for holder, function in patched:
            holder._get_managed_states = function


def shard(model, mesh, **options):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def managed_by_fsdp(model):
    return {name for name, param in model.named_parameters() if isinstance(param, DTensor)}


# ------------------------------------------------------------------ the patch of fully_shard


@distributed(world=2)
def test_plain_fully_shard_skips_dedicated_parameters(rank, world):
    mesh = flat_mesh(world)
    expected = {name for name, param in ToyModel().named_parameters() if not is_proj(name, param)}
    with plain_torch():
        untouched = [holder._get_managed_states for holder in HOLDERS]
        assert HOLDERS and all(function.__module__.startswith("torch.") for function in untouched)
        model = ToyModel()
        objects = dict(model.named_parameters())
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        assert all(
            holder._get_managed_states is not function for holder, function in zip(HOLDERS, untouched, strict=True)
        )
        shard(model, mesh)
        assert managed_by_fsdp(model) == expected
        for name, param in model.named_parameters():
            if is_proj(name, param):
                assert param is objects[name] and param.shape == objects[name].shape


@distributed(world=2)
def test_without_the_patch_fully_shard_takes_dedicated_parameters(rank, world):
    """It stumbles over their placeholders. When torch skips them by itself, the patch can go."""
    model = ToyModel()
    mesh = flat_mesh(world)
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    with plain_torch(), pytest.raises(NotImplementedError):
        shard(model, mesh)


@distributed(world=2)
def test_the_patch_is_installed_once(rank, world):
    with plain_torch():
        untouched = [holder._get_managed_states for holder in HOLDERS]
        teach_fully_shard_to_skip_dedicated()
        once = [holder._get_managed_states for holder in HOLDERS]
        teach_fully_shard_to_skip_dedicated()
        dmuon.dedicate_params(ToyModel(), flat_mesh(world), predicate=is_proj)
        assert all(holder._get_managed_states is function for holder, function in zip(HOLDERS, once, strict=True))
        assert [function.__wrapped__ for function in once] == untouched


@distributed(world=2)
def test_models_without_dedicated_parameters_are_left_alone(rank, world):
    mesh = flat_mesh(world)
    results = []
    for patched in (False, True):
        with plain_torch():
            if patched:
                teach_fully_shard_to_skip_dedicated()
            model = ToyModel()
            shard(model, mesh)
            assert managed_by_fsdp(model) == {name for name, _ in model.named_parameters()}
            ignoring = ToyModel()
            ignored = {ignoring.norm.weight, ignoring.norm.bias}
            shard(ignoring, mesh, ignored_params=ignored)  # the user's own set still counts
            everything = {name for name, _ in ignoring.named_parameters()}
            assert managed_by_fsdp(ignoring) == everything - {"norm.weight", "norm.bias"}
            assert len(ignored) == 2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, 2, rank)
        results.append({name: param.full_tensor().detach() for name, param in model.named_parameters()})
    assert_same(results[1], results[0], atol=0, rtol=0)


@distributed(world=2)
def test_agrees_with_the_public_ignored_params(rank, world):
    mesh = flat_mesh(world)
    results, managed = [], []
    for public in (False, True):
        model = ToyModel()
        dmuon.dedicate_params(model, mesh, predicate=is_proj)
        assert dmuon.ignored_params(model) == {
            param for name, param in model.named_parameters() if is_proj(name, param)
        }
        if public:
            with plain_torch():
                shard(model, mesh, ignored_params=dmuon.ignored_params(model))
        else:
            shard(model, mesh)
        managed.append(managed_by_fsdp(model))
        train(model, dmuon.Muon(model), 2, rank)
        results.append(full_weights(model))
    assert managed[0] == managed[1] and managed[0]
    assert_same(results[1], results[0], atol=0, rtol=0)


@distributed(world=2)
def test_a_users_ignored_params_add_up_with_the_dedicated_ones(rank, world):
    mesh = flat_mesh(world)
    model = ToyModel()
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    mine = {model.norm.weight}
    shard(model, mesh, ignored_params=mine)
    expected = {name for name, param in ToyModel().named_parameters() if not is_proj(name, param)} - {"norm.weight"}
    assert managed_by_fsdp(model) == expected
    assert mine == {model.norm.weight}


# ------------------------------------------------------------------ moving a dedicated model

MOVES = {
    "to dtype": lambda module: module.to(torch.bfloat16),
    "to device": lambda module: module.to("cpu"),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "cuda": lambda module: module.cuda(),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}


@distributed(world=2)
def test_moving_a_dedicated_model_is_refused_with_advice(rank, world):
    class Parent(nn.Module):
        def __init__(self, child):
            super().__init__()
            self.child = child

    for sharded in (False, True):
        model, optimizer = build(world, shard=sharded, muon={} if sharded else {"adamw_lr": 0.0})
        parts = [
            model,
            model.layers,
            model.layers[1],
            model.layers[2].q_proj,
            Parent(model),
            torch.compile(model),
        ]
        for name, move in MOVES.items():
            for part in parts:
                with pytest.raises(RuntimeError) as caught:
                    move(part)
                for word in (
                    "dedicated to owner ranks",
                    "before dedicate_params",
                    "param_policy",
                    "dmuon.materialize",
                ):
                    assert word in str(caught.value), (name, type(part).__name__)
        # And nothing has happened: training goes on as if nobody had asked.
        train(model, optimizer, 1, rank)
        oracle = ToyModel()
        train_one_process(oracle, OracleMuon(oracle, is_proj, adamw_lr=1e-3 if sharded else 0.0), 1, world)
        chosen = [name for name, param in oracle.named_parameters() if sharded or is_proj(name, param)]
        actual, expected = full_weights(model), weights_of(oracle)
        assert_same({name: actual[name] for name in chosen}, {name: expected[name] for name in chosen})


@distributed(world=2)
def test_parts_without_dedicated_parameters_move_freely(rank, world):
    model, _ = build(world, shard=False, optimizer=False)
    assert model.embed.to(torch.bfloat16) is model.embed
    assert model.embed.weight.dtype == torch.bfloat16
    assert model.layers[0].norm.double().weight.dtype == torch.float64
    assert model.layers[0].q_proj.weight.dtype == torch.float32
    other = ToyModel().half()
    assert {param.dtype for param in other.parameters()} == {torch.float16}
    assert not {param.dtype for param in ToyModel().to_empty(device="meta").parameters()} - {torch.float32}


def test_models_without_dedicated_parameters_move_freely():
    for name, move in MOVES.items():
        if name != "cuda":
            assert isinstance(move(ToyModel()), ToyModel), name


# ------------------------------------------------------------------ process groups


@distributed(world=4, new_processes=True)
def test_group_like_inherits_members_backend_and_timeout(rank, world):
    """Made among its members only: the two halves do not know of each other, and one makes more groups."""
    cpu = torch.device("cpu")
    halves = [
        dist.new_group([0, 2], timeout=timedelta(seconds=41)),
        dist.new_group([1, 3], timeout=timedelta(seconds=43)),
    ]
    mine = halves[rank % 2]
    for attempt in range(1 + rank % 2):
        group = group_like(mine, cpu, f"test_{attempt}")
        assert group is not mine
        assert dist.get_process_group_ranks(group) == [rank % 2, rank % 2 + 2]
        assert dist.get_backend(group) == "gloo"
        assert group._get_backend(cpu).options._timeout == timedelta(seconds=41 if rank % 2 == 0 else 43)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == 2.0 * (rank % 2) + 2.0


@distributed(world=2)
def test_isolated_groups_of_a_dedicated_model(rank, world):
    cpu = torch.device("cpu")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=37))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = ToyModel()
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    lanes = runtime_of(model).lanes
    assert len({id(lanes.unshard.group), id(lanes.reduce.group), id(group)}) == 3
    for lane in (lanes.unshard, lanes.reduce):
        assert dist.get_process_group_ranks(lane.group) == [0, 1]
        assert lane.group._get_backend(cpu).options._timeout == timedelta(seconds=37)

    shared = ToyModel()
    dmuon.dedicate_params(shared, mesh, predicate=is_proj, process_group_policy="shared")
    lanes = runtime_of(shared).lanes
    assert lanes.unshard.group is lanes.reduce.group is mesh.get_group()


@distributed(world=2, new_processes=True)
def test_set_group_timeout(rank, world):
    """Seen from outside: a collective that the other rank never joins gives up after it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    set_group_timeout(group, torch.device("cpu"), timedelta(seconds=0.5))
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - start < 20
    dist.barrier()


# ------------------------------------------------------------------ the end of backward


@pytest.mark.parametrize("queue_at", ["output", "layer"])
def test_end_of_backward_comes_once_and_last(queue_at):
    model, events = ToyModel(), []

    def queue(*_):
        queue_end_of_backward(lambda: events.append("END"))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    if queue_at == "layer":
        model.layers[1].register_full_backward_hook(queue)
    names = sorted(name for name, _ in model.named_parameters())
    for step in range(2):  # every pass has its own end
        events.clear()
        tokens, labels = batch(step, 0)
        loss = loss_of(model(tokens), labels)
        if queue_at == "output":
            loss.register_hook(queue)
        loss.backward()
        assert sorted(events[:-1]) == names
        assert events[-1] == "END"


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1)], ids=["1-D", "2x2"])
@distributed(world=4)
def test_zero_grad_and_step_drop_what_fsdp2_holds_back(rank, world, mesh):
    """Gradients of no_sync and of set_requires_all_reduce(False) are in no param.grad; the next step must be that of a
    run which never saw them."""
    results = []
    for dirty in (False, True):
        model, optimizer = build(world, mesh=mesh, muon={"adamw_lr": 0.05})
        train(model, optimizer, 1, rank)
        if dirty:
            tokens, labels = batch(50, rank)
            with dmuon.no_sync(model):
                loss_of(model(tokens), labels).backward()
            optimizer.zero_grad()
            with dmuon.no_sync(model):
                loss_of(model(tokens), labels).backward()
            optimizer.step()  # nothing was reduced: nothing moves, and it drops the gradients as zero_grad does
            dmuon.set_requires_all_reduce(model, False)
            loss_of(model(tokens), labels).backward()
            dmuon.set_requires_all_reduce(model, True)
            optimizer.zero_grad()
        train(model, optimizer, 2, rank, start=1)
        results.append(full_weights(model))
    assert_same(results[1], results[0], atol=0, rtol=0)


@distributed(world=2)
def test_the_divide_factor_is_of_all_gradients(rank, world):
    """FSDP2's and ours: sums of all ranks' gradients."""
    model, _ = build(world)
    dmuon.set_gradient_divide_factor(model, 1.0)
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    oracle = ToyModel()
    for other in range(world):
        tokens, labels = batch(0, other)
        loss_of(oracle(tokens), labels).backward()
    assert_same(full_gradients(model), {name: p.grad for name, p in oracle.named_parameters()}, atol=2e-6)
