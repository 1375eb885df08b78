"""Semantic parameter groups (behaviour 20 of docs/design)."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import dmuon
from tests.support.harness import assert_same, build, full_weights, train, weights_of
from tests.support.oracle import ExpertModel, OracleMuon, ToyModel, is_proj, train_one_process
from tests.support.pool import distributed


def split(model, action="layers.1."):
    """The guide's two groups: a part of the model trains faster."""
    base, fast = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            (fast if name.startswith(action) else base).append(param)
    return base, fast


class TwoOracles:
    """One oracle per group, each over its own parameters."""

    def __init__(self, model, base, action):
        self.model = model
        self.parts = []
        for hyper, chosen in (
            (base, lambda n: not n.startswith("layers.1.")),
            (action, lambda n: n.startswith("layers.1.")),
        ):
            part = OracleMuon(model, lambda n, p, c=chosen: is_proj(n, p) and c(n), **hyper)
            rest = [p for n, p in model.named_parameters() if chosen(n) and not is_proj(n, p)]
            part.adamw = torch.optim.AdamW(
                rest, lr=hyper["adamw_lr"], weight_decay=hyper.get("adamw_weight_decay", 0.01),
                betas=hyper.get("adamw_betas", (0.9, 0.999)), eps=hyper.get("adamw_eps", 1e-8),
            )  # fmt: skip
            part.zero_grad = lambda: None
            self.parts.append(part)

    def step(self):
        for part in self.parts:
            part.step()
        self.model.zero_grad()


