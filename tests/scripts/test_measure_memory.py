"""Planned memory against a run of the trainer on the CPU, by kind."""

import json

import pytest

from tests.support.scripts import run_script
from tests.support.training import ROOT

KINDS = {"masters", "momentum", "gradients", "forward", "logits and loss", "FSDP2 weights"}


@pytest.mark.dist
@pytest.mark.parametrize("checkpointing", ["none", "full", "op"])
def test_planned_memory_is_what_the_debug_model_takes(checkpointing, tmp_path):
    argv = ["--job.config_file", ROOT / "train_configs" / "debug_model.toml", "--training.local_batch_size", "4"]
    argv += ["--activation_checkpoint.mode", "selective" if checkpointing == "op" else checkpointing]
    argv += ["--activation_checkpoint.selective_ac_option", "op", "--dmuon.prefetch", "2"]
    done = run_script("measure_memory", *argv, "--out", tmp_path / "rows.json", folder=tmp_path, world=2)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows.keys() >= KINDS
    for kind, (planned, measured) in rows.items():
        assert planned == pytest.approx(measured, rel=0.1), f"{kind}: planned {planned}, measured {measured}"
        assert kind in done.stdout
