"""What the distributed tests share: building a dedicated toy model, collecting full tensors, comparing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from tests.support.meshes import DEVICE, mesh_of
from tests.support.oracle import ToyModel, batch, is_proj, loss_of
from tests.support.private import runtime_of


def tensor_parallel_plan():
    """Every kind of placement: columns, rows (with a replicated bias), and columns gathered again."""
    return {
        "q_proj": ColwiseParallel(output_layouts=Replicate()),
        "up_proj": ColwiseParallel(use_local_output=False),  # a DTensor knows uneven sizes
        "down_proj": RowwiseParallel(),
    }


def build(
    world, model=None, predicate=is_proj, shard=True, optimizer=True, fsdp=None, muon=None, mesh=None, **dedicate
):
    """(model, optimizer) dedicated over ``mesh`` = (replicate, shard, tp) sizes, by default 1-D, and wrapped by tensor
    parallelism and FSDP2 as in the guide."""
    muon = {"gradients_reduced_elsewhere": not shard, **(muon or {})}
    if "mode" in dedicate:  # as behaviours.md calls them
        dedicate["reshard_after_forward"] = {"z2": False, "z3": True}[dedicate.pop("mode")]
    replicate, size, tp = mesh or (1, world, 1)
    assert replicate * size * tp == world
    model = ToyModel() if model is None else model
    if tp == 1 and replicate == 1:
        data_mesh = flat_mesh(world)
        dmuon.dedicate_params(model, data_mesh, predicate=predicate, **dedicate)
    else:
        grid = mesh_of(replicate=replicate, shard=size, tp=tp)
        if tp > 1:
            for layer in model.layers:
                parallelize_module(layer, grid["tp"], tensor_parallel_plan())
            dedicate["tp_mesh"] = grid["tp"]
        if replicate > 1:
            dedicate["replicate_mesh"] = grid["replicate"]
        dmuon.dedicate_params(model, grid["shard"], predicate=predicate, **dedicate)
        data_mesh = grid["replicate", "shard"] if replicate > 1 else grid["shard"]
    if shard:
        for layer in model.layers:
            fully_shard(layer, mesh=data_mesh, **(fsdp or {}))
        fully_shard(model, mesh=data_mesh, **(fsdp or {}))
    return model, dmuon.Muon(model, **muon) if optimizer else None


needs_dtensor_collectives = pytest.mark.skipif(DEVICE == "cuda", reason="they crash over gloo on CUDA (torch 2.11)")
# Newton-Schulz runs in float16 on CUDA: 5e-3 of an update of lr * 0.2 * sqrt(37) = 0.024, over a few steps.
_CUDA_TOLERANCE = 2e-3


# Arguments of ``build``: everything dedicated, on the three routes.
EVERY_ROUTE = {
    "predicate": lambda n, p: p.requires_grad,
    "param_policy": {
        "defaults": {"route": "adamw"},
        "overrides": [
            {"name": "proj.weight", "set": {"route": "muon"}},
            {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
        ],
    },
    "shard": False,
}


def all_routes(n, p):
    return True


# The guide's type split, in its own words for a model with HuggingFace's names, and for the toy model.
GUIDE_TYPE_SPLIT = {
    "predicate": lambda n, p: p.requires_grad,
    "param_policy": {
        "defaults": {"route": "adamw", "param_dtype": torch.bfloat16},
        "overrides": [
            {
                "name": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
                "set": {"route": "muon"},
            },
            {
                "name": ["embed_tokens", "lm_head"],
                "set": {"route": "sharded_adamw"},
            },
        ],
    },
}
TYPE_SPLIT = {
    "defaults": {"route": "adamw"},
    "overrides": [
        {"name": ["q_proj.weight", "up_proj.weight", "down_proj.weight"], "set": {"route": "muon"}},
        {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
    ],
}


def build_on_meta(build):
    """What ``build()`` makes, without memory."""
    with torch.device("meta"):
        return build()


def muon_names(model, **options):
    """Names of the parameters that ``classify`` gives to Muon."""
    return [name for name, decision in dmuon.classify(model, **options).items() if decision.muon]


class CountingNewtonSchulz(dmuon.NewtonSchulz):
    """Notes how many matrices went through it, one number a stack."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def iterate(self, x):
        self.numbers.append(x.shape[0])
        return super().iterate(x)


