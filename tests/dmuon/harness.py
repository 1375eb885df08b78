"""What the distributed tests share: building a dedicated toy model, collecting full tensors, comparing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from tests.oracle import ToyModel, batch, is_proj, loss_of


def build(world, model=None, predicate=is_proj, shard=True, optimizer=True, fsdp=None, muon=None, **dedicate):
    """(model, optimizer) dedicated over a 1-D mesh and wrapped by FSDP2 as in the guide."""
    mesh = init_device_mesh("cpu", (world,))
    model = ToyModel() if model is None else model
    dmuon.dedicate_params(model, mesh, predicate=predicate, **dedicate)
    if shard:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **(fsdp or {}))
        fully_shard(model, mesh=mesh, **(fsdp or {}))
    return model, dmuon.Muon(model, **(muon or {})) if optimizer else None


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
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_parameters(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.named_parameters())


def full_weights(model):
    """Name -> full fp32 weight on every rank. Collective."""
    weights = {}
    owned = dmuon.get_model_state_dict(model)
    dedicated = {dp.fqn: dp for dp in dmuon.get_dedicated_params(model)}
    for name, param in sharded_parameters(model):
        if name in dedicated:
            dp = dedicated[name]
            tensor = owned[name].clone() if dp.is_owned else torch.empty(dp.shape, dtype=dp.spec.master_dtype)
            dist.broadcast(tensor, src=dp.owner_rank)
            weights[name] = tensor
        else:
            weights[name] = full_tensor(param.detach()).clone()
    return weights


def full_gradients(model):
    """Name -> full gradient on every rank, ``None`` where no rank had one. Collective."""
    runtime = vars(model)["_dmuon_runtime"]
    runtime.wait_gradients()
    gradients = {}
    dedicated = {dp.fqn: dp for dp in runtime.params}
    for name, param in sharded_parameters(model):
        if name in dedicated:
            dp = dedicated[name]
            have = torch.zeros(()) if dp.grad is None else (dp.grad_count != 0).float()
            dist.broadcast(have, src=dp.owner_rank)
            tensor = dp.grad.clone() if dp.grad is not None else torch.zeros(dp.shape, dtype=dp.spec.grad_dtype)
            dist.broadcast(tensor, src=dp.owner_rank)
            gradients[name] = tensor if have else None
        else:
            gradients[name] = None if param.grad is None else full_tensor(param.grad).clone()
    return gradients


def assert_same(actual, expected, atol=1e-5, rtol=1e-5):
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
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
