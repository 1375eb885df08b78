"""Plans of runs that nobody starts: every configuration that is shipped, and figures that runs on GPUs gave."""

import json
import re
import time
from pathlib import Path

import pytest

from torchtitan_dmuon.config import Problems, load_config
from torchtitan_dmuon.plan import Assumptions, format_plan, make_plan
from torchtitan_dmuon.plan.__main__ import main
from torchtitan_dmuon.plan.memory import MOMENTS
from torchtitan_dmuon.preflight import examine

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))
GIB = 2**30


def plan_of(name, ranks, *argv, assumed=None):
    config = load_config(["--job.config_file", str(ROOT / "train_configs" / f"{name}.toml"), *argv])
    examined = examine(config, ranks, Problems(), only_model=True)
    return make_plan(config, examined.model_args, examined.dims, assumed or Assumptions())


@pytest.mark.parametrize("argv", [(), ("--dmuon.others", "dedicated"), ("--optimizer.name", "AdamW")], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_is_planned(name, argv):
    plan = plan_of(name, 64, "--parallelism.data_parallel_replicate_degree", "2", *argv)
    assert json.loads(json.dumps(plan)) == plan
    memory, owners = plan["memory"], plan["owners"]
    for moment, total in enumerate(memory["totals"]):
        assert total == sum(sizes[moment] for sizes in memory["kinds"].values()) > 0
    assert memory["peak"] == max(memory["totals"])
    text = format_plan(plan)
    assert all(kind in text for kind in memory["kinds"]) and f"{plan['run']['parameters']:,}" in text
    if owners is None:
        assert argv[1:] == ("AdamW",)
        return
    assert len(owners["bytes"]) == 64 and sum(owners["newton_schulz_share"]) == pytest.approx(1)
    assert owners["bytes"] == [4 * elements for elements in owners["elements"]]
    if "dedicated" in argv:
        assert sum(owners["elements"]) == plan["run"]["parameters"]
    assert owners["max_over_mean"]["bytes"] == max(owners["bytes"]) / (sum(owners["bytes"]) / 64)


def stated(name):
    """(GiB, ranks, further keys) of every figure in a configuration's comments."""
    for line in (ROOT / "train_configs" / f"{name}.toml").read_text().splitlines():
        if line.startswith(("# Memory of the fullest rank by --plan: ", "# With --")):
            keys, _, figures = line.partition(": ")
            argv = keys.split()[2:] if keys.startswith("# With") else []
            for gib, ranks in re.findall(r"([\d.]+) GiB on ([\d,]+)", figures):
                yield float(gib), int(ranks.replace(",", "")), argv


@pytest.mark.parametrize("name", [name for name in CONFIGS if "debug" not in name])
def test_figures_in_the_configurations_are_the_plans(name):
    found = list(stated(name))
    assert len(found) >= 2
    for gib, ranks, argv in found:
        assert plan_of(name, ranks, *argv)["memory"]["peak"] / GIB == pytest.approx(gib, abs=0.06)


# Peak GiB that scripts/notes give for whole steps without compilation and activation checkpointing.
EAGER = ("--compile.enable", "false", "--activation_checkpoint.mode", "none")
MEASURED = {
    ("llama3_1b", 1, "--optimizer.name", "AdamW"): 64.1,
    ("llama3_1b", 1): 62.4,
    ("llama3_1b", 2, "--optimizer.name", "AdamW"): 57.2,
    ("llama3_1b", 2, "--dmuon.reshard_after_forward", "false"): 58.2,
    ("llama3_1b", 2): 56.5,
    ("llama3_3b", 2, "--optimizer.name", "AdamW"): 58.0,
    ("llama3_3b", 2, "--dmuon.reshard_after_forward", "false"): 60.6,
    ("llama3_3b", 2): 55.6,
}


@pytest.mark.parametrize(("run", "measured"), MEASURED.items(), ids=str)
def test_memory_is_what_runs_on_gpus_measured(run, measured):
    name, ranks, *argv = run
    assert plan_of(name, ranks, *EAGER, *argv)["memory"]["peak"] / GIB == pytest.approx(measured, rel=0.02)


def test_16384_ranks_take_seconds():
    begin = time.process_time()
    plan = plan_of("llama3_405b", 16384)
    assert time.process_time() - begin < 10
    assert plan["owners"]["idle"] == 16384 - 7 * 126


WARNINGS = {
    "more ranks than matrices": ("debug_model", 64, 80.0),
    "uneven owners": ("llama3_3b", 110, 80.0),
    "one shard group of 512 ranks": ("llama3_70b", 512, 80.0),
    "does not fit": ("llama3_8b", 1, 80.0),
}


@pytest.mark.parametrize(("text", "run"), WARNINGS.items(), ids=WARNINGS)
def test_warnings_name_a_remedy(text, run):
    name, ranks, gpu_gib = run
    warnings = plan_of(name, ranks, assumed=Assumptions(gpu_gib=gpu_gib))["warnings"]
    assert [warning for warning in warnings if warning.startswith(text)], warnings
    assert not plan_of("llama3_1b", 8)["warnings"]


def test_the_remedy_for_many_shards_removes_the_warning():
    assert "data_parallel_replicate_degree 8 " in next(w for w in plan_of("llama3_70b", 512)["warnings"] if "HSDP" in w)
    argv = ("--parallelism.data_parallel_replicate_degree", "8")
    assert not [w for w in plan_of("llama3_70b", 512, *argv)["warnings"] if "shard group" in w]


def test_time_and_newton_schulz():
    """By hand: the 1B has 112 matrices and 21.3 TFLOP of Newton-Schulz (scripts/notes)."""
    assumed = Assumptions(mfu=0.5, peak_tflops=1000.0, ns_tflops=500.0)
    plan = plan_of("llama3_1b", 8, "--training.steps", "1000", assumed=assumed)
    work, duration = plan["newton_schulz"], plan["duration"]
    assert sum(plan["owners"]["matrices"]) == 112 and work["all"] / 1e12 == pytest.approx(21.3, abs=0.05)
    assert work["predicted_seconds"] == pytest.approx(work["busiest"] / 5e14)
    assert work["floor_seconds"] <= work["predicted_seconds"] and work["busiest"] >= work["all"] / 8
    assert duration["tokens"] == 1000 * 8 * 4 * 4096
    assert duration["flops"] == duration["tokens"] * duration["flops_per_token"]
    assert duration["step_seconds"] == pytest.approx(duration["flops"] / 1000 / 8 / 5e14)
    assert duration["days"] == pytest.approx(1000 * (duration["step_seconds"] + work["predicted_seconds"]) / 86400)
    assert plan_of("llama3_1b", 112, assumed=assumed)["newton_schulz"]["tflops"] == assumed.ns_tflops_alone


def test_accumulation_reduces_each_micro_batch_and_publishes_once():
    argv = ("--parallelism.data_parallel_replicate_degree", "2")
    once, four = (plan_of("llama3_1b", 8, *argv, "--training.global_batch_size", size) for size in ("32", "128"))
    assert four["run"]["micro_batches"] == 4 * once["run"]["micro_batches"] == 4
    for lane, times in {"unshard": 4, "reduce": 4, "reduce_replicate": 1, "publish_replicate": 1}.items():
        assert four["lanes"][lane]["payload_bytes"] == times * once["lanes"][lane]["payload_bytes"] > 0
    loss = MOMENTS.index("loss")
    assert four["memory"]["kinds"]["gradients"][loss] > once["memory"]["kinds"]["gradients"][loss] == 0


def test_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("NGPU", "8")
    monkeypatch.setenv("NNODES", "2")
    config = ["--job.config_file", str(ROOT / "train_configs" / "llama3_1b.toml"), "--training.dataset", "bin"]
    config += ["--training.dataset_path", "/only/on/the/cluster/*.bin"]
    assert main([*config, "--plan=json", "--plan.mfu", "0.3", "--plan.png", str(tmp_path / "plan.png")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["run"]["ranks"] == 16 and plan["assumed"]["mfu"] == 0.3
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main([*config, "--plan"]) == 0
    assert "on 16 ranks" in capsys.readouterr().out
    assert main([*config, "--plan", "--parallelism.tensor_parallel_degree", "3"]) == 1
    assert "parallelism" in capsys.readouterr().err
