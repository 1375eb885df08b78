"""Pictures of scaling runs. Needs matplotlib."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scaling_fit import Fit
from scaling_report import Result, best_runs, by_optimizer, frontier

_LR, _SIZE = "optimizer.lr", "model.flavor"


def draw_all(results: Sequence[Result], fits: Mapping[str, Fit], out: Path) -> list[Path]:
    """Write every picture for which there are runs. Returns their paths."""
    wanted: dict[str, Callable[[], Figure | None]] = {
        "loss_against_compute": lambda: draw_compute(results, fits),
        "tokens_to_loss": lambda: draw_tokens(results),
        "learning_rates": lambda: draw_rates(results),
        "ranks": lambda: draw_ranks(results),
    }
    drawn = []
    for name, draw in wanted.items():
        figure = draw()
        if figure is not None:
            drawn.append(out / f"{name}.png")
            figure.savefig(drawn[-1], dpi=120)
    return drawn


def _figure(columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(7 * columns, 5), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def draw_compute(results: Sequence[Result], fits: Mapping[str, Fit]) -> Figure:
    """Loss against compute; the frontier's law with its 90% band."""
    figure, (axes,) = _figure()
    best = {run.name for run in best_runs(results)}
    for index, (name, runs) in enumerate(by_optimizer(results).items()):
        color = f"C{index}"
        rest = [run for run in runs if run.name not in best]
        chosen = [run for run in runs if run.name in best]
        axes.scatter([r.figures["flops"] for r in rest], [r.loss for r in rest], color=color, alpha=0.25, s=15)
        axes.scatter([r.figures["flops"] for r in chosen], [r.loss for r in chosen], color=color, s=30, label=name)
        if name in fits:
            ends = [run.figures["flops"] for run in frontier(chosen)]
            compute = np.geomspace(min(ends), 3 * max(ends), 100)
            law = fits[name].law
            label = f"{law.e:.2f} + {law.a:.2f} (C / {law.scale:.2g})^-{law.alpha:.2f}"
            axes.plot(compute, law(compute), color=color, linewidth=1.2, label=label)
            if fits[name].resampled:
                axes.fill_between(compute, *fits[name].band(compute), color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel="model FLOP of the run", ylabel="loss", xscale="log", title="loss against compute, 90% bands")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure


def draw_tokens(results: Sequence[Result]) -> Figure:
    """Tokens that the fastest run of each size needs to reach a loss."""
    figure, (axes,) = _figure()
    runs = best_runs(results)
    sizes = list(dict.fromkeys(str(run.keys.get(_SIZE, "")) for run in runs))
    for index, (name, group) in enumerate(by_optimizer(runs).items()):
        for size in sizes:
            alike = [run for run in group if str(run.keys.get(_SIZE, "")) == size]
            lowest = min((run.loss for run in alike), default=None)
            if lowest is None:
                continue
            highest = max(run.curve["losses"][0][1] for run in alike)
            losses = np.linspace(highest, lowest, 60)
            tokens = [min((t for run in alike if (t := run.tokens_to(loss))), default=np.nan) for loss in losses]
            width = 0.8 + 1.6 * sizes.index(size) / len(sizes)
            axes.plot(tokens, losses, color=f"C{index}", linewidth=width, label=f"{name} {size}")
    axes.set(xlabel="tokens", ylabel="loss", xscale="log", title="tokens to reach a loss")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure


def draw_rates(results: Sequence[Result]) -> Figure | None:
    """Loss against learning rate, of runs that differ in nothing else; the best rate is marked."""
    sweeps: dict[tuple, list[Result]] = defaultdict(list)
    for run in results:
        if _LR in run.keys:
            sweeps[tuple((key, str(value)) for key, value in run.keys.items() if key != _LR)].append(run)
    sweeps = {alike: runs for alike, runs in sweeps.items() if len(runs) > 1}
    if not sweeps:
        return None
    figure, (axes,) = _figure()
    for index, (alike, runs) in enumerate(sorted(sweeps.items())):
        runs = sorted(runs, key=lambda run: run.keys[_LR])
        label = ", ".join(value for _, value in alike)
        axes.plot([run.keys[_LR] for run in runs], [run.loss for run in runs], "o-", color=f"C{index}", label=label)
        best = min(runs, key=lambda run: run.loss)
        axes.plot(best.keys[_LR], best.loss, "*", markersize=16, color=f"C{index}")
    axes.set(xlabel="peak learning rate", ylabel="loss", xscale="log", title="learning rates; a star is the best")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure


def draw_ranks(results: Sequence[Result]) -> Figure | None:
    """Step time and tokens/s against ranks, of runs that differ in nothing else."""
    groups: dict[tuple, dict[int, Result]] = defaultdict(dict)
    for run in results:
        alike = tuple((key, str(value)) for key, value in run.keys.items() if key != "ranks")
        groups[alike][int(run.keys["ranks"])] = run
    groups = {alike: runs for alike, runs in groups.items() if len(runs) > 1}
    if not groups:
        return None
    figure, (time, rate) = _figure(2)
    for alike, runs in sorted(groups.items()):
        label, ranks = ", ".join(value for _, value in alike), sorted(runs)
        time.plot(ranks, [runs[n].figure("step_ms") for n in ranks], "o-", label=label)
        rate.plot(ranks, [runs[n].tokens_per_second for n in ranks], "o-", label=label)
    time.set(xlabel="ranks", ylabel="ms", title="step time", ylim=0)
    rate.set(xlabel="ranks", ylabel="tokens/s of all ranks", title="throughput", ylim=0)
    for axes in (time, rate):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure
