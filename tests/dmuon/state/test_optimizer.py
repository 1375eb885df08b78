"""``optimizer.state_dict()`` and ``load_state_dict()``."""

import contextlib
import copy
import logging
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dmuon
from tests.support.harness import EVERY_ROUTE, assert_same, build, full_weights, train, weights_of
from tests.support.oracle import OracleMuon, Skipping, ToyModel, batch, is_proj, loss_of, train_one_process
from tests.support.pool import distributed
from torchtitan_dmuon.dmuon.state.optimizer import ByName
from torchtitan_dmuon.dmuon.state.pieces import parts_of

MESHES = {"4": None, "2x2": (2, 2, 1), "1x2x2": (1, 2, 2)}


def shared_folder():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


@pytest.mark.parametrize("normuon", [False, True])
@pytest.mark.parametrize("routes", ["fsdp2", "dedicated"])
@pytest.mark.parametrize("mesh", MESHES)
@distributed(world=4)
def test_a_round_trip_through_dcp_is_bitwise(rank, world, mesh, routes, normuon):
    options = {"mesh": MESHES[mesh], "muon": {"normuon": normuon}, **(EVERY_ROUTE if routes == "dedicated" else {})}
    data = rank // (2 if mesh == "1x2x2" else 1)
    model, optimizer = build(world, **options)
    train(model, optimizer, 2, data)
    state = optimizer.state_dict()
    keys = sorted((fqn, key) for fqn, values in state["state"].items() for key in values)
    everyone = [None] * world
    dist.all_gather_object(everyone, (keys, state["param_groups"], state["muon"]))
    assert all(other == everyone[0] for other in everyone)
    assert {fqn for fqn, _ in keys} == {name for name, _ in ToyModel().named_parameters()}
    for fqn, values in state["state"].items():
        shape = dict(ToyModel().named_parameters())[fqn].shape
        for key, value in values.items():
            expected = (
                torch.Size([shape[0], 1]) if key == "second_moment" else torch.Size([]) if key == "step" else shape
            )
            assert value.size() == expected, (fqn, key)
    folder = shared_folder()
    dcp.save({"model": dmuon.get_model_state_dict(model), "optimizer": state}, checkpoint_id=folder)

    optimizer.param_groups[0]["lr"] = 0.5  # what was saved wins over what is there
    train(model, optimizer, 2, data, start=2)
    saved = {name: weight.clone() for name, weight in full_weights(model).items()}

    again, other = build(world, ToyModel(seed=5), **options)
    held = {"model": dmuon.get_model_state_dict(again), "optimizer": other.state_dict()}
    dcp.load(held, checkpoint_id=folder)
    dmuon.publish_weights(again)
    other.load_state_dict(held["optimizer"])
    assert other.param_groups[0]["lr"] == 0.02
    other.param_groups[0]["lr"] = 0.5
    train(again, other, 2, data, start=2)
    assert_same(full_weights(again), saved, atol=0, rtol=0)


@distributed(world=2)
def test_a_copy_in_memory_loads(rank, world):
    model, optimizer = build(world, muon={"lr": 0.03})
    train(model, optimizer, 2, rank)
    weights = {name: t.clone() for name, t in dmuon.get_model_state_dict(model).items()}
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1, rank, start=2)
    expected = full_weights(model)
    dmuon.set_model_state_dict(model, weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, 1, rank, start=2)
    assert_same(full_weights(model), expected, atol=0, rtol=0)


