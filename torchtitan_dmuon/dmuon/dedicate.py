"""``dedicate_params``: decides, checks, builds and attaches everything."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .kernels.newton_schulz import newton_schulz_flops
from .ownership.assignment import Assignment, MatrixCost, assign
from .ownership.boundaries import hook_boundaries
from .ownership.classify import canonical_fqn, classify
from .ownership.fused_weights import matrix_layouts
from .ownership.policy import ParamSpec, boundary_dtypes, resolve_specs
from .runtime.handle import RUNTIME_ATTRIBUTE, Runtime, refuse_copy
from .runtime.hooks import register_hooks
from .runtime.pack import OwnedPack
from .runtime.param import DedicatedParam, Piece
from .runtime.rows import RowPack
from .runtime.schedule import UnitSchedule
from .runtime.unit import Pack, Unit
from .transport import torch_private
from .transport.grid import GROUP_POLICIES, Grid, Lanes, build_grid, build_lanes
from .transport.tensor_parallel import sharded_dim

logger = logging.getLogger(__name__)

MODES = ("z2", "z3")

Predicate = Callable[[str, nn.Parameter], bool]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None = None,
    *,
    replicate_mesh: DeviceMesh | None = None,
    tp_mesh: DeviceMesh | None = None,
    param_policy: Mapping[str, Any] | None = None,
    route_hint_fn: Callable[[str, nn.Parameter], str | None] | None = None,
    mode: str = "z3",
    prefetch: int = 1,
    process_group_policy: str = "isolated",
    replicate_async: bool = True,
    hook_boundary_predicate: Callable[[str, nn.Module], bool] | None = None,
    strict_hook_boundary: bool = True,
    reasons: Mapping[str, str] | None = None,
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
            layers inside repeated blocks (``classify.py``).
        param_policy, route_hint_fn: see ``policy.py``.
        mode: ``z3`` frees unsharded weights after use and broadcasts them again for backward; ``z2`` keeps them
            until the optimizer changes them.
        prefetch: number of units whose broadcasts are launched ahead.
        process_group_policy: ``isolated`` makes own process groups, ``shared`` uses the meshes'.
        replicate_async: new weights travel to replicas and tensor-parallel shards while the next step begins; else
            ``step`` waits for them. Bitwise the same.
        hook_boundary_predicate: ``(module name, module) -> bool``: the nearest enclosing module that it accepts is
            where a parameter's unit is hooked. Default: the outermost repeated block, else the root.
        strict_hook_boundary: a parameter without an accepted enclosing module is an error; else the root is used.
        reasons: what the ownership table says of why each parameter is or is not selected, by name.

    Returns:
        The assignment, the same on every rank.

    Raises:
        RuntimeError: ``fully_shard`` or ``dedicate_params`` was called before.
        ValueError: the predicate selects nothing, a policy rule is wrong, or ``mesh`` does not fit. All checks come
            before the first collective.
    """
    _check_order(model)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch}")
    if process_group_policy not in GROUP_POLICIES:
        raise ValueError(f"process_group_policy must be one of {GROUP_POLICIES}, got {process_group_policy!r}")
    selected, why, skipped = _select(model, predicate, reasons or {})
    tp_mesh = tp_mesh if tp_mesh is not None else _tp_mesh_of(selected)
    tp_dims = {fqn: sharded_dim(fqn, param, tp_mesh) for fqn, param in selected.items()}
    specs = resolve_specs(selected, why, param_policy, route_hint_fn, matrix_layouts(model))
    boundaries = hook_boundaries(model, selected, hook_boundary_predicate, strict_hook_boundary)
    casts = {
        boundary: boundary_dtypes(boundary, [specs[fqn] for fqn in specs if boundaries[fqn] == boundary])
        for boundary in dict.fromkeys(boundaries.values())
    }
    grid = build_grid(mesh, replicate_mesh, tp_mesh)
    parts = {fqn: _parts(spec, tp_dims[fqn], grid.num_slots) for fqn, spec in specs.items()}
    costs = [_cost(specs[fqn], boundaries[fqn], start, stop) for fqn, ranges in parts.items() for start, stop in ranges]
    assignment = assign(costs, grid.num_slots)

    lanes = build_lanes(mesh, replicate_mesh, tp_mesh, grid, process_group_policy)
    torch_private.teach_fully_shard_to_skip_dedicated()
    params = {fqn: DedicatedParam(fqn, param, specs[fqn], tp_dims[fqn], grid) for fqn, param in selected.items()}
    for fqn, ranges in parts.items():
        for start, stop in ranges:
            owner = assignment.owner[_part_name(specs[fqn], start, stop)]
            rank = grid.ranks[owner]
            params[fqn].pieces.append(Piece(params[fqn], start, stop, owner, rank, owner == grid.slot))
    runtime = _build(
        model, params, boundaries, casts, assignment, grid, lanes, mode, prefetch, skipped, replicate_async
    )
    vars(model)[RUNTIME_ATTRIBUTE] = runtime
    torch_private.guard_apply(model, lambda: runtime.may_move)
    model.register_state_dict_pre_hook(_refuse_state_dict)
    for module in model.modules():
        if any(map(torch_private.is_dedicated, module.parameters())):
            vars(module)["__deepcopy__"] = functools.partial(refuse_copy, type(module).__name__)
    vars(model)["zero_grad"] = functools.partial(_zero_grad, model, runtime)
    loads = ", ".join(f"{load:.3f}" for load in assignment.loads)
    logger.info(
        "dedicate_params: %d params assigned to %d ranks, imbalance=%.1f%%, loads=[%s]",
        len(params), grid.num_slots, 100 * assignment.imbalance, loads,
    )  # fmt: skip
    return assignment


