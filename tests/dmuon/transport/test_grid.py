"""Every mesh gives the result of one process: HSDP, tensor parallelism and both (behaviours 3 to 8 of docs/design)."""

import pytest
import torch
import torch.distributed as dist

import dmuon
from tests.support.harness import (
    TYPE_SPLIT,
    CountingNewtonSchulz,
    all_routes,
    assert_same,
    build,
    data_rank,
    full_gradients,
    full_weights,
    needs_dtensor_collectives,
    train,
    usable,
    weights_of,
)
from tests.support.meshes import mesh_of
from tests.support.oracle import (
    ExpertModel,
    OracleMuon,
    Skipping,
    ToyModel,
    batch,
    is_proj,
    loss_of,
    orthogonalize,
    train_one_process,
)
from tests.support.pool import distributed
from tests.support.private import own_part, runtime_of

MESHES = {
    "shard 4": (1, 4, 1),
    "2x2": (2, 2, 1),
    "4x1": (4, 1, 1),
    "dp2 tp2": (1, 2, 2),
    "tp4": (1, 1, 4),
    "2x1x2": (2, 1, 2),
}


def odd_model(**kwargs):
    """Sizes that neither 2 nor 4 divide."""
    return ToyModel(dim=20, hidden=37, **kwargs)


def oracle_after(steps, world_data, model=odd_model, select=is_proj, **hyper):
    oracle = model()
    train_one_process(oracle, OracleMuon(oracle, select, **hyper), steps, world_data)
    return weights_of(oracle)


def assert_modes_alike(train_in):
    """Of ``train_in(mode) -> (model, optimizer)``: bitwise the same in Z2 and Z3. Returns the weights. Collective."""
    results = []
    for mode in ("z2", "z3"):
        model, optimizer = train_in(mode)
        momentum = {p.fqn: optimizer.state_of(p).get("momentum_buffer") for p in dmuon.get_owned_params(model)}
        results.append((full_weights(model), momentum))
    for z2, z3 in zip(*results, strict=True):
        assert_same(z2, z3, atol=0, rtol=0)
    return results[0][0]


@pytest.mark.parametrize("mesh", MESHES)
@distributed(world=4)
def test_three_steps_equal_one_process(rank, world, mesh):
    """In both modes, which are bitwise the same (behaviours 2 to 5 of docs/design)."""
    shape = MESHES[mesh]

    def train_in(mode):
        model, optimizer = build(world, odd_model(), mesh=shape, mode=mode, muon={"weight_decay": 0.1})
        train(model, optimizer, 3, data_rank(rank, shape))
        return model, optimizer

    assert_same(assert_modes_alike(train_in), oracle_after(3, shape[0] * shape[1], weight_decay=0.1))


@distributed(world=4)
def test_one_owner_in_the_whole_grid(rank, world):
    """Each matrix has one master, one momentum and one Newton-Schulz per step in the world; replicas hold only the
    compute dtype."""
    policy = {**TYPE_SPLIT, "defaults": {"route": "adamw", "param_dtype": torch.bfloat16}}
    for shape in usable([(2, 2, 1), (1, 2, 2), (2, 1, 2)]):
        counting = CountingNewtonSchulz()
        options = {"muon": {"ns_backend": counting}, "param_policy": policy}
        model, optimizer = build(world, odd_model(), all_routes, mesh=shape, shard=False, **options)
        tokens, labels = batch(0, data_rank(rank, shape))
        loss_of(model(tokens), labels).backward()
        optimizer.step()
        seen = torch.tensor(sum(counting.numbers))
        dist.all_reduce(seen)
        assert seen == 9
        for unit in runtime_of(model).units:
            for piece in unit.pack.pieces:
                assert (piece.master is not None) == piece.is_owned
                assert piece.master is None or piece.master.dtype == torch.float32
            assert own_part(unit).dtype == torch.uint8 and own_part(unit).numel() == unit.pack.own_bytes
        held = [None] * world
        matrices = [piece for piece in dmuon.get_owned_params(model) if piece.spec.route == "muon"]
        assert all("momentum_buffer" in optimizer.state[piece.param] for piece in matrices)
        dist.all_gather_object(held, [piece.fqn for piece in matrices])
        names = [name for each in held for name in each]
        assert len(names) == len(set(names)) == 9
        assert all(held), "a rank owns nothing although there are more matrices than ranks"


@distributed(world=4)
def test_the_owners_gradient_is_the_global_mean(rank, world):
    for shape in usable(MESHES.values()):
        model, optimizer = build(world, odd_model(), mesh=shape)
        tokens, labels = batch(0, data_rank(rank, shape))
        loss_of(model(tokens), labels).backward()
        oracle = odd_model()
        ranks = shape[0] * shape[1]
        for r in range(ranks):
            tokens, labels = batch(0, r)
            (loss_of(oracle(tokens), labels) / ranks).backward()
        assert_same(full_gradients(model), {n: p.grad for n, p in oracle.named_parameters()}, atol=1e-6)
        optimizer.zero_grad()


