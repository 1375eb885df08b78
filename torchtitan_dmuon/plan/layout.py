"""Who owns what in a run that has not started: the decisions of ``dmuon.dedicate_params`` without a process group."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torchtitan_dmuon.config import ConfigError, JobConfig
from torchtitan_dmuon.dmuon.kernels.newton_schulz import newton_schulz_flops
from torchtitan_dmuon.dmuon.ownership.assignment import Assignment, assign
from torchtitan_dmuon.dmuon.ownership.boundaries import hook_boundaries
from torchtitan_dmuon.dmuon.ownership.decide import decide, select
from torchtitan_dmuon.dmuon.ownership.fused_weights import matrix_layouts
from torchtitan_dmuon.dmuon.ownership.policy import resolve_specs
from torchtitan_dmuon.dmuon.ownership.runs import cost_of, runs_of
from torchtitan_dmuon.dmuon.ownership.spec import ParamSpec, chunk_bounds
from torchtitan_dmuon.dmuon.runtime.pack import Pack
from torchtitan_dmuon.dmuon.runtime.param import DedicatedParam
from torchtitan_dmuon.dmuon.transport.grid import Grid
from torchtitan_dmuon.families import ModelSpec, Parts, get_model_spec
from torchtitan_dmuon.parallel import ParallelDims
from torchtitan_dmuon.parallel.parallelize import dedication, plan_dedication, uses_loss_parallel


@dataclass(frozen=True)
class PlannedParam:
    """A parameter that gets owners. ``runs`` has (start, stop, owner's slot) of every piece, ``flops`` each one's
    Newton-Schulz work."""

    spec: ParamSpec
    param: nn.Parameter
    tp_dim: int | None
    boundary: str
    runs: tuple[tuple[int, int, int], ...]
    flops: tuple[int, ...]

    def elements(self, index: int) -> int:
        """Elements of a piece, not cut by tensor parallelism."""
        start, stop, _ = self.runs[index]
        return math.prod((stop - start, *self.spec.shape[1:]))

    @property
    def matrices(self) -> int:
        """What Newton-Schulz sees of each index of an expert stack, or of the whole parameter."""
        blocks = 1 if self.spec.blocks is None else len(self.spec.blocks.blocks)
        return blocks if self.spec.route == "muon" else 0


@dataclass(frozen=True)
class Layout:
    """The whole model on meta, and who owns what of it.

    Attributes:
        parts: modules of the model.
        dims: ranks of each kind of parallelism; slots are counted as in ``dmuon``'s grid.
        params: with owners, in model order; none under AdamW.
        sharded: those that FSDP2 shards, with the dimension that tensor parallelism cuts.
        boundaries: of the units, in forward order.
        assignment: of the pieces whose owner is chosen; ``None`` under AdamW.
    """

    model: nn.Module
    parts: Parts
    dims: ParallelDims
    params: tuple[PlannedParam, ...]
    sharded: dict[str, tuple[nn.Parameter, int | None]]
    boundaries: tuple[str, ...]
    assignment: Assignment | None

    @property
    def grid_shape(self) -> tuple[int, int, int]:
        return self.dims.dp_replicate, self.dims.dp_shard, self.dims.tp

    @property
    def ranks(self) -> int:
        return math.prod(self.grid_shape)

    def coordinate_of(self, slot: int) -> tuple[int, int, int]:
        """(replicate, shard, tp)."""
        return self._origin.coordinate_of(slot)

    def packs(self, slot: int) -> dict[str, Pack]:
        """How the rank at ``slot`` packs each unit, by the unit's boundary."""
        grid = dataclasses.replace(self._origin, coordinate=self.coordinate_of(slot))
        units: dict[str, list[DedicatedParam]] = {name: [] for name in self.boundaries}
        for planned in self.params:
            dp = DedicatedParam(planned.spec.fqn, planned.param, planned.spec, planned.tp_dim, grid, planned.runs)
            units[planned.boundary].append(dp)
        return {name: Pack(params, grid) for name, params in units.items()}

    def pinned(self, boundary: str) -> bool:
        """Whether the unit's weights stay from its forward to the end of backward: other units lie inside it."""
        return not boundary or any(other.startswith(f"{boundary}.") for other in self.boundaries)

    @functools.cached_property
    def _origin(self) -> Grid:
        """The grid as the rank at slot 0 sees it."""
        return Grid(torch.device("meta"), self.grid_shape, (0, 0, 0), tuple(range(self.ranks)))


def build_layout(config: JobConfig, model_args: Any, dims: ParallelDims) -> Layout:
    """The layout of a run, with nothing allocated. Raises ConfigError as ``parallelize`` does."""
    spec = get_model_spec(config.model.name)
    with torch.device("meta"):
        model = spec.build(model_args)
    named, parts = dict(model.named_parameters()), spec.parts(model)
    cut = tensor_parallel_dims(model, spec, uses_loss_parallel(config)) if dims.tp > 1 else {}
    if config.optimizer.name != "DMuon":
        sharded = {name: (param, cut.get(name)) for name, param in named.items()}
        return Layout(model, parts, dims, (), sharded, (), None)
    arguments = dedication(model, plan_dedication(model, config.dmuon), spec, config)
    try:
        selection = select(model, arguments["predicate"], arguments["reasons"])
        specs = resolve_specs(selection, arguments["param_policy"], arguments["route_hint_fn"], matrix_layouts(model))
        boundaries = hook_boundaries(model, selection.names, None, True)
        decided = decide(model, selection, specs, boundaries, None)
        grid_shape = (dims.dp_replicate, dims.dp_shard, dims.tp)
        runs = {fqn: runs_of(spec, cut.get(fqn), grid_shape) for fqn, spec in specs.items()}
    except ValueError as error:
        raise ConfigError("[dmuon]", None, str(error)) from None
    costs = {
        fqn: [cost_of(specs[fqn], boundaries[fqn], run, newton_schulz_flops) for run in each]
        for fqn, each in runs.items()
    }
    chosen = [cost for fqn in runs for cost, run in zip(costs[fqn], runs[fqn], strict=True) if run.slot is None]
    assignment = assign(chosen, math.prod(grid_shape))
    params = []
    for fqn, each in runs.items():
        slots = [assignment.owner[run.name_in(specs[fqn])] if run.slot is None else run.slot for run in each]
        owned = tuple((run.start, run.stop, slot) for run, slot in zip(each, slots, strict=True))
        flops = tuple(cost.flops for cost in costs[fqn])
        params.append(PlannedParam(specs[fqn], named[fqn], cut.get(fqn), boundaries[fqn], owned, flops))
    sharded = {name: (param, cut.get(name)) for name, param in named.items() if name not in specs}
    return Layout(model, parts, dims, tuple(params), sharded, tuple(decided.casts), assignment)


def tensor_parallel_dims(model: nn.Module, spec: ModelSpec, loss_parallel: bool) -> dict[str, int]:
    """The dimension along which tensor parallelism cuts each parameter that it cuts, by name."""
    outside, in_blocks = spec.tensor_parallel_plan(model.args, loss_parallel)
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, int] = {}
    for root, plan in [(model, outside), *zip(spec.parts(model).blocks, in_blocks, strict=True)]:
        for module, style in ((root.get_submodule(name), style) for name, style in plan.items()):
            if (dim := _cut_dim(module, style)) is not None:
                leaves = [leaf for leaf, param in module.named_parameters() if param.ndim == 2]
                found |= {f"{names[module]}.{leaf}": dim for leaf in leaves}
    named = dict(model.named_parameters())  # a tied parameter has the name that comes first
    return {name: dim for name, dim in found.items() if name in named}


