"""Summaries of the parameter groups and of what a step communicates, the latter against counted collectives."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon
from tests.support.harness import TYPE_SPLIT, all_routes, build, data_rank, train
from tests.support.oracle import ToyModel, is_proj
from tests.support.pool import distributed
from tests.support.private import runtime_of
from torchtitan_dmuon.dmuon.kernels.newton_schulz import newton_schulz_flops
from torchtitan_dmuon.dmuon.transport.lane import LANES

# ------------------------------------------------------------------ what a step communicates

# Name in torch.distributed -> (position of the larger buffer, or of what is sent; how often its bytes leave a rank).
COLLECTIVES = {
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "all_gather_into_tensor": (0, 1),
    "reduce_scatter_tensor": (1, 1),
    "all_reduce": (0, 2),
    "all_to_all_single": (1, None),
}


class Counted:
    """Inside, every collective on a lane is counted as it is called: [collectives, payload bytes, sent bytes]."""

    def __init__(self, lanes):
        self.name_of = {id(lane.group): lane.name for lane in lanes.all}
        self.totals = {name: [0, 0, 0.0] for name in LANES}

    def __enter__(self):
        self.originals = {name: vars(dist)[name] for name in COLLECTIVES}
        for name in COLLECTIVES:
            setattr(dist, name, self.counting(name))
        return self.totals

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)

    def counting(self, name):
        position, times = COLLECTIVES[name]

        def call(*args, group=None, **kwargs):
            if id(group) in self.name_of:
                total = self.totals[self.name_of[id(group)]]
                itemsize, size = args[position].element_size(), args[position].numel()
                n = dist.get_world_size(group)
                if times is None:
                    sent = (size - args[3][dist.get_rank(group)]) * itemsize
                else:
                    sent = times * size * itemsize * (n - 1) / n
                total[0] += 1
                total[1] += size * itemsize
                total[2] += sent
            return self.originals[name](*args, group=group, **kwargs)

        return call


class Various(ToyModel):
    """Sizes that nothing divides, a stack of experts, a layer and an embedding that are frozen."""

    def __init__(self):
        super().__init__(dim=20, hidden=37)
        self.layers[0].experts = nn.Parameter(torch.ones(5, 4, 6))
        for param in (*self.layers[1].parameters(), self.embed.weight):
            param.requires_grad_(False)


EXPERTS = {"name": "experts", "set": {"route": "muon", "stack": True}}
VARIOUS = {**TYPE_SPLIT, "overrides": [*TYPE_SPLIT["overrides"], EXPERTS]}


@pytest.mark.parametrize("mode", ["z2", "z3"])
@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)], ids=["shard4", "2x2", "dp2tp2", "2x1x2"])
@distributed(world=4)
def test_the_plan_is_what_is_counted(rank, world, mesh, mode):
    for make, policy, steps in ((ToyModel, TYPE_SPLIT, 1), (Various, VARIOUS, 2)):
        model, optimizer = build(world, make(), all_routes, shard=False, mesh=mesh, mode=mode, param_policy=policy)
        plan = dmuon.summarize_comm_plan(model)
        assert json.loads(json.dumps(plan)) == plan
        assert plan["reshard_after_forward"] == (mode == "z3") and tuple(plan["mesh"].values()) == mesh
        with Counted(runtime_of(model).lanes) as counted:
            train(model, optimizer, steps, data_rank(rank, mesh))
        keys = ("collectives", "payload_bytes", "sent_bytes_per_rank")
        planned = {name: [steps * lane[key] for key in keys] for name, lane in plan["lanes"].items()}
        assert planned == counted
        assert dmuon.summarize_comm_plan(model) == plan  # nothing of it depends on what has run
        replicate, shard, tp = mesh
        sizes = [shard, shard, replicate, tp, replicate, tp]
        for (name, lane), size in zip(plan["lanes"].items(), sizes, strict=True):
            assert lane["ranks"] == size and (lane["collectives"] > 0) == (size > 1), name


@distributed(world=4)
def test_ranks_of_a_shard_group_agree(rank, world):
    for mesh in ((1, 4, 1), (2, 2, 1)):
        plan = dmuon.summarize_comm_plan(build(world, mesh=mesh, shard=False)[0])
        everywhere = [None] * world
        dist.all_gather_object(everywhere, (plan["lanes"]["unshard"], plan["lanes"]["reduce"], plan["owner_load"]))
        assert everywhere == [everywhere[0]] * world


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@distributed(world=4)
def test_closed_form(rank, world, param_dtype):
    """Z2 2(N-1)/N P and Z3 3(N-1)/N P when gradients are as big as weights. The last layer, which Z3 does not fetch
    again, is one of many."""
    for mode, fetches in (("z2", 1), ("z3", 2)):
        model, _ = build(
            world, ToyModel(layers=24, dim=48, hidden=96), shard=False, mode=mode,
            param_policy={"defaults": {"route": "muon", "param_dtype": param_dtype}},
        )  # fmt: skip
        elements = sum(dp.numel for dp in dmuon.get_dedicated_params(model))
        lanes = dmuon.summarize_comm_plan(model)["lanes"]
        share = (world - 1) / world
        weights, gradients = (lanes[name]["sent_bytes_per_rank"] for name in ("unshard", "reduce"))
        assert weights == pytest.approx(fetches * share * elements * param_dtype.itemsize, rel=0.03)
        assert gradients == pytest.approx(share * elements * 4, rel=0.03)
        if param_dtype == torch.float32:
            assert weights + gradients == pytest.approx((fetches + 1) * share * elements * 4, rel=0.03)


@distributed(world=4)
def test_owner_load_is_what_the_owners_hold(rank, world):
    for mesh in ((1, 4, 1), (2, 1, 2)):
        model, _ = build(world, Various(), all_routes, shard=False, mesh=mesh, param_policy=VARIOUS)
        pieces = [piece for piece in dmuon.get_owned_params(model) if piece.spec.route != "sharded_adamw"]
        size = sum(piece.master.numel() * piece.master.element_size() for piece in pieces)
        flops = sum(
            newton_schulz_flops(*piece.shape[-2:]) * math.prod(piece.shape[:-2])
            for piece in pieces
            if piece.spec.route == "muon" and piece.spec.trainable
        )
        everyone = [None] * world
        dist.all_gather_object(everyone, (flops, size))
        load = dmuon.summarize_comm_plan(model)["owner_load"]
        for key, values in zip(("flops", "bytes"), zip(*everyone, strict=True), strict=True):
            mean = sum(values) / world
            assert load[key] == {"max": max(values), "mean": mean, "max_over_mean": max(values) / mean}
            assert load[key]["max_over_mean"] > 1  # 11 matrices on 4 owners cannot be even


@distributed(world=4)
def test_a_load_without_any_work(rank, world):
    model, _ = build(world, shard=False, route_hint_fn=lambda name, param: "adamw")
    load = dmuon.summarize_comm_plan(model)["owner_load"]
    assert load["flops"] == {"max": 0, "mean": 0.0, "max_over_mean": 1.0} and load["bytes"]["max"] > 0


def test_an_undedicated_model_has_no_plan():
    with pytest.raises(RuntimeError, match=r"call dmuon.dedicate_params first"):
        dmuon.summarize_comm_plan(ToyModel())


# ------------------------------------------------------------------ parameter groups


@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 2, 2)])
@distributed(world=4)
def test_param_groups_with_fsdp(rank, world, mesh):
    toy = ToyModel(layers=2)
    toy.layers[1].q_proj.weight.requires_grad_(False)  # dedicated and frozen: in its group
    toy.norm.bias.requires_grad_(False)  # frozen and not dedicated: in none
    matrices = 2 * (20 * 20 + 2 * 20 * 36)
    rest = sum(p.numel() for n, p in toy.named_parameters() if p.requires_grad and not is_proj(n, p))
    _, optimizer = build(world, toy, mesh=mesh, muon={"lr": 0.5, "weight_decay": 0.1, "adamw_betas": (0.8, 0.99)})
    summary = dmuon.summarize_param_groups(optimizer)
    assert summary == [
        {
            "group_name": "muon",
            "num_params": 6,
            "num_elements": matrices,
            "routes": {"muon": 5, "frozen": 1},
            "lr": 0.5,
            "momentum": 0.95,
            "nesterov": True,
            "weight_decay": 0.1,
        },
        {
            "group_name": "adamw",
            "num_params": 9,
            "num_elements": rest,
            "routes": {"adamw (FSDP2)": 9},
            "lr": 1e-3,
            "betas": [0.8, 0.99],
            "weight_decay": 0.01,
            "eps": 1e-8,
        },
    ]
    assert json.loads(json.dumps(summary)) == summary
    everywhere = [None] * world
    dist.all_gather_object(everywhere, summary)
    assert everywhere == [summary] * world


@distributed(world=4)
def test_param_groups_of_a_wholly_dedicated_model(rank, world):
    _, optimizer = build(world, Various(), all_routes, shard=False, mesh=(2, 1, 2), param_policy=VARIOUS)
    muon, adamw = dmuon.summarize_param_groups(optimizer)
    # Per layer 3 matrices, 2 of a norm and a bias; one layer and the embedding are frozen.
    assert muon["routes"] == {"muon": 7, "frozen": 3} and muon["num_params"] == 10
    assert adamw["routes"] == {"adamw": 8, "sharded_adamw": 1, "frozen": 4} and adamw["num_params"] == 13
    assert muon["num_elements"] + adamw["num_elements"] == sum(p.numel() for p in Various().parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    now = dmuon.summarize_param_groups(optimizer)[0]
    assert (now["lr"], now["initial_lr"]) == (0.125, 0.25)
    assert json.loads(json.dumps(now)) == now
