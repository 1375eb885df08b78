"""What was decided, as plain data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import nn

from .classify import canonical_fqn
from .runtime import runtime_of


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
            route = dp.spec.route if dp.spec.trainable else "frozen"
            shared = dp.spec.route == "sharded_adamw"
            owners = tuple(sorted(runtime.layout.ranks if shared else {piece.owner_rank for piece in dp.pieces}))
            rows.append(OwnershipRow(fqn, dp.shape, route, owners, unit or "<root>", dp.spec.reason))
        else:
            route = "adamw (FSDP2)" if param.requires_grad else "frozen"
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
    cells += [
        (
            row.name,
            "x".join(map(str, row.shape)),
            row.route,
            _told(row.owners),
            row.reason,
        )
        for row in shown
    ]
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(cell, widths, strict=True)).rstrip() for cell in cells]
    if len(shown) < len(rows):
        lines.insert(len(lines) - tail, f"... {len(rows) - len(shown)} more")
    return "\n".join(lines)


def _told(owners: tuple[int, ...]) -> str:
    if not owners:
        return "-"
    return str(owners[0]) if len(owners) == 1 else f"{len(owners)} ranks"
