"""A plan as a picture: owners, memory and communication. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw_plan(plan: dict[str, Any], path: str) -> None:
    """Write the picture to ``path``, in the format of its suffix."""
    run, duration = plan["run"], plan["duration"]
    figure = Figure(figsize=(15, 5), layout="constrained")
    figure.suptitle(
        f"{run['model']}, {run['optimizer']}, {run['ranks']:,} ranks ({' x '.join(map(str, run['mesh'].values()))}): "
        f"{duration['tokens']:.3g} tokens in {duration['days']:.2f} days at {plan['assumed']['mfu']:.0%} MFU"
    )
    owners, memory, lanes = figure.subplots(1, 3)
    if plan["owners"] is not None:
        _draw_owners(owners, plan["owners"])
    _draw_memory(memory, plan["memory"], plan["assumed"]["gpu_gib"])
    _draw_lanes(lanes, plan["lanes"])
    figure.savefig(path, dpi=120)


def _draw_owners(axes: Axes, owners: dict[str, Any]) -> None:
    for name, values in (("Newton-Schulz", owners["newton_schulz_flops"]), ("master bytes", owners["bytes"])):
        mean = sum(values) / len(values) or 1
        relative = [value / mean for value in sorted(values, reverse=True)]
        axes.step([*range(len(relative) + 1)], [*relative, relative[-1]], where="post", label=name)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="owners, the busiest first", ylabel="over the mean", title="owners", ylim=0)
    axes.legend()


def _draw_memory(axes: Axes, memory: dict[str, Any], gpu_gib: float) -> None:
    below = [0.0] * len(memory["moments"])
    for index, (name, sizes) in enumerate(memory["kinds"].items()):
        heights = [size / 2**30 for size in sizes]
        axes.bar(memory["moments"], heights, bottom=below, label=name, color=f"C{index % 10}", hatch="//" * (index > 9))
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if max(below) > gpu_gib / 3:
        axes.axhline(gpu_gib, color="black", linestyle="--", linewidth=0.8)
    axes.set(ylabel="GiB", title=f"memory of rank {memory['rank']}, the fullest")
    axes.tick_params(axis="x", rotation=20)
    axes.legend(fontsize="x-small")


def _draw_lanes(axes: Axes, lanes: dict[str, Any]) -> None:
    used = {name: lane for name, lane in lanes.items() if lane["collectives"]}
    bars = axes.barh([*used], [lane["sent_bytes_per_rank"] / 2**30 for lane in used.values()])
    axes.bar_label(bars, [f" {lane['collectives']:,} collectives" for lane in used.values()], fontsize="small")
    axes.margins(x=0.4)
    axes.invert_yaxis()
    axes.set(xlabel="GiB that leave a rank in a step", title="lanes (without FSDP2's)")