@pytest.mark.parametrize("mesh", ["shard 4", "2x2", "dp2 tp2", "2x1x2"])
@distributed(world=4)
def test_asynchronous_publish_is_bitwise(rank, world, mesh):
    shape = MESHES[mesh]
    weights = []
    for replicate_async in (True, False):
        model, optimizer = build(world, odd_model(), mesh=shape, muon={"replicate_async": replicate_async})
        losses = train(model, optimizer, 4, data_rank(rank, shape))
        weights.append(({"losses": torch.tensor(losses)}, full_weights(model)))
    assert_same(weights[0][0], weights[1][0], atol=0, rtol=0)
    assert_same(weights[0][1], weights[1][1], atol=0, rtol=0)


# ------------------------------------------------------------------ routes (behaviour 8 of docs/design)


@pytest.mark.parametrize("mesh", ["shard 4", "2x2", "4x1", "dp2 tp2", "2x1x2"])
@distributed(world=4)
def test_every_parameter_dedicated_needs_no_fsdp(rank, world, mesh):
    """The guide's type-split routing: vocabulary 29 rows over 4 ranks, and sizes nothing divides. In both modes."""
    shape = MESHES[mesh]
    hyper = {"weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.1}

    def train_in(mode):
        model, optimizer = build(
            world, odd_model(), all_routes, shard=False, mesh=shape, mode=mode, param_policy=TYPE_SPLIT, muon=hyper
        )
        assert {dp.spec.route for dp in dmuon.get_dedicated_params(model)} == {"muon", "adamw", "sharded_adamw"}
        train(model, optimizer, 3, data_rank(rank, shape))
        return model, optimizer

    assert_same(assert_modes_alike(train_in), oracle_after(3, shape[0] * shape[1], **hyper))


@pytest.mark.parametrize("route", ["adamw", "sharded_adamw"])
@distributed(world=4)
def test_adamw_routes_equal_torch_adamw(rank, world, route):
    for shape in ((1, 4, 1), (2, 2, 1)):
        hyper = {"adamw_lr": 2e-3, "adamw_weight_decay": 0.1, "adamw_betas": (0.8, 0.99), "adamw_eps": 1e-6}
        model, optimizer = build(
            world, odd_model(), all_routes, shard=False, mesh=shape, muon=hyper, route_hint_fn=lambda n, p: route
        )
        train(model, optimizer, 3, data_rank(rank, shape))
        oracle = odd_model()
        adamw = torch.optim.AdamW(oracle.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6)
        for step in range(3):
            tokens, labels = (torch.cat(x) for x in zip(*(batch(step, r) for r in range(4)), strict=True))
            loss_of(oracle(tokens), labels).backward()
            adamw.step()
            adamw.zero_grad()
        assert_same(full_weights(model), weights_of(oracle), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mesh", ["shard 4", "2x2", "dp2 tp2"])
@distributed(world=4)
def test_accumulation_on_every_route(rank, world, mesh):
    """Reduced every time, not at all until the last, and without the later stages until the last."""
    shape = MESHES[mesh]
    ranks = shape[0] * shape[1]
    oracle = odd_model()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 2, ranks, micro=3)
    for way in ("every", "no_sync", "no all-reduce", "never all-reduce"):
        model, optimizer = build(world, odd_model(), all_routes, shard=False, mesh=shape, param_policy=TYPE_SPLIT)
        for step in range(2):
            for micro in range(3):
                tokens, labels = batch(3 * step + micro, data_rank(rank, shape))
                loss = loss_of(model(tokens), labels) / 3
                last = micro == 2
                if way == "no_sync" and not last:
                    with dmuon.no_sync(model):
                        loss.backward()
                else:
                    dmuon.set_requires_all_reduce(model, way == "every" or (last and way == "no all-reduce"))
                    loss.backward()
            optimizer.step()
        assert_same(full_weights(model), weights_of(oracle), atol=3e-6)


@pytest.mark.parametrize("mesh", ["shard 4", "2x2", "2x1x2"])
@distributed(world=4, timeout=60)
def test_unused_parameters_on_every_route(rank, world, mesh):
    """A layer skipped everywhere, then on one data rank, then used again (behaviour 11 of docs/design)."""
    shape = MESHES[mesh]
    ranks = shape[0] * shape[1]

    def plan(step, on):
        if step == 1:
            return frozenset({1})
        return frozenset({0, 2}) if step == 2 and on == ranks - 1 else frozenset()

    hyper = {"weight_decay": 0.1, "lr": 0.01, "adamw_weight_decay": 0.3}
    model, optimizer = build(
        world, Skipping(), all_routes, shard=False, mesh=shape, param_policy=TYPE_SPLIT, muon=hyper
    )
    oracle = Skipping()
    oracle_optimizer = OracleMuon(oracle, is_proj, **hyper)
    for step in range(4):
        mine = data_rank(rank, shape)
        tokens, labels = batch(step, mine)
        model.skip = plan(step, mine)
        loss_of(model(tokens), labels).backward()
        optimizer.step()
        for other in range(ranks):
            tokens, labels = batch(step, other)
            oracle.skip = plan(step, other)
            (loss_of(oracle(tokens), labels) / ranks).backward()
        oracle_optimizer.step()
        assert_same(full_weights(model), weights_of(oracle))


# ------------------------------------------------------------------ expert stacks


class ExpertOracle:
    """Every expert matrix by itself."""

    def __init__(self, model):
        self.model = model
        self.parts = []
        for name, p in model.named_parameters():
            if "experts" in name:
                self.parts += [(p, e) for e in range(p.shape[0])]
        rest = [p for n, p in model.named_parameters() if "experts" not in n]
        self.adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01)
        self.momentum = {}

    @torch.no_grad()
    def step(self):
        for key, (p, e) in enumerate(self.parts):
            m = self.momentum.setdefault(key, torch.zeros_like(p[e]))
            m.mul_(0.95).add_(p.grad[e])
            update = orthogonalize(p.grad[e] + 0.95 * m)
            p[e].sub_((0.02 * 0.2 * max(p.shape[1:]) ** 0.5 * update).float())
        self.adamw.step()
        self.model.zero_grad()


