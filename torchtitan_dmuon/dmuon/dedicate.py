"""``dedicate_params``: check, decide, lay out, assign, build, take over."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .guards import guard
from .kernels.accumulate import add, copy
from .kernels.newton_schulz import newton_schulz_flops
from .migration import refuse
from .ownership.assignment import Assignment, assign
from .ownership.boundaries import hook_boundaries
from .ownership.classify import canonical_fqn
from .ownership.decide import Decisions, Predicate, decide, select
from .ownership.fused_weights import matrix_layouts
from .ownership.policy import resolve_specs
from .ownership.runs import Run, cost_of, runs_of
from .runtime.handle import RUNTIME_ATTRIBUTE, Runtime
from .runtime.hooks import register_hooks
from .runtime.param import DedicatedParam
from .runtime.schedule import UnitSchedule
from .runtime.unit import Unit
from .transport import torch_private
from .transport.grid import Grid, build_grid
from .transport.lane import GROUP_POLICIES, Lanes, build_lanes

logger = logging.getLogger(__name__)


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None = None,
    *,
    replicate_mesh: DeviceMesh | None = None,
    tp_mesh: DeviceMesh | None = None,
    param_policy: Mapping[str, Any] | None = None,
    route_hint_fn: Callable[[str, nn.Parameter], str | None] | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    process_group_policy: str = "isolated",
    hook_boundary_predicate: Callable[..., bool] | None = None,
    hook_boundary_strict: bool = True,
    reasons: Mapping[str, str] | None = None,
    **unknown: Any,
) -> Assignment:
    """Give every selected parameter one owner rank. Call it before ``fully_shard``. Collective over the meshes.

    Afterwards each selected parameter is the same ``nn.Parameter`` object with its true shape; it shows its weight
    (in ``param_dtype``) inside forward and backward and NaN elsewhere. Its gradient never appears in ``param.grad``
    but, averaged over the ranks, on the owner's ``Piece.grad``.

    Args:
        model: on any device, unsharded but for tensor parallelism; parameters on ``meta`` wait for :func:`materialize`.
        mesh: 1-D, the ranks over which data is split and weights are sharded.
        replicate_mesh: 1-D, replicas of the shard group (HSDP). A matrix still has one owner in all of them.
        tp_mesh: 1-D, the mesh of the DTensors among the parameters; found from them when it is not given. The owner
            holds the whole matrix.
        predicate: ``(name, parameter) -> bool``; names have no wrapper prefixes. ``None``: the weights of linear
            layers inside repeated blocks (``ownership/classify.py``).
        param_policy, route_hint_fn: see ``ownership/policy.py``.
        reshard_after_forward: free unsharded weights after use and broadcast them again for backward (Z3); else keep
            them until the optimizer changes them (Z2).
        prefetch: number of units whose broadcasts are launched ahead.
        process_group_policy: ``isolated`` makes own process groups, ``shared`` uses the meshes'.
        hook_boundary_predicate: ``(module name, module) -> bool`` or ``(module) -> bool``: the nearest enclosing module
            that it accepts is where a parameter's unit is hooked. Default: the outermost repeated block, else the root.
        hook_boundary_strict: a parameter without an accepted enclosing module is an error; else the root is used.
        reasons: why each parameter is or is not selected, by name, for the ownership table.

    Returns:
        The assignment, the same on every rank.

    Raises:
        RuntimeError: ``fully_shard`` or ``dedicate_params`` was called before.
        ValueError: the predicate selects nothing, a policy rule is wrong, or ``mesh`` does not fit. All checks come
            before the first collective.
    """
    if unknown:
        refuse("dedicate_params", unknown, inspect.signature(dedicate_params).parameters)
    _check(model, prefetch, process_group_policy)
    selection = select(model, predicate, reasons or {})
    specs = resolve_specs(selection, param_policy, route_hint_fn, matrix_layouts(model, selection.min_matrix_dim))
    boundaries = hook_boundaries(model, selection.names, hook_boundary_predicate, hook_boundary_strict)
    decided = decide(model, selection, specs, boundaries, tp_mesh)
    torch_private.teach_fully_shard_to_skip_dedicated()
    grid = build_grid(mesh, replicate_mesh, decided.tp_mesh)
    runs = {fqn: runs_of(spec, decided.tp_dims[fqn], grid.shape) for fqn, spec in decided.specs.items()}
    costs = [
        cost_of(decided.specs[fqn], decided.boundaries[fqn], run, newton_schulz_flops)
        for fqn in runs for run in runs[fqn] if run.slot is None
    ]  # fmt: skip
    assignment = assign(costs, grid.num_slots)
    params = {fqn: _build_param(fqn, decided, runs[fqn], assignment, grid) for fqn in decided.params}
    lanes = build_lanes(mesh, replicate_mesh, decided.tp_mesh, grid, process_group_policy)
    units = _build_units(model, decided, params, grid, lanes)
    schedule = UnitSchedule(units, lanes, reshard_after_forward, prefetch, float(grid.shape[0] * grid.shape[1]))
    runtime = Runtime(model, units, lanes, grid, assignment, schedule, selection.skipped)
    _take_over(runtime)
    register_hooks(model, schedule)
    vars(model)[RUNTIME_ATTRIBUTE] = runtime
    guard(model, runtime)
    loads = ", ".join(f"{load:.3f}" for load in assignment.loads)
    logger.info(
        "dedicate_params: %d params assigned to %d ranks, imbalance=%.1f%%, loads=[%s]",
        len(params), grid.num_slots, 100 * assignment.imbalance, loads,
    )  # fmt: skip
    return assignment


def _check(model: nn.Module, prefetch: int, process_group_policy: str) -> None:
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch}")
    if process_group_policy not in GROUP_POLICIES:
        raise ValueError(f"process_group_policy must be one of {GROUP_POLICIES}, got {process_group_policy!r}")
    for name, module in model.named_modules():
        if RUNTIME_ATTRIBUTE in vars(module):
            raise RuntimeError(f"dedicate_params was already called on {name or 'this model'}; call it once")
        if isinstance(module, FSDPModule):
            raise RuntimeError(
                f"fully_shard was applied to {name or 'the root module'} before dedicate_params; dedicate first, so "
                "that fully_shard can skip the dedicated parameters"
            )
    for name, param in model.named_parameters():
        if torch_private.is_dedicated(param):
            raise RuntimeError(f"dedicate_params was already called on another module that holds {name}; call it once")


def _build_param(fqn: str, decided: Decisions, runs: list[Run], assignment: Assignment, grid: Grid) -> DedicatedParam:
    spec = decided.specs[fqn]
    slots = [assignment.owner[run.name_in(spec)] if run.slot is None else run.slot for run in runs]
    owned = [(run.start, run.stop, slot) for run, slot in zip(runs, slots, strict=True)]
    return DedicatedParam(fqn, decided.params[fqn], spec, decided.tp_dims[fqn], grid, owned)


def _build_units(
    model: nn.Module, decided: Decisions, params: Mapping[str, DedicatedParam], grid: Grid, lanes: Lanes
) -> list[Unit]:
    """One unit for each boundary, in registration order, which is the forward order."""
    modules = dict(model.named_modules())
    units = []
    for name, casts in decided.casts.items():
        inside = [dp for fqn, dp in params.items() if decided.boundaries[fqn] == name]
        inner = set(modules[name].modules())  # by identity: a module inside may have its first name elsewhere
        pinned = not name or any(other != name and modules[other] in inner for other in decided.casts)
        units.append(Unit(canonical_fqn(name), modules[name], inside, grid, lanes, pinned, casts, copy, add))
    return units


@torch.no_grad()
def _take_over(runtime: Runtime) -> None:
    """Move the weights from the model's parameters into the owners' masters. Collective under tensor parallelism, where
    no rank has a whole matrix."""
    runtime.materialised = not any(dp.param.is_meta for dp in runtime.params)
    for unit in runtime.units:
        if runtime.materialised:
            unit.allocate_masters()
            for dp in unit.params:
                whole = dp.param.full_tensor() if dp.tp_dim is not None else torch_private.local_tensor(dp.param)
                for piece in dp.pieces:
                    if piece.is_owned:
                        piece.master.copy_(piece.of(whole))
        for dp, view in zip(unit.params, unit.views, strict=True):
            _replace(dp, view)
        unit.show_placeholders()
    if runtime.materialised:
        runtime.refresh_and_publish()


def _replace(dp: DedicatedParam, view: torch.Tensor) -> None:
    """Let the parameter read ``view``, which a unit fills."""
    dp.param.grad = None  # as fully_shard does: it belongs to a parameter that is no more
    # .data, or writing into the buffer would count as a change of the parameter between forward and backward.
    shown: torch.Tensor = view.data
    if isinstance(dp.param, DTensor):
        # A DTensor takes the storage offset of the tensor it is made of, once. torch.compile (before 2.14) fails where
        # the offset of the tensor inside is another one.
        strides = torch.empty(dp.shape, device="meta").stride()
        mesh, placements = dp.param.device_mesh, dp.param.placements
        shown = DTensor.from_local(shown, mesh, placements, run_check=False, shape=dp.shape, stride=strides)
    if dp.param.is_meta or isinstance(dp.param, DTensor):
        # Unlike .data, this can change meta into a real device, and the Parameter stays the same object.
        torch.utils.swap_tensors(dp.param, nn.Parameter(shown, requires_grad=dp.param.requires_grad))
    vars(dp.param)[torch_private.OWNER_MARKER] = dp.owner_rank