def usable(meshes):
    """Of these (as ``build`` takes them): tensor parallelism needs DTensor's collectives."""
    crashing = DEVICE == "cuda" and dist.get_backend() == "gloo"
    return [mesh for mesh in meshes if not crashing or mesh[2] == 1]


def flat_mesh(world):
    """A 1-D mesh of all ranks."""
    return mesh_of(dp=world)


def data_rank(rank, mesh):
    """Index of the data a rank reads: tensor-parallel columns share it."""
    return rank // mesh[2] if mesh else rank


def train(model, optimizer, steps, rank, start=0, loss_fn=loss_of):
    losses = []
    for step in range(start, start + steps):
        tokens, labels = batch(step, rank)
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full_tensor(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    if DEVICE == "cpu":
        return tensor.full_tensor()
    # DTensor's own gathering crashes over gloo on CUDA (torch 2.11).
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (offset, tensor.to_local().cpu()))
    return assemble(tensor.shape, tensor.dtype, parts).to(DEVICE)


def sharded_parameters(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def gather(model, values):
    """Name -> [(offset, tensor)] over all ranks, from this rank's ``piece -> tensor``."""
    held = []
    for piece, tensor in values.items():
        offset = [piece.start] + [0] * (tensor.ndim - 1)
        held.append((piece.fqn, offset[: tensor.ndim], tensor))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    found = {}
    for fqn, offset, tensor in (entry for rank in everyone for entry in rank):
        found.setdefault(fqn, []).append((offset, tensor))
    return found


def assemble(shape, dtype, parts):
    full = torch.full(tuple(shape), torch.nan, dtype=dtype)
    for offset, tensor in parts:
        if tensor.numel() == 0:
            continue
        full[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))] = tensor
    assert not full.isnan().any() or any(t.isnan().any() for _, t in parts), "some part has no owner"
    return full


def full_weights(model):
    """Name -> full fp32 weight on every rank. Collective."""
    runtime = runtime_of(model)
    parts = gather(model, {piece: piece.master for piece in runtime.owned})
    dedicated = {dp.fqn: dp for dp in runtime.params}
    weights = {}
    for name, param in sharded_parameters(model):
        if name in dedicated:
            weights[name] = assemble(dedicated[name].shape, dedicated[name].spec.master_dtype, parts[name])
        else:
            weights[name] = full_tensor(param.detach()).clone()
    return weights


def full_gradients(model):
    """Name -> full gradient on every rank, ``None`` where no rank had one. Collective."""
    runtime = runtime_of(model)
    runtime.wait_gradients()
    parts = gather(model, {p: p.grad for p in runtime.owned if p.grad is not None and p.grad_count != 0})
    dedicated = {dp.fqn: dp for dp in runtime.params}
    gradients = {}
    for name, param in sharded_parameters(model):
        if name in dedicated:
            dp = dedicated[name]
            gradients[name] = assemble(dp.shape, dp.spec.grad_dtype, parts[name]) if name in parts else None
        else:
            gradients[name] = None if param.grad is None else full_tensor(param.grad).clone()
    return gradients


def assert_same(actual, expected, atol=1e-5, rtol=1e-5):
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    if DEVICE != "cpu" and atol > 0:
        atol = max(atol, _CUDA_TOLERANCE)
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, f"{name}: expected no tensor"
        else:
            assert actual[name] is not None, f"{name}: expected a tensor"
            torch.testing.assert_close(
                actual[name], value.detach(), atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}"
            )


def weights_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}
