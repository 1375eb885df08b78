"""``dedicate_params``: decides, checks, builds and attaches everything; and the runtime object that holds it."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from . import fsdp2
from .assignment import Assignment, MatrixCost, assign
from .classify import block_of, canonical_fqn, classify, is_bare_container
from .hooks import register_hooks
from .mesh import Lanes, Layout, build_lanes, build_layout
from .newton_schulz import newton_schulz_flops
from .policy import ParamSpec, boundary_dtypes, resolve_specs
from .schedule import UnitSchedule
from .storage import DedicatedParam, OwnedPack, placeholder
from .unit import Unit

logger = logging.getLogger(__name__)

MODES = ("z2", "z3")
_ATTRIBUTE = "_dmuon_runtime"

Predicate = Callable[[str, nn.Parameter], bool]


class Runtime:
    """All that dedication has made for one model. Users reach it through the functions of this module."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        lanes: Lanes,
        layout: Layout,
        assignment: Assignment,
        schedule: UnitSchedule,
        skipped: dict[str, str],
    ) -> None:
        self.model = model
        self.units = units
        self.lanes = lanes
        self.layout = layout
        self.assignment = assignment
        self.schedule = schedule
        self.skipped = skipped  # canonical name -> why it was not dedicated
        order = {canonical_fqn(name): index for index, (name, _) in enumerate(model.named_parameters())}
        self.params = sorted((dp for unit in units for dp in unit.params), key=lambda dp: order[dp.fqn])
        self.divide_factor = float(layout.num_slots)
        self.may_move = False

    @property
    def owned(self) -> list[DedicatedParam]:
        return [dp for dp in self.params if dp.is_owned]

    def wait_gradients(self) -> None:
        """Reductions launched by backward are finished; owners hold the averaged gradients."""
        for dp in self.params:
            if dp.param.requires_grad and not dp.spec.trainable:
                raise RuntimeError(
                    f"{dp.fqn} was frozen when it was dedicated and now requires a gradient, for which nothing was "
                    "built; set requires_grad before dedicate_params"
                )
        self.schedule.wait_gradients()

    def publish(self) -> None:
        """The masters have changed: bring the sources up to date and forget what is unsharded."""
        self.schedule.invalidate_weights()
        for unit in self.units:
            for pack in unit.packs:
                pack.publish()

    def zero_grad(self) -> None:
        self.schedule.drop_gradients()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Lifts the guard on ``.to()`` and its kin, for code that leaves dedicated parameters alone."""
        self.may_move = True
        try:
            yield
        finally:
            self.may_move = False


def find_runtime(model: nn.Module) -> Runtime | None:
    """The runtime attached to ``model`` or to the one module inside it that was dedicated."""
    for module in model.modules():
        if _ATTRIBUTE in vars(module):
            return vars(module)[_ATTRIBUTE]
    return None


def runtime_of(model: nn.Module) -> Runtime:
    """As :func:`find_runtime`. Raises RuntimeError when ``dedicate_params`` was not called."""
    runtime = find_runtime(model)
    if runtime is not None:
        return runtime
    raise RuntimeError(f"{type(model).__name__} has no dedicated parameters: call dmuon.dedicate_params first")


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None = None,
    *,
    param_policy: Mapping[str, Any] | None = None,
    route_hint_fn: Callable[[str, nn.Parameter], str | None] | None = None,
    mode: str = "z3",
    prefetch: int = 1,
    process_group_policy: str = "isolated",
    hook_boundary_predicate: Callable[[str, nn.Module], bool] | None = None,
    strict_hook_boundary: bool = True,
    reasons: Mapping[str, str] | None = None,
) -> Assignment:
    """Give every selected parameter one owner rank. Call it before ``fully_shard``. Collective over ``mesh``.

    Afterwards each selected parameter is the same ``nn.Parameter`` object with its true shape; it shows its weight
    (in ``param_dtype``) inside forward and backward and NaN elsewhere. Its gradient never appears in ``param.grad``
    but, averaged over the ranks, on the owner's ``DedicatedParam.grad``.

    Args:
        model: unsharded, on any device; parameters on ``meta`` wait for :func:`materialize`.
        mesh: 1-D, the ranks over which data is split and matrices are owned.
        predicate: ``(name, parameter) -> bool``; names have no wrapper prefixes. ``None``: the weights of linear
            layers inside repeated blocks (``classify.py``).
        param_policy, route_hint_fn: see ``policy.py``.
        mode: ``z3`` frees unsharded weights after use and broadcasts them again for backward; ``z2`` keeps them
            until the optimizer changes them.
        prefetch: number of units whose broadcasts are launched ahead.
        process_group_policy: ``isolated`` makes own process groups, ``shared`` uses the mesh's.
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
    layout = build_layout(mesh)
    selected, why, skipped = _select(model, predicate, reasons or {})
    specs = resolve_specs(selected, why, param_policy, route_hint_fn)
    boundaries = _boundaries(model, selected, hook_boundary_predicate, strict_hook_boundary)
    casts = {
        boundary: boundary_dtypes(boundary, [specs[fqn] for fqn in specs if boundaries[fqn] == boundary])
        for boundary in dict.fromkeys(boundaries.values())
    }
    costs = [
        MatrixCost(
            fqn,
            boundaries[fqn],
            newton_schulz_flops(*spec.shape) if spec.trainable else 0,
            selected[fqn].numel() * spec.master_dtype.itemsize,
        )
        for fqn, spec in specs.items()
    ]
    assignment = assign(costs, layout.num_slots)

    lanes = build_lanes(mesh, layout, process_group_policy)
    fsdp2.teach_fully_shard_to_skip_dedicated()
    runtime = _build(model, selected, specs, boundaries, casts, assignment, layout, lanes, mode, prefetch, skipped)
    vars(model)[_ATTRIBUTE] = runtime
    fsdp2.guard_apply(model, lambda: runtime.may_move)
    model.register_state_dict_pre_hook(_refuse_state_dict)
    loads = ", ".join(f"{load:.3f}" for load in assignment.loads)
    logger.info(
        "dedicate_params: %d params assigned to %d ranks, imbalance=%.1f%%, loads=[%s]",
        len(selected), layout.num_slots, 100 * assignment.imbalance, loads,
    )  # fmt: skip
    return assignment


