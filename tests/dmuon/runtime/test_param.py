"""Declared dtypes hold (behaviour 19 of docs/design), and packed buffers come and go."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from dmuon import Block, HeadWeights, QKClip, QKClipLayer, split_interleaved, split_sizes
from tests.support.harness import EVERY_ROUTE, build, data_rank, full_gradients, full_tensor, full_weights, train
from tests.support.oracle import ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed
from tests.support.private import has_packed_gradients, is_unsharded, runtime_of

BF16_FSDP = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


@distributed(world=2)
def test_declared_dtypes_hold_also_after_a_restart(rank, world):
    policy = {
        "defaults": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
        "overrides": [
            {"name": "layers.1.", "set": {"optim_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}},
            {"name": "layers.2.", "set": {"output_dtype": None}},  # FSDP2 keeps the last norm in bf16
        ],
    }
    seen = {"weight": set(), "input": set(), "output": set()}

    def make():
        model, optimizer = build(world, fsdp=BF16_FSDP, param_policy=policy)
        layer = model.layers[0]
        layer.q_proj.register_forward_hook(lambda m, a, o: seen["weight"].add(m.weight.dtype))
        layer.norm.register_forward_hook(lambda m, a, o: seen["input"].add(a[0].dtype))
        layer.register_forward_hook(lambda m, a, o: seen["output"].add(o.dtype))
        return model, optimizer

    def check(model, optimizer):
        for dp in dmuon.get_owned_params(model):
            low = dp.fqn.startswith("layers.1.")
            assert dp.master.dtype == torch.float32
            assert optimizer.state[dp.param]["momentum_buffer"].dtype == (torch.bfloat16 if low else torch.float32)
        tokens, labels = batch(5, rank)
        loss_of(model(tokens), labels).backward()
        for name, grad in full_gradients(model).items():
            if is_proj(name, grad):
                assert grad.dtype == (torch.bfloat16 if name.startswith("layers.1.") else torch.float32), name
        optimizer.zero_grad()
        assert seen == {"weight": {torch.bfloat16}, "input": {torch.bfloat16}, "output": {torch.float32}}

    model, optimizer = make()
    train(model, optimizer, 2, rank)
    check(model, optimizer)
    state = dmuon.get_model_state_dict(model)
    again, optimizer = make()
    dmuon.set_model_state_dict(again, state)
    check(again, optimizer)


@distributed(world=2)
def test_bf16_compute_with_fp32_masters_trains_like_the_plain_recipe(rank, world):
    """One step against a hand-made one: bf16 copy of fp32 weights forward and backward, fp32 mean of the bf16
    gradients, fp32 update. The momentum starts at zero, so the update is a function of the gradient alone."""
    model, _ = build(world, shard=False, param_policy={"defaults": {"param_dtype": torch.bfloat16,
        "cast_forward_inputs": True, "output_dtype": torch.float32}})  # fmt: skip
    tokens, labels = batch(0, rank)
    for layer in model.layers:
        layer.norm.to(torch.bfloat16)
        layer.down_proj.bias.data = layer.down_proj.bias.data.bfloat16()
    loss_of(model(tokens), labels).backward()
    actual = full_gradients(model)

    total: dict = {}
    for r in range(world):
        plain = ToyModel()
        plain.layers.bfloat16()
        for layer in plain.layers:
            layer.register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))
            layer.register_forward_hook(lambda m, a, o: o.float())
        tokens, labels = batch(0, r)
        loss_of(plain(tokens), labels).backward()
        for name, param in plain.named_parameters():
            if is_proj(name, param):
                total[name] = total.get(name, 0) + param.grad.float() / world
    for name, grad in total.items():
        torch.testing.assert_close(actual[name], grad, atol=0, rtol=1e-6)


@distributed(world=2)
def test_conflicting_dtypes_at_one_boundary_are_refused(rank, world):
    for override, message in [
        ({"name": "q_proj", "set": {"output_dtype": torch.float32}}, "'layers.0': conflicting output_dtype"),
        ({"name": "layers.2.q_proj", "set": {"grad_dtype": torch.bfloat16}}, "'layers.2': conflicting grad_dtype"),
        ({"name": "q_proj", "set": {"param_dtype": torch.float32}}, "'layers.0': cast_forward_inputs with conflicting"),
    ]:
        policy = {
            "defaults": {"param_dtype": torch.bfloat16, "cast_forward_inputs": True},
            "overrides": [override],
        }
        with pytest.raises(ValueError, match=message):
            build(world, param_policy=policy)


@distributed(world=2)
def test_mixed_param_dtypes_without_input_cast(rank, world):
    """A unit may hold weights of two dtypes; each shows its own."""
    policy = {
        "defaults": {"param_dtype": torch.float32},
        "overrides": [{"name": "up_proj", "set": {"param_dtype": torch.float64, "master_dtype": torch.float64}}],
    }
    model, _ = build(world, shard=False, param_policy=policy)
    dtypes = {}
    for leaf in ("q_proj", "up_proj"):
        module = model.layers[0].get_submodule(leaf)
        module.register_forward_pre_hook(
            lambda m, a, n=leaf: (dtypes.update({n: m.weight.dtype}), a[0].to(m.weight.dtype))[1:]
        )
        module.register_forward_hook(lambda m, a, o: o.float())
    with pytest.raises(RuntimeError):  # layers 1 and 2 are not patched: a dtype mismatch in their matmul
        model(batch(0, rank)[0])
    assert dtypes == {"q_proj": torch.float32, "up_proj": torch.float64}


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_memory_of_packed_buffers(rank, world, mode):
    model, optimizer = build(world, ToyModel(layers=4), mode=mode)
    units = runtime_of(model).units

    def resident():
        return [is_unsharded(unit) for unit in units]

    peak = []
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda m, a, o: peak.append(sum(resident())))
    assert resident() == [False] * 4
    tokens, labels = batch(0, rank)
    loss = loss_of(model(tokens), labels)
    assert resident() == ([True] * 4 if mode == "z2" else [False, False, False, True])
    assert max(peak) == (4 if mode == "z2" else 2)  # the one that computes and the one ahead
    loss.backward()
    assert resident() == [mode == "z2"] * 4
    assert not any(has_packed_gradients(unit) for unit in units)
    optimizer.step()
    assert resident() == [False] * 4
    assert all(piece.grad is None for unit in units for piece in unit.owned)


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=["1-D", "2x2", "tp2"])
@pytest.mark.parametrize("route", ["one matrix", "blocks", "normuon", "qk-clip"])
@distributed(world=4)
def test_forward_reads_the_new_masters(rank, world, mesh, route):
    """Whoever changes a master also changes what is sent of it, in the compute dtype: Muon on matrices and on blocks,
    AdamW on owned weights and on shared rows, QK-clip."""
    policy = EVERY_ROUTE["param_policy"]
    blocks = [
        {"name": "up_proj.weight", "set": {"blocks": split_interleaved(4, (2, 7))}},
        {"name": "down_proj.weight", "set": {"blocks": split_sizes((4, 16))}},
    ]
    policy = {
        "defaults": {**policy["defaults"], "param_dtype": torch.bfloat16},
        "overrides": [*policy["overrides"], *(blocks if route == "blocks" else [])],
    }
    maxima = [torch.zeros(4) for _ in range(3)]
    muon = {"normuon": route == "normuon"}
    if route == "qk-clip":
        heads = [HeadWeights(f"layers.{index}.q_proj.weight", Block(0, 5, 4, 5), 0.5) for index in range(3)]
        muon["qk_clip"] = QKClip([QKClipLayer(*layer) for layer in zip(maxima, [(h,) for h in heads], strict=True)])
    model, optimizer = build(world, mesh=mesh, muon=muon, **{**EVERY_ROUTE, "param_policy": policy})
    shown = {}

    def noting(prefix):
        def note(module, args):  # runs after the runtime's own hook
            for name, param in model.named_parameters():
                if name.startswith("layers") == bool(prefix) and name.startswith(prefix):
                    shown[name] = full_tensor(param.detach()).clone()

        return note

    for name, module in (("", model), *((f"layers.{i}.", layer) for i, layer in enumerate(model.layers))):
        module.register_forward_pre_hook(noting(name))

    def compare():
        shown.clear()
        model(batch(2, data_rank(rank, mesh))[0])
        weights = full_weights(model)
        assert shown.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(shown[name], weight.to(torch.bfloat16)), name
        return weights

    before = compare()
    for step in range(2):
        train(model, optimizer, 1, data_rank(rank, mesh), start=step)
        for layer in maxima:
            layer.fill_(500.0)
    after = compare()
    assert not any(torch.equal(after[name], weight) for name, weight in before.items())
    dmuon.set_model_state_dict(model, before, full_state_dict=True)
    compare()
