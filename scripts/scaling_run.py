"""Many runs from one file: a grid over any keys, then a table, pictures and a fitted scaling law.

    python scripts/scaling_run.py SPEC.toml [--out outputs/scaling/SPEC] [--parallel N] [--section.key value ...]
    python scripts/scaling_run.py SPEC.toml --list              # the runs, their compute and memory; starts nothing
    python scripts/scaling_run.py SPEC.toml --sbatch FILE       # a Slurm array instead: one node and one run a task
    python scripts/scaling_run.py SPEC.toml --only 3            # what a task calls
    python scripts/scaling_run.py SPEC.toml --collect           # table and pictures of what has finished

A run is a plain ./run_train.sh in a folder of its own below OUT/runs; one that has finished is not run again, one that
was interrupted goes on (from its checkpoint, if it has any), and one that failed is moved to OUT/failed. The file has

    [run]      config_file; ranks (processes of a run); parallel (runs at a time); python
    [fixed]    keys of all runs
    [[grid]]   keys with lists: every combination is a run. Several tables are joined

Beside the keys of the configuration there are ``ranks``, ``tokens_per_parameter`` (sets training.steps; 0 leaves it)
and ``warmup_ratio`` (sets lr_scheduler.warmup_steps). Further arguments go to every run and win over the file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scaling_report import read_log, short, write_report  # noqa: E402

from torchtitan_dmuon.config import ConfigError, Problems, load_config  # noqa: E402
from torchtitan_dmuon.plan import Assumptions, make_plan  # noqa: E402
from torchtitan_dmuon.preflight import examine  # noqa: E402

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

_SECTIONS = {"run": dict, "fixed": dict, "grid": list}
_RUN_KEYS = {"config_file": None, "ranks": 1, "parallel": 1}
_OURS = ("ranks", "tokens_per_parameter", "warmup_ratio")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of its folder, from the keys of its grid.
        keys: those of the grid, for the table.
        ranks: processes.
        arguments: of ./run_train.sh, without the folder.
        figures: parameters, tokens, flops, and what the plan says of memory (bytes) and time (days, on H100s).
    """

    name: str
    keys: dict[str, Any]
    ranks: int
    arguments: tuple[str, ...]
    figures: dict[str, float]


class SpecError(ValueError):
    """What is wrong with a file, in one line."""


def read_spec(path: Path) -> dict[str, Any]:
    """The file's tables. Raises SpecError."""
    try:
        spec = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: {error}") from None
    for name, value in spec.items():
        if name not in _SECTIONS or not isinstance(value, _SECTIONS[name]):
            raise SpecError(f"{path}: found {name!r}, expected [run], [fixed] and [[grid]]")
    run = spec.setdefault("run", {})
    if unknown := [key for key in run if key not in _RUN_KEYS]:
        raise SpecError(f"{path}: unknown key {unknown[0]!r} in [run]; known: {', '.join(_RUN_KEYS)}")
    if "config_file" not in run:
        raise SpecError(f"{path}: [run] needs config_file")
    if not spec.get("grid"):
        raise SpecError(f"{path}: needs a [[grid]]")
    for table in spec["grid"]:
        if wrong := [key for key, values in table.items() if not isinstance(values, list) or not values]:
            raise SpecError(f"{path}: [[grid]] {wrong[0]!r} needs a list of values")
    spec.setdefault("fixed", {})
    spec["run"] = {**_RUN_KEYS, **run}
    return spec


def expand(spec: Mapping[str, Any], further: list[str]) -> list[Run]:
    """Every run of a spec. Raises SpecError for two runs of one name, ConfigError for keys that do not go together."""
    found: dict[str, Run] = {}
    for table in spec["grid"]:
        for values in itertools.product(*table.values()):
            keys = dict(zip(table, values, strict=True))
            run = _run(spec, keys, further)
            if found.setdefault(run.name, run) is not run:
                raise SpecError(f"two runs are called {run.name}: leave one of them out of its [[grid]]")
    return list(found.values())


