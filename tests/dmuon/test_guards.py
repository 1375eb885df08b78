"""What users do to a dedicated model that has no good meaning is refused, on every rank, before anything is lost; what
has one is done right."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import dmuon
from tests.support.harness import assert_same, build, full_gradients, full_weights, train, weights_of
from tests.support.meshes import DEVICE
from tests.support.oracle import Block, OracleMuon, ToyModel, batch, is_proj, loss_of, train_one_process
from tests.support.pool import distributed

NAME = r"layers\.1\.q_proj\.weight"


def replace_layer(model):
    model.layers[1].q_proj = nn.Linear(20, 20, bias=False)


def replace_block(model):
    model.layers[1] = Block(20, 36)


def replace_parameter(model):
    model.layers[1].q_proj.weight = nn.Parameter(torch.zeros(20, 20))


def parametrize(model):
    weight_norm(model.layers[1].q_proj)


def tie(model):
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight


@distributed(world=2)
def test_weights_that_were_replaced(rank, world):
    for spoil in (replace_layer, replace_block, replace_parameter, parametrize, tie):
        model, optimizer = build(world)
        spoil(model)
        for use in (
            lambda m: m(batch(0, rank)[0]),
            dmuon.Muon,
            dmuon.get_model_state_dict,
            lambda m: dmuon.set_model_state_dict(m, {}, strict=False),
            lambda m, optimizer=optimizer: dmuon.get_optimizer_state_dict(m, optimizer),
        ):
            with pytest.raises(RuntimeError, match=r"layers\.1\..* was dedicated, and since then"):
                use(model)


@distributed(world=2)
def test_a_tie_to_a_dedicated_parameter(rank, world):
    """It is in the model still, but also where no hook looks after it."""
    model, _ = build(world, ToyModel(dim=29), predicate=lambda n, p: is_proj(n, p) or "embed" in n, optimizer=False)
    model.lm_head.weight = model.embed.weight
    with pytest.raises(RuntimeError, match=r"embed\.weight was dedicated, and since then"):
        dmuon.Muon(model)


@distributed(world=2)
def test_wrappers_may_come_later(rank, world):
    """They change the way to a parameter, not the parameter."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model, optimizer = build(world)
    model.layers[1] = Wrapper(model.layers[1])
    train(model, optimizer, 2, rank)
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 2, world)
    model.layers[1] = model.layers[1].inner
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_state_dicts_and_pickles_of_any_part(rank, world):
    model, _ = build(world, optimizer=False)
    for part in (model, model.layers, model.layers[0], model.layers[0].q_proj):
        with pytest.raises(RuntimeError, match="get_model_state_dict"):
            part.state_dict()
    assert model.norm.state_dict().keys() == {"weight", "bias"}
    weight = model.layers[0].q_proj.weight
    for take in (copy.deepcopy, pickle.dumps, lambda w: torch.save({"w": w}, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"layers\.0\.q_proj\.weight cannot be copied"):
            take(weight)
    with pytest.raises(dcp.CheckpointException, match=r"cannot be copied"):
        dcp.save(dict(model.named_parameters()), storage_writer=dcp.FileSystemWriter("/nowhere"))
    for assign in (False, True):
        for part, name in ((model, "layers.0.q_proj.weight"), (model.layers[0], "q_proj.weight")):
            with pytest.raises(RuntimeError, match=rf"cannot reach {name}.*set_model_state_dict"):
                part.load_state_dict({name: torch.zeros(20, 20)}, strict=False, assign=assign)
    model.load_state_dict({}, strict=False)


@distributed(world=2)
def test_a_write_to_a_weight_that_is_elsewhere(rank, world):
    for write in (nn.init.zeros_, lambda w: nn.init.constant_(w, 0.5)):
        model, optimizer = build(world)
        before = full_weights(model)
        tokens, labels = batch(0, rank)
        loss_of(model(tokens), labels).backward()
        optimizer.zero_grad()
        for use in (lambda m: m(batch(0, rank)[0]), dmuon.get_model_state_dict, dmuon.Muon):
            write(model.layers[1].q_proj.weight)
            with pytest.raises(RuntimeError, match=rf"written into {NAME}.*summon_full_params"):
                use(model)
            assert model.layers[1].q_proj.weight.isnan().all()
        assert_same(full_weights(model), before, atol=0, rtol=0)
        train(model, optimizer, 1, rank)


class WithInit(ToyModel):
    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.constant_(module.weight, 0.01)
            if isinstance(module, nn.Linear) and module.out_features == module.in_features:
                nn.init.eye_(module.weight)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


@distributed(world=4)
def test_init_weights_after_parallelize(rank, world):
    """Built on meta or with other weights, 1-D and with replicas and tensor parallelism."""
    oracle = WithInit()
    oracle.init_weights()
    for mesh in (None, (2, 2, 1)):
        for device in ("meta", DEVICE):
            with torch.device(device):
                model = meta_model() if device == "meta" else WithInit()
            model, _ = build(world, model, mesh=mesh, optimizer=False)
            if device == "meta":
                dmuon.materialize(model)
            with dmuon.summon_full_params(model):
                assert model.layers[0].q_proj.weight.dtype == torch.float32
                model.init_weights()
            assert_same(full_weights(model), weights_of(oracle), atol=0, rtol=0)


def meta_model():
    model = nn.Module.__new__(WithInit)
    nn.Module.__init__(model)
    model.embed = nn.Embedding(29, 20)
    model.layers = nn.ModuleList(Block(20, 36) for _ in range(3))
    model.norm = nn.LayerNorm(20)
    model.lm_head = nn.Linear(20, 29, bias=False)
    return model


@distributed(world=2)
def test_summoned_parameters(rank, world):
    """Reading gives the weights; what only rank 1 writes counts where rank 1 is the owner; errors undo everything."""
    model, optimizer = build(world)
    before = full_weights(model)
    with dmuon.summon_full_params(model):
        for name, param in model.named_parameters():
            if is_proj(name, param):
                torch.testing.assert_close(param.detach(), before[name], atol=0, rtol=0)
        with torch.no_grad():
            for dp in dmuon.get_dedicated_params(model):
                model.get_parameter(dp.fqn).fill_(rank)
    after = full_weights(model)
    for dp in dmuon.get_dedicated_params(model):
        assert (after[dp.fqn] == dp.owner_rank).all()
    with pytest.raises(ZeroDivisionError), dmuon.summon_full_params(model):
        nn.init.zeros_(model.layers[0].q_proj.weight)
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match=rf"{NAME} was replaced while"), dmuon.summon_full_params(model):
        replace_parameter(model)
    assert_same(full_weights(model), after, atol=0, rtol=0)
    train(model, optimizer, 1, rank)


