"""What was decided, as plain data and as a table: owners, parameter groups, and what travels in a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..optimizer.muon import Muon
from ..ownership.classify import canonical_fqn
from ..runtime.handle import runtime_of
from ..runtime.pack import Pack, pack_weights
from ..runtime.param import DedicatedParam
from ..transport.lane import LANES

_FSDP2 = "adamw (FSDP2)"


@dataclass(frozen=True)
class OwnershipRow:
    """One line of the ownership table. ``owners`` are global ranks: several for an expert stack, all for shared rows,
    none for a parameter that is not dedicated."""

    name: str
    shape: tuple[int, ...]
    route: str
    owners: tuple[int, ...]
    unit: str | None
    reason: str

    def as_dict(self) -> dict:
        return asdict(self)


def ownership_table(model: nn.Module) -> list[OwnershipRow]:
    """Every parameter of ``model``, dedicated or not, in ``named_parameters`` order. The same on every rank."""
    runtime = runtime_of(model)
    dedicated = {dp.fqn: (dp, unit.name) for unit in runtime.units for dp in unit.params}
    rows = []
    for name, param in model.named_parameters():
        fqn = canonical_fqn(name)
        if fqn in dedicated:
            dp, unit = dedicated[fqn]
            owners = tuple(sorted({piece.owner_rank for piece in dp.pieces}))
            rows.append(OwnershipRow(fqn, dp.shape, _route(dp), owners, unit or "<root>", _why(dp)))
        else:
            route = _FSDP2 if param.requires_grad else "frozen"
            rows.append(OwnershipRow(fqn, tuple(param.shape), route, (), None, runtime.skipped[fqn]))
    return rows


def format_ownership_table(rows: list[OwnershipRow], limit: int | None = None) -> str:
    """A text table; with ``limit`` at most so many rows are shown, the last two among them if there is room, and the
    ones left out are counted."""
    shown, tail = rows, 0
    if limit is not None and len(rows) > limit:
        tail = 2 if limit > 2 else 0
        shown = [*rows[: limit - tail], *rows[len(rows) - tail :]]
    cells = [("parameter", "shape", "route", "owner", "why")]
    for row in shown:
        owner = f"{len(row.owners)} ranks" if len(row.owners) > 1 else "".join(map(str, row.owners)) or "-"
        cells.append((row.name, "x".join(map(str, row.shape)), row.route, owner, row.reason))
    lines = _aligned(cells)
    if len(shown) < len(rows):
        lines.insert(len(lines) - tail, f"... {len(rows) - len(shown)} more")
    return "\n".join(lines)


def format_owners(model: nn.Module) -> str:
    """A text table of what each rank owns: the matrices that its Newton-Schulz sees (experts and blocks one by one),
    elements, MiB of master weights, share of the FLOPs of all Newton-Schulz."""
    runtime = runtime_of(model)
    matrices, elements, size = Counter(), Counter(), Counter()
    for piece in (piece for dp in runtime.params for piece in dp.pieces):
        elements[piece.owner] += piece.numel
        size[piece.owner] += piece.numel * piece.spec.master_dtype.itemsize
        if _route(piece.dp) == "muon":
            blocks = len(piece.spec.blocks.blocks) if piece.spec.blocks else 1
            matrices[piece.owner] += blocks * math.prod(piece.shape[:-2])
    cells = [("rank", "matrices", "elements", "MiB", "Newton-Schulz")]
    for slot, flops in enumerate(runtime.assignment.flops):
        own = f"{matrices[slot]:,}", f"{elements[slot]:,}", f"{size[slot] / 2**20:.1f}"
        cells.append((str(runtime.grid.ranks[slot]), *own, f"{flops / (sum(runtime.assignment.flops) or 1):.1%}"))
    return "\n".join(_aligned(cells))


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True)).rstrip() for cell in cells]


def _route(dp: DedicatedParam) -> str:
    return dp.spec.route if dp.spec.trainable else "frozen"


def _why(dp: DedicatedParam) -> str:
    """The reason, and how Newton-Schulz sees the weight if not as one matrix stored [out, in]."""
    spec = dp.spec
    notes = [str(spec.blocks or ""), "stored [in, out]" * spec.transposed] if spec.route == "muon" else []
    return "; ".join(filter(None, (spec.reason, *notes)))


def summarize_param_groups(optimizer: Muon) -> list[dict[str, Any]]:
    """One dictionary a group, JSON-able and the same on every rank: ``group_name``, ``num_params``, ``num_elements``
    (of whole parameters, however they are sharded), ``routes`` (route -> number of parameters) and, as they are now,
    the group's hyperparameters by their own names."""
    dedicated = {dp.param: dp for dp in optimizer.runtime.params}
    summaries = []
    for group in optimizer.param_groups:
        params = group["params"]
        routes = Counter(_route(dedicated[param]) if param in dedicated else _FSDP2 for param in params)
        hyperparameters = {name: _plain(group[name]) for name in group if name not in ("params", "group_name")}
        summaries.append(
            {
                "group_name": group["group_name"],
                "num_params": len(params),
                "num_elements": sum(dedicated[p].numel if p in dedicated else p.numel() for p in params),
                "routes": dict(routes),
                **hyperparameters,
            }
        )
    return summaries


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def summarize_comm_plan(model: nn.Module) -> dict[str, Any]:
    """The bytes that this rank communicates in one step (a forward, a backward and an optimizer step, every unit called
    once), and how even the owners' loads are. JSON-able; not collective. Only dedicated parameters count.

    Returns:
        ``reshard_after_forward``: as it was dedicated.
        ``mesh``: sizes of ``replicate``, ``shard`` and ``tp``.
        ``lanes``: for each of ``transport.lane.LANES``, zeros where nothing travels: ``ranks`` (size of its group),
            ``collectives`` (NCCL sends those of one unit as one), ``payload_bytes`` (the buffers handed to them) and
            ``sent_bytes_per_rank`` (leaving a rank on average over the group; of the exchanges between tensor-parallel
            columns, leaving this rank). Ranks of one shard group agree on ``unshard`` and ``reduce``. The later stages
            carry only what this rank is the source or the owner of, so they differ from rank to rank.
        ``owner_load``: ``max``, ``mean`` and ``max_over_mean`` over all owners, of optimizer ``flops`` per step and of
            ``bytes`` of master weights. Rows that every rank shares (``sharded_adamw``) are even and not in it.
    """
    runtime = runtime_of(model)
    schedule, (replicas, shards, columns) = runtime.schedule, runtime.grid.shape
    plan = {
        name: {"ranks": ranks, "collectives": 0, "payload_bytes": 0, "sent_bytes_per_rank": 0.0}
        for name, ranks in zip(LANES, (shards, shards, replicas, columns, replicas, columns), strict=True)
    }
    for unit in runtime.units:
        for lane, payload, sent in transfers(unit.pack):
            times = 1 if lane != "unshard" or not schedule.reshard_after_forward or schedule.stays(unit) else 2
            plan[lane]["collectives"] += times
            plan[lane]["payload_bytes"] += times * payload
            plan[lane]["sent_bytes_per_rank"] += times * sent
    assignment = runtime.assignment
    return {
        "reshard_after_forward": schedule.reshard_after_forward,
        "mesh": dict(zip(("replicate", "shard", "tp"), runtime.grid.shape, strict=True)),
        "lanes": plan,
        "owner_load": {"flops": _load(assignment.flops), "bytes": _load(assignment.bytes)},
    }