@pytest.mark.parametrize("mesh", ["shard 4", "2x2", "4x1"])
@distributed(world=4)
def test_expert_stacks(rank, world, mesh):
    """[E, m, n] equals E matrices; runs of experts have an owner each (public faults: Muon 60, marin 3902)."""
    shape = MESHES[mesh]
    model, optimizer = build(world, ExpertModel(), lambda n, p: "experts" in n, mesh=shape)
    for dp in dmuon.get_dedicated_params(model):
        assert [(piece.start, piece.stop) for piece in dp.pieces] == [(0, 1), (1, 2), (2, 3), (3, 5)]
    loads = [sum(p.numel for p in dmuon.get_owned_params(model, rank=r)) for r in range(world)]
    assert max(loads) / (sum(loads) / world) < 1.3
    train(model, optimizer, 3, data_rank(rank, shape))
    oracle = ExpertModel()
    train_one_process(oracle, ExpertOracle(oracle), 3, shape[0] * shape[1])
    assert_same(full_weights(model), weights_of(oracle))


# ------------------------------------------------------------------ process groups (behaviour 22 of docs/design)


@pytest.mark.parametrize("policy", ["isolated", "shared"])
@distributed(world=4, timeout=120)
def test_the_trainers_collectives_in_between(rank, world, policy):
    """15 steps, the trainer's own collectives on the meshes' groups drawn at random; with the diagnostic fence the
    same numbers."""
    import os

    results = []
    for fence in ("0", "1"):
        os.environ["DMUON_ISOLATED_PG_BARRIER"] = fence
        try:
            model, optimizer = build(world, mesh=(2, 2, 1), process_group_policy=policy)
            draw = torch.Generator("cpu").manual_seed(5)
            for step in range(15):
                for _ in range(int(torch.randint(3, (), generator=draw, device="cpu"))):
                    dist.all_reduce(torch.ones(5))
                train(model, optimizer, 1, rank, start=step)
            results.append(full_weights(model))
        finally:
            del os.environ["DMUON_ISOLATED_PG_BARRIER"]
    assert_same(results[0], results[1], atol=0, rtol=0)
    lanes = runtime_of(model).lanes
    own = {lane.group for lane in lanes.all}
    assert len(own) == (4 if policy == "isolated" else 2)


@needs_dtensor_collectives
@distributed(world=4)
def test_meshes_that_do_not_fit_are_refused(rank, world):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    grid = mesh_of(dp=2, tp=2)
    with pytest.raises(ValueError, match="mesh must be 1-D"):
        dmuon.dedicate_params(ToyModel(), grid, predicate=is_proj)
    with pytest.raises(ValueError, match="overlap"):
        dmuon.dedicate_params(ToyModel(), grid["dp"], predicate=is_proj, replicate_mesh=grid["dp"])
    model = ToyModel()
    parallelize_module(model.layers[0], grid["tp"], {"up_proj": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"layers\.0\.up_proj\.weight is a DTensor over"):
        dmuon.dedicate_params(model, grid["tp"], predicate=is_proj, tp_mesh=grid["dp"])
    dmuon.dedicate_params(model, grid["dp"], predicate=is_proj)  # tp_mesh found from the parameters
    assert runtime_of(model).grid.shape == (1, 2, 2)
