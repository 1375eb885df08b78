"""scripts/bench_optimizer.py on the CPU: every optimizer steps, and Newton-Schulz is part of ours."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_optimizer.py"


def test_smoke(tmp_path):
    command = [sys.executable, str(SCRIPT), "--cpu-smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row[1]: row[2:] for row in json.loads((tmp_path / "optimizer.json").read_text())["rows"]}
    assert rows.keys() == {"AdamW fused", "torch.optim.Muon", "dmuon.Muon (auto)", "dmuon.Muon (cublas)"}
    assert all(row[0] > 0 for row in rows.values())
    for name in ("dmuon.Muon (auto)", "dmuon.Muon (cublas)"):
        ms, newton_schulz, rest, _ = rows[name]
        assert 0 < newton_schulz < ms and rest > 0