def _check_order(model: nn.Module) -> None:
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


def _select(
    model: nn.Module, predicate: Predicate | None, told: Mapping[str, str]
) -> tuple[dict[str, nn.Parameter], dict[str, str], dict[str, str]]:
    """(selected, why selected, why not), each by canonical name."""
    named = {canonical_fqn(name): param for name, param in model.named_parameters()}
    if predicate is None:
        decisions = classify(model)
        selected = {name: param for name, param in named.items() if decisions[name].muon}
        reasons = {name: decision.reason for name, decision in decisions.items()}
        advice = "pass a predicate"
    else:
        selected = {name: param for name, param in named.items() if predicate(name, param)}
        reasons = {name: "predicate" if name in selected else "not in the predicate" for name in named}
        advice = "check it against the names of model.named_parameters()"
    if not selected:
        raise ValueError(f"no parameter of {type(model).__name__} was selected for an owner; {advice}")
    reasons |= {name: reason for name, reason in told.items() if name in named}
    return selected, reasons, {name: reason for name, reason in reasons.items() if name not in selected}


def _tp_mesh_of(selected: Mapping[str, nn.Parameter]) -> DeviceMesh | None:
    """The mesh of the first DTensor; the others are checked against it."""
    return next((param.device_mesh for param in selected.values() if isinstance(param, DTensor)), None)