@distributed(world=2)
def test_the_guides_groups_give_four_halves_whose_rates_show(rank, world):
    model, _ = build(world, optimizer=False)
    base, action = split(model)
    optimizer = dmuon.Muon(
        model,
        lr=5e-3,
        adamw_lr=5e-3,
        param_groups=[
            {"params": base, "lr": 5e-3, "group_name": "base"},
            {"params": action, "lr": 1e-2, "group_name": "action"},
        ],
    )
    assert [g["group_name"] for g in optimizer.param_groups] == [
        "base/muon", "base/adamw", "action/muon", "action/adamw",
    ]  # fmt: skip
    assert [g["lr"] for g in optimizer.param_groups] == [5e-3, 5e-3, 1e-2, 1e-2]
    train(model, optimizer, 3, rank)
    oracle = ToyModel()
    both = TwoOracles(oracle, {"lr": 5e-3, "adamw_lr": 5e-3}, {"lr": 1e-2, "adamw_lr": 1e-2})
    train_one_process(oracle, both, 3, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_every_key_reaches_its_half(rank, world):
    model, _ = build(world, optimizer=False)
    base, action = split(model)
    keys = {"muon_lr": 0.01, "adamw_lr": 0.002, "muon_weight_decay": 0.2, "adamw_weight_decay": 0.3, "momentum": 0.8,
            "nesterov": False, "adamw_betas": (0.7, 0.9), "adamw_eps": 1e-6}  # fmt: skip
    optimizer = dmuon.Muon(
        model,
        lr=0.03,
        weight_decay=0.1,
        param_groups=[{"params": base, "weight_decay": 0.05}, {"params": action, **keys}],
    )
    train(model, optimizer, 3, rank)
    oracle = ToyModel()
    base_hyper = {"lr": 0.03, "adamw_lr": 1e-3, "weight_decay": 0.05, "adamw_weight_decay": 0.05}
    action_hyper = {"lr": 0.01, "weight_decay": 0.2, **{k: v for k, v in keys.items() if not k.startswith("muon_")}}
    train_one_process(oracle, TwoOracles(oracle, base_hyper, action_hyper), 3, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_a_scheduler_scales_every_group(rank, world):
    """Each from its own rate (known bug DeepSpeed 7713)."""
    model, _ = build(world, optimizer=False)
    base, action = split(model)
    optimizer = dmuon.Muon(
        model, lr=0.01, adamw_lr=0.01, param_groups=[{"params": base}, {"params": action, "lr": 0.02}]
    )
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    seen = []
    for step in range(3):
        seen.append([g["lr"] for g in optimizer.param_groups])
        train(model, optimizer, 1, rank, start=step)
        scheduler.step()
    for k, rates in enumerate(seen, start=1):
        assert rates == pytest.approx([0.01 / k, 0.01 / k, 0.02 / k, 0.02 / k], rel=1e-12)


@distributed(world=2)
def test_routes_are_kept_or_forced(rank, world):
    policy = {"overrides": [{"name": "q_proj", "set": {"route": "adamw"}}]}
    model, _ = build(world, optimizer=False, param_policy=policy)
    params = [p for p in model.parameters() if p.requires_grad]
    kept = dmuon.Muon(model, param_groups=[{"params": params, "group_name": "all"}])
    assert {g["group_name"]: len(g["params"]) for g in kept.param_groups} == {
        "all/muon": 6,
        "all/adamw": len(params) - 6,
    }
    for key in ("dmuon_route", "dmuon_optimizer", "matrix_optimizer"):
        forced = dmuon.Muon(model, param_groups=[{"params": params, "group_name": "all", key: "adamw"}])
        assert [g["group_name"] for g in forced.param_groups] == ["all/adamw"]
        back = dmuon.Muon(model, param_groups=[{"params": params, "group_name": "all", key: "muon"}])
        assert len(back.param_groups[0]["params"]) == 9
    train(model, back, 1, rank)


@pytest.mark.parametrize("second", [None, "keep", "some"])
@distributed(world=2)
def test_what_is_forced_ends_with_its_optimizer(rank, world, second):
    """A new one starts from the routes of dedicate_params, whether it has groups or not."""
    policy = {"overrides": [{"name": "q_proj", "set": {"route": "adamw"}}]}
    model, _ = build(world, optimizer=False, param_policy=policy)
    base, action = split(model)
    for route in ("adamw", "muon"):
        dmuon.Muon(model, param_groups=[{"params": list(model.parameters()), "dmuon_route": route}])
        groups = None if second is None else [{"params": base}, {"params": action}]
        if second == "some":
            groups[1]["dmuon_route"] = route
        optimizer = dmuon.Muon(model, param_groups=groups)
        routes = {dp.fqn: dp.spec.route for dp in dmuon.get_dedicated_params(model)}
        expected = {fqn: "adamw" if "q_proj" in fqn else "muon" for fqn in routes}
        if second == "some":
            expected |= {fqn: route for fqn in routes if fqn.startswith("layers.1.")}
        assert routes == expected
        matrices = [p for g in optimizer.param_groups if g["group_name"].endswith("muon") for p in g["params"]]
        assert {optimizer.names[p] for p in matrices} == {fqn for fqn, kept in expected.items() if kept == "muon"}
    before = full_weights(model)
    train(model, optimizer, 1, rank)
    after = full_weights(model)
    assert all(not torch.equal(after[name], before[name]) for name in after)


@distributed(world=2)
def test_parameters_may_come_with_their_names(rank, world):
    """Pairs, as every PyTorch optimizer takes them, also straight from named_parameters(), and beside plain tensors."""
    model, _ = build(world, optimizer=False)
    plain = dmuon.Muon(model, param_groups=[{"params": list(model.parameters())}])
    named = list(model.named_parameters())
    mixed = [*named[:5], *(param for _, param in named[5:])]
    for given in (named, model.named_parameters(), mixed):
        optimizer = dmuon.Muon(model, param_groups=[{"params": given}])
        assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    train(model, optimizer, 2, rank)
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 2, world)
    assert_same(full_weights(model), weights_of(oracle))
    for wrong, told in (([name for name, _ in named], "embed.weight"), (named[0], "embed.weight"), ([None], "None")):
        with pytest.raises(ValueError, match=rf"param_groups\[0\]: params must be tensors or pairs .* got '?{told}"):
            dmuon.Muon(model, param_groups=[{"params": wrong}])


@distributed(world=2)
def test_a_frozen_group_is_left_out(rank, world):
    """Known bug DeepSpeed 7869."""
    model = ToyModel()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith("layers.1."))
    model, _ = build(world, model, optimizer=False)
    base = [p for n, p in model.named_parameters() if not n.startswith("layers.1.")]
    frozen = [p for n, p in model.named_parameters() if n.startswith("layers.1.")]
    optimizer = dmuon.Muon(model, param_groups=[{"params": base}, {"params": frozen, "group_name": "frozen"}])
    assert [g["group_name"] for g in optimizer.param_groups] == ["group0/muon", "group0/adamw"]
    train(model, optimizer, 1, rank)


