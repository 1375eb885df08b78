"""State as logical tensors by canonical name, in the form ``torch.distributed.checkpoint`` saves and loads.

Every tensor is held by exactly one writer: a dedicated parameter and its momentum by the owner, FSDP2 tensors as
DTensors. Keys of tensors that live elsewhere are absent here, which is how DCP learns who writes and reads them.
"""

from __future__ import annotations

import torch
from torch import nn

from .classify import canonical_fqn
from .fsdp2 import is_dedicated, sharded_parameters
from .runtime import find_runtime


def get_model_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of the model: owned masters, FSDP2 DTensors, plain parameters, persistent buffers.

    The tensors are the live ones: loading into them in place and then calling :func:`publish_weights`
    loads the model. Not collective. A tensor with several names (tied) has its first one.
    """
    state: dict[str, torch.Tensor] = {}
    for name, param in sharded_parameters(model):
        if not is_dedicated(param):
            state[canonical_fqn(name)] = param.detach()
    runtime = find_runtime(model)
    state |= {dp.fqn: dp.master for dp in runtime.owned} if runtime is not None else {}
    state |= persistent_buffers(model)
    return state


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that ``state_dict`` would hold, by canonical name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                buffers[canonical_fqn(f"{prefix}.{leaf}" if prefix else leaf)] = buffer
    return buffers


@torch.no_grad()
def set_model_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy ``state`` (as from :func:`get_model_state_dict`) into the model and publish the owners' weights.

    Raises:
        KeyError: a tensor this rank holds is missing from ``state``.
    """
    for name, tensor in get_model_state_dict(model).items():
        if name not in state:
            raise KeyError(f"{name} is missing from the state dict")
        if state[name] is not tensor:
            tensor.copy_(state[name])
    publish_weights(model)


def publish_weights(model: nn.Module) -> None:
    """After owned masters were changed in place: let the next forward see them. Nothing without dedication."""
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.publish()


def get_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of the state of a ``Muon`` or ``torch.optim.AdamW``, as ``<canonical name>.<state name>``: the
    live tensors, created where no step has been taken yet. Load into them in place. Not collective."""
    names = {param: canonical_fqn(name) for name, param in sharded_parameters(model)}
    _create_adamw_state(optimizer)
    return {
        f"{names[param]}.{key}": value for param, values in optimizer.state.items() for key, value in values.items()
    }


def _create_adamw_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every AdamW parameter the state its first step would create."""
    for group in optimizer.param_groups:
        if "betas" not in group:
            continue
        for param in group["params"]:
            if param not in optimizer.state:
                device = param.device if group["fused"] else "cpu"
                optimizer.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
