"""scripts/bench_step.py on the CPU: every variant runs, and exposed communication is counted right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_smoke(tmp_path, world):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    command = [sys.executable, *launcher, str(SCRIPTS / "bench_step.py"), "--cpu-smoke", "--profile"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"step_{world}.json").read_text())["rows"]
    assert [row[1] for row in rows] == ["adamw", "adamw-z2", "adamw-hot", "allgather", "dmuon-z2", "dmuon-z3"]
    for _, _, step, forward, backward, optimizer, *_ in rows:
        assert min(forward, backward, optimizer) > 0
        assert step >= max(forward, backward, optimizer)


@pytest.mark.parametrize(
    ("communication", "computation", "expected"),
    [
        ([(0, 10)], [], 10),
        ([(0, 10)], [(2, 4), (3, 6)], 6),
        ([(0, 4), (2, 6)], [(5, 9)], 5),
        ([(3, 4)], [(0, 10)], 0),
        ([], [(0, 10)], 0),
    ],
)
def test_exposed_time(monkeypatch, communication, computation, expected):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from bench_step import exposed_time

    assert exposed_time(communication, computation) == expected