@distributed(world=2)
def test_what_is_wrong_raises_on_every_rank(rank, world):
    stale = ToyModel()
    wrapped_too_late = list(stale.parameters())
    model, _ = build(world, stale, optimizer=False)
    base, action = split(model)
    for groups, message in [
        ([{"params": base}], r"leave out 6 trainable parameters, layers\.1\."),
        ([{"params": base}, {"params": action}, {"params": action[:1]}], r"layers\.1\..* is in group 'group1' already"),
        ([{"params": wrapped_too_late}], "is not the model's; build groups from named_parameters"),
        ([{"params": base, "learning_rate": 1}, {"params": action}], "unknown key 'learning_rate'"),
        ([{"params": base, "muon_lrr": 1}, {"params": action}], "did you mean 'muon_lr'"),
        ([{"params": base, "lr": -1}, {"params": action}], r"param_groups\[0\]: muon_lr is out of range: -1"),
        ([{"params": base}, {"params": action, "momentum": 1.0}], r"param_groups\[1\]: momentum is out of range"),
        ([{"params": base}, {"params": action, "adamw_betas": (0.9, 1.0)}], r"adamw_betas\[1\] is out of range"),
        ([{"lr": 1}], "'params' is missing"),
        ([{"params": base, "group_name": "x"}, {"params": action, "group_name": "x"}], "'x' is given twice"),
        ([{"params": base, "dmuon_route": "moun"}, {"params": action}], "did you mean 'muon'"),
        ([{"params": base, "dmuon_route": "sharded_adamw"}, {"params": action}], "was dedicated on route 'muon'"),
        (
            [{"params": base, "dmuon_route": "muon", "matrix_optimizer": "adamw"}, {"params": action}],
            "different things",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            dmuon.Muon(model, param_groups=groups)
    with pytest.raises(ValueError, match="momentum is out of range"):
        dmuon.Muon(model, momentum=1.5)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5, eta_min=1e-4),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, [g["lr"] for g in o.param_groups], total_steps=6, cycle_momentum=False
    ),
    "lambda per group": lambda o: LambdaLR(o, [lambda t, k=k: 1 / (1 + k * t) for k in range(4)]),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@distributed(world=2)
def test_any_scheduler_moves_each_group_as_it_would_a_plain_optimizers(rank, world, kind):
    model, _ = build(world, optimizer=False)
    base, action = split(model)
    groups = [{"params": base}, {"params": action, "lr": 0.02}]
    optimizer = dmuon.Muon(model, lr=0.01, adamw_lr=0.003, param_groups=groups)
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in optimizer.param_groups]
    plain = torch.optim.SGD(
        [{"params": [w], "lr": g["lr"]} for w, g in zip(weights, optimizer.param_groups, strict=True)]
    )
    schedulers = [SCHEDULERS[kind](each) for each in (optimizer, plain)]
    for step in range(4):
        train(model, optimizer, 1, rank, start=step)
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
        rates = [[g["lr"] for g in each.param_groups] for each in (optimizer, plain)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12), step
    assert len(set(rates[0])) > 1


@distributed(world=2)
def test_a_wide_predicate_needs_no_policy_where_groups_choose_the_routes(rank, world):
    """Every parameter is dedicated; embedding and head, which are matrices, are sent to AdamW by their group."""
    model, _ = build(world, ToyModel(), lambda n, p: p.requires_grad, shard=False, optimizer=False)
    matrices = [p for n, p in model.named_parameters() if is_proj(n, p)]
    rest = [p for n, p in model.named_parameters() if not is_proj(n, p)]
    groups = [{"params": matrices, "dmuon_route": "muon"}, {"params": rest, "dmuon_route": "adamw"}]
    optimizer = dmuon.Muon(model, param_groups=groups)
    assert {dp.fqn for dp in optimizer.runtime.params if dp.spec.route == "muon"} == {
        n for n, p in model.named_parameters() if is_proj(n, p)
    }
    train(model, optimizer, 3, rank)
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 3, world)
    assert_same(full_weights(model), weights_of(oracle))
    with pytest.raises(ValueError, match=r"param_groups\[1\]: .*norm\.weight: the muon route needs a matrix"):
        dmuon.Muon(model, param_groups=[groups[0], {"params": rest, "dmuon_route": "muon"}])


