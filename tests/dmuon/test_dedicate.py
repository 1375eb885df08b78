"""``dedicate_params`` and what it promises about the model; the guide's steps."""

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.harness import EVERY_ROUTE, assert_same, build, flat_mesh, full_weights, train, weights_of
from tests.support.meshes import DEVICE, mesh_of
from tests.support.oracle import Block, OracleMuon, ToyModel, batch, is_proj, loss_of, train_one_process
from tests.support.pool import distributed
from tests.support.private import runtime_of


@distributed(world=4, new_processes=True)
def test_the_guides_first_five_steps(rank, world):
    """The snippets of the guide, in its order, on a 1-D mesh."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("torchtitan_dmuon.dmuon.dedicate").addHandler(handler)
    logging.getLogger("torchtitan_dmuon.dmuon.dedicate").setLevel(logging.INFO)

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = ToyModel()
    assignment = dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
    assert records[0].startswith("dedicate_params: 9 params assigned to 4 ranks, imbalance=")
    assert f"imbalance={100 * assignment.imbalance:.1f}%, loads=[" in records[0]

    owned = dmuon.get_owned_params(model, rank=dist.get_rank())
    total_owned = sum(dp.numel for dp in owned)
    everyone = torch.tensor(float(total_owned))
    dist.all_reduce(everyone)
    assert everyone == 3 * (20 * 20 + 2 * 20 * 36)

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = dmuon.Muon(
        model,
        lr=0.02,
        momentum=0.95,
        ns_steps=5,
        nesterov=True,
        weight_decay=0.0,
        adamw_lr=1e-3,
        adamw_betas=(0.9, 0.999),
        adamw_weight_decay=0.01,
        adamw_eps=1e-8,
    )
    assert [group["group_name"] for group in optimizer.param_groups] == ["muon", "adamw"]
    adamw_params = optimizer.param_groups[1]["params"]

    for step in range(3):
        tokens, labels = batch(step, rank)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adamw_params, max_norm=1.0)
        dmuon.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()

    all_dp = dmuon.get_dedicated_params(model)
    fsdp_count = len(list(model.parameters())) - len(all_dp)
    assert (len(all_dp), fsdp_count) == (9, len(list(ToyModel().parameters())) - 9)

    oracle = ToyModel()
    oracle_optimizer = OracleMuon(oracle, is_proj)
    matrices = [p for n, p in oracle.named_parameters() if is_proj(n, p)]
    rest = [p for n, p in oracle.named_parameters() if not is_proj(n, p)]
    for step in range(3):
        parts = [batch(step, r) for r in range(world)]
        tokens, labels = (torch.cat(x) for x in zip(*parts, strict=True))
        loss_of(oracle(tokens), labels).backward()
        torch.nn.utils.clip_grad_norm_(rest, max_norm=1.0)
        torch.nn.utils.clip_grad_norm_(matrices, max_norm=1.0)
        oracle_optimizer.step()
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_parameters_look_right_at_all_times(rank, world):
    model = ToyModel()
    before = {name: (param, param.shape) for name, param in model.named_parameters()}
    model, optimizer = build(world, model, shard=False)
    seen = []
    model.layers[1].q_proj.register_forward_hook(lambda m, a, o: seen.append(m.weight.detach().clone()))

    def check():
        assert len(list(model.parameters())) == len(before)
        for name, param in model.named_parameters():
            assert param is before[name][0] and param.shape == before[name][1], name
            assert param.grad is None or not is_proj(name, param), name
        assert model.layers[1].q_proj.weight.isnan().all()

    check()
    tokens, labels = batch(0, rank)
    loss = loss_of(model(tokens), labels)
    check()
    loss.backward()
    check()
    optimizer.step()
    check()
    torch.testing.assert_close(seen[0], ToyModel().layers[1].q_proj.weight.detach(), atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="single memory location"):  # a stale write cannot go unnoticed
        model.layers[1].q_proj.weight.data.add_(1)
    with pytest.raises(RuntimeError, match="get_model_state_dict"):
        model.state_dict()


@distributed(world=2)
def test_frozen_parameters(rank, world):
    """Behaviour 12 of docs/design: inside the predicate, never reduced, unchanged, in checkpoints."""
    model = ToyModel()
    for name, param in model.named_parameters():
        if name.startswith("layers.1.") or name.endswith("q_proj.weight"):
            param.requires_grad_(False)
    model, optimizer = build(world, model, muon={"weight_decay": 0.3})
    train(model, optimizer, 3, rank)
    weights = full_weights(model)
    oracle = ToyModel()
    for name, param in oracle.named_parameters():
        if name.startswith("layers.1.") or name.endswith("q_proj.weight"):
            param.requires_grad_(False)
    initial = weights_of(oracle)
    train_one_process(oracle, OracleMuon(oracle, is_proj, weight_decay=0.3), 3, world)
    assert_same(weights, weights_of(oracle))
    assert torch.equal(weights["layers.1.up_proj.weight"], initial["layers.1.up_proj.weight"])
    units = runtime_of(model).units
    assert sum(len(unit.trainable) for unit in units) == 4  # up and down of layers 0 and 2
    assert units[1].pack.gradients.size == 0
    saved = [None] * world
    dist.all_gather_object(saved, sorted(dmuon.get_model_state_dict(model)))
    assert "layers.1.up_proj.weight" in {name for names in saved for name in names}
    frozen = next(dp for dp in dmuon.get_dedicated_params(model) if dp.fqn == "layers.1.up_proj.weight")
    frozen.param.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers\.1\.up_proj\.weight was frozen"):
        optimizer.step()


@distributed(world=2)
def test_wrong_order_and_wrong_selections_raise_on_every_rank(rank, world):
    mesh = flat_mesh(world)

    sharded = ToyModel()
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(RuntimeError, match="before dedicate_params"):
        dmuon.dedicate_params(sharded, mesh, predicate=is_proj)

    twice = ToyModel()
    dmuon.dedicate_params(twice, mesh, predicate=is_proj)
    with pytest.raises(RuntimeError, match="already called"):
        dmuon.dedicate_params(twice, mesh, predicate=is_proj)

    fresh = ToyModel()
    norm_to_muon = {"name": "layers.0.norm.weight", "set": {"route": "muon"}}
    with pytest.raises(RuntimeError, match="dedicate_params first"):
        dmuon.Muon(fresh)
    for arguments, message in [
        (
            {"predicate": lambda n, p: "norm.weight" in n, "param_policy": {"overrides": [norm_to_muon]}},
            r"layers\.0\.norm\.weight: the muon route needs a matrix",
        ),
        ({"predicate": lambda n, p: False}, "no parameter of ToyModel was selected"),
        ({}, "no parameter of ToyModel was selected"),  # its matrices are below the default size
        (
            {"predicate": is_proj, "param_policy": {"overrides": [{"name": "k_proj", "set": {"route": "muon"}}]}},
            "'k_proj' matches none",
        ),
        (
            {"predicate": is_proj, "hook_boundary_predicate": lambda n, m: n == "layers.0"},
            r"layers\.1\.q_proj\.weight: hook_boundary_predicate accepts no module",
        ),
        ({"predicate": is_proj, "prefetch": -1}, "prefetch must be at least 0"),
        ({"predicate": is_proj, "process_group_policy": "own"}, "process_group_policy must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            dmuon.dedicate_params(fresh, mesh, **arguments)
    with pytest.raises(ValueError, match="mesh must be 1-D"):
        dmuon.dedicate_params(fresh, mesh_of(replicate=1, dp=world), predicate=is_proj)
    # None of the refusals has touched the model.
    assert not any(p.isnan().any() for p in fresh.parameters())
    dmuon.dedicate_params(fresh, mesh, predicate=is_proj)


@distributed(world=2)
def test_modules_dedicated_apart_are_no_one_model(rank, world):
    """Neither is taken for the whole, wherever the whole is asked for; each can still be used by itself."""
    model, mesh = nn.Sequential(ToyModel(), ToyModel(seed=1)), flat_mesh(world)
    for part in model:
        dmuon.dedicate_params(part, mesh, predicate=is_proj)
    for ask in (
        dmuon.Muon,
        dmuon.get_dedicated_params,
        dmuon.get_model_state_dict,
        lambda m: dmuon.set_model_state_dict(m, {}),
        dmuon.publish_weights,
        dmuon.ownership_table,
        lambda m: dmuon.set_requires_all_reduce(m, True),
        lambda m: dmuon.no_sync(m).__enter__(),
        lambda m: dmuon.materialize(m, lambda fqn, tensor: None),
    ):
        with pytest.raises(RuntimeError, match="called on 0 and on 1, which share no owners: call it once"):
            ask(model)
    for part, seed in zip(model, (0, 1), strict=True):
        train(part, dmuon.Muon(part, gradients_reduced_elsewhere=True), 1, rank)
        oracle = ToyModel(seed=seed)
        train_one_process(oracle, OracleMuon(oracle, is_proj), 1, world)
        expected = {name: weight for name, weight in weights_of(oracle).items() if is_proj(name, weight)}
        assert_same({n: w for n, w in full_weights(part).items() if n in expected}, expected)


@distributed(world=2)
def test_a_part_of_what_is_dedicated_is_not_dedicated_again(rank, world):
    """Nor is a module that shares a parameter with it."""
    mesh, model, other = flat_mesh(world), ToyModel(), ToyModel()
    dmuon.dedicate_params(model, mesh, predicate=is_proj)
    other.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    for again, name in ((model.layers[0], "q_proj.weight"), (other, "layers.1.q_proj.weight")):
        with pytest.raises(RuntimeError, match=f"already called on another module that holds {name}"):
            dmuon.dedicate_params(again, mesh, predicate=is_proj)


@pytest.mark.parametrize("shard", [True, False])
@distributed(world=2)
def test_copies_are_refused_and_told_what_to_do(rank, world, shard):
    """Of the model, and of any part with dedicated parameters; before dedication they are allowed."""
    plain = ToyModel()
    average, _ = build(world, copy.deepcopy(plain), shard=shard, optimizer=False)
    model, optimizer = build(world, plain, shard=shard)
    parts = {"ToyModel": model, "ModuleList": model.layers, "Block": model.layers[1], "Linear": model.layers[1].q_proj}
    for name, part in parts.items():
        with pytest.raises(RuntimeError, match=f"^{name} cannot be copied: .*get_model_state_dict"):
            copy.deepcopy(part)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(RuntimeError, match="runtime of a dedicated model cannot be copied"):
        copy.deepcopy(runtime_of(model))
    # What the message says. Nothing of the model was changed.
    train(model, optimizer, 1, rank)
    dmuon.set_model_state_dict(average, dmuon.get_model_state_dict(model))
    assert_same(full_weights(average), full_weights(model), atol=0, rtol=0)


@distributed(world=2)
def test_custom_boundaries(rank, world):
    """Units inside units, each linear its own unit, and everything at the root, give the same weights."""
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 2, world)
    for accept, strict, names in [
        (lambda n, m: (isinstance(m, nn.Linear) and "q_proj" not in n) or n == "layers.0", False,
         {"", "layers.0", "layers.0.up_proj", "layers.0.down_proj", "layers.1.up_proj"}),
        (lambda n, m: isinstance(m, nn.Linear), True, {"layers.2.q_proj"}),
        (lambda n, m: n == "", True, {""}),
    ]:  # fmt: skip
        model, optimizer = build(world, hook_boundary_predicate=accept, hook_boundary_strict=strict)
        assert names <= {unit.name for unit in runtime_of(model).units}
        train(model, optimizer, 2, rank)
        assert_same(full_weights(model), weights_of(oracle))


class Looped(ToyModel):
    """Its first and last block are one module, and every block holds one common projection."""

    def __init__(self, seed=0):
        super().__init__(seed=seed)
        self.layers[2] = self.layers[0]
        self.layers[1].q_proj = self.layers[0].q_proj


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_boundaries_of_modules_with_several_names(rank, world, mode):
    """A module registered twice is one boundary, under its first name."""
    oracle = Looped()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 2, world)
    for accept, names in [
        (
            lambda n, m: n.endswith(("q_proj", "up_proj")),
            {"", "layers.0.q_proj", "layers.0.up_proj", "layers.1.up_proj"},
        ),
        (lambda n, m: isinstance(m, Block), {"", "layers.0", "layers.1"}),
        (lambda n, m: isinstance(m, Block) or n.endswith("q_proj"), {"", "layers.0", "layers.1", "layers.0.q_proj"}),
    ]:
        options = {"hook_boundary_predicate": accept, "hook_boundary_strict": False, "mode": mode}
        model, optimizer = build(world, Looped(), **options, **EVERY_ROUTE)
        assert {unit.name for unit in runtime_of(model).units} == names
        train(model, optimizer, 2, rank)
        assert_same(full_weights(model), weights_of(oracle))


@pytest.mark.parametrize("policy", ["isolated", "shared"])
@distributed(world=2)
def test_group_policies(rank, world, policy):
    model, optimizer = build(world, process_group_policy=policy)
    lanes = runtime_of(model).lanes
    assert (lanes.unshard.group is dist.group.WORLD) == (policy == "shared")
    for step in range(6):  # the trainer's own collectives between ours
        train(model, optimizer, 1, rank, start=step)
        dist.all_reduce(torch.ones(3 + rank * 0))
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 6, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_gradient_divide_factor(rank, world):
    model, optimizer = build(world, shard=False)
    dmuon.set_gradient_divide_factor(model, 1.0)
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    optimizer.runtime.wait_gradients()
    oracle = ToyModel()
    for r in range(world):
        tokens, labels = batch(0, r)
        loss_of(oracle(tokens), labels).backward()
    expected = dict(oracle.named_parameters())
    for dp in dmuon.get_owned_params(model):
        torch.testing.assert_close(dp.grad, expected[dp.fqn].grad, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="positive"):
        dmuon.set_gradient_divide_factor(model, 0)


@distributed(world=2)
def test_destroy_and_rebuild(rank, world):
    weights = []
    for _ in range(2):
        model, optimizer = build(world)
        train(model, optimizer, 2, rank)
        weights.append(full_weights(model))
    assert_same(weights[0], weights[1], atol=0, rtol=0)


@distributed(world=1)
def test_one_process(rank, world):
    model, optimizer = build(world, shard=False)
    train(model, optimizer, 3, rank)
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 3, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_collectives_of_a_step(rank, world):
    """Z3 broadcasts twice and reduces once, Z2 broadcasts once; the bytes are those of the packed buffers."""
    for mode, broadcasts in (("z2", 1), ("z3", 2)):
        model, optimizer = build(world, shard=False, mode=mode)
        counted = {"broadcast": 0, "reduce": 0}
        originals = {name: vars(dist)[name] for name in counted}

        def counting(name, original=originals, counted=counted):
            def call(tensor, *args, **kwargs):
                counted[name] += tensor.numel() * tensor.element_size()
                return original[name](tensor, *args, **kwargs)

            return call

        for name in counted:
            setattr(dist, name, counting(name))
        try:
            train(model, optimizer, 1, rank)
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        packs = [unit.pack for unit in runtime_of(model).units]
        sizes = [sum(end - begin for (begin, end), _ in pack.weight_segments) for pack in packs]
        # The last unit stays from forward to backward.
        assert counted["broadcast"] == broadcasts * sum(sizes) - (broadcasts - 1) * sizes[-1]
        assert counted["reduce"] == sum(pack.gradients.size * pack.grad_itemsize for pack in packs)


@distributed(world=2)
def test_nothing_outlives_the_model(rank, world):
    """Parameters, buffers and process groups are freed with the model: destroying and rebuilding does not pile up."""
    model, optimizer = build(world, shard=False)
    train(model, optimizer, 1, rank)
    runtime = weakref.ref(runtime_of(model))
    group = weakref.ref(runtime_of(model).lanes.unshard)
    del model, optimizer
    gc.collect()
    assert runtime() is None and group() is None
