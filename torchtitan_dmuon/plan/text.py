"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_OWNERS_SHOWN = 4


def format_plan(plan: dict[str, Any]) -> str:
    """The text, several paragraphs."""
    parts = [_run(plan), _owners(plan), _memory(plan), _lanes(plan), _duration(plan), _warnings(plan)]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def gib(size: float) -> str:
    """Bytes as GiB, or MiB where that is less than a tenth."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.1f} MiB"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of cells: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  " + "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def _run(plan: dict[str, Any]) -> Iterator[str]:
    run, mesh = plan["run"], plan["run"]["mesh"]
    yield f"{run['model']} with {run['optimizer']}: {run['parameters']:,} parameters on {run['ranks']:,} ranks"
    yield (
        f"mesh: {mesh['replicate']} replicas x {mesh['shard']} shards x {mesh['tp']} tensor-parallel ranks; "
        f"{run['tokens_per_step']:,} tokens a step in {run['micro_batches']} micro-batches"
    )


def _owners(plan: dict[str, Any]) -> Iterator[str]:
    owners = plan["owners"]
    if owners is None:
        return
    ratio = owners["max_over_mean"]
    yield (
        f"owners: {sum(owners['matrices']):,} matrices; max / mean of Newton-Schulz "
        f"{ratio['newton_schulz_flops']:.3f}, of bytes {ratio['bytes']:.3f}; {owners['idle']:,} ranks own no matrix"
    )
    order = sorted(range(len(owners["bytes"])), key=lambda rank: -owners["newton_schulz_share"][rank])
    shown = order if len(order) <= 2 * _OWNERS_SHOWN else [*order[:_OWNERS_SHOWN], *order[-_OWNERS_SHOWN:]]
    rows = [["rank", "matrices", "elements", "master bytes", "Newton-Schulz share"]]
    for rank in shown:
        figures = (owners[name][rank] for name in ("matrices", "elements", "bytes"))
        rows.append([f"{rank}", *(f"{figure:,}" for figure in figures), f"{owners['newton_schulz_share'][rank]:.4%}"])
    lines = list(table(rows))
    if len(shown) < len(order):
        lines.insert(1 + _OWNERS_SHOWN, f"  ... {len(order) - len(shown):,} more")
    yield from lines


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    memory = plan["memory"]
    peak = gib(memory["peak"])
    yield f"memory of the fullest rank ({memory['rank']}): at most {peak}, beside the CUDA context and NCCL"
    rows = [["", *memory["moments"]]]
    for name, moments in [*memory["kinds"].items(), ("total", memory["totals"])]:
        rows.append([name, *(gib(size) if size else "-" for size in moments)])
    yield from table(rows)


def _lanes(plan: dict[str, Any]) -> Iterator[str]:
    if not plan["lanes"]:
        return
    yield f"communication of a step, without FSDP2's (rank {plan['memory']['rank']}; sent: leaving a rank on average)"
    rows = [["", "ranks", "collectives", "payload", "sent"]]
    for name, lane in plan["lanes"].items():
        if lane["collectives"]:
            sizes = (gib(lane[key]) for key in ("payload_bytes", "sent_bytes_per_rank"))
            rows.append([name, f"{lane['ranks']:,}", f"{lane['collectives']:,}", *sizes])
    if len(rows) == 1:
        yield "  none: one rank"
    else:
        yield from table(rows)


def _duration(plan: dict[str, Any]) -> Iterator[str]:
    assumed, duration, work = plan["assumed"], plan["duration"], plan["newton_schulz"]
    if work is not None:
        yield (
            f"Newton-Schulz: {work['busiest'] / 1e12:.2f} of {work['all'] / 1e12:,.1f} TFLOP on the busiest rank, "
            f"{1000 * work['predicted_seconds']:.2f} ms a step at {work['tflops']:g} TFLOP/s; "
            f"floor {1000 * work['floor_seconds']:.2f} ms at {assumed['ns_tflops_floor']:g}"
        )
    yield (
        f"time: {duration['steps']:,} steps, {duration['tokens']:.3g} tokens, {duration['flops']:.3g} FLOP; at "
        f"{assumed['mfu']:.0%} MFU of {assumed['peak_tflops']:g} TFLOP/s "
        f"{1000 * duration['step_seconds']:,.1f} ms a step of forward and backward, {duration['days']:.2f} days in all"
    )


def _warnings(plan: dict[str, Any]) -> Iterator[str]:
    for warning in plan["warnings"]:
        yield f"warning: {warning}"
