"""Every call of the user's guide, in its order, in one program: 4 gloo ranks, 1-D and 2x2.

The comments name the guide's sections. What the guide leaves to the reader (the model, the data) is a tiny model with
HuggingFace's names that returns an object with ``.loss``.
"""

import contextlib
import io
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.harness import GUIDE_TYPE_SPLIT, assert_same, full_weights, weights_of
from tests.support.oracle import OracleMuon
from tests.support.pool import distributed

VOCAB, DIM, HIDDEN, LENGTH = 29, 20, 36, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(DIM, DIM, bias=False))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(DIM)
        self.self_attn = Attention()
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class MyModel(nn.Module):
    """The guide's ``MyModel``, and ``action_transformer`` for its second kind of group."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.action_transformer = Layer()
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, batch):
        x = self.embed_tokens(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(self.action_transformer(x)))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))


def is_proj(name, param):
    return "proj" in name and param.ndim == 2


def batches(rank, steps, start=0):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield torch.randint(VOCAB, (4, LENGTH + 1), generator=generator)


@contextlib.contextmanager
def info_lines():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("torchtitan_dmuon")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def wrap(model, mesh):
    for layer in [*model.layers, model.action_transformer]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def on_mesh(model, hsdp, world, **options):
    """Steps 2 and 3: dedicate, then FSDP2, on a 1-D mesh or the guide's HSDP mesh."""
    if not hsdp:
        mesh = init_device_mesh("cpu", (world,))
        assignment = dmuon.dedicate_params(model, mesh, **options)
    else:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        assignment = dmuon.dedicate_params(model, mesh["shard"], replicate_mesh=mesh["replicate"], **options)
    wrap(model, mesh)
    return assignment


@pytest.mark.parametrize("hsdp", [False, True], ids=["1-D", "2x2"])
@distributed(world=4, timeout=150, new_processes=True)
def test_the_guide_from_top_to_bottom(rank, world, hsdp):
    # --- Predicates: three common ones
    by_name = lambda n, p: "proj" in n and p.ndim == 2  # noqa: E731

    def without_embeddings(n, p):
        if p.ndim != 2:
            return False
        if "embed" in n or "head" in n or "lm_head" in n:
            return False
        return "proj" in n

    def large_enough(n, p):
        if p.ndim != 2:
            return False
        return p.numel() >= 500 and "proj" in n

    # --- Steps 1 to 3, and the summary that dedicate_params logs
    model = MyModel()
    with info_lines() as said:
        assignment = on_mesh(model, hsdp, world, predicate=by_name)
    assert "dedicate_params: 21 params assigned to 4 ranks, imbalance=" in said.getvalue()
    assert len(assignment.owner) == 21
    for predicate, count in ((without_embeddings, 21), (large_enough, 9)):
        other = MyModel()
        on_mesh(other, hsdp, world, predicate=predicate)
        assert len(dmuon.get_dedicated_params(other)) == count

    # --- Looking at the assignment
    owned = dmuon.get_owned_params(model, rank=dist.get_rank())
    total_owned = sum(dp.numel for dp in owned)
    all_dp = dmuon.get_dedicated_params(model)
    fsdp_count = len(list(model.parameters())) - len(all_dp)
    assert fsdp_count == len(list(MyModel().parameters())) - 21
    totals = [None] * world
    dist.all_gather_object(totals, (len(owned), total_owned))
    assert sum(count for count, _ in totals) == 21
    assert sum(elements for _, elements in totals) == sum(
        p.numel() for n, p in MyModel().named_parameters() if is_proj(n, p)
    )

    # --- Step 4: the optimizer, with every argument the guide shows; two groups
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
    assert len(optimizer.param_groups) == 2 and len(optimizer.param_groups[0]["params"]) == 21

    # --- Step 5: the loop; it equals one process on the concatenated batch
    for batch in batches(rank, 3):
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    oracle = MyModel()
    expected = OracleMuon(oracle, is_proj)
    for data in zip(*(batches(other, 3) for other in range(world)), strict=True):
        oracle(torch.cat(data)).loss.backward()
        expected.step()
    assert_same(full_weights(model), weights_of(oracle))

    # --- Clipping: PyTorch's for the rest, DMuon's for its own
    adamw_params = [p for n, p in model.named_parameters() if not is_proj(n, p)]
    for batch in batches(rank, 2, start=3):
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adamw_params, max_norm=1.0)
        muon_norm = dmuon.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()
    for data in zip(*(batches(other, 2, start=3) for other in range(world)), strict=True):
        oracle(torch.cat(data)).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for n, p in oracle.named_parameters() if not is_proj(n, p)], 1.0)
        plain = torch.nn.utils.clip_grad_norm_([p for n, p in oracle.named_parameters() if is_proj(n, p)], 1.0)
        expected.step()
    torch.testing.assert_close(muon_norm, plain, rtol=1e-4, atol=0)
    assert_same(full_weights(model), weights_of(oracle), atol=2e-5)

    # --- A strategy of the user's own; the three buckets in one call
    def halve(entries, max_norm, norm_type, lanes):
        for entry in entries:
            entry.gradient.mul_(0.5)
        return torch.zeros(())

    name = f"halve on {'2x2' if hsdp else '1-D'}"
    dmuon.register_muon_grad_clip_strategy(name, halve)
    (batch,) = batches(rank, 1, start=9)
    model(batch).loss.backward()
    dmuon.clip_grad_norm_(optimizer, max_norm=1.0, strategy=name)
    norms = dmuon.try_clip_optimizer_grad_norm_buckets_(
        optimizer,
        regular_grads=[model.embed_tokens.weight.grad],
        adamw_grads=[p.grad for p in adamw_params if p is not model.embed_tokens.weight],
        max_norm=1.0,
    )
    assert set(norms) == {"regular", "muon", "adamw"} and all(norm > 0 for norm in norms.values())
    optimizer.zero_grad()

    # --- Logs and debugging
    assert dmuon.get_ns_backend().startswith("Gram NS · kernel=")
    status = dmuon.get_backend_status()
    assert status["cublas"].keys() == {"name", "available", "reason"}


