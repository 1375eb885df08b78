"""Weights for a model built on ``meta``: each rank makes room for, and fills, only what it holds."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..ownership.classify import canonical_fqn
from ..runtime.handle import find_runtime
from ..transport import torch_private

InitFn = Callable[[str, torch.Tensor], None]


@torch.no_grad()
def materialize(model: nn.Module, init_fn: InitFn, device: torch.device | None = None) -> None:
    """Allocate this rank's weights and initialise them. Collective with replicas or tensor parallelism.

    Call it after ``dedicate_params`` and ``fully_shard``. ``init_fn(fqn, tensor)`` fills the full float32 tensor of one
    parameter in place, on the mesh's device; when it depends on nothing but name and shape (a generator seeded per
    name), the weights are the same for any number of ranks and bitwise those of one process. At most one full
    parameter exists at a time beyond what the rank keeps. Buffers are allocated uninitialised: the model computes
    them afterwards. Works on models without dedicated parameters too, which need ``device``.
    """
    runtime = find_runtime(model)
    device = runtime.grid.device if device is None else torch.device(device)
    tied = _shared_parameters(model)
    with contextlib.nullcontext() if runtime is None else runtime.moving():
        torch_private.apply_to_undedicated(model, lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for (first, key), *others in tied:  # a plain parameter on meta was replaced once in each place it is used
        for module, other_key in others:
            setattr(module, other_key, first.get_parameter(key))
    if runtime is not None:
        for unit in runtime.units:
            unit.allocate_masters()
            for dp in unit.params:
                owned = [piece for piece in dp.pieces if piece.is_owned]
                if owned:
                    # Initialised in float32 whatever the master's dtype, as an eager build would be.
                    whole = torch.empty(dp.shape, dtype=torch.float32, device=device)
                    init_fn(dp.fqn, whole)
                for piece in owned:
                    piece.master.copy_(piece.of(whole))
        runtime.materialised = True
        runtime.refresh_and_publish()
    initialize_undedicated(model, init_fn)


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of every parameter that has more than one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            places[param].append((module, key))
    return [found for found in places.values() if len(found) > 1]


@torch.no_grad()
def initialize_undedicated(model: nn.Module, init_fn: InitFn) -> None:
    """Fill every plain or DTensor parameter that is not dedicated through ``init_fn``. Not collective."""
    for name, param in model.named_parameters():
        if torch_private.is_dedicated(param):
            continue
        full = torch.empty(param.shape, dtype=torch.float32, device=param.device)
        init_fn(canonical_fqn(name), full)
        full = full.to(param.dtype)
        if isinstance(param, DTensor):
            param.to_local().copy_(torch_private.local_shard(full, param))
        else:
            param.copy_(full)
