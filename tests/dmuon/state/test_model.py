"""State by name: a restart continues bitwise (behaviour 15 of docs/design)."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon
from tests.support.harness import EVERY_ROUTE, assert_same, build, data_rank, flat_mesh, full_weights, train, weights_of
from tests.support.oracle import ToyModel, batch, is_proj
from tests.support.pool import distributed
from tests.support.toy import read_checkpoint
from torchtitan_dmuon.dmuon.state.pieces import parts_of

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
def test_every_rank_has_every_name_and_one_rank_the_tensor(rank, world):
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    state = state_of(model, optimizer)
    held = {
        name: (tuple(tensor.size()), [tuple(offset) for _, offset in parts_of(tensor)[1]])
        for name, tensor in state.items()
    }
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, held)
    assert all(list(names) == list(held) for names in everyone)
    assert all([size for size, _ in names.values()] == [size for size, _ in held.values()] for names in everyone)
    for dp in dmuon.get_dedicated_params(model):
        for key in (f"model.{dp.fqn}", f"optim.{dp.fqn}.momentum_buffer"):
            assert [bool(names[key][1]) for names in everyone] == [r == dp.owner_rank for r in range(world)], key
    assert {f"model.{n}" for n, _ in ToyModel().named_parameters()} <= held.keys()
    rest = [n for n, p in ToyModel().named_parameters() if not is_proj(n, p)]
    assert {f"optim.{n}.{key}" for n in rest for key in ("step", "exp_avg", "exp_avg_sq")} <= held.keys()


@distributed(world=2)
def test_what_would_lose_tensors_is_refused(rank, world):
    """Pickling a rank's part, PyTorch's own function for optimizers, and a whole dict that is not said to be one."""
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    state, moments = dmuon.get_model_state_dict(model), dmuon.get_optimizer_state_dict(model, optimizer)
    for part in (state, moments, optimizer.state_dict()):
        with pytest.raises(RuntimeError, match=r"dcp\.save.*full_state_dict=True"):
            torch.save(part, io.BytesIO())
    with pytest.raises(RuntimeError, match=r"use dmuon\.get_optimizer_state_dict"):
        torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)
    before = full_weights(model)
    whole = dmuon.get_model_state_dict(build(world, ToyModel(seed=5), optimizer=False)[0], full_state_dict=True)
    with pytest.raises(ValueError, match="whole tensor in the state dict: pass full_state_dict=True"):
        dmuon.set_model_state_dict(model, whole)
    whole = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    with pytest.raises(ValueError, match="pass full_state_dict=True"):
        dmuon.set_optimizer_state_dict(model, optimizer, whole)
    assert_same(full_weights(model), before, atol=0, rtol=0)


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


# ------------------------------------------------------------------ whole tensors

MESHES = {"shard 4": (1, 4, 1), "2x2": (2, 2, 1), "dp2 tp2": (1, 2, 2)}
ROUTES = {
    "fsdp2": {"predicate": is_proj},
    "dedicated": {
        "predicate": lambda n, p: True,
        "param_policy": {
            "defaults": {"route": "adamw"},
            "overrides": [
                {"name": ["q_proj.weight", "up_proj.weight", "down_proj.weight"], "set": {"route": "muon"}},
                {"name": ["embed"], "set": {"route": "sharded_adamw"}},
            ],
        },
        "shard": False,
    },
}


class Tied(ToyModel):
    """Head and embedding are one; odd sizes; a persistent buffer."""

    def __init__(self, seed=0):
        super().__init__(dim=20, hidden=37, seed=seed, tie=True)
        self.register_buffer("offset", torch.arange(7.0) + seed)


def trained(rank, world, mesh, routes, seed=0, steps=2):
    model, optimizer = build(world, Tied(seed), mesh=mesh, **ROUTES[routes])
    train(model, optimizer, steps, data_rank(rank, mesh))
    return model, optimizer


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("mesh", MESHES)
@distributed(world=4)
def test_full_state_dict(rank, world, mesh, routes):
    """Whole, under every name, on every rank or on rank 0 alone; what the plain model loads and computes with."""
    shape = MESHES[mesh]
    model, optimizer = trained(rank, world, shape, routes)
    expected = full_weights(model)
    full = dmuon.get_model_state_dict(model, full_state_dict=True)
    assert_same({n: t for n, t in full.items() if n in expected}, expected, atol=0, rtol=0)
    plain = Tied(seed=5)
    plain.load_state_dict(full)  # strict
    assert plain.offset.equal(model.offset)
    tokens, _ = batch(9, data_rank(rank, shape))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens), atol=1e-5, rtol=1e-5)
    before = {name: tensor.clone() for name, tensor in full.items()}
    train(model, optimizer, 1, data_rank(rank, shape), start=2)
    assert_same(full, before, atol=0, rtol=0)  # copies

    offloaded = dmuon.get_model_state_dict(model, full_state_dict=True, cpu_offload=True)
    assert bool(offloaded) == (rank == 0)
    expected = {name: tensor.cpu() for name, tensor in full_weights(model).items()}
    if rank == 0:  # assert_same compares devices too
        assert_same({n: t for n, t in offloaded.items() if n in expected}, expected, atol=0, rtol=0)
    state = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    trainable = [n for n, _ in plain.named_parameters()]
    kinds = {n: ("momentum_buffer",) if is_proj(n, p) else ADAMW for n, p in plain.named_parameters()}
    assert state.keys() == {f"{name}.{kind}" for name in trainable for kind in kinds[name]}
    for name, param in plain.named_parameters():
        for kind in kinds[name]:
            assert state[f"{name}.{kind}"].shape == (() if kind == "step" else param.shape)
    assert state["norm.weight.step"] == 3


ADAMW = ("step", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("mesh", MESHES)
@distributed(world=4)
def test_set_from_whole_tensors(rank, world, mesh, routes, broadcast):
    """On every mesh, from whole tensors on all ranks or on rank 0 alone: the next step is that of the source."""
    shape, flat = MESHES[mesh], (1, 4, 1)
    source, its_optimizer = trained(rank, world, flat, "fsdp2")
    offload = {"full_state_dict": True, "cpu_offload": broadcast}
    weights = dmuon.get_model_state_dict(source, **offload)
    state = dmuon.get_optimizer_state_dict(source, its_optimizer, **offload)
    expected = full_weights(source)

    target, optimizer = trained(rank, world, shape, routes, seed=3, steps=1)
    options = {"full_state_dict": True, "broadcast_from_rank0": broadcast}
    dmuon.set_model_state_dict(target, weights, **options)
    dmuon.set_optimizer_state_dict(target, optimizer, state, **options)
    assert_same(full_weights(target), expected, atol=0, rtol=0)
    whole = dmuon.get_optimizer_state_dict(target, optimizer, full_state_dict=True)
    source_state = dmuon.get_optimizer_state_dict(source, its_optimizer, full_state_dict=True)
    assert_same(whole, source_state, atol=0, rtol=0)
    for tensor in (*weights.values(), *state.values()):
        tensor.fill_(torch.nan)  # nothing of the target shares memory with them
    assert_same(full_weights(target), expected, atol=0, rtol=0)


@distributed(world=2)
def test_whole_tensors_that_do_not_fit_are_refused_on_every_rank(rank, world):
    model, optimizer = build(world)
    full = dmuon.get_model_state_dict(model, full_state_dict=True, cpu_offload=True)
    options = {"full_state_dict": True, "broadcast_from_rank0": True}
    wrong = {
        "missing from the state dict": {n: t for n, t in full.items() if n != "norm.weight"},
        "is in the state dict but not here": full | {"layers.9.q_proj.weight": torch.zeros(2)},
        r"norm.weight has shape \[3\] in the state dict, here \[20\]": full | {"norm.weight": torch.zeros(3)},
    }
    for message, state in wrong.items():
        with pytest.raises((KeyError, ValueError), match=message):
            dmuon.set_model_state_dict(model, state, **options)
    before = full_weights(model)
    some = {"norm.weight": torch.full((20,), 7.0)} if rank == 0 else {}
    dmuon.set_model_state_dict(model, some, **options, strict=False)
    after = full_weights(model)
    assert after.pop("norm.weight").eq(7).all() and before.pop("norm.weight") is not None
    assert_same(after, before, atol=0, rtol=0)
    with pytest.raises(ValueError, match="needs full_state_dict=True"):
        dmuon.set_model_state_dict(model, full, broadcast_from_rank0=True)
    with pytest.raises(KeyError, match="missing from the state dict"):
        dmuon.set_optimizer_state_dict(model, optimizer, {}, **options)


@distributed(world=2)
def test_one_tensor_at_a_time(rank, world):
    """While a model is gathered to rank 0 or sent from it, no rank allocates more than the largest tensor at once."""
    model, _ = build(world)
    largest = max(p.numel() for p in model.parameters())
    sizes = []
    broadcast = torch.distributed.broadcast

    def recorded(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return broadcast(tensor, *args, **kwargs)

    torch.distributed.broadcast = recorded
    try:
        full = dmuon.get_model_state_dict(model, full_state_dict=True, cpu_offload=True)
        dmuon.set_model_state_dict(model, full, full_state_dict=True, broadcast_from_rank0=True)
    finally:
        torch.distributed.broadcast = broadcast
    assert max(sizes) == largest and (rank == 0 or not full)


@distributed(world=2)
def test_offloaded_parts_are_copies_that_can_be_set(rank, world):
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    kept = dmuon.get_model_state_dict(model, cpu_offload=True)
    state = dmuon.get_optimizer_state_dict(model, optimizer, cpu_offload=True)
    expected = full_weights(model)
    train(model, optimizer, 1, rank, start=1)
    later = full_weights(model)
    dmuon.set_model_state_dict(model, kept)
    dmuon.set_optimizer_state_dict(model, optimizer, state)
    assert_same(full_weights(model), expected, atol=0, rtol=0)
    train(model, optimizer, 1, rank, start=1)
    assert_same(full_weights(model), later, atol=0, rtol=0)


class Repeated(ToyModel):
    """One block under two names, with buffers: one of its own, one that the block has twice, one that is not saved."""

    def __init__(self, seed=0):
        super().__init__(seed=seed)
        self.layers[2] = self.layers[0]
        norm = self.layers[0].norm
        norm.register_buffer("count", torch.arange(3.0) + seed)
        norm.register_buffer("again", norm.count)
        norm.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("broadcast", [True, False])
@distributed(world=2)
def test_whole_tensors_have_all_names_of_parameters_and_buffers(rank, world, broadcast):
    model, optimizer = build(world, Repeated(), **EVERY_ROUTE)
    train(model, optimizer, 1, rank)
    full = dmuon.get_model_state_dict(model, full_state_dict=True)
    plain = Repeated(seed=4)
    assert full.keys() == plain.state_dict().keys()
    plain.load_state_dict(full)  # strict
    assert plain.layers[2].norm.again.equal(torch.arange(3.0))
    assert_same(full_weights(model), weights_of(plain), atol=0, rtol=0)
    fresh = Repeated(seed=5).state_dict() if rank == 0 or not broadcast else {}
    dmuon.set_model_state_dict(model, fresh, full_state_dict=True, broadcast_from_rank0=broadcast)
    assert model.layers[0].norm.count.equal(torch.arange(3.0) + 5)
    assert_same(full_weights(model), weights_of(Repeated(seed=5)), atol=0, rtol=0)


class Narrow(ToyModel):
    """With a head of one row, of which FSDP2 leaves nothing to the second rank."""

    def __init__(self, seed=0):
        super().__init__(vocab=29, seed=seed)
        self.score = torch.nn.Linear(20, 1)

    def forward(self, tokens):
        return super().forward(tokens) + self.score(self.embed(tokens))


@pytest.mark.parametrize("kind", ["Muon", "AdamW"])
@distributed(world=2)
def test_a_rank_with_an_empty_shard_sets_what_it_was_given(rank, world, kind, tmp_path):
    torch.manual_seed(0)
    model, optimizer = build(world, Narrow())
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(p for n, p in model.named_parameters() if not is_proj(n, p))
    train(model, optimizer, 1, rank)
    kept = dmuon.get_model_state_dict(model, cpu_offload=True)
    state = dmuon.get_optimizer_state_dict(model, optimizer, cpu_offload=True)
    assert kept.keys() == dmuon.get_model_state_dict(model).keys()
    expected = full_weights(model)
    moments = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    train(model, optimizer, 1, rank, start=1)
    dmuon.set_model_state_dict(model, kept)
    dmuon.set_optimizer_state_dict(model, optimizer, state)
    assert_same(full_weights(model), expected, atol=0, rtol=0)
    again = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    assert_same(again, moments, atol=0, rtol=0)
    dcp.save(kept, checkpoint_id=str(tmp_path))
    if rank == 0:
        assert_same(read_checkpoint(tmp_path), expected, atol=0, rtol=0)
    torch.distributed.barrier()


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.linspace(-1, 1, 120).view(5, 6, 4))


@distributed(world=2)
def test_states_of_another_shape_than_their_piece(rank, world, tmp_path):
    """A row-wise second moment [E, m, 1], one number an expert [E], a scalar: cut as far as they are as long as what is
    cut, and whole again in a checkpoint."""
    model = Stack()
    policy = {"defaults": {"stack": True}}
    dmuon.dedicate_params(model, flat_mesh(world), predicate=lambda n, p: True, param_policy=policy)
    optimizer = dmuon.Muon(model)
    (piece,) = optimizer.runtime.owned  # experts 0-1 here, 2-4 there
    start, stop = piece.start, piece.stop
    extra = {
        "rows": torch.arange(30.0).view(5, 6, 1)[start:stop],
        "per_expert": torch.arange(5.0)[start:stop] + 50,
        "count": torch.tensor(3.0),
    }
    plain_state_of = optimizer.state_of
    optimizer.state_of = lambda piece: {**plain_state_of(piece), **extra}
    dcp.save(dmuon.get_optimizer_state_dict(model, optimizer), checkpoint_id=str(tmp_path))
    full = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    torch.distributed.barrier()
    for found in (full, read_checkpoint(tmp_path) if rank == 0 else full):
        assert found["experts.rows"].equal(torch.arange(30.0).view(5, 6, 1))
        assert found["experts.per_expert"].equal(torch.arange(5.0) + 50)
        assert found["experts.count"] == 3 and found["experts.momentum_buffer"].shape == (5, 6, 4)
