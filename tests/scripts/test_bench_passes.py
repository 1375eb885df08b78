"""scripts/bench_passes.py on the CPU: it runs, and every variant that can run there is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_passes.py"


def test_smoke(tmp_path):
    options = ["--models", "tiny", "--cpu", "--variants", "eager", "--out", str(tmp_path)]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "passes_tiny.json").read_text())
    assert {row["variant"] for row in rows} == {"eager"} and len(rows) == 4
    assert all(row["error"] < 1e-6 for row in rows)
