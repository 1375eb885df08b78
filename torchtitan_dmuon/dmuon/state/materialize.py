"""Weights for a model built on ``meta``: each rank makes room for, and fills, only the weights it holds."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..ownership.classify import canonical_fqn
from ..runtime.handle import Runtime, find_runtime, runtime_of
from ..transport import torch_private
from .pieces import logical_tensor
from .whole import gather_whole

InitFn = Callable[[str, torch.Tensor], None]


@torch.no_grad()
def materialize(model: nn.Module, init_fn: InitFn | None = None, device: torch.device | None = None) -> None:
    """Allocate this rank's weights and initialise them. Collective with replicas or tensor parallelism.

    Call it after ``dedicate_params`` and ``fully_shard``. A weight is the same for any number of ranks, and bitwise
    that of one process, where ``init_fn`` depends on nothing but name and shape: a generator seeded by the name. At
    most one whole parameter exists at a time beyond what the rank keeps. Buffers are allocated uninitialised: the model
    computes them afterwards. Models without dedicated parameters work too.

    Args:
        init_fn: called as ``init_fn(fqn, tensor)``; fills the whole float32 tensor of one parameter in place. ``None``:
            dedicated weights are NaN and the others uninitialised until ``model.init_weights()`` inside
            :func:`summon_full_params`, or :func:`set_model_state_dict`, fills them.
        device: of the weights; default: that of the mesh. Needed without dedicated parameters.
    """
    runtime = find_runtime(model)
    device = runtime.grid.device if device is None else torch.device(device)
    tied = _tied_parameters(model)
    torch_private.apply_to_undedicated(model, lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for (first, key), *others in tied:  # a plain parameter on meta was replaced once in each place it is used
        for module, other_key in others:
            setattr(module, other_key, first.get_parameter(key))
    if runtime is not None:
        _fill_owned(runtime, init_fn or (lambda fqn, whole: whole.fill_(torch.nan)), device)
    if init_fn is not None:
        _fill_undedicated(model, init_fn)


@contextlib.contextmanager
def summon_full_params(model: nn.Module) -> Iterator[None]:
    """Inside, every dedicated parameter is a plain ``nn.Parameter`` on every rank, with the whole weight in the master
    dtype, so that ``model.init_weights()`` and other code may read and write it. At the end each owner takes over the
    values of its own rank, and publishes them; after an exception nothing has changed. Collective at both ends.

    The model cannot run inside. Every rank needs room for all dedicated weights; :func:`materialize` needs less. The
    other parameters stay as they are (DTensors of FSDP2, which PyTorch's ``nn.init`` functions fill).
    """
    runtime = runtime_of(model)
    runtime.check_usable("summoning its parameters")
    owned = ((dp, [(piece, piece.master) for piece in dp.pieces if piece.is_owned]) for dp in runtime.params)
    live = {dp.fqn: logical_tensor(masters) for dp, masters in owned if masters}
    whole = gather_whole(live, runtime.grid.device, keep_on=runtime.grid.device)
    summoned = {dp.param: nn.Parameter(whole[dp.fqn], requires_grad=dp.param.requires_grad) for dp in runtime.params}
    with torch_private.stand_in(model, summoned):
        yield
        present = set(model.parameters())
        if lost := [dp.fqn for dp in runtime.params if summoned[dp.param] not in present]:
            raise RuntimeError(f"{lost[0]} was replaced while it was summoned: write into it instead")
    with torch.no_grad():
        for piece in runtime.owned:
            piece.master.copy_(piece.of(summoned[piece.param]))
    runtime.refresh_and_publish()


def _fill_owned(runtime: Runtime, init_fn: InitFn, device: torch.device) -> None:
    for unit in runtime.units:
        unit.allocate_masters()
        for dp in unit.params:
            if any(piece.is_owned for piece in dp.pieces):
                # Initialised in float32 whatever the master's dtype, as an eager build would be.
                whole = torch.empty(dp.shape, dtype=torch.float32, device=device)
                init_fn(dp.fqn, whole)
                for piece in dp.pieces:
                    if piece.is_owned:
                        piece.master.copy_(piece.of(whole))
    runtime.materialised = True
    runtime.refresh_and_publish()


def _fill_undedicated(model: nn.Module, init_fn: InitFn) -> None:
    for name, param in model.named_parameters():
        if not torch_private.is_dedicated(param):
            whole = torch.empty(param.shape, dtype=torch.float32, device=param.device)
            init_fn(canonical_fqn(name), whole)
            if isinstance(param, DTensor):
                param.to_local().copy_(torch_private.local_shard(whole.to(param.dtype), param))
            else:
                param.copy_(whole)


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of every parameter that has more than one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places[param].append((module, key))
    return [found for found in places.values() if len(found) > 1]
