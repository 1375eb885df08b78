"""scripts/bench_optimizer.py on the CPU: every optimizer steps, and Newton-Schulz is part of ours."""

import json

import pytest

from tests.support.scripts import run_script


@pytest.mark.dist
def test_smoke(tmp_path):
    done = run_script("bench_optimizer", "--cpu-smoke", "--out", tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row[1]: row[2:] for row in json.loads((tmp_path / "optimizer.json").read_text())["rows"]}
    assert rows.keys() == {"AdamW fused", "torch.optim.Muon", "dmuon.Muon (auto)", "dmuon.Muon (cublas)"}
    assert all(row[0] > 0 for row in rows.values())
    for name in ("dmuon.Muon (auto)", "dmuon.Muon (cublas)"):
        ms, newton_schulz, rest, _ = rows[name]
        assert 0 < newton_schulz < ms and rest > 0
