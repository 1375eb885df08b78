"""scripts/scaling_run.py: the fit against known laws, the grid, resuming, failures, the report, the Slurm array."""

import csv
import json
import re
import sys

import numpy as np
import pytest

from tests.support.training import ROOT
from torchtitan_dmuon.config import ConfigError

sys.path.insert(0, str(ROOT / "scripts"))  # as for a script that python runs
import scaling_report as report
import scaling_run as scaling
from scaling_fit import fit_law

SPECS = sorted((ROOT / "scripts" / "scaling").glob("*.toml"))

# ---------------------------------------------------------------- the fit

COMPUTE = np.geomspace(1e17, 1e21, 10)


def known_law(e=1.7, a=2.0, alpha=0.15):
    return e + a * (COMPUTE / 1e18) ** -alpha


@pytest.mark.parametrize("law", [{}, {"e": 0.0}, {"e": 2.5, "alpha": 0.5}, {"a": 0.3, "alpha": 0.08}], ids=str)
def test_a_law_without_noise_is_found(law):
    fit = fit_law(COMPUTE, known_law(**law))
    expected = {"e": 1.7, "a": 2.0, "alpha": 0.15, **law}
    assert fit.law.e == pytest.approx(expected["e"], abs=2e-3)
    assert fit.law.alpha == pytest.approx(expected["alpha"], rel=5e-3)
    assert fit.law.a == pytest.approx(expected["a"] * (fit.law.scale / 1e18) ** -expected["alpha"], rel=5e-3)
    np.testing.assert_allclose(fit.law(COMPUTE), known_law(**law), rtol=1e-4)


def test_intervals_hold_the_law_as_often_as_they_say():
    held = {"e": 0, "alpha": 0}
    for seed in range(12):
        noisy = known_law() + 0.01 * np.random.default_rng(seed).standard_normal(len(COMPUTE))
        fit = fit_law(COMPUTE, noisy, seed)
        for name, value in (("e", 1.7), ("alpha", 0.15)):
            low, high = fit.interval(name)
            held[name] += low <= value <= high
        low, high = fit.band(COMPUTE)
        assert np.all(low <= high)
    assert all(count >= 8 for count in held.values()), held  # 90% of 12 are 10.8


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="three different values"):
        fit_law([1e18, 1e18, 1e19], [3.0, 3.1, 2.9])
    with pytest.raises(ValueError, match="does not fall"):
        fit_law([1e18, 1e19, 1e20], [1.0, 2.0, 3.0])


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_shipped_specs_expand(path):
    runs = scaling.expand(scaling.read_spec(path), [])
    assert len({run.name for run in runs}) == len(runs)
    assert len({run.figures["parameters"] for run in runs}) == 4  # sizes
    assert {run.keys["optimizer.name"] for run in runs} == {"DMuon", "AdamW"}
    assert all(run.figures["planned_memory"] < 75 * 2**30 for run in runs)


SPEC = """
[run]
config_file = "train_configs/debug_model.toml"
parallel = 2
[fixed]
warmup_ratio = 0.1
"training.seq_len" = 64
"checkpoint.enable" = false
"dmuon.min_matrix_dim" = 32
[[grid]]
"model.flavor" = ["tiny64", "tiny96", "tiny128", "tiny160"]
"optimizer.name" = ["DMuon", "AdamW"]
"training.steps" = [20]
[[grid]]
"model.flavor" = ["tiny64"]
"optimizer.lr" = [1e-3, 2e-3]
tokens_per_parameter = [1]
ranks = [1, 2]
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    return path


def test_keys_of_a_run(spec):
    runs = {run.name: run for run in scaling.expand(scaling.read_spec(spec), ["--training.seq_len", "32"])}
    assert len(runs) == 8 + 4
    run = runs["tiny96,AdamW,steps=20,ranks=1"]
    arguments = dict(zip(run.arguments[::2], run.arguments[1::2], strict=True))
    assert arguments["--optimizer.name"] == "AdamW" and arguments["--training.seq_len"] == "32"
    assert arguments["--lr_scheduler.warmup_steps"] == "2"
    assert run.figures["tokens"] == 20 * 8 * 32
    run = runs["tiny64,lr=0.001,tokens_per_parameter=1,ranks=2"]
    steps = int(run.arguments[run.arguments.index("--training.steps") + 1])
    assert steps == round(run.figures["parameters"] / (2 * 8 * 32)) and run.ranks == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[run]", "[runs]", "expected .run."),
        ("parallel = 2", "paralel = 2", "unknown key 'paralel'"),
        ('"training.steps" = [20]', '"training.steps" = 20', "'training.steps' needs a list"),
        ('"training.steps" = [20]', '"training.stepps" = [20]', "unknown key"),
        ('["DMuon", "AdamW"]', '["DMuon", "DMuon"]', "two runs are called"),
    ],
)
def test_mistakes_in_a_spec(spec, before, after, message):
    spec.write_text(SPEC.replace(before, after))
    with pytest.raises((scaling.SpecError, ConfigError), match=message):
        scaling.expand(scaling.read_spec(spec), [])


def test_a_slurm_array(spec, tmp_path, capsys):
    script = tmp_path / "array.sh"
    assert (
        scaling.main([str(spec), "--sbatch", str(script), "--out", str(tmp_path / "out"), "--training.seq_len", "32"])
        == 0
    )
    text = script.read_text()
    assert "#SBATCH --array=0-11\n" in text and "--gpus-per-node=2" in text
    assert re.search(r"exec .*scaling_run.py.*'--training.seq_len' '32' --only \"\$SLURM_ARRAY_TASK_ID\"", text)
    assert scaling.main([str(spec), "--list"]) == 0
    assert "12 runs" in capsys.readouterr().out


# ---------------------------------------------------------------- runs

# Writes the log of a run whose loss follows a law of its size; AdamW of tiny128 fails while a file is there.
FAKE = """#!/usr/bin/env bash
echo "$*" >> {calls}
[[ "$*" == *tiny128*AdamW* && -e {broken} ]] && {{ echo "it broke"; exit 3; }}
{python} - "$@" <<'CODE'
import sys
size = float(sys.argv[sys.argv.index("--model.flavor") + 1].removeprefix("tiny"))
loss = 1.5 + (2.5 if "AdamW" in sys.argv else 2.0) * (size / 64) ** -0.5
for step in range(1, 21):
    print(f"- INFO - step: {{step:4d}}  loss: {{loss + 1 / step - 0.05:.4f}}  grad_norm: 1.0  lr: 1e-3  tokens/s: 1,000"
          "  TFLOP/s: 0.01  memory: 0.25 GiB  step: 12.5 ms  optimizer: 2.5 ms  data: 0.1 ms")