def _cut_dim(module: nn.Module, style: ParallelStyle) -> int | None:
    """Weights of linear layers are [out, in]; the rows of an embedding are its inputs."""
    if isinstance(style, ColwiseParallel):
        return 1 if isinstance(module, nn.Embedding) else 0
    if isinstance(style, RowwiseParallel):
        return 0 if isinstance(module, nn.Embedding) else 1
    return None


def local_elements(shape: tuple[int, ...], tp_dim: int | None, columns: int, column: int) -> int:
    """Elements of a tensor-parallel column's part."""
    if tp_dim is None:
        return math.prod(shape)
    return math.prod(shape) // shape[tp_dim] * chunk_bounds(shape[tp_dim], columns, column)[1]


def summarize_owners(layout: Layout) -> dict[str, list[int]]:
    """Of each slot: ``matrices`` (what Newton-Schulz sees), ``elements`` and ``bytes`` of master weights that it owns,
    and ``newton_schulz_flops`` a step."""
    columns = {name: [0] * layout.ranks for name in ("matrices", "elements", "bytes", "newton_schulz_flops")}
    for planned in layout.params:
        stacked = len(planned.spec.shape) == 3
        for index, (start, stop, slot) in enumerate(planned.runs):
            elements = planned.elements(index)
            columns["matrices"][slot] += planned.matrices * (stop - start if stacked else 1)
            columns["elements"][slot] += elements
            columns["bytes"][slot] += elements * planned.spec.master_dtype.itemsize
            columns["newton_schulz_flops"][slot] += planned.flops[index]
    return columns
