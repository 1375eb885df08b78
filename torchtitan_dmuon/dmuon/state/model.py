"""The tensors of a model, and of its optimizer, by canonical name, in the form ``torch.distributed.checkpoint`` (DCP)
saves and loads: the same names on every rank. The owner alone has a dedicated parameter and its state, other ranks have
a ``PartialTensor`` without parts; FSDP2 tensors are DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..ownership.classify import canonical_fqn
from ..runtime.handle import find_runtime
from ..transport.torch_private import is_dedicated, own_persistent_buffers, sharded_parameters
from .optimizer import State, adamw_state, flat_view, tell_frozen
from .pieces import PartialTensor, is_partial, logical_tensor, pair_parts, parts_of
from .whole import gather_whole, scatter_whole

Tensors = dict[str, torch.Tensor]


class HasNamedState(Protocol):
    """``Muon``, as far as it matters here."""

    def named_state(self) -> State: ...


def get_model_state_dict(model: nn.Module, *, full_state_dict: bool = False, cpu_offload: bool = False) -> Tensors:
    """The model's tensors by canonical name, in the master dtype.

    By default this rank's part of them: masters (all, some or none of a parameter), FSDP2 DTensors, plain parameters,
    persistent buffers. They are the live tensors: loading into them in place and then calling :func:`publish_weights`
    loads the model. A tensor with several names (tied) has its first one. Not collective.

    Args:
        full_state_dict: whole tensors, as copies, under all their names, so that ``load_state_dict`` of the plain model
            takes them. Collective; gathered one by one.
        cpu_offload: copies in host memory; of a full state dict on rank 0 only, the other ranks get an empty dict.
    """
    state = _taken(model, _live_model(model), full_state_dict=full_state_dict, cpu_offload=cpu_offload)
    if full_state_dict:
        state |= {alias: state[name] for alias, name in _aliases(model).items() if name in state}
    return state


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
        KeyError: a tensor is missing from ``state``, or unknown. ValueError: it is there in another layout or shape, or
            whole without ``full_state_dict``. Nothing has changed then.
    """
    copy = _copier(model, full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0)
    aliases = _aliases(model)
    copy(_live_model(model), {name: t for name, t in state.items() if name not in aliases}, strict=strict)
    publish_weights(model)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: HasNamedState | torch.optim.AdamW,
    *,
    full_state_dict: bool = False,
    cpu_offload: bool = False,
) -> Tensors:
    """The state of a ``Muon`` or ``torch.optim.AdamW``, as ``<canonical name>.<state name>``; hyperparameters stay in
    ``param_groups``. By default this rank's part: the live tensors, created where no step has been taken yet, to be
    loaded into in place; not collective. The options are those of :func:`get_model_state_dict`."""
    live = _live_optimizer(model, optimizer)
    return _taken(model, live, full_state_dict=full_state_dict, cpu_offload=cpu_offload)


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizer: HasNamedState | torch.optim.AdamW,
    state: Mapping[str, torch.Tensor],
    *,
    full_state_dict: bool = False,
    broadcast_from_rank0: bool = False,
    strict: bool = True,
) -> None:
    """Copy ``state`` (as from :func:`get_optimizer_state_dict`) into the optimizer, but for that of frozen parameters.
    Arguments and errors are those of :func:`set_model_state_dict`."""
    frozen = {canonical_fqn(name) for name, param in sharded_parameters(model) if not param.requires_grad}
    fqns = {key: key.rpartition(".")[0] for key in state}
    tell_frozen(fqns.values(), frozen)
    state = {key: tensor for key, tensor in state.items() if fqns[key] not in frozen}
    copy = _copier(model, full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0)
    copy(_live_optimizer(model, optimizer), state, strict=strict)


def publish_weights(model: nn.Module) -> None:
    """After owned masters were changed in place: let the next forward see them. Nothing without dedication."""
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.refresh_and_publish()


