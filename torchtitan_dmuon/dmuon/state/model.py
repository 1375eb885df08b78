"""State as logical tensors by canonical name, in the form ``torch.distributed.checkpoint`` saves and loads.

Every tensor is held by exactly one writer: a dedicated parameter and its momentum by the owner, FSDP2 tensors as
DTensors. Keys of tensors that live elsewhere are absent here, which is how DCP learns who writes and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..optimizer.adamw import new_state
from ..optimizer.muon import Muon
from ..ownership.classify import canonical_fqn
from ..runtime.handle import find_runtime
from ..transport.torch_private import is_dedicated, sharded_parameters
from .optimizer import live_state
from .pieces import Chunks, is_absent, logical_tensors, parts_of
from .whole import gather_full, scatter_full


def get_model_state_dict(
    model: nn.Module, *, full_state_dict: bool = False, cpu_offload: bool = False
) -> dict[str, torch.Tensor]:
    """The model's tensors by canonical name, in the master dtype.

    By default this rank's part of them: owned masters, FSDP2 DTensors, plain parameters, persistent buffers. They are
    the live tensors: loading into them in place and then calling :func:`publish_weights` loads the model. A tensor with
    several names (tied) has its first one. Not collective.

    Args:
        full_state_dict: whole tensors, as copies, under all their names, so that ``load_state_dict`` of the plain model
            takes them. Collective; gathered one by one.
        cpu_offload: copies in host memory; of a full state dict on rank 0 only, the other ranks get an empty dict.
    """
    state = _live_model(model)
    if not full_state_dict:
        return _offloaded(state) if cpu_offload else state
    full = gather_full({name: parts_of(tensor) for name, tensor in state.items()}, _device(model), cpu_offload)
    return full | {alias: full[name] for alias, name in _aliases(model).items() if name in full}


def _live_model(model: nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for name, param in sharded_parameters(model):
        if not is_dedicated(param):
            state[canonical_fqn(name)] = param.detach()
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.check_materialised("taking or setting its state")
        state |= logical_tensors({piece: piece.master for piece in runtime.owned})
    state |= persistent_buffers(model)
    return state


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _offloaded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory, under the same names; parts of a larger tensor stay parts."""
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        whole, parts = parts_of(tensor)
        parts = [(part.detach().to("cpu", copy=True), offset) for part, offset in parts]
        if not isinstance(tensor, (Chunks, DTensor)):
            copies[name] = parts[0][0]
        else:  # without parts where this rank's shard is empty
            copies[name] = Chunks.of(whole, parts) if parts else Chunks.absent(whole, tensor.dtype)
    return copies


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that have several -> the first one."""
    first: dict[int, str] = {}
    aliases = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), canonical_fqn(name)) != canonical_fqn(name):
            aliases[canonical_fqn(name)] = first[id(param)]
    prefixes: dict[nn.Module, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if prefixes.setdefault(module, prefix) != prefix:
            own = _own_buffers(prefixes[module], module), _own_buffers(prefix, module)
            aliases |= {alias: name for name, alias in zip(*own, strict=True) if alias != name}
    return aliases


def get_model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Global shape of everything the model's state dicts hold over all ranks, by canonical name. Not collective, and
    the same on every rank."""
    shapes = {canonical_fqn(name): tuple(param.shape) for name, param in sharded_parameters(model)}
    return shapes | {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that ``state_dict`` would hold, by canonical name."""
    buffers = {}
    for prefix, module in model.named_modules():
        buffers |= _own_buffers(prefix, module)
    return buffers


def _own_buffers(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        canonical_fqn(f"{prefix}.{leaf}" if prefix else leaf): buffer
        for leaf, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if leaf not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    *,
    full_state_dict: bool = False,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> None:
    """Copy ``state`` into the model and publish the owners' weights. Collective with replicas or tensor parallelism.

    Args:
        state: as from :func:`get_model_state_dict`: this rank's part.
        full_state_dict: ``state`` has whole tensors, on any device. Collective.
        broadcast_from_rank0: only rank 0's ``state`` is read, and sent tensor by tensor. Needs ``full_state_dict``.
        strict: tensors missing from ``state`` (and, of a full one, unknown tensors in it) are an error.

    Raises:
        KeyError: a tensor is missing from ``state``, or unknown. ValueError: it is there in another layout or shape.
    """
    aliases = _aliases(model)
    _set(
        _live_model(model),
        {name: tensor for name, tensor in state.items() if name not in aliases},
        _device(model),
        full_state_dict,
        broadcast_from_rank0,
        strict,
    )
    publish_weights(model)


def _set(
    live: dict[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    full: bool,
    broadcast: bool,
    strict: bool,
) -> None:
    if broadcast and not full:
        raise ValueError("broadcast_from_rank0 needs full_state_dict=True: ranks hold different parts otherwise")
    if full:
        scatter_full({name: parts_of(tensor) for name, tensor in live.items()}, state, device, broadcast, strict)
        return
    for name, tensor in live.items():
        if name not in state:
            if strict:
                raise KeyError(f"{name} is missing from the state dict")
        elif state[name] is not tensor:
            _copy(name, tensor, state[name])


def _copy(name: str, to: torch.Tensor, source: torch.Tensor) -> None:
    """Raises ValueError when the two hold different parts of the tensor."""
    (whole, here), (other_whole, there) = parts_of(to), parts_of(source)
    if whole != other_whole or [(p.shape, at) for p, at in here] != [(p.shape, at) for p, at in there]:
        raise ValueError(f"{name}: this rank holds another part of it than the state dict; load through DCP instead")
    for (part, _), (values, _) in zip(here, there, strict=True):
        part.copy_(values)


def publish_weights(model: nn.Module) -> None:
    """After owned masters were changed in place: let the next forward see them. Nothing without dedication."""
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.refresh_and_publish()


def get_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, full_state_dict: bool = False, cpu_offload: bool = False
) -> dict[str, torch.Tensor]:
    """The state of a ``Muon`` or ``torch.optim.AdamW``, as ``<canonical name>.<state name>``; hyperparameters stay in
    ``param_groups``. By default this rank's part: the live tensors, created where no step has been taken yet, to be
    loaded into in place; not collective. The options are those of :func:`get_model_state_dict`."""
    state = _live_optimizer(model, optimizer)
    if not full_state_dict:
        return _offloaded(state) if cpu_offload else state
    return gather_full({name: parts_of(tensor) for name, tensor in state.items()}, _device(model), cpu_offload)


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, torch.Tensor],
    *,
    full_state_dict: bool = False,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> None:
    """Copy ``state`` (as from :func:`get_optimizer_state_dict`) into the optimizer. Arguments and errors are those of
    :func:`set_model_state_dict`."""
    live = _live_optimizer(model, optimizer)
    _set(live, state, _device(model), full_state_dict, broadcast_from_rank0, strict)


def _live_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    if isinstance(optimizer, Muon):
        held = live_state(optimizer)
        state = {f"{fqn}.{key}": tensor for fqn, values in held.items() for key, tensor in values.items()}
        return {name: tensor for name, tensor in state.items() if not is_absent(tensor)}
    state = {}
    fused = {id(param): bool(group["fused"]) for group in optimizer.param_groups for param in group["params"]}
    for name, param in sharded_parameters(model):
        if id(param) not in fused:
            continue
        if param not in optimizer.state:
            optimizer.state[param] = new_state(param, param.device if fused[id(param)] else "cpu")
        state |= {f"{canonical_fqn(name)}.{key}": value for key, value in optimizer.state[param].items()}
    return state