class Experts(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        drawn = torch.randn(4, 8, 16, generator=generator, device="cpu")
        self.experts = torch.nn.Parameter(drawn.to(torch.get_default_device()))

    def forward(self, x):
        return x + torch.tanh(torch.einsum("bd,ehd,ehf->bf", x, self.experts, self.experts))


class Lopsided(torch.nn.Module):
    """The large matrix is work enough for one rank, so the other owns both runs of every stack."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.large = torch.nn.Parameter(torch.ones(256, 256))
        self.layers = torch.nn.ModuleList(Experts(generator) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean() + self.large.pow(2).mean()


@pytest.mark.parametrize("way", ["load_state_dict", "set_optimizer_state_dict", "full", "dcp"])
@distributed(world=2)
def test_runs_of_one_stack_on_one_rank_resume_alike(rank, world, way):
    """Forced onto AdamW, they have one step count."""

    def lopsided(seed):
        model, _ = build(world, Lopsided(seed), lambda n, p: True, shard=False, optimizer=False)
        groups = [
            {"params": [p], "dmuon_route": "adamw" if "experts" in n else None} for n, p in model.named_parameters()
        ]
        return model, dmuon.Muon(model, lr=0.01, adamw_lr=0.01, param_groups=groups)

    def data(step, rank):
        drawn = torch.randn(4, 16, generator=torch.Generator("cpu").manual_seed(10 * step + rank), device="cpu")
        return drawn.to(torch.get_default_device())

    def advance(model, optimizer, steps):
        for step in steps:
            model(data(step, rank)).backward()
            optimizer.step()

    model, optimizer = lopsided(0)
    assert max(sum(piece.owner_rank == 1 for piece in dp.pieces) for dp in optimizer.runtime.params) == 2
    advance(model, optimizer, range(3))
    again, other = lopsided(1)
    full = way == "full"
    dmuon.set_model_state_dict(again, dmuon.get_model_state_dict(model, full_state_dict=full), full_state_dict=full)
    if way == "load_state_dict":
        other.load_state_dict(optimizer.state_dict())
    elif way == "dcp":
        folder = shared_folder()
        dcp.save(dmuon.get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
        dcp.load(dmuon.get_optimizer_state_dict(again, other), checkpoint_id=folder)
    else:
        state = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=full)
        dmuon.set_optimizer_state_dict(again, other, state, full_state_dict=full)
    for run in ((model, optimizer), (again, other)):
        advance(*run, range(3, 5))
    assert_same(full_weights(again), full_weights(model), atol=0, rtol=0)

    oracle = Lopsided()
    adamw = torch.optim.AdamW(oracle.layers.parameters(), lr=0.01)
    for step in range(5):
        adamw.zero_grad()
        for other_rank in range(world):
            (oracle(data(step, other_rank)) / world).backward()
        adamw.step()
    experts = {name: weight for name, weight in weights_of(oracle).items() if "experts" in name}
    assert_same({name: full_weights(model)[name] for name in experts}, experts)


class TorchOracle:
    """``torch.optim.Muon`` and ``torch.optim.AdamW``, with our coefficients and heavy numerics left as PyTorch's: only
    its state is compared."""

    def __init__(self, model, named):
        split = [(n, p) for n, p in model.named_parameters()]
        muon = [(n, p) if named else p for n, p in split if is_proj(n, p)]
        rest = [(n, p) if named else p for n, p in split if not is_proj(n, p)]
        self.muon = torch.optim.Muon(muon, lr=0.02, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.01)
        self.model = model

    def step(self):
        self.muon.step()
        self.adamw.step()
        self.model.zero_grad()


@pytest.mark.parametrize("named", [True, False])
@distributed(world=2)
def test_the_state_of_torch_optimizers_of_one_process_loads(rank, world, named):
    """The next step is the one that heavy-ball momentum of the same history gives."""
    plain = ToyModel()
    torch_run = TorchOracle(plain, named)
    gradients = []
    for step in range(3):
        for other in range(world):
            tokens, labels = batch(step, other)
            (loss_of(plain(tokens), labels) / world).backward()
        gradients.append({name: p.grad.clone() for name, p in plain.named_parameters()})
        torch_run.step()
    names = [[n for n, p in plain.named_parameters() if is_proj(n, p) == muon] for muon in (True, False)]
    state = dmuon.state_dict_from_torch(
        torch_run.muon.state_dict(), torch_run.adamw.state_dict(), *([] if named else names)
    )
    start = ToyModel()
    start.load_state_dict(plain.state_dict())
    model, optimizer = build(world, start)
    optimizer.load_state_dict(state)
    train(model, optimizer, 1, rank, start=3)

    oracle = ToyModel()
    oracle.load_state_dict(plain.state_dict())
    expected = OracleMuon(oracle, is_proj)
    for name in names[0]:
        m = torch.zeros_like(gradients[0][name])
        for each in gradients:
            m = 0.95 * m + each[name]
        expected.momentum[name] = m
    moments = torch_run.adamw.state_dict()
    moments["param_groups"] = expected.adamw.state_dict()["param_groups"]
    expected.adamw.load_state_dict(moments)
    train_one_process(oracle, expected, 1, world, start=3)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_what_torch_never_used_starts_anew(rank, world):
    """Its optimizers keep no state of it: zeros here, also over what there was. A name lost by mistake is an error."""
    plain = Skipping()
    plain.skip = {1}
    torch_run = TorchOracle(plain, named=True)
    tokens, labels = batch(0, rank=0)
    loss_of(plain(tokens), labels).backward()
    torch_run.step()
    state = dmuon.state_dict_from_torch(torch_run.muon.state_dict(), torch_run.adamw.state_dict())
    unused = {name for name, _ in plain.named_parameters() if name.startswith("layers.1.")}
    assert set(state["fresh"]) == unused and state["state"].keys().isdisjoint(unused)
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    optimizer.load_state_dict(state)
    whole = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    for name, value in whole.items():
        assert value.any() != any(name.startswith(prefix) for prefix in unused), name
    for lost in ("layers.0.q_proj.weight", "layers.0.norm.weight"):
        broken = {**state, "state": {fqn: values for fqn, values in state["state"].items() if fqn != lost}}
        with pytest.raises(ValueError, match=f"{lost}: the state dict has nothing of it"):
            optimizer.load_state_dict(broken)


@distributed(world=2)
def test_what_does_not_fit_is_told_and_nothing_moves(rank, world):
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    before = copy.deepcopy(optimizer.state_dict())

    def broken(change):
        state = copy.deepcopy(before)
        change(state)
        return state

    def ema(state):
        state["muon"]["momentum_form"] = "ema"

    def lost(state):
        del state["state"]["layers.1.q_proj.weight"]["momentum_buffer"]

    def alien(state):
        state["state"]["layers.9.q_proj.weight"] = {}

    def wrong_shape(state):
        state["state"]["layers.1.q_proj.weight"]["momentum_buffer"] = torch.zeros(3, 20)

    def renamed(state):
        state["param_groups"][0]["group_name"] = "matrices"

    def moved(state):
        state["param_groups"][1]["params"].append(state["param_groups"][0]["params"].pop())

    for change, message in [
        (ema, "holds 'ema' momentum, .* dmuon.convert_ema_momentum"),
        (lost, r"layers\.1\.q_proj\.weight: the state dict has nothing of it, momentum_buffer is missing"),
        (alien, r"has layers\.9\.q_proj\.weight, which this optimizer has not"),
        (
            wrong_shape,
            r"layers\.1\.q_proj\.weight\.momentum_buffer has shape \[3, 20\] in the state dict, here \[20, 20\]",
        ),
        (renamed, "has no group 'muon', only 'matrices', 'adamw'"),
        (moved, "group 'muon' has other parameters"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(broken(change))
    after = optimizer.state_dict()
    for fqn, values in before["state"].items():
        for key, value in values.items():
            for (old, _), (new, _) in zip(parts_of(value)[1], parts_of(after["state"][fqn][key])[1], strict=True):
                assert torch.equal(old, new)
    with pytest.raises(ValueError, match="3 muon_names for 1 parameters"):
        torch_muon = torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))]).state_dict()
        dmuon.state_dict_from_torch(torch_muon, torch_muon, "abc", "abc")
    with pytest.raises(ValueError, match="muon state has no parameter names: pass muon_names"):
        dmuon.state_dict_from_torch(torch_muon, torch_muon)


@contextlib.contextmanager
def warnings_of(*modules):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    loggers = [logging.getLogger(f"torchtitan_dmuon.dmuon.{module}") for module in modules]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield told
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


FROZEN = ("layers.1.q_proj.weight", "layers.1.norm.weight", "embed.weight")  # of Muon, AdamW and the rows of both ranks


def freeze(model):
    for name, param in model.named_parameters():
        param.requires_grad_(name not in FROZEN)
    return model


@pytest.mark.parametrize("way", ["load_state_dict", "dcp", "full"])
@pytest.mark.parametrize("routes", ["fsdp2", "dedicated"])
@distributed(world=2)
def test_a_run_goes_on_with_layers_frozen(rank, world, routes, way):
    """What is still trained keeps its state, on new owners. That of the frozen is left out, and one line says so."""
    options = {**EVERY_ROUTE, "predicate": lambda n, p: True} if routes == "dedicated" else {}
    model, optimizer = build(world, **options)
    train(model, optimizer, 2, rank)
    again, other = build(world, freeze(ToyModel(seed=5)), **options)
    weights = dmuon.get_model_state_dict(model, full_state_dict=True)
    dmuon.set_model_state_dict(again, weights, full_state_dict=True)
    flat = dmuon.get_optimizer_state_dict(model, optimizer, full_state_dict=True)
    nested = {**optimizer.state_dict(), "state": {}}
    for key, tensor in flat.items():
        fqn, _, name = key.rpartition(".")
        nested["state"].setdefault(fqn, {})[name] = tensor
    with warnings_of("state.optimizer") as told:
        if way == "load_state_dict":
            other.load_state_dict(nested)
        elif way == "dcp":  # reads what the live state dict asks for
            folder, held = shared_folder(), other.state_dict()
            dcp.save(optimizer.state_dict(), checkpoint_id=folder)
            dcp.load(held, checkpoint_id=folder)
            other.load_state_dict(held)
        else:
            dmuon.set_optimizer_state_dict(again, other, flat, full_state_dict=True)
    line = "the state dict has the state of 3 parameters that are frozen now: it is left out (embed.weight, ...)"
    assert told == ([] if way == "dcp" else [line])
    nested["state"]["layers.9.q_proj.weight"] = {}
    with pytest.raises(ValueError, match=r"has layers\.9\.q_proj\.weight, which this optimizer has not"):
        other.load_state_dict(nested)
    train(again, other, 2, rank, start=2)

    oracle = ToyModel()
    expected = OracleMuon(oracle, is_proj)
    train_one_process(oracle, expected, 2, world)
    train_one_process(freeze(oracle), expected, 2, world, start=2)
    assert_same(full_weights(again), weights_of(oracle))


@distributed(world=2)
def test_another_recipe_is_said(rank, world):
    _, optimizer = build(world)
    state = optimizer.state_dict()
    _, other = build(world, muon={"scale": "unit", "ns_backend": dmuon.NewtonSchulz(coefficients="kj")})
    with warnings_of("optimizer.named_state") as told:
        other.load_state_dict(state)
    assert any("was made with scale match_rms_adamw, this optimizer has unit" in line for line in told)
    assert any("was made with coefficients" in line for line in told)


def test_ema_momentum_is_a_tenth_of_the_sum():
    """M_ema = (1 - mu) M."""
    state = {"state": {"w": {"momentum_buffer": torch.full((2,), 0.05), "step": torch.ones(())}}}
    converted = dmuon.convert_ema_momentum(state, 0.95)
    torch.testing.assert_close(converted["state"]["w"]["momentum_buffer"], torch.ones(2))
    assert converted["state"]["w"]["step"] == 1 and converted["muon"]["momentum_form"] == "heavy_ball"
    assert state["state"]["w"]["momentum_buffer"][0] == 0.05


@distributed(world=2)
def test_hyperparameters_are_checked_before_anything_is_taken(rank, world):
    _, optimizer = build(world)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, key, value, message in [
        (1, "betas", (2.0, 0.9), r"group 'adamw' of the state dict: adamw_betas\[0\] is out of range"),
        (1, "betas", (0.9,), "adamw_betas must be two numbers"),
        (0, "lr", "fast", "lr must be a number, got 'fast'"),
        (0, "momentum", None, "group 'muon' of the state dict has no momentum"),
    ]:
        state = copy.deepcopy(optimizer.state_dict())
        if value is None:
            del state["param_groups"][group][key]
        else:
            state["param_groups"][group][key] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="it has no 'state', only"):
        optimizer.load_state_dict({"param_groups": []})
    broken = copy.deepcopy(optimizer.state_dict())
    broken["state"]["layers.0.q_proj.weight"]["momentum_buffer"] = [1.0]
    with pytest.raises(ValueError, match="momentum_buffer is a list in the state dict, expected a tensor"):
        optimizer.load_state_dict(broken)
    assert [group["lr"] for group in optimizer.param_groups] == rates


@distributed(world=2)
def test_parts_can_be_copied_and_printed(rank, world):
    model, optimizer = build(world)
    train(model, optimizer, 1, rank)
    state = optimizer.state_dict()
    momenta = [values["momentum_buffer"] for values in state["state"].values() if "momentum_buffer" in values]
    absent = next(momentum for momentum in momenta if "PartialTensor" in repr(momentum))
    assert repr(absent).endswith("no part on this rank)")
    cloned = {f: {k: v.detach().clone() for k, v in values.items()} for f, values in state["state"].items()}
    train(model, optimizer, 1, rank, start=1)
    optimizer.load_state_dict({**state, "state": cloned})
    for piece in optimizer.runtime.owned:
        momentum = cloned[piece.fqn]["momentum_buffer"]
        assert torch.equal(optimizer.state_of(piece)["momentum_buffer"], momentum)


@distributed(world=2)
def test_the_hooks_of_state_dicts(rank, world):
    """PyTorch's four registrations, in its order; a hook may hand on another dict. Whole, the dict can be pickled."""
    _, optimizer = build(world)
    called = []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("state pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: called.append("state post") or {**state, "mine": rank})
    optimizer.register_state_dict_post_hook(lambda o, state: called.append(f"again {state['mine']}"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: called.append("load pre") or {**state, "muon": {}})
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("load post"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state["mine"] == rank
    assert called == ["state pre", "state post", f"again {rank}", "load pre", "load post"]


def test_a_whole_state_dict_is_loaded_by_torch_alone():
    state = {"state": ByName({"w": {"momentum_buffer": torch.ones(2)}})}
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert not isinstance(loaded["state"], ByName)
    torch.testing.assert_close(dict(loaded["state"]), dict(state["state"]))
