"""The shell scripts find their folder and the caller's files whatever the caller has exported."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_run_train_with_an_exported_cdpath(tmp_path):
    """``cd`` would print where CDPATH has led it, into the captured path of the config or to another folder."""
    there = tmp_path / "there"
    for folder in (there, tmp_path / "decoy" / "there"):
        (folder / "scripts").mkdir(parents=True)
        (folder / "conf.toml").touch()
        (folder / "scripts" / "setup.sh").write_text(f"PYTHON={folder}/python\n")
        (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@" >&2\nexit 3\n')
        (folder / "python").chmod(0o755)
    shutil.copy(ROOT / "run_train.sh", there)
    environment = {**os.environ, "CDPATH": f"{tmp_path}/decoy", "CONFIG_FILE": "there/conf.toml"}
    done = subprocess.run(
        ["bash", "there/run_train.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3, done.stdout
    assert done.stderr.splitlines() == [
        *(str(there), "-m", "torchtitan_dmuon.preflight", "--job.config_file", f"{there}/conf.toml")
    ]


@pytest.mark.parametrize("script", ["run_train.sh", "scripts/gpu_check.sh", "scripts/setup.sh", "scripts/test.sh"])
def test_no_cd_looks_at_cdpath(script):
    for line in (ROOT / script).read_text().splitlines():
        if re.search(r"(^|[(;&]|\s)cd ", line.partition("#")[0]):
            assert "CDPATH='' cd -- " in line and ">/dev/null" in line, line