@distributed(world=2)
def test_a_group_forces_no_convolution_onto_muon(rank, world):
    """Unless it was declared a stack when it was dedicated."""

    def dedicated(**declared):
        model = ToyModel(layers=1)
        model.layers[0].conv = torch.nn.Conv1d(16, 16, 3, bias=False)
        policy = {"overrides": [{"name": "conv", "set": {"route": "adamw", **declared}}]}
        accept = lambda n, p: "proj.weight" in n or "conv" in n  # noqa: E731
        build(world, model, accept, shard=False, optimizer=False, param_policy=policy)
        params = [dp.param for dp in dmuon.get_dedicated_params(model)]
        for param in model.parameters():
            param.requires_grad_(param in set(params))
        dmuon.Muon(model, param_groups=[{"params": params, "dmuon_route": "muon"}])
        return {dp.spec.route for dp in dmuon.get_dedicated_params(model)}

    with pytest.raises(ValueError, match=r"param_groups\[0\]: layers\.0\.conv\.weight: the muon route .*'stack': True"):
        dedicated()
    assert dedicated(stack=True) == {"muon"}


@distributed(world=2)
def test_wrong_kinds_of_values_and_failed_attempts_leave_no_trace(rank, world):
    model, _ = build(world, optimizer=False)
    base, action = split(model)
    routes = [dp.spec.route for dp in dmuon.get_dedicated_params(model)]
    for keys, message in [
        ({"adamw_betas": (0.9,)}, r"param_groups\[0\]: adamw_betas must be two numbers, got \(0.9,\)"),
        ({"adamw_betas": 0.9}, "adamw_betas must be two numbers"),
        ({"nesterov": "no"}, "nesterov must be True or False"),
        ({"muon_lr": None}, "muon_lr must be a number, got None"),
        ({"momentum": True}, "momentum must be a number"),
    ]:
        with pytest.raises(ValueError, match=message):
            dmuon.Muon(model, param_groups=[{"params": base, **keys}, {"params": action}])
    with pytest.raises(ValueError, match="leave out"):
        dmuon.Muon(model, param_groups=[{"params": base, "dmuon_route": "adamw"}])
    assert [dp.spec.route for dp in dmuon.get_dedicated_params(model)] == routes


@distributed(world=2)
def test_a_stack_split_among_owners_may_be_forced_onto_adamw(rank, world):
    """Every run of experts has AdamW state of its own."""
    model, _ = build(world, ExpertModel(), lambda n, p: "experts" in n, optimizer=False)
    params = list(model.parameters())
    hyper = {"adamw_lr": 0.01, "adamw_weight_decay": 0.1}
    optimizer = dmuon.Muon(model, param_groups=[{"params": params, "dmuon_route": "adamw", **hyper}])
    train(model, optimizer, 3, rank)
    oracle = ExpertModel()
    adamw = torch.optim.AdamW(oracle.parameters(), lr=0.01, weight_decay=0.1)
    adamw.zero_grad()
    train_one_process(oracle, Stepper(oracle, adamw), 3, world)
    assert_same(full_weights(model), weights_of(oracle), atol=5e-5)
    shapes = {name: p.shape for name, p in oracle.named_parameters()}
    for fqn, values in optimizer.state_dict()["state"].items():
        assert values["exp_avg"].size() == shapes[fqn]


class Stepper:
    def __init__(self, model, inner):
        self.model, self.inner = model, inner

    def step(self):
        self.inner.step()
        self.model.zero_grad()


@distributed(world=2)
def test_what_only_the_owner_would_notice_is_refused_on_every_rank(rank, world):
    """A state dtype that AdamW cannot take, and a parameter frozen since: elsewhere they would hang the other ranks."""
    everything = {"predicate": lambda n, p: True, "shard": False}
    with pytest.raises(ValueError, match=r"on route 'adamw' optim_dtype \(torch.bfloat16\) must be master_dtype"):
        build(
            world,
            optimizer=False,
            param_policy={
                "defaults": {"route": "adamw"},
                "overrides": [{"name": "layers.1.norm.bias", "set": {"optim_dtype": torch.bfloat16}}],
            },
            **everything,
        )
    model, _ = build(world, optimizer=False)
    dict(model.named_parameters())["layers.0.q_proj.weight"].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"layers\.0\.q_proj\.weight: requires_grad is False and was True when"):
        dmuon.Muon(model)