def _check_order(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if _ATTRIBUTE in vars(module):
            raise RuntimeError(f"dedicate_params was already called on {name or 'this model'}; call it once")
        if isinstance(module, FSDPModule):
            raise RuntimeError(
                f"fully_shard was applied to {name or 'the root module'} before dedicate_params; dedicate first, so "
                "that fully_shard can skip the dedicated parameters"
            )


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
    for name, param in selected.items():
        if isinstance(param, DTensor):
            raise ValueError(f"{name} is a DTensor over {param.device_mesh}; dedicate parameters before sharding them")
    return selected, reasons, {name: reason for name, reason in reasons.items() if name not in selected}


def _boundaries(
    model: nn.Module,
    selected: Mapping[str, nn.Parameter],
    accept: Callable[[str, nn.Module], bool] | None,
    strict: bool,
) -> dict[str, str]:
    """Boundary module name (as in ``named_modules``) of each selected parameter."""
    modules = dict(model.named_modules())
    by_id = {id(param): fqn for fqn, param in selected.items()}
    found: dict[str, set[str]] = defaultdict(set)
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in by_id:
            continue
        holder = name.rpartition(".")[0]
        if accept is None:
            boundary = block_of(model, holder) or ""
        else:
            boundary = _nearest_accepted(modules, holder, accept)
            if boundary is None and strict:
                raise ValueError(
                    f"{name}: hook_boundary_predicate accepts no module around it; widen the predicate or pass "
                    "strict_hook_boundary=False to hook such parameters at the root"
                )
        found[by_id[id(param)]].add(boundary or "")
    # A parameter shared by several boundaries is needed whenever one of them runs: it belongs to the root.
    return {fqn: names.pop() if len(names) == 1 else "" for fqn, names in ((f, found[f]) for f in selected)}


def _nearest_accepted(
    modules: Mapping[str, nn.Module], name: str, accept: Callable[[str, nn.Module], bool]
) -> str | None:
    while True:
        if accept(canonical_fqn(name), modules[name]) and not is_bare_container(modules[name]):
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def _build(
    model: nn.Module,
    selected: Mapping[str, nn.Parameter],
    specs: Mapping[str, ParamSpec],
    boundaries: Mapping[str, str],
    casts: Mapping[str, tuple[torch.dtype | None, torch.dtype | None]],
    assignment: Assignment,
    layout: Layout,
    lanes: Lanes,
    mode: str,
    prefetch: int,
    skipped: dict[str, str],
) -> Runtime:
    modules = dict(model.named_modules())
    names = [name for name in modules if name in casts]  # registration order: the forward order
    runtime: Runtime | None = None

    def divide_factor() -> float:
        return runtime.divide_factor

    units = []
    for name in names:
        params = []
        for fqn, param in selected.items():
            if boundaries[fqn] == name:
                owner = assignment.owner[fqn]
                owner_rank = layout.ranks[owner]
                params.append(DedicatedParam(fqn, param, specs[fqn], owner, owner_rank, owner == layout.slot))
        pack = OwnedPack(params, layout.num_slots, layout.slot, layout.device, divide_factor)
        _take_over(pack)
        pinned = any(other != name and (not name or other.startswith(f"{name}.")) for other in names) or not name
        input_dtype, output_dtype = casts[name]
        units.append(Unit(canonical_fqn(name), modules[name], [pack], lanes, pinned, input_dtype, output_dtype))
    schedule = UnitSchedule(units, keep_unsharded=mode == "z2", prefetch=prefetch)
    register_hooks(model, schedule)
    runtime = Runtime(model, units, lanes, layout, assignment, schedule, skipped)
    return runtime


@torch.no_grad()
def _take_over(pack: OwnedPack) -> None:
    """Move the weights of one unit from the model's parameters into the owners' masters."""
    if not all(dp.param.is_meta for dp in pack.params):
        pack.allocate_masters()
        for dp in pack.params:
            if dp.param.is_meta:
                raise ValueError(f"{dp.fqn} is on meta while others of its unit are not; build all or none on meta")
            if dp.is_owned:
                dp.master.copy_(dp.param)
        pack.publish()
    for dp in pack.params:
        if dp.param.is_meta:
            # Unlike .data, this can change meta into a real device, and the Parameter stays the same object.
            shown = placeholder(dp.shape, dp.spec.param_dtype, pack.device)
            torch.utils.swap_tensors(dp.param, nn.Parameter(shown, requires_grad=dp.param.requires_grad))
        vars(dp.param)[fsdp2.OWNER_MARKER] = dp.owner_rank
    pack.conceal()


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        "state_dict() of a model with dedicated parameters would hold placeholders (NaN): use "
        "dmuon.get_model_state_dict(model)"
    )