@distributed(world=2)
def test_hooks_on_gradients(rank, world):
    """Registered before dedication they see this rank's own gradient, later ones are refused and not left with none."""
    model, seen = ToyModel(), []
    model.layers[1].q_proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model, _ = build(world, model, optimizer=False)
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    alone = ToyModel()
    loss_of(alone(tokens), labels).backward()
    torch.testing.assert_close(seen, [alone.layers[1].q_proj.weight.grad])
    model.layers[1].q_proj.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RuntimeError, match=rf"{NAME}: a post-accumulate-grad hook"):
        loss_of(model(tokens), labels).backward()


@distributed(world=2)
def test_backward_passes_that_cannot_be_right(rank, world):
    model, optimizer = build(world)
    tokens, labels = batch(0, rank)
    loss = loss_of(model(tokens), labels)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        loss.backward(create_graph=True)
    optimizer.zero_grad()
    stale = loss_of(model(tokens), labels)
    loss_of(model(tokens), labels).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="whose weights the optimizer has changed"):
        stale.backward()
    optimizer.zero_grad()
    loss_of(model(tokens), labels).backward()
    oracle = ToyModel()
    train_one_process(oracle, OracleMuon(oracle, is_proj), 1, world)
    parts = [batch(0, r) for r in range(world)]
    tokens, labels = (torch.cat(x) for x in zip(*parts, strict=True))
    loss_of(oracle(tokens), labels).backward()
    assert_same(full_gradients(model), {name: p.grad for name, p in oracle.named_parameters()})