def transfers(pack: Pack) -> Iterator[tuple[str, int, float]]:
    """(lane, payload bytes, bytes that leave a rank) of each collective that moves the pack's weights and gradients
    once. Broadcast, reduce, all-gather and reduce-scatter move each byte to (or from) every other rank once at best."""
    (replicas, shards, columns), column, itemsize = pack.grid.shape, pack.grid.coordinate[2], pack.grad_itemsize
    for lane, ranks, segments, width in (
        ("unshard", shards, pack.weight_segments, 1),
        ("publish_replicate", replicas, pack.publish_segments, 1),
        ("reduce", shards, pack.gradient_segments, itemsize),
        ("reduce_replicate", replicas, pack.replicate_segments, itemsize),
    ):
        sizes = [(end - begin) * width for (begin, end), _ in segments if end > begin and ranks > 1]
        yield from ((lane, size, size * (ranks - 1) / ranks) for size in sizes)
    if columns > 1:
        weights = [pack_weights(pack.cells_of(column), target).size for target in range(columns)]
        yield "publish_tp", sum(weights), sum(weights) - weights[column]
        if pack.trainable:
            spans = [[pack.gradients.spans[cell] for cell in pack.cells_of(target)] for target in range(columns)]
            gradients = [sum(end - begin for begin, end in each) * itemsize for each in spans]
            yield "reduce_tp", sum(gradients), sum(gradients) - gradients[column]


def _load(values: Sequence[int]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {"max": max(values), "mean": mean, "max_over_mean": max(values) / mean if mean else 1.0}
