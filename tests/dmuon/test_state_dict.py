"""State by name: a restart continues bitwise (scenario 15)."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from tests.dmuon.harness import assert_same, build, full_weights, train
from tests.oracle import ToyModel, batch, is_proj
from tests.pool import distributed

BF16 = {
    "fsdp": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "param_policy": {"defaults": {"param_dtype": torch.bfloat16}},
}


def state_of(model, optimizer):
    tensors = {f"model.{n}": t for n, t in dmuon.get_model_state_dict(model).items()}
    return tensors | {f"optim.{n}": t for n, t in dmuon.get_optimizer_state_dict(model, optimizer).items()}


@pytest.mark.parametrize("mode", ["z2", "z3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world=2)
def test_restart_is_bitwise(rank, world, mode, precision):
    import tempfile

    options = {"mode": mode, **(BF16 if precision == "bf16" else {})}
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    model, optimizer = build(world, **options)
    train(model, optimizer, 2, rank)
    with torch.no_grad():
        model(batch(9, rank)[0])  # leaves FSDP2's root unsharded
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder[0]}/a")
    train(model, optimizer, 2, rank, start=2)
    expected = full_weights(model)
    assert all(w.dtype == torch.float32 for w in expected.values())

    for generation in "ab":  # the second restart starts from what the first one saved
        model, optimizer = build(world, ToyModel(seed=7), **options)
        dcp.load(state_of(model, optimizer), checkpoint_id=f"{folder[0]}/{generation}")
        dmuon.publish_weights(model)
        if generation == "a":
            dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder[0]}/b")
    train(model, optimizer, 2, rank, start=2)
    assert_same(full_weights(model), expected, atol=0, rtol=0)


@distributed(world=2)
def test_every_tensor_has_one_writer(rank, world):
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    names = [None] * world
    torch.distributed.all_gather_object(names, sorted(state_of(model, optimizer)))
    for dp in dmuon.get_dedicated_params(model):
        for key in (f"model.{dp.fqn}", f"optim.{dp.fqn}.momentum_buffer"):
            assert [key in held for held in names] == [r == dp.owner_rank for r in range(world)], key
    everything = set(names[0]) | set(names[1])
    assert {f"model.{n}" for n, _ in ToyModel().named_parameters()} <= everything
    rest = [n for n, p in ToyModel().named_parameters() if not is_proj(n, p)]
    assert {f"optim.{n}.{key}" for n in rest for key in ("step", "exp_avg", "exp_avg_sq")} <= everything


@distributed(world=2)
def test_set_model_state_dict(rank, world):
    source, _ = build(world, ToyModel(seed=3))
    target, _ = build(world, ToyModel(seed=4))
    state = {name: tensor.clone() for name, tensor in dmuon.get_model_state_dict(source).items()}
    dmuon.set_model_state_dict(target, state)
    assert_same(full_weights(target), full_weights(source), atol=0, rtol=0)
    tokens, _ = batch(0, rank)
    with torch.no_grad():
        torch.testing.assert_close(target(tokens), source(tokens), atol=0, rtol=0)
    missing = sorted(state)[0]
    del state[missing]
    with pytest.raises(KeyError, match="missing from the state dict"):
        dmuon.set_model_state_dict(target, state)