def get_model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Global shape of everything the model's state dicts hold over all ranks, by canonical name. Not collective, and
    the same on every rank."""
    shapes = {canonical_fqn(name): tuple(param.shape) for name, param in sharded_parameters(model)}
    return shapes | {name: tuple(buffer.shape) for name, buffer in _persistent_buffers(model).items()}


def _live_model(model: nn.Module) -> Tensors:
    live = {canonical_fqn(name): p.detach() for name, p in sharded_parameters(model) if not is_dedicated(p)}
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.check_usable("taking or setting its state")
        for dp in runtime.params:
            owned = [(piece, piece.master) for piece in dp.pieces if piece.is_owned]
            absent = PartialTensor.of(dp.shape, [], dp.spec.master_dtype)
            live[dp.fqn] = logical_tensor(owned) if owned else absent
    return live | _persistent_buffers(model)


def _live_optimizer(model: nn.Module, optimizer: HasNamedState | torch.optim.AdamW) -> Tensors:
    if not isinstance(optimizer, torch.optim.AdamW):
        return flat_view(optimizer.named_state())
    return flat_view(adamw_state(optimizer, {param: canonical_fqn(name) for name, param in sharded_parameters(model)}))


def _persistent_buffers(model: nn.Module) -> Tensors:
    """Buffers that ``state_dict`` would hold, by canonical name."""
    own = (_own_buffers(prefix, module) for prefix, module in model.named_modules())
    return {name: buffer for buffers in own for name, buffer in buffers.items()}


def _own_buffers(prefix: str, module: nn.Module) -> Tensors:
    return {
        canonical_fqn(f"{prefix}.{leaf}" if prefix else leaf): buffer for leaf, buffer in own_persistent_buffers(module)
    }


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that have several -> the first one."""
    first: dict[nn.Parameter, str] = {}
    aliases = {}
    for name, param in ((canonical_fqn(n), p) for n, p in model.named_parameters(remove_duplicate=False)):
        if first.setdefault(param, name) != name:
            aliases[name] = first[param]
    prefixes: dict[nn.Module, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if prefixes.setdefault(module, prefix) != prefix:
            own = _own_buffers(prefixes[module], module), _own_buffers(prefix, module)
            aliases |= {alias: name for name, alias in zip(*own, strict=True) if alias != name}
    return aliases


def _taken(model: nn.Module, live: Tensors, *, full_state_dict: bool, cpu_offload: bool) -> Tensors:
    if full_state_dict:
        device = _device(model)
        host = torch.device("cpu") if dist.get_rank() == 0 else None
        return gather_whole(live, device, keep_on=host if cpu_offload else device)
    return {name: _host_copy(tensor) for name, tensor in live.items()} if cpu_offload else live


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Parts of a larger tensor stay parts."""
    whole, parts = parts_of(tensor)
    copies = [(part.detach().to("cpu", copy=True), offset) for part, offset in parts]
    return PartialTensor.of(whole, copies, tensor.dtype) if is_partial(tensor) else copies[0][0]


def _copier(model: nn.Module, *, full_state_dict: bool, broadcast_from_rank0: bool) -> Callable[..., None]:
    """The function ``(live, state, *, strict)`` that copies such a state."""
    if broadcast_from_rank0 and not full_state_dict:
        raise ValueError("broadcast_from_rank0 needs full_state_dict=True: ranks hold different parts otherwise")
    send_over = _device(model) if broadcast_from_rank0 else None
    return functools.partial(scatter_whole, send_over=send_over) if full_state_dict else _copy_parts


def _copy_parts(live: Tensors, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    pairs = []
    for name, tensor in live.items():
        if name in state:
            if is_partial(tensor) and not is_partial(state[name]):
                raise ValueError(f"{name} is a whole tensor in the state dict: pass full_state_dict=True")
            pairs += pair_parts(name, tensor, state[name])
        elif strict:
            raise KeyError(f"{name} is missing from the state dict")
    for part, values in pairs:
        part.copy_(values)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