CODE
"""


def test_runs_resume_failures_are_apart_and_the_report_is_written(spec, tmp_path, monkeypatch, capsys):
    calls, broken, out = tmp_path / "calls", tmp_path / "broken", tmp_path / "out"
    fake = tmp_path / "run_train.sh"
    fake.write_text(FAKE.format(calls=calls, broken=broken, python=sys.executable))
    fake.chmod(0o755)
    broken.touch()
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert scaling.main([str(spec), "--out", str(out)]) == 1
    name = "tiny128,AdamW,steps=20,ranks=1"
    assert "it broke" in (out / "failed" / name / "log.txt").read_text()
    assert "exit code 3" in capsys.readouterr().err
    assert len(list((out / "runs").iterdir())) == 11 and len(calls.read_text().splitlines()) == 12

    broken.unlink()
    assert scaling.main([str(spec), "--out", str(out)]) == 0
    assert calls.read_text().count("\n") == 13  # only the failed one again
    assert scaling.main([str(spec), "--out", str(out), "--training.seq_len", "32"]) == 0
    assert calls.read_text().count("\n") == 25  # other keys: other runs

    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == 12
    row = next(row for row in rows if row["run"] == name)
    assert float(row["loss"]) == pytest.approx(1.5 + 2.5 * 2**-0.5, abs=0.01)
    assert float(row["tokens_per_second"]) == pytest.approx(8 * 32 / 12.5e-3)
    assert float(row["memory_gib"]) == 0.25 and float(row["optimizer_ms"]) == 2.5
    told = capsys.readouterr().out
    assert "DMuon: L(C) = " in told and "90% intervals" in told
    for picture in ("loss_against_compute", "tokens_to_loss", "learning_rates", "ranks"):
        assert (out / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- the report


def result(name, flops, losses, **keys):
    curve = {"losses": [[10 * (i + 1), loss] for i, loss in enumerate(losses)], "validation": None, "step_ms": [2.0]}
    return report.Result(name, keys, {"flops": flops, "tokens_per_step": 100}, curve, 1.0)


def test_best_frontier_and_tokens_to_a_loss():
    runs = [result(f"lr{lr}", 1e18, [4.0, loss], **{"optimizer.lr": lr}) for lr, loss in ((1, 3.0), (2, 2.5), (4, 2.8))]
    assert [run.name for run in report.best_runs(runs)] == ["lr2"]
    points = [result(str(i), flops, [loss]) for i, (flops, loss) in enumerate([(1, 3.0), (2, 3.5), (3, 2.5), (3, 2.6)])]
    assert [run.name for run in report.frontier(points)] == ["0", "2"]
    run = result("a", 1, [4.0, 3.0, 2.0])
    assert run.tokens_to(3.5) == 2000 and run.tokens_to(4.0) == 1000 and run.tokens_to(1.0) is None
    assert run.tokens_per_second == 50_000


def test_the_log():
    text = (
        "step:    1  loss: 5.0  tokens/s: 10  memory: 0.1 GiB  step: 99.0 ms  optimizer: 9.0 ms\n"
        "step:    2  loss: 4.0  tokens/s: 1,200  memory: 0.2 GiB  step: 20.0 ms  optimizer: 2.0 ms\n"
        "validation: step:    2  loss: 4.25\n"
    )
    curve = report.read_log(text)
    assert curve["losses"] == [[1, 5.0], [2, 4.0]] and curve["validation"] == 4.25
    assert curve["tokens_per_second"] == [1200.0] and curve["step_ms"] == [20.0]
    assert json.loads(json.dumps(curve)) == curve
