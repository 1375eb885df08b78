"""Keys of features that do not exist here, older names, and TorchTitan's own presets."""

from pathlib import Path

import pytest

from torchtitan_dmuon.config import ConfigError, JobConfig, load_config
from torchtitan_dmuon.config.job_config import KEYS, SECTIONS
from torchtitan_dmuon.config.unsupported import RENAMED, UNSUPPORTED, asks_for_nothing


def refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as told:
        load_config(argv)
    return str(told.value)


MISSING = "this TorchTitan feature does not exist in torchtitan_dmuon"


def test_keys_of_missing_features_are_refused_all_at_once(toml):
    file = """[parallelism]
pipeline_parallel_degree = 2
[validation.dataloader]
num_workers = 2
pin_memory = false
[memory_estimation]
enable = true
disable_fake_mode = true
[fault_tolerance]
enable = 0
"""
    with pytest.raises(ConfigError) as told:
        load_config([*toml(file), "--parallelism.context-parallel-degree=2", "--model.converters", '["float8"]'])
    assert [line.partition(" (")[0] for line in told.value.lines] == [
        *("parallelism.context_parallel_degree", "model.converters", "parallelism.pipeline_parallel_degree"),
        *("validation.dataloader.num_workers", "memory_estimation.enable", "fault_tolerance.enable"),
    ]
    assert all(MISSING in line for line in told.value.lines)
    assert told.value.lines[2] == f"parallelism.pipeline_parallel_degree (c.toml): {MISSING}: not built yet"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_every_unsupported_name_is_refused_with_its_reason(name):
    """Unless it only shapes a feature that another key switches on."""
    if asks_for_nothing(name, "x"):
        assert load_config([f"--{name}", "x"]) == JobConfig()
    else:
        assert refusal([f"--{name}", "x"]) == f"{name} (command line): {MISSING}: {UNSUPPORTED[name]}"
    assert name not in KEYS and name not in SECTIONS


@pytest.mark.parametrize(
    "argv",
    [
        ["--parallelism.pipeline_parallel_degree", "1", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"],
        ["--model.converters", "[]", "--quantize.linear.float8.emulate", "--training.dtype=float32"],
        ["--activation_checkpoint.determinism_check", "default", "--experimental.custom_import", '""'],
    ],
)
def test_keys_that_ask_for_nothing_are_accepted(argv):
    assert load_config(argv) == JobConfig()


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_older_names_are_told_with_those_of_now(old):
    assert refusal([f"--{old}", "1"]) == f"{old} (command line): unknown key, {RENAMED[old]} is its name now"
    assert old not in KEYS and (RENAMED[old] in KEYS or RENAMED[old] in UNSUPPORTED)


PRESETS = Path(__file__).parent / "torchtitan"


@pytest.mark.parametrize("preset", ["debug_model", "llama3_8b", "llama3_70b"])
def test_presets_of_torchtitan_load(preset):
    config = load_config(["--job.config_file", str(PRESETS / f"{preset}.toml")])
    assert config.optimizer.name == "AdamW" and config.parallelism.tensor_parallel_degree in (1, 8)


def test_a_preset_that_asks_for_float8_says_what_is_missing():
    path = PRESETS / "llama3_405b.toml"
    with pytest.raises(ConfigError) as told:
        load_config(["--job.config_file", str(path)])
    expected = [f"{name} ({path})" for name in ("model.converters", "parallelism.enable_async_tensor_parallel")]
    assert [line.partition(": ")[0] for line in told.value.lines] == expected
