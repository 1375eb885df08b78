"""A toy run for the tests of checkpoints: a model with all kinds of tensors, its checkpointer, and what is in it, found
without the code under test."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import dmuon
from models.llama3 import Llama3HFNameMap
from tests.support.harness import TYPE_SPLIT, assemble, build, full_tensor, full_weights, gather
from tests.support.oracle import ToyModel, batch, loss_of
from tests.support.private import runtime_of
from torchtitan_dmuon.checkpoint import Checkpointer, Contents, TrainState
from torchtitan_dmuon.config.job_config import Checkpoint

VOCAB = 29
# The data of one step is that of four ranks, whoever reads it.
DATA = 4


class Toy(ToyModel):
    """Odd sizes, a persistent buffer, a frozen matrix; embedding and head tied on request."""

    def __init__(self, seed=0, tie=False):
        super().__init__(layers=2, dim=20, hidden=37, vocab=VOCAB, seed=seed, tie=tie)
        self.register_buffer("offset", torch.arange(7.0) + seed)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.layers[1].q_proj.weight.requires_grad_(False)


def matrices(name, p):
    return "proj" in name and p.ndim == 2


def without_up(name, p):
    return matrices(name, p) and "up_proj" not in name


# Routes of a run: the arguments of ``harness.build``.
ROUTES = {
    "fsdp2": {"predicate": matrices},
    "z2": {"predicate": matrices, "mode": "z2"},
    "dedicated": {"predicate": lambda n, p: True, "param_policy": TYPE_SPLIT, "shard": False},
    "exclude": {"predicate": without_up},
}


# Small, because Newton-Schulz magnifies what the order of a sum does to the last bits of small gradients.
HYPER = {"lr": 5e-3, "weight_decay": 0.1}


def build_toy(world, mesh=None, routes="fsdp2", seed=0, tie=False):
    options = dict(ROUTES[routes])
    if tie and "param_policy" in options:
        overrides = [TYPE_SPLIT["overrides"][0], {"name": ["embed"], "set": {"route": "sharded_adamw"}}]
        options["param_policy"] = {**TYPE_SPLIT, "overrides": overrides}
    return build(world, Toy(seed, tie), mesh=mesh, muon=HYPER, **options)


def step(model, optimizer, number, rank, mesh):
    """One step on the data of four ranks."""
    readers = mesh[0] * mesh[1]
    reader, share = rank // mesh[2], DATA // readers
    parts = [batch(number, data) for data in range(reader * share, (reader + 1) * share)]
    tokens, labels = (torch.cat(x) for x in zip(*parts, strict=True))
    loss = loss_of(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def full_state(model, optimizer):
    """The optimizer's state as whole tensors by ``name.key``, on every rank. Collective."""
    runtime = runtime_of(model)
    held = {}
    for piece in runtime.owned:
        if piece.spec.trainable and piece.numel:
            for key, value in optimizer.state_of(piece).items():
                held.setdefault(key, {})[piece] = value
    state = {}
    shapes = {dp.fqn: dp.shape for dp in runtime.params}
    keys = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(keys, sorted(held))
    for key in sorted({key for found in keys for key in found}):
        for fqn, parts in gather(model, held.get(key, {})).items():
            shape = shapes[fqn] if parts[0][1].ndim else ()
            state[f"{fqn}.{key}"] = assemble(shape, parts[0][1].dtype, parts)
    for name, param in model.named_parameters():
        if param not in optimizer.state or name in shapes:
            continue
        for key, value in optimizer.state[param].items():
            state[f"{name}.{key}"] = (full_tensor(value) if isinstance(value, DTensor) else value).clone()
    return state


def everything(model, optimizer):
    """What a checkpoint of this run must hold, by its names there. Collective."""
    tensors = {f"model.{name}": tensor for name, tensor in full_weights(model).items()}
    tensors["model.offset"] = model.offset.clone()
    return tensors | {f"optimizer.{name}": tensor for name, tensor in full_state(model, optimizer).items()}


def checkpointer(folder, model, optimizer, name="toy", **config):
    """The checkpointer of this run. Collective."""
    contents = Contents(
        model=lambda: dmuon.get_model_state_dict(model),
        optimizer=lambda: dmuon.get_optimizer_state_dict(model, optimizer),
        shapes=lambda: dmuon.get_model_shapes(model),
        frozen=set,
        loaded=lambda: dmuon.publish_weights(model),
        model_name=name,
        optimizer_name="DMuon",
        config_toml="# none\n",
        seed=0,
        hf_names=Llama3HFNameMap(),
        hf_config={},
    )
    return Checkpointer(Checkpoint(enable=True, **config), Path(folder), contents)


def state_at(step_number):
    return TrainState(step_number, {"consumed_samples": step_number}, {"last_epoch": step_number}, "DMuon", "toy")


def read_checkpoint(path):
    """All tensors of a checkpoint through plain DCP, by name."""
    copy = Path(path).with_suffix(".pt")
    dcp_to_torch_save(str(path), str(copy))
    tensors = torch.load(copy)
    copy.unlink()
    return tensors
