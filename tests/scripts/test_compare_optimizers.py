"""scripts/compare_optimizers.py: what it reads from logs, what it writes, and one run for real."""

import importlib.util
import subprocess
import sys

import pytest

from tests.support.training import ROOT, write_corpus
from torchtitan_dmuon.config import load_config

spec = importlib.util.spec_from_file_location("compare_optimizers", ROOT / "scripts" / "compare_optimizers.py")
compare = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = compare  # dataclasses look their module up
spec.loader.exec_module(compare)

LOG = """
[rank0]:12-01 05:07:44 step: 1/3  loss: 5.5000  grad_norm: 4.2  lr: 4.000e-03  data: 1.0%  optimizer: 30.0 ms
[rank0]:12-01 05:07:44 step: 2/3  loss: 4.0000  grad_norm: 4.2  lr: 4.000e-03  data: 1.0%  optimizer: 10.0 ms
[rank0]:12-01 05:07:44 validation: step: 2/3  loss: 4.2500
[rank0]:12-01 05:07:44 step: 3/3  loss: 3.0000  grad_norm: 4.2  lr: 4.000e-03  data: 1.0%  optimizer: 20.0 ms
"""


def test_log_and_table():
    result = compare.read_log(LOG, 12.4)
    assert result.losses == {1: 5.5, 2: 4.0, 3: 3.0} and result.validation == 4.25
    assert result.mean_of_last() == 3.0 and result.mean_of_last(0.7) == 3.5
    worse = compare.Result({1: 4.0})
    lines = compare.table({"worse": worse, "better": result}).splitlines()
    assert lines[2] == "| better | 3.0000 | 4.2500 | 20.0 | 12 |"
    assert lines[3] == "| worse | 4.0000 | - | - | 0 |"


def test_an_unknown_variant_is_refused(capsys):
    with pytest.raises(SystemExit):
        compare.main(["--only", "kj,sophia"])
    assert "unknown variant 'sophia'; known: polar_express, you, kj" in capsys.readouterr().err


@pytest.mark.parametrize("name", compare.VARIANTS)
def test_every_variant_is_a_config(name):
    load_config(compare.VARIANTS[name])


@pytest.mark.parametrize("installed", [True, False])
def test_without_matplotlib_there_is_a_table_and_no_plot(tmp_path, monkeypatch, capsys, installed):
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    elif importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    monkeypatch.setattr(compare, "run", lambda *_: compare.Result({1: 4.0}))
    assert compare.main(["--only", "kj", "--out", str(tmp_path)]) == 0
    assert "| kj | 4.0000 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "loss.png").exists() == installed
    assert ("needs the package matplotlib (extra plot): pip install matplotlib" in capsys.readouterr().out) != installed


@pytest.mark.slow
@pytest.mark.dist
def test_one_variant_for_three_steps(tmp_path):
    pytest.importorskip("matplotlib")
    write_corpus(tmp_path / "corpus")
    data = ["--training.dataset", "text", "--training.dataset_path", str(tmp_path / "corpus" / "*.txt")]
    command = [sys.executable, "scripts/compare_optimizers.py", "--steps", "3", "--processes", "1"]
    command += ["--out", str(tmp_path / "out"), "--only", "deepseek_v4", *data]
    command += ["--training.seq_len", "32", "--training.local_batch_size", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| deepseek_v4 |" in table
    assert (tmp_path / "out" / "loss.png").read_bytes()[:4] == b"\x89PNG"
