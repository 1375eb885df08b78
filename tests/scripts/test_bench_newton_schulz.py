"""scripts/bench_newton_schulz.py on the CPU: it runs, and its check passes."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_newton_schulz.py"


def test_smoke(tmp_path):
    command = [sys.executable, str(SCRIPT), "--cpu-smoke", "--check", "--table", "--model", "--out", str(tmp_path)]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # interpreted is slow
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CHECK passed" in done.stdout
    rows = json.loads((tmp_path / "newton_schulz.json").read_text())["rows"]
    assert {row[1] for row in rows if row[0] == "32x64" and isinstance(row[2], float)} >= {
        "direct bf16 cuBLAS",
        "ours auto",
        "ours cublas",
    }
    total = json.loads((tmp_path / "newton_schulz_3b.json").read_text())["rows"]
    assert {row[0] for row in total if isinstance(row[1], float)} >= {"direct bf16 cuBLAS", "ours auto"}
