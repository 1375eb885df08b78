"""All that is decided about the parameters of a model before ranks come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .boundaries import boundary_dtypes
from .classify import MIN_MATRIX_DIM, Decision, classify
from .spec import ParamSpec, Selection, canonical_fqn

Predicate = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Decisions:
    """What is decided about the selected parameters, by canonical name, in model order.

    Attributes:
        tp_mesh, tp_dims: the tensor-parallel mesh, and the dimension it shards of each parameter.
        boundaries: name of the module at which each parameter's unit is hooked.
        casts: (input, output) dtypes by boundary, in the order in which boundaries are registered.
    """

    params: dict[str, nn.Parameter]
    specs: dict[str, ParamSpec]
    tp_mesh: DeviceMesh | None
    tp_dims: dict[str, int | None]
    boundaries: dict[str, str]
    casts: dict[str, tuple[torch.dtype | None, torch.dtype | None]]


def select(model: nn.Module, predicate: Predicate | None, told: Mapping[str, str]) -> Selection:
    """The parameters that ``predicate`` accepts; without one, those that :func:`classify` gives to Muon. ``told`` has
    reasons by name that replace the default ones. Raises ValueError if nothing is selected."""
    named = {canonical_fqn(name): param for name, param in model.named_parameters()}
    if predicate is None:
        decisions, advice = classify(model), "pass a predicate"
    else:
        chosen = {name: predicate(name, param) for name, param in named.items()}
        decisions = {n: Decision(muon, "predicate" if muon else "not in the predicate") for n, muon in chosen.items()}
        advice = "check it against the names of model.named_parameters()"
    selected = {name: param for name, param in named.items() if decisions[name].muon}
    if not selected:
        raise ValueError(f"no parameter of {type(model).__name__} was selected for an owner; {advice}")
    reasons = {name: told.get(name, decision.reason) for name, decision in decisions.items()}
    skipped = {name: reason for name, reason in reasons.items() if name not in selected}
    of_param = {param: [] for param in named.values()}
    for name, param in model.named_parameters(remove_duplicate=False):
        of_param[param].append(name)
    names = {name: of_param[param] for name, param in selected.items()}
    return Selection(selected, reasons, names, skipped, 0 if predicate else MIN_MATRIX_DIM)


def decide(
    model: nn.Module,
    selection: Selection,
    specs: dict[str, ParamSpec],
    boundaries: dict[str, str],
    tp_mesh: DeviceMesh | None,
) -> Decisions:
    """Join what is known of every selected parameter. Raises ValueError if only some are on meta, if those of one
    boundary disagree on its dtypes, or if tensor parallelism has placed one in a way that no owner can undo."""
    selected = selection.params
    real = [fqn for fqn, param in selected.items() if not param.is_meta]
    if real and len(real) < len(selected):
        raise ValueError(f"some selected parameters are on meta and some, as {real[0]}, are not: build all alike")
    if tp_mesh is None:  # that of the first DTensor; the others are checked against it
        tp_mesh = next((param.device_mesh for param in selected.values() if isinstance(param, DTensor)), None)
    tp_dims = {fqn: sharded_dim(fqn, param, tp_mesh) for fqn, param in selected.items()}
    used = set(boundaries.values())
    casts = {
        name: boundary_dtypes(name, [specs[fqn] for fqn in specs if boundaries[fqn] == name])
        for name, _ in model.named_modules()
        if name in used
    }
    return Decisions(selected, specs, tp_mesh, tp_dims, boundaries, casts)


def sharded_dim(fqn: str, param: torch.Tensor, tp_mesh: DeviceMesh | None) -> int | None:
    """The dimension of ``param`` that ``tp_mesh`` shards; ``None`` when every column holds the whole parameter. Raises
    ValueError for a DTensor on another mesh, or one whose placement an owner cannot undo."""
    if not isinstance(param, DTensor):
        return None
    if tp_mesh is None or param.device_mesh != tp_mesh:
        raise ValueError(f"{fqn} is a DTensor over {param.device_mesh}; dedicate it with that mesh as tp_mesh")
    (placement,) = param.placements
    if placement.is_replicate():
        return None
    if not placement.is_shard():
        raise ValueError(f"{fqn} has placement {placement} on the tensor-parallel mesh; only Shard and Replicate work")
    return placement.dim % param.ndim
