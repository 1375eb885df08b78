"""scripts/bench_step.py on the CPU: every variant runs, and exposed communication is counted right."""

import json

import pytest

from tests.support.scripts import SCRIPTS, run_script


@pytest.mark.dist
def test_smoke(tmp_path):
    arguments = ("--cpu-smoke", "--profile", "--out", tmp_path)
    done = run_script("bench_step", *arguments, folder=tmp_path, world=2, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step_2.json").read_text())["rows"]
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