@pytest.mark.parametrize("hsdp", [False, True], ids=["1-D", "2x2"])
@distributed(world=4, timeout=150, new_processes=True)
def test_semantic_groups_and_type_split_routing(rank, world, hsdp):
    # --- Type-split routing: everything dedicated, three routes, one dtype policy
    model = MyModel()
    on_mesh(model, hsdp, world, **GUIDE_TYPE_SPLIT)
    routes = {dp.fqn: dp.spec.route for dp in dmuon.get_dedicated_params(model)}
    assert routes.keys() == {n for n, _ in MyModel().named_parameters()}
    assert routes["layers.0.self_attn.q_proj.weight"] == "muon"
    assert routes["norm.weight"] == "adamw" and routes["lm_head.weight"] == "sharded_adamw"

    # --- Semantic groups, built from the wrapped model; routes are kept inside a group
    base_params, action_params = [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        (action_params if "action_transformer" in name else base_params).append(param)
    optimizer = dmuon.Muon(
        model,
        lr=5e-5,
        adamw_lr=5e-5,
        param_groups=[
            {"params": base_params, "lr": 5e-5, "group_name": "base"},
            {"params": action_params, "lr": 1e-4, "group_name": "action"},
        ],
    )
    names = [group["group_name"] for group in optimizer.param_groups]
    assert names == ["base/muon", "base/adamw", "action/muon", "action/adamw"]
    assert [group["lr"] for group in optimizer.param_groups] == [5e-5, 5e-5, 1e-4, 1e-4]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    losses = []
    for batch in batches(rank, 3):
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert all(loss > 0 for loss in losses)
    assert optimizer.param_groups[2]["lr"] == pytest.approx(1e-4 / 8)
    for name, weight in full_weights(model).items():
        before = dict(MyModel().named_parameters())[name]
        assert not torch.equal(weight, before), f"{name} has not moved"
        assert (weight - before).abs().max() < 0.01, f"{name} has moved too far for its rate"

    # --- Order: shard first is refused; route hints of older integrations still work
    late = MyModel()
    fully_shard(late, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(RuntimeError, match="before dedicate_params"):
        dmuon.dedicate_params(late, init_device_mesh("cpu", (world,)), predicate=is_proj)
    hinted = MyModel()
    on_mesh(
        hinted,
        hsdp,
        world,
        predicate=lambda n, p: p.requires_grad,
        route_hint_fn=lambda n, p: "muon" if is_proj(n, p) else "adamw",
    )
    assert {dp.spec.route for dp in dmuon.get_dedicated_params(hinted)} == {"muon", "adamw"}


@distributed(world=4, new_processes=True)
def test_the_barrier_of_the_guide_changes_no_number(rank, world):
    import os

    weights = []
    for fence in ("0", "1"):
        os.environ["DMUON_ISOLATED_PG_BARRIER"] = fence
        try:
            model = MyModel()
            on_mesh(model, True, world, predicate=is_proj, process_group_policy="isolated")
            optimizer = dmuon.Muon(model)
            for batch in batches(rank, 2):
                model(batch).loss.backward()
                optimizer.step()
            weights.append(full_weights(model))
        finally:
            del os.environ["DMUON_ISOLATED_PG_BARRIER"]
    assert_same(weights[1], weights[0], atol=0, rtol=0)
