"""Meta build and initialisation by name (behaviour 18 of docs/design)."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.harness import DEVICE, assert_same, build, flat_mesh, full_tensor, full_weights, train
from tests.support.oracle import ToyModel, is_proj
from tests.support.pool import distributed


def init(fqn, tensor):
    generator = torch.Generator(tensor.device).manual_seed(sum(map(ord, fqn)))
    tensor.normal_(generator=generator)


def eager(**kwargs):
    model = ToyModel(**kwargs)
    with torch.no_grad():
        for name, param in model.named_parameters():
            init(name, param)
    return model


@pytest.mark.parametrize("tie", [False, True])
@distributed(world=4)
def test_meta_build_equals_eager_build_bitwise(rank, world, tie):
    with torch.device("meta"):
        model = ToyModel(tie=tie)
    model, _ = build(world, model, optimizer=False)
    parameters = dict(model.named_parameters())
    dmuon.materialize(model, init)
    for name, param in model.named_parameters():
        assert not param.is_meta
        assert param is parameters[name]
    if tie:
        assert model.lm_head.weight is model.embed.weight
    expected = {name: param.detach() for name, param in eager(tie=tie).named_parameters()}
    assert_same(full_weights(model), expected, atol=0, rtol=0)
    optimizer = dmuon.Muon(model)
    reference, reference_optimizer = build(world, eager(tie=tie))
    assert train(model, optimizer, 2, rank) == train(reference, reference_optimizer, 2, rank)
    assert_same(full_weights(model), full_weights(reference), atol=0, rtol=0)


@distributed(world=2)
def test_only_what_a_rank_holds_is_allocated(rank, world):
    with torch.device("meta"):
        model = ToyModel(layers=4)
    model, _ = build(world, model, optimizer=False)
    assert all(piece.master is None for piece in dmuon.get_owned_params(model))
    largest, live = [0], [0]

    def counting_init(fqn, tensor):
        live[0] += 1
        largest[0] = max(largest[0], tensor.numel())
        init(fqn, tensor)

    dmuon.materialize(model, counting_init)
    for piece in (piece for dp in dmuon.get_dedicated_params(model) for piece in dp.pieces):
        assert (piece.master is not None) == piece.is_owned == (piece.owner_rank == rank)
    rest = sum(1 for n, p in ToyModel(layers=4).named_parameters() if not is_proj(n, p))
    assert live[0] == len(dmuon.get_owned_params(model)) + rest


@distributed(world=2)
def test_empty_weights_are_not_moved_in_place_of_materialize(rank, world):
    with torch.device("meta"):
        model = ToyModel()
    model, _ = build(world, model, optimizer=False)
    with pytest.raises(RuntimeError, match=r"dmuon\.materialize"):
        model.to_empty(device="cpu")


@pytest.mark.parametrize("selects", ["proj", "layers.1.q_proj"])
@distributed(world=2)
def test_what_needs_weights_raises_before_materialize_on_every_rank(rank, world, selects):
    """Also on the one that owns nothing: it would wait for the other in the next collective."""
    with torch.device("meta"):
        model = ToyModel()
    model, _ = build(world, model, predicate=lambda n, p: selects in n and p.ndim == 2, optimizer=False)
    for ask, wanted in (
        (dmuon.Muon, "building the optimizer"),
        (dmuon.get_model_state_dict, "taking or setting its state"),
        (lambda m: dmuon.get_model_state_dict(m, full_state_dict=True), "taking or setting its state"),
        (lambda m: dmuon.set_model_state_dict(m, {}, full_state_dict=True), "taking or setting its state"),
    ):
        with pytest.raises(
            RuntimeError, match=rf"q_proj.weight has no weight yet: call dmuon\.materialize before {wanted}"
        ):
            ask(model)
    dmuon.materialize(model, init)
    train(model, dmuon.Muon(model), 1, rank)


@distributed(world=2)
def test_undedicated_models(rank, world):
    """Plain on one device, and under FSDP2 alone."""
    expected = {name: param.detach() for name, param in eager(tie=True).named_parameters()}
    with torch.device("meta"):
        plain, sharded = ToyModel(tie=True), ToyModel(tie=True)
    dmuon.materialize(plain, init, torch.device(DEVICE))
    assert plain.lm_head.weight is plain.embed.weight
    assert_same({n: p.detach() for n, p in plain.named_parameters()}, expected, atol=0, rtol=0)
    fully_shard(sharded, mesh=flat_mesh(world))
    dmuon.materialize(sharded, init, torch.device(DEVICE))
    assert_same({n: full_tensor(p.detach()) for n, p in sharded.named_parameters()}, expected, atol=0, rtol=0)


@distributed(world=2)
def test_persistent_buffers_survive(rank, world):
    model = ToyModel()
    model.register_buffer("table", torch.arange(5.0))
    model.layers[0].register_buffer("scratch", torch.zeros(2), persistent=False)
    model, _ = build(world, model)
    state = dmuon.get_model_state_dict(model)
    assert torch.equal(state["table"], torch.arange(5.0))
    assert "layers.0.scratch" not in state
    assert isinstance(model.layers[0], nn.Module)