# -------------------------------------------------------------------- what users ask of a dedicated model


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter, in ``named_parameters`` order, the same list on every rank."""
    return list(runtime_of(model).params)


def get_owned_params(model: nn.Module, rank: int | None = None) -> list[DedicatedParam]:
    """The dedicated parameters owned by global ``rank`` (default: this one)."""
    rank = dist.get_rank() if rank is None else rank
    return [dp for dp in runtime_of(model).params if dp.owner_rank == rank]


def ignored_params(model: nn.Module) -> set[nn.Parameter]:
    """What to pass to ``fully_shard(..., ignored_params=...)``."""
    return {dp.param for dp in runtime_of(model).params}


def set_gradient_divide_factor(model: nn.Module, factor: float) -> None:
    """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks. 1.0 leaves sums, for a
    loss already divided by the global number of tokens."""
    if not factor > 0:
        raise ValueError(f"factor must be positive, got {factor}")
    runtime_of(model).divide_factor = float(factor)


def set_timeout(model: nn.Module, timeout: timedelta) -> None:
    """Change the timeout of DMuon's own process groups."""
    runtime = runtime_of(model)
    for lane in (runtime.lanes.unshard, runtime.lanes.reduce):
        fsdp2.set_group_timeout(lane.group, lane.device, timeout)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally, without any reduction, for dedicated and for FSDP2 parameters. The first backward
    outside reduces what has gathered. Holds one full unsharded gradient per rank."""
    runtime = runtime_of(model)
    runtime.schedule.sync_gradients = False
    fsdp2.set_fsdp_gradient_sync(model, False)
    try:
        yield
    finally:
        runtime.schedule.sync_gradients = True
        fsdp2.set_fsdp_gradient_sync(model, True)