def _run(spec: Mapping[str, Any], keys: dict[str, Any], further: list[str]) -> Run:
    settings = {"ranks": spec["run"]["ranks"], "tokens_per_parameter": 0, "warmup_ratio": 0.0, **spec["fixed"], **keys}
    ranks = int(settings["ranks"])
    config_file = str(ROOT / spec["run"]["config_file"])
    arguments = [word for key, value in settings.items() if key not in _OURS for word in (f"--{key}", _text(value))]
    arguments = ["--job.config_file", config_file, *arguments, *further]
    plan = _plan(tuple(arguments), ranks)
    run, duration = plan["run"], plan["duration"]
    steps = duration["steps"]
    if settings["tokens_per_parameter"]:
        steps = max(1, round(settings["tokens_per_parameter"] * run["parameters"] / run["tokens_per_step"]))
    warmup = round(settings["warmup_ratio"] * steps)
    arguments += ["--training.steps", str(steps), "--lr_scheduler.warmup_steps", str(warmup)]
    load_config(arguments)  # raises what is wrong with the keys of this run
    tokens = steps * run["tokens_per_step"]
    figures = {
        "parameters": run["parameters"],
        "tokens": tokens,
        "flops": tokens * duration["flops_per_token"],
        "tokens_per_step": run["tokens_per_step"],
        "planned_memory": plan["memory"]["peak"],
        "planned_days": duration["days"] * steps / duration["steps"],
    }
    keys = {**keys, "ranks": ranks}
    parts = (value if isinstance(value, str) else f"{short(key)}={_text(value)}" for key, value in keys.items())
    return Run(",".join(parts).replace("/", "_"), keys, ranks, tuple(arguments[2:]), figures)


def _plan(arguments: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """The plan of a run whose length and schedule are not known yet."""
    at = [index for index, word in enumerate(arguments) if word == "--optimizer.lr"]  # a plan is the same for all rates
    kept = tuple(word for index, word in enumerate(arguments) if index not in at and index - 1 not in at)
    return _plan_once((*kept, "--lr_scheduler.warmup_steps", "0"), ranks)


@functools.lru_cache
def _plan_once(arguments: tuple[str, ...], ranks: int) -> dict[str, Any]:
    config = load_config(list(arguments))
    examined = examine(config, ranks, Problems(), only_model=True)
    return make_plan(config, examined.model_args, examined.dims, Assumptions())


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


# ---- one run


def execute(run: Run, config_file: str, out: Path, devices: Mapping[str, str]) -> bool:
    """Run to the end. ``devices`` are environment variables that say on which GPUs or cores. Returns whether the run is
    done; a failed one is moved away."""
    folder = out / "runs" / run.name
    done, settings = folder / "done.json", {"ranks": run.ranks, "arguments": list(run.arguments)}
    if done.exists():
        if json.loads(done.read_text())["settings"] == settings:
            return True
        shutil.rmtree(folder)  # the spec has changed since
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **devices, "NGPU": str(run.ranks), "CONFIG_FILE": config_file}
    environment["PYTHON"] = sys.executable
    begin = time.monotonic()
    command = [str(ROOT / "run_train.sh"), *run.arguments, "--job.dump_folder", str(folder.resolve() / "output")]
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.monotonic() - begin
    curve = read_log((folder / "log.txt").read_text())
    if code == 0 and curve["losses"] and "Stopped by a signal" not in (folder / "log.txt").read_text():
        result = {"keys": run.keys, "figures": run.figures, "seconds": seconds, "curve": curve, "settings": settings}
        done.write_text(json.dumps(result))
        return True
    failed = out / "failed" / run.name
    failed.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(failed, ignore_errors=True)
    folder.rename(failed)
    print(f"{run.name}: exit code {code}, see {failed / 'log.txt'}", file=sys.stderr, flush=True)
    return False


