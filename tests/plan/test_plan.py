"""Plans of runs that nobody starts: every configuration that is shipped, and figures that runs on GPUs gave."""

import json
import time
from pathlib import Path

import pytest

from torchtitan_dmuon.config import Problems, load_config
from torchtitan_dmuon.plan import Assumptions, format_plan, make_plan
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