def _parts(spec: ParamSpec, tp_dim: int | None, num_slots: int) -> list[tuple[int, int]]:
    """The ranges of the first dimension that get an owner each: all of it, or even runs of experts; none when every
    rank shares the rows.

    Raises:
        ValueError: a stack whose experts tensor parallelism splits.
    """
    if spec.route == "sharded_adamw":
        return []
    if spec.route == "muon" and len(spec.shape) == 3:
        experts = spec.shape[0]
        if tp_dim == 0:
            raise ValueError(f"{spec.fqn}: tensor parallelism splits the experts themselves; shard another dimension")
        runs = min(experts, num_slots)
        return [(experts * run // runs, experts * (run + 1) // runs) for run in range(runs)]
    return [(0, spec.shape[0] if spec.shape else 1)]


def _part_name(spec: ParamSpec, start: int, stop: int) -> str:
    whole = not spec.shape or (start, stop) == (0, spec.shape[0])
    return spec.fqn if whole else f"{spec.fqn}[{start}:{stop}]"


def _cost(spec: ParamSpec, unit: str, start: int, stop: int) -> MatrixCost:
    """What owning one part costs. AdamW's cost is one of memory only."""
    elements = math.prod((stop - start, *spec.shape[1:]))
    flops = 0
    if spec.route == "muon" and spec.trainable:
        shapes = [spec.shape[-2:]]
        if spec.blocks is not None:
            shapes = [spec.blocks.shape_of(block, spec.shape) for block in spec.blocks.blocks]
        flops = sum(newton_schulz_flops(*shape) for shape in shapes) * (stop - start if len(spec.shape) == 3 else 1)
    return MatrixCost(_part_name(spec, start, stop), unit, flops, elements * spec.master_dtype.itemsize)


def _build(
    model: nn.Module,
    params: Mapping[str, DedicatedParam],
    boundaries: Mapping[str, str],
    casts: Mapping[str, tuple[torch.dtype | None, torch.dtype | None]],
    assignment: Assignment,
    grid: Grid,
    lanes: Lanes,
    mode: str,
    prefetch: int,
    skipped: dict[str, str],
    replicate_async: bool,
) -> Runtime:
    modules = dict(model.named_modules())
    names = [name for name in modules if name in casts]  # registration order: the forward order
    runtime: Runtime | None = None

    def divide_factor() -> float:
        return runtime.divide_factor

    units = []
    for name in names:
        inside = [dp for fqn, dp in params.items() if boundaries[fqn] == name]
        owned = [dp for dp in inside if dp.spec.route != "sharded_adamw"]
        packs: list[Pack] = [OwnedPack(owned, grid, divide_factor)] if owned else []
        packs += [RowPack(dp, grid, divide_factor) for dp in inside if dp.spec.route == "sharded_adamw"]
        inner = set(modules[name].modules())  # by identity: a module inside may have its first name elsewhere
        pinned = not name or any(other != name and modules[other] in inner for other in names)
        units.append(Unit(canonical_fqn(name), modules[name], packs, lanes, pinned, *casts[name]))
    schedule = UnitSchedule(units, lanes, keep_unsharded=mode == "z2", prefetch=prefetch)
    runtime = Runtime(model, units, lanes, grid, assignment, schedule, skipped, replicate_async)
    materialised = [dp.fqn for dp in params.values() if not dp.param.is_meta]
    if materialised and len(materialised) < len(params):
        raise ValueError(
            f"some selected parameters are on meta and some, as {materialised[0]}, are not: build all alike"
        )
    for unit in units:
        for pack in unit.packs:
            _take_over(pack, bool(materialised))
    register_hooks(model, schedule)
    if materialised:
        runtime.materialised = True
        runtime.publish()
    return runtime


@torch.no_grad()
def _take_over(pack: Pack, materialised: bool) -> None:
    """Move the weights of one pack from the model's parameters into the owners' masters. Collective under tensor
    parallelism, where no rank has the whole matrix."""
    if materialised:
        pack.allocate_masters()
        for dp in pack.params:
            full = dp.param.full_tensor() if dp.tp_dim is not None else torch_private.local_tensor(dp.param)
            for piece in dp.pieces:
                if piece.is_owned:
                    weight = torch_private.local_tensor(dp.param) if dp.spec.route == "sharded_adamw" else full
                    piece.master.copy_(weight if piece.is_whole else weight[piece.start : piece.stop])
    for dp, view in zip(pack.params, pack.views, strict=True):
        dp.param.grad = None  # as fully_shard does: it belongs to a parameter that is no more
        # .data, lest what fills the buffer counted as a change of the parameter between forward and backward.
        shown: torch.Tensor = view.data
        if isinstance(dp.param, DTensor):
            # A DTensor takes the storage offset of the tensor it is made of, once: torch.compile (before 2.14) fails
            # where that is not the offset of what it holds.
            strides = torch.empty(dp.shape, device="meta").stride()
            mesh, placements = dp.param.device_mesh, dp.param.placements
            shown = DTensor.from_local(shown, mesh, placements, run_check=False, shape=dp.shape, stride=strides)
        if dp.param.is_meta or isinstance(dp.param, DTensor):
            # Unlike .data, this can change meta into a real device, and the Parameter stays the same object.
            torch.utils.swap_tensors(dp.param, nn.Parameter(shown, requires_grad=dp.param.requires_grad))
        vars(dp.param)[torch_private.OWNER_MARKER] = dp.owner_rank
    pack.conceal()


def _zero_grad(model: nn.Module, runtime: Runtime, set_to_none: bool = True) -> None:
    """``model.zero_grad()``, which loops that do not call the optimizer's use: drops what owners hold, too."""
    runtime.zero_grad()
    type(model).zero_grad(model, set_to_none)


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        "state_dict() of a model with dedicated parameters would hold placeholders (NaN): use "
        "dmuon.get_model_state_dict(model)"
    )