def execute_all(runs: list[Run], config_file: str, out: Path, parallel: int, gpus: int) -> int:
    """All runs, ``parallel`` at a time, each on GPUs of its own. Returns how many failed."""
    most = max(run.ranks for run in runs)
    if gpus and parallel * most > gpus:
        raise SpecError(f"parallel {parallel} x ranks {most} is more than the {gpus} GPUs here")
    places: queue.Queue[int] = queue.Queue()
    for place in range(parallel):
        places.put(place)

    def one(run: Run) -> bool:
        place = places.get()
        try:
            first = place * most
            if gpus:
                environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + run.ranks)))}
            else:  # runs beside each other share the cores
                environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (parallel * run.ranks)))}
            begin = time.monotonic()
            done = execute(run, config_file, out, environment)
            print(f"{run.name}: {'done' if done else 'FAILED'} ({time.monotonic() - begin:.0f} s)", flush=True)
            return done
        finally:
            places.put(place)

    with ThreadPoolExecutor(parallel) as pool:
        return [*pool.map(one, runs)].count(False)


def sbatch_array(path: Path, spec_file: Path, out: Path, runs: list[Run], further: list[str]) -> str:
    """A Slurm script: one task a run, each on one node, and the command that collects the results."""
    command = [sys.executable, str(Path(__file__).resolve()), str(spec_file.resolve()), "--out", str(out.resolve())]
    words = " ".join(f"'{word}'" for word in [*command, *further])
    return (
        "#!/usr/bin/env bash\n"
        f"#SBATCH --job-name={spec_file.stem}\n"
        f"#SBATCH --array=0-{len(runs) - 1}\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH --ntasks=1\n"
        f"#SBATCH --gpus-per-node={max(run.ranks for run in runs)}\n"
        "#SBATCH --signal=TERM@180\n"
        f"# Submit with: sbatch {path}\n"
        f"# Afterwards: {words} --collect\n"
        f'exec {words} --only "$SLURM_ARRAY_TASK_ID"\n'
    )


def print_list(runs: list[Run]) -> None:
    for index, run in enumerate(runs):
        figures = run.figures
        print(
            f"{index:3d}  {run.name}: {figures['parameters']:,} parameters, {figures['tokens']:.3g} tokens, "
            f"{figures['flops']:.3g} FLOP, {figures['planned_memory'] / 2**30:.2f} GiB"
        )
    days = sum(run.figures["planned_days"] for run in runs)
    print(f"{len(runs)} runs; one after the other on H100s they take {days:.2g} days")


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("spec", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--sbatch", type=Path)
    parser.add_argument("--only", type=int)
    parser.add_argument("--collect", action="store_true")
    options, further = parser.parse_known_args(argv)
    out = options.out or ROOT / "outputs" / "scaling" / options.spec.stem
    try:
        spec = read_spec(options.spec)
        runs = expand(spec, further)
        if options.only is not None and not 0 <= options.only < len(runs):
            raise SpecError(f"--only {options.only}: there are runs 0 to {len(runs) - 1}")
        if options.list:
            print_list(runs)
            return 0
        if options.sbatch is not None:
            options.sbatch.write_text(sbatch_array(options.sbatch, options.spec, out, runs, further))
            print(f"written: {options.sbatch}, {len(runs)} tasks")
            return 0
        failed = 0
        if not options.collect:
            import torch

            chosen = runs if options.only is None else [runs[options.only]]
            parallel = 1 if options.only is not None else options.parallel or spec["run"]["parallel"]
            config_file = str(ROOT / spec["run"]["config_file"])
            failed = execute_all(chosen, config_file, out, parallel, torch.cuda.device_count())
        if options.only is None:
            print(write_report(out))
    except (SpecError, ConfigError) as error:
        lines = error.lines if isinstance(error, ConfigError) else [str(error)]
        print(*(f"error: {line}" for line in lines), sep="\n", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
