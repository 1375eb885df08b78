"""What scaling runs found: a CSV, a table, and pictures. Used by ``scaling_run.py``."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scaling_fit import Fit, fit_law

_STEP = re.compile(r"step:\s+(\d+)  loss: ([\d.naif]+)")
_VALIDATION = re.compile(r"validation: step:\s+\d+  loss: ([\d.naif]+)")
_FIGURES = {"step_ms": r"step: ([\d.]+) ms", "optimizer_ms": r"optimizer: ([\d.]+) ms"}
_FIGURES |= {"tokens_per_second": r"tokens/s: ([\d,]+)", "memory_gib": r"memory: ([\d.]+) GiB"}
_LAST = 0.1  # share of the logged steps whose mean is the loss of a run without validation
_OPTIMIZER, _LR = "optimizer.name", "optimizer.lr"


def short(key: str) -> str:
    """The last part of a key; of ``optimizer.name`` the first."""
    return key.removesuffix(".name").rpartition(".")[2]


def read_log(text: str) -> dict[str, Any]:
    """``losses`` by step, the last ``validation`` loss or None, and the figures of every log line but the first, which
    is about building and warming up."""
    curve: dict[str, Any] = {"losses": [], "validation": None, **{name: [] for name in _FIGURES}}
    for line in text.splitlines():
        if match := _VALIDATION.search(line):
            curve["validation"] = float(match[1])
        elif match := _STEP.search(line):
            curve["losses"].append([int(match[1]), float(match[2])])
            for name, pattern in _FIGURES.items():
                if len(curve["losses"]) > 1 and (figure := re.search(pattern, line)):
                    curve[name].append(float(figure[1].replace(",", "")))
    return curve


@dataclass(frozen=True)
class Result:
    """A finished run: its folder's name, the keys of its grid, figures known before, and what its log said."""

    name: str
    keys: dict[str, Any]
    figures: dict[str, float]
    curve: dict[str, Any]
    seconds: float

    @property
    def optimizer(self) -> str:
        return str(self.keys.get(_OPTIMIZER, "runs"))

    @property
    def loss(self) -> float:
        """The last validation loss, else the mean of the last tenth of the logged steps."""
        if self.curve["validation"] is not None:
            return self.curve["validation"]
        losses = [loss for _, loss in self.curve["losses"]]
        return float(np.mean(losses[-max(1, round(_LAST * len(losses))) :]))

    def figure(self, name: str) -> float:
        """The median of a figure of the log; NaN for a run that logged once."""
        return median(self.curve[name]) if self.curve[name] else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return 1000 * self.figures["tokens_per_step"] / self.figure("step_ms")

    def tokens_to(self, loss: float) -> float | None:
        """Tokens after which the loss, smoothed over its last tenth, was first this low."""
        losses = [value for _, value in self.curve["losses"]]
        for index, (step, _) in enumerate(self.curve["losses"]):
            window = losses[max(0, index - max(1, round(_LAST * len(losses))) + 1) : index + 1]
            if np.mean(window) <= loss:
                return step * self.figures["tokens_per_step"]
        return None


def load_results(out: Path) -> list[Result]:
    """Every finished run below ``out``, by name."""
    results = []
    for path in sorted((out / "runs").glob("*/done.json")):
        found = json.loads(path.read_text())
        parts = (found[name] for name in ("keys", "figures", "curve", "seconds"))
        results.append(Result(path.parent.name, *parts))
    return results


# ---- what the results say


def best_runs(results: Iterable[Result], apart: Sequence[str] = (_LR,)) -> list[Result]:
    """Of runs that differ only in the keys ``apart``, the one with the lowest loss."""
    best: dict[tuple, Result] = {}
    for result in results:
        alike = tuple((key, str(value)) for key, value in result.keys.items() if key not in apart)
        if alike not in best or result.loss < best[alike].loss:
            best[alike] = result
    return list(best.values())


