"""The folder of a run is one run's: its lock, its log and its config."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.training import assert_refused, tiny, train, write_corpus
from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.run_folder import CONFIG_FILE, LOCK_FILE, LOG_FILE, held_by_another


def holder(**changes) -> str:
    """The lock of a process that is alive on this host: that which runs the tests."""
    started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return json.dumps({"host": os.uname().nodename, "pid": os.getppid(), "started": started, "run": "7"} | changes)


def ended() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("lock", "run", "problem"),
    [
        (None, None, None),
        (holder(), None, f"is in use by the run of process {os.getppid()} on {os.uname().nodename}: choose another"),
        (holder(), "7", "is in use by the run"),  # two runs in one Slurm allocation
        (holder(started="1"), None, None),  # the number is another process's by now
        (holder(pid=ended()), None, None),
        (holder(host="elsewhere"), None, "is in use by the run of process"),
        (holder(host="elsewhere"), "8", "is in use by the run of process"),
        (holder(host="elsewhere"), "7", None),  # rank 0 was there before the ranks were started again
        ("", None, "is in use, but run.lock cannot be read"),
        ("{}", None, "is in use, but run.lock cannot be read"),
    ],
)
def test_who_holds_a_folder(tmp_path, monkeypatch, lock, run, problem):
    monkeypatch.delenv("RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("RUN_ID", run)
    if lock is not None:
        (tmp_path / LOCK_FILE).write_text(lock)
    found = held_by_another(tmp_path)
    assert found is None if problem is None else f"{tmp_path} {problem}" in found
    assert found is None or f"remove {tmp_path / LOCK_FILE} if that run is gone" in found


@pytest.mark.dist
def test_a_second_run_is_refused_before_it_writes_and_a_dead_ones_lock_is_taken_over(tmp_path):
    write_corpus(tmp_path / "corpus")
    out = tmp_path / "out"
    out.mkdir()
    (out / LOCK_FILE).write_text(holder())
    arguments = tiny(tmp_path, checkpoint__enable=False, training__steps=1, lr_scheduler__warmup_steps=1)
    assert_refused(
        train(2, *arguments), f"error: job.dump_folder: {out} is in use by the run of process {os.getppid()}"
    )
    assert [path.name for path in out.iterdir()] == [LOCK_FILE]

    (out / LOCK_FILE).write_text(holder(pid=ended()))
    run = train(2, *arguments)
    assert run.codes == [0, 0], run.output
    assert not (out / LOCK_FILE).exists() and not (out / "checkpoint").exists()
    assert "Training completed at step 1" in (out / LOG_FILE).read_text()
    assert "\x1b" not in (out / LOG_FILE).read_text()
    assert load_config(["--job.config_file", str(out / CONFIG_FILE)]) == load_config(arguments)
