"""The debug model under several optimizers, side by side: a table and a plot of the loss.

    python scripts/compare_optimizers.py [--steps 100] [--processes 2] [--out outputs/compare] [--only kj,AdamW]
                                         [--section.key value ...]

Every variant is one run of train.py with the same data, seed and schedule. Arguments that are not listed above go to
every run. AdamW takes the learning rate that is best for it on this model (see train_configs/debug_model.toml), Muon's
variants all take the config's. Without matplotlib there is no plot.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

VARIANTS: dict[str, list[str]] = {
    "polar_express": [],
    "you": ["--dmuon.ns_coefficients", "you"],
    "kj": ["--dmuon.ns_coefficients", "kj"],
    # Ten steps for which no restart is safe: the direct form only.
    "deepseek_v4": ["--dmuon.ns_coefficients", "deepseek_v4", "--dmuon.ns_backend", "direct"],
    "NorMuon": ["--dmuon.normuon", "true"],
    "AdamW": ["--optimizer.name", "AdamW", "--optimizer.lr", "4e-3"],
}

_STEP = re.compile(r"step: (\d+)/\d+  loss: ([\d.naif]+)")
_OPTIMIZER = re.compile(r"optimizer: ([\d.]+) ms")
_VALIDATION = re.compile(r"validation: step: \d+/\d+  loss: ([\d.naif]+)")


@dataclass
class Result:
    """One run: the training loss by step, the last validation loss, and milliseconds of an optimizer step."""

    losses: dict[int, float] = field(default_factory=dict)
    validation: float | None = None
    optimizer_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def mean_of_last(self, share: float = 0.1) -> float:
        """Mean loss of the last steps: one step's is noisy."""
        last = list(self.losses.values())[-max(1, round(len(self.losses) * share)) :]
        return sum(last) / len(last)


def run(name: str, arguments: list[str], processes: int, folder: Path) -> Result:
    """One variant. Raises SystemExit with the end of its log when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["--local-ranks-filter", "0", "train.py", "--job.dump_folder", str(folder / name), *arguments]
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    return read_log(done.stdout, time.monotonic() - started)


def read_log(text: str, seconds: float) -> Result:
    result = Result(seconds=seconds)
    for line in text.splitlines():
        if match := _VALIDATION.search(line):
            result.validation = float(match[1])
        elif match := _STEP.search(line):
            result.losses[int(match[1])] = float(match[2])
            if match := _OPTIMIZER.search(line):
                result.optimizer_ms.append(float(match[1]))
    return result


def table(results: dict[str, Result]) -> str:
    """Markdown, the lowest loss first."""
    lines = ["| optimizer | loss, last tenth | validation | optimizer ms | seconds |", "|---|---|---|---|---|"]
    for name, result in sorted(results.items(), key=lambda item: item[1].mean_of_last()):
        validation = "-" if result.validation is None else f"{result.validation:.4f}"
        milliseconds = sorted(result.optimizer_ms)
        median = f"{milliseconds[len(milliseconds) // 2]:.1f}" if milliseconds else "-"
        lines.append(f"| {name} | {result.mean_of_last():.4f} | {validation} | {median} | {result.seconds:.0f} |")
    return "\n".join(lines)


def plot(results: dict[str, Result], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        axes.plot(result.losses.keys(), result.losses.values(), label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "compare")
    parser.add_argument("--only", help=f"variants, separated by commas, of {', '.join(VARIANTS)}")
    options, rest = parser.parse_known_args(argv)
    names = options.only.split(",") if options.only else list(VARIANTS)
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]!r}; known: {', '.join(VARIANTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    common = ["--job.config_file", "train_configs/debug_model.toml", "--checkpoint.enable", "false"]
    common += ["--training.steps", str(options.steps), "--metrics.log_freq", "1"]
    common += ["--lr_scheduler.warmup_steps", str(max(1, options.steps // 10))]
    results = {}
    for name in names:
        results[name] = run(name, [*common, *VARIANTS[name], *rest], options.processes, options.out.resolve())
        print(f"{name}: {results[name].mean_of_last():.4f} after {results[name].seconds:.0f} s", flush=True)
    text = table(results)
    (options.out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\nwritten: {options.out / 'table.md'}")
    try:
        plot(results, options.out / "loss.png")
        print(f"written: {options.out / 'loss.png'}")
    except ImportError:
        print("no plot: it needs the package matplotlib (extra plot): pip install matplotlib")
    return 0


if __name__ == "__main__":
    import environment  # noqa: F401

    sys.exit(main(sys.argv[1:]))