def frontier(results: Iterable[Result]) -> list[Result]:
    """The runs that no run of at most their compute beats, in order of compute."""
    kept: list[Result] = []
    for result in sorted(results, key=lambda result: (result.figures["flops"], result.loss)):
        if not kept or result.loss < kept[-1].loss:
            kept.append(result)
    return kept


def by_optimizer(results: Iterable[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.optimizer].append(result)
    return dict(sorted(groups.items(), reverse=True))


def fit_frontiers(results: Iterable[Result]) -> dict[str, Fit]:
    """The law of each optimizer whose frontier has at least three runs."""
    fits = {}
    for name, runs in by_optimizer(best_runs(results)).items():
        points = frontier(runs)
        if len(points) >= 3:
            fits[name] = fit_law([run.figures["flops"] for run in points], [run.loss for run in points])
    return fits


def write_report(out: Path) -> str:
    """Write the CSV, the table and, with matplotlib, the pictures. Returns what a person should read."""
    results = load_results(out)
    if not results:
        return f"no run below {out / 'runs'} has finished"
    write_csv(results, out / "results.csv")
    text = table(results)
    fits = fit_frontiers(results)
    for name, fit in fits.items():
        text += f"\n\n{describe(name, fit)}"
    (out / "table.md").write_text(text + "\n")
    try:
        from scaling_plots import draw_all
    except ImportError:
        return f"{text}\n\nno pictures: they need matplotlib (pip install matplotlib)"
    drawn = draw_all(results, fits, out)
    return f"{text}\n\nwritten: {', '.join(map(str, [out / 'results.csv', out / 'table.md', *drawn]))}"


def describe(name: str, fit: Fit) -> str:
    """A fit in words, with 90% intervals."""
    law = fit.law
    text = f"{name}: L(C) = {law.e:.3f} + {law.a:.3f} (C / {law.scale:.3g})^-{law.alpha:.3f}"
    if fit.resampled:
        (e_low, e_high), (alpha_low, alpha_high) = fit.interval("e"), fit.interval("alpha")
        text += f"; 90% intervals: E {e_low:.2f} to {e_high:.2f}, alpha {alpha_low:.3f} to {alpha_high:.3f}"
    else:
        text += "; no intervals: three runs on the frontier, and a law of three numbers goes through any three"
    return text


def write_csv(results: Sequence[Result], path: Path) -> None:
    keys = list(dict.fromkeys(key for result in results for key in result.keys))
    figures = list(dict.fromkeys(name for result in results for name in result.figures))
    logged = ["step_ms", "optimizer_ms", "memory_gib"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", *keys, *figures, "loss", "validation", "tokens_per_second", *logged, "seconds"])
        for result in results:
            row = [result.keys.get(key, "") for key in keys] + [result.figures.get(name, "") for name in figures]
            row += [result.loss, "" if result.curve["validation"] is None else result.curve["validation"]]
            row += [result.tokens_per_second, *(result.figure(name) for name in logged), result.seconds]
            writer.writerow([result.name, *row])


def table(results: Sequence[Result]) -> str:
    """Markdown: every run, in order of compute; the best learning rate of each is in bold."""
    keys = list(dict.fromkeys(key for result in results for key in result.keys))
    head = [short(key) for key in keys] + ["parameters", "tokens", "FLOP", "loss", "step ms", "tokens/s"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    best = {result.name for result in best_runs(results)}
    order = sorted(results, key=lambda result: (result.optimizer, result.figures["flops"], result.loss))
    for result in order:
        loss = f"**{result.loss:.3f}**" if result.name in best else f"{result.loss:.3f}"
        figures = [f"{result.figures[name]:.3g}" for name in ("tokens", "flops")]
        cells = [str(result.keys.get(key, "")) for key in keys] + [f"{result.figures['parameters']:,}", *figures, loss]
        cells += [f"{result.figure('step_ms'):.1f}", f"{result.tokens_per_second:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
