"""A JobConfig written back as TOML or a dict, the help text, and `python -m torchtitan_dmuon.config`."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_dmuon.config import JobConfig, config_to_dict, config_to_toml, load_config
from torchtitan_dmuon.config.job_config import KEYS, SECTIONS

REPOSITORY = Path(__file__).parents[2]


def test_toml_round_trip(toml):
    argv = ["--job.description", 'a "b" \\ {{x}} \u00e9 \U0001f600 \t\n\x7f {model.name}']
    argv += ["--optimizer.eps", "1e-16", "--dmuon.adamw_lr", "3e-4", "--dmuon.include", "a.*", 'b"']
    argv += ["--training.dataset", "text", "--training.dataset_path", "d/*.txt", "--compile.components="]
    config = load_config([*argv, "--training.dataloader.num_workers", "3"])
    assert config.job.description == 'a "b" \\ {x} \u00e9 \U0001f600 \t\n\x7f llama3'
    assert load_config(toml(config_to_toml(config))) == config
    assert load_config(toml(config_to_toml(JobConfig()))) == JobConfig()


def test_toml_text(toml):
    lines = config_to_toml(load_config(toml("[training]\nsteps = 300\n"))).splitlines()
    assert lines[:6] == [
        "[job]",
        '# config_file = "c.toml"',
        'dump_folder = "./outputs"',
        'description = "default job"',
        "print_config = false",
        "",
    ]
    start = lines.index("[lr_scheduler]")
    assert lines[start + 1 : start + 4] == [
        "warmup_steps = 200",
        "# total_steps = none",
        "# decay_ratio = none",
    ]
    assert lines[lines.index("[training.dataloader]") - 1] == ""
    assert [line for line in lines if line.startswith("[")] == [f"[{section}]" for section in SECTIONS]


def test_config_to_dict_is_plain():
    table = config_to_dict(JobConfig())
    assert table["training"]["dataloader"] == {
        "num_workers": 0,
        "persistent_workers": False,
        "pin_memory": False,
        "prefetch_factor": None,
    }
    assert list(table) == [section for section in SECTIONS if "." not in section]


def test_every_key_can_be_none_only_by_default():
    # TOML has no null, so an optional key with another default could not be written back.
    assert [spec.name for spec in KEYS.values() if spec.optional and spec.default is not None] == []
    assert all(spec.check(spec.default) == spec.default for spec in KEYS.values())


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit) as info:
        load_config(["--help"])
    assert info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for spec in KEYS.values():
        assert f" --{spec.name} " in text
        assert f"{spec.help} ({spec.expected()}; default" in text
    assert all(f" [{section}]: " in text for section in SECTIONS)


def run_module(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchtitan_dmuon.config", *argv],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_program():
    done = run_module()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run_module("--training.steps", "x")
    line = "error: training.steps (command line): found 'x', expected int >= 1\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
    done = run_module("--job.print_config")
    assert done.stdout == config_to_toml(load_config(["--job.print_config"]))
    done = run_module("--help")
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "usage: train.py [--section.key value ...]")


def test_the_config_package_needs_no_torch():
    code = "import sys, torchtitan_dmuon.config; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
