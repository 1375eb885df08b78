"""Loading a JobConfig: precedence, types, ranges, error lines and placeholders."""

import dataclasses
import os

import pytest

from torchtitan_dmuon.config import ConfigError, JobConfig, config_to_dict, load_config
from torchtitan_dmuon.config.job_config import KEYS


def error_of(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as info:
        load_config(argv)
    message = str(info.value)
    assert len(message.splitlines()) == 1
    return message


def value_of(config: JobConfig, name: str):
    value = config_to_dict(config)
    for part in name.split("."):
        value = value[part]
    return value


# ---- sources and precedence


def test_no_arguments_give_the_defaults():
    assert load_config([]) == JobConfig()
    assert load_config([]).optimizer.name == "DMuon"
    assert load_config([]).compile.components == ["model", "loss"]


def test_command_line_over_toml_over_defaults(toml):
    argv = toml("[training]\nsteps = 300\nseq_len = 64\n[training.dataloader]\nnum_workers = 2\n")
    config = load_config([*argv, "--training.steps", "400", "--training.dataloader.pin_memory"])
    assert (config.training.steps, config.training.seq_len, config.training.gc_freq) == (400, 64, 50)
    assert (config.training.dataloader.num_workers, config.training.dataloader.pin_memory) == (2, True)
    assert config.job.config_file == "c.toml"


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        (["--training.steps=500"], "training.steps", 500),
        (["--training.seq-len", "64"], "training.seq_len", 64),
        (["--lr-scheduler.warmup-steps=7"], "lr_scheduler.warmup_steps", 7),
        (["--training.steps", "500", "--training.steps", "600"], "training.steps", 600),
        (["--training.steps=1e4"], "training.steps", 10000),
        (["--training.steps", "2.5E3"], "training.steps", 2500),
        (["--dmuon.ns_restart_iterations", "1,2e0"], "dmuon.ns_restart_iterations", [1, 2]),
        (["--checkpoint.load_step", "-1"], "checkpoint.load_step", -1),
        (["--training.global_batch_size=-1"], "training.global_batch_size", -1),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 0.001),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--training.steps", "500"], "checkpoint.enable", True),
        (["--checkpoint.enable", "true"], "checkpoint.enable", True),
        (["--dmuon.nesterov", "false"], "dmuon.nesterov", False),
        (["--dmuon.nesterov=False"], "dmuon.nesterov", False),
        (["--dmuon.include", "a.*", "b.*"], "dmuon.include", ["a.*", "b.*"]),
        (["--dmuon.include", "a.*,b.*"], "dmuon.include", ["a.*", "b.*"]),
        (["--dmuon.include", '["a.*", "[bc].*"]'], "dmuon.include", ["a.*", "[bc].*"]),
        (["--dmuon.exclude", '["a.*",', '"b.*"]'], "dmuon.exclude", ["a.*", "b.*"]),
        (
            ["--optimizer.param_groups", '[{patterns = ["a.*", "[bc].*"]}]'],
            *("optimizer.param_groups", [{"patterns": ["a.*", "[bc].*"]}]),
        ),
        (["--dmuon.ns_restart_iterations", "[1, 2]"], "dmuon.ns_restart_iterations", [1, 2]),
        (["--compile.components="], "compile.components", []),
        (["--dmuon.adamw_lr", "none"], "dmuon.adamw_lr", None),
        (["--lr_scheduler.total_steps", "300"], "lr_scheduler.total_steps", 300),
        (["--activation_checkpoint.mode", "none"], "activation_checkpoint.mode", "none"),
        (["--job.description", "a=b c"], "job.description", "a=b c"),
        (
            ["--activation_checkpoint.selective_ac_option", "op"],
            "activation_checkpoint.selective_ac_option",
            "op",
        ),
    ],
)
def test_command_line_forms(argv, name, expected):
    value = value_of(load_config(argv), name)
    assert value == expected
    assert type(value) is type(expected)


def test_the_command_line_none_overrides_toml(toml):
    argv = toml("[dmuon]\nadamw_lr = 0.5\n")
    assert load_config(argv).dmuon.adamw_lr == 0.5
    assert load_config([*argv, "--dmuon.adamw_lr", "none"]).dmuon.adamw_lr is None


def test_a_toml_float_without_fraction_becomes_int(toml):
    steps = load_config(toml("[training]\nsteps = 1e3\n")).training.steps
    assert (steps, type(steps)) == (1000, int)


def test_toml_int_becomes_float(toml):
    lr = load_config(toml("[optimizer]\nlr = 1\n")).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_config_is_frozen_and_shares_no_lists():
    config = load_config([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.training.steps = 3
    config.dmuon.include.append("x")
    config.compile.components.clear()
    assert load_config([]) == JobConfig()
    assert JobConfig().compile.components == ["model", "loss"]


# ---- refused values


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--training.steps 1.5", "training.steps (command line): found 1.5, expected int >= 1"),
        ("--training.steps 1e400", "training.steps (command line): found inf, expected int >= 1"),
        ("--dmuon.include [bc].*", "dmuon.include (command line): found '[bc].*', expected list of str"),
        ("--training.steps true", "training.steps (command line): found 'true', expected int >= 1"),
        ("--training.steps none", "training.steps (command line): found 'none', expected int >= 1"),
        ("--training.steps 0", "training.steps (command line): found 0, expected int >= 1"),
        (
            "--training.global_batch_size 0",
            "training.global_batch_size (command line): found 0, expected int >= 1, or -1",
        ),
        ("--optimizer.lr -1e-3", "optimizer.lr (command line): found -0.001, expected float >= 0"),
        ("--optimizer.lr nan", "optimizer.lr (command line): found nan, expected float >= 0"),
        ("--optimizer.beta2 1", "optimizer.beta2 (command line): found 1.0, expected float >= 0 and < 1"),
        ("--training.max_norm 0", "training.max_norm (command line): found 0.0, expected float > 0"),
        (
            "--lr_scheduler.decay_ratio 1.5",
            "lr_scheduler.decay_ratio (command line): found 1.5, expected float >= 0 and <= 1, or none",
        ),
        ("--checkpoint.enable 1", "checkpoint.enable (command line): found '1', expected true or false"),
        ("--dmuon.clip all", "dmuon.clip (command line): found 'all', expected one of 'joint', 'buckets'"),
        (
            "--compile.components model,optimizer",
            "compile.components (command line): found ['model', 'optimizer'], expected list of 'model', 'loss'",
        ),
        ("--training.steps", "training.steps (command line): found no value, expected int >= 1"),
        ("--training.steps 500 6", "command line: found '6', expected --section.key value"),
        ("-x", "command line: found '-x', expected --section.key value"),
        ("--", "command line: found '--', expected --section.key value"),
    ],
)
def test_refused_on_the_command_line(argv, message):
    assert error_of(argv.split()) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nsteps = true", "training.steps (c.toml): found True, expected int >= 1"),
        ("[training]\nsteps = 1.5", "training.steps (c.toml): found 1.5, expected int >= 1"),
        ("[training]\nsteps = '5'", "training.steps (c.toml): found '5', expected int >= 1"),
        ("[training]\nsteps = {a = 1}", "training.steps (c.toml): found {'a': 1}, expected int >= 1"),
        ("[optimizer]\nlr = true", "optimizer.lr (c.toml): found True, expected float >= 0"),
        ("[optimizer]\nlr = inf", "optimizer.lr (c.toml): found inf, expected float >= 0"),
        ("[checkpoint]\nenable = 1", "checkpoint.enable (c.toml): found 1, expected true or false"),
        ("[dmuon]\ninclude = 'a'", "dmuon.include (c.toml): found 'a', expected list of str"),
        ("[dmuon]\ninclude = [1]", "dmuon.include (c.toml): found [1], expected list of str"),
        (
            "[activation_checkpoint]\nselective_ac_option = 2",
            "activation_checkpoint.selective_ac_option (c.toml): found 2, expected str",
        ),
        ("training = 5", "training (c.toml): found 5, expected a table [training]"),
        (
            "[training]\ndataloader = 5",
            "training.dataloader (c.toml): found 5, expected a table [training.dataloader]",
        ),
        ("[job]\nconfig_file = 'd.toml'", "job.config_file (c.toml): expected on the command line only"),
        ("[job]\ndescription = 'a\nb'", "c.toml: not valid TOML: "),
    ],
)
def test_refused_in_toml(toml, text, message):
    found = error_of(toml(text))
    assert found.startswith(message) if message.endswith(": ") else found == message


@pytest.mark.parametrize("name", ["job.dump_folder", "job.description", "dmuon.include"])
def test_bytes_that_are_no_utf_8(name):
    """As Python gives them to a program; the config could not be written beside a checkpoint."""
    text = os.fsdecode(b"o/\xff")
    found = repr([text] if name == "dmuon.include" else text)
    assert error_of([f"--{name}", text]) == f"{name} (command line): found {found}, expected UTF-8 text"
    assert load_config([f"--{name}", "o/\u00e9\U0001f600"])


def test_a_huge_integer_is_no_float(toml):
    assert error_of(toml(f"[optimizer]\nlr = {10**400}")) == "optimizer.lr (c.toml): found inf, expected float >= 0"


def test_unreadable_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = "job.config_file (command line): 'no.toml' does not exist"
    assert error_of(["--job.config_file", "no.toml"]) == missing
    folder = "job.config_file (command line): cannot read '.': Is a directory"
    assert error_of(["--job.config_file", "."]) == folder
    (tmp_path / "latin.toml").write_bytes(b"[job]\ndescription = '\xff'\n")
    assert error_of(["--job.config_file", "latin.toml"]).startswith("latin.toml: not valid TOML: 'utf-8' codec")


# ---- several problems


def lines_of(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as info:
        load_config(argv)
    assert str(info.value) == "\n".join(info.value.lines)
    return info.value.lines


def test_all_problems_are_told_at_once(toml):
    argv = toml(
        "[training]\nseq_len = 0\ntext = 3\n[dmuon]\nclip = 'x'\n[checkpoint]\nlast_save_in_hf = true\n[validations]\n"
    )
    argv += ["--training.gc_freq", "--dmuon.y", "1", "2", "--optimizer.lr", "fast", "--job.description", "{x.y}"]
    assert lines_of(argv) == [
        "dmuon.y (command line): unknown key, nearest is dmuon.clip",
        "training.gc_freq (command line): found no value, expected int >= 1",
        "optimizer.lr (command line): found 'fast', expected float >= 0",
        "training.text (c.toml): unknown key, nearest is training.text_key",
        "validations (c.toml): unknown section, nearest is validation",
        "training.seq_len (c.toml): found 0, expected int >= 1",
        "dmuon.clip (c.toml): found 'x', expected one of 'joint', 'buckets'",
        "job.description (command line): found placeholder {x.y}, expected {section.key} of a single value that is "
        "set, outside [job]",
        "checkpoint.last_save_in_hf (c.toml): found true, expected checkpoint.last_save_model_only = true with it",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--training.steps none --lr_scheduler.warmup_steps 20000", "training.steps (command line): found 'none'"),
        ("--lr_scheduler.warmup_step 5 --training.steps 10", "lr_scheduler.warmup_step (command line): unknown key"),
        ("--checkpoint.enabled --checkpoint.load_only", "checkpoint.enabled (command line): unknown key"),
    ],
)
def test_no_contradiction_is_told_of_a_key_that_has_a_problem(argv, message):
    (line,) = lines_of(argv.split())
    assert line.startswith(message)


def test_an_unreadable_file_is_told_with_the_command_line_alone():
    assert lines_of(["--job.config_file", "no.toml", "--optimizer.lr", "fast", "--training.steps", "1"]) == [
        "optimizer.lr (command line): found 'fast', expected float >= 0",
        "job.config_file (command line): 'no.toml' does not exist",
    ]


# ---- unknown names


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--training.step 5", "training.step (command line): unknown key, nearest is training.steps"),
        ("--trainin.steps=5", "trainin.steps (command line): unknown key, nearest is training.steps"),
        (
            "--optimizer.momentum .9",
            "optimizer.momentum (command line): unknown key, nearest is dmuon.momentum",
        ),
        ("--training 5", "training (command line): unknown key, nearest is training.steps"),
        ("--training.seed 5", "training.seed (command line): unknown key, debug.seed is its name now"),
    ],
)
def test_unknown_on_the_command_line(argv, message):
    assert error_of(argv.split()) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstep = 5", "training.step (c.toml): unknown key, nearest is training.steps"),
        ("[trainin]\nsteps = 5", "trainin (c.toml): unknown section, nearest is training"),
        (
            "[training.dataloder]\n",
            "training.dataloder (c.toml): unknown section, nearest is training.dataloader",
        ),
        ("steps = 5", "steps (c.toml): unknown key, nearest is training.steps"),
        ("'training.steps' = 5", "training.steps (c.toml): unknown key, nearest is training.steps"),
        ('"a\\nb" = 5', "a\\nb (c.toml): unknown key, nearest is compile.enable"),
    ],
)
def test_unknown_in_toml(toml, text, message):
    assert error_of(toml(text)) == message


# ---- keys that contradict each other


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--training.steps 10",
            "lr_scheduler.warmup_steps (default): found 200, expected 0 to 10, the length of the schedule",
        ),
        (
            "--training.skip_sigma 6",
            "training.skip_sigma (command line): found 6.0, expected training.skip_max_steps > 0 with it",
        ),
        (
            "--lr_scheduler.total_steps 10 --lr_scheduler.warmup_steps 11",
            "lr_scheduler.warmup_steps (command line): found 11, expected 0 to 10, the length of the schedule",
        ),
        (
            "--profiling.enable_profiling --profiling.profile_freq 3",
            "profiling.profile_freq (command line): found 3, expected at least profiler_warmup + profiler_active = 4",
        ),
        (
            "--activation_checkpoint.selective_ac_option 0",
            "activation_checkpoint.selective_ac_option (command line): found '0', "
            "expected 'op' or a positive integer as a string",
        ),
        (
            "--training.dataset text",
            "training.dataset_path (default): found none, expected a glob or folder because training.dataset is 'text'",
        ),
        (
            "--training.dataset_path d",
            "training.dataset_path (command line): found 'd', expected none because training.dataset is 'stdlib'",
        ),
        (
            "--validation.enable --validation.dataset bin",
            "validation.dataset_path (default): found none, expected a glob or folder because "
            "validation.dataset is 'bin'",
        ),
        (
            "--training.dataloader.persistent_workers",
            "training.dataloader.persistent_workers (command line): found True, "
            "expected training.dataloader.num_workers > 0 with it",
        ),
    ],
)
def test_contradictions(argv, message):
    assert error_of(argv.split()) == message


def test_what_is_switched_off_does_not_contradict():
    assert load_config(["--profiling.profile_freq", "3"]).profiling.profile_freq == 3
    assert load_config(["--validation.dataset", "bin"]).validation.dataset == "bin"


# ---- placeholders


def test_placeholders_see_the_final_config(toml):
    argv = toml('[job]\ndump_folder = "o/{model.flavor}-{optimizer.name}"\n[model]\nflavor = "a"\n')
    assert load_config([*argv, "--model.flavor", "b"]).job.dump_folder == "o/b-DMuon"
    text = "{optimizer.lr} {dmuon.nesterov} {training.dataloader.num_workers} {{x}}"
    assert load_config(["--job.description", text]).job.description == "0.0008 true 0 {x}"


@pytest.mark.parametrize("name", ["x", "model.flavour", "job.dump_folder", "dmuon.adamw_lr", "dmuon.include", ""])
def test_unknown_placeholders(name):
    assert error_of(["--job.dump_folder", "o/{" + name + "}"]) == (
        f"job.dump_folder (command line): found placeholder {{{name}}}, "
        "expected {section.key} of a single value that is set, outside [job]"
    )


# ---- paths

PATHS = [name for name, spec in KEYS.items() if spec.path]


def test_every_key_of_a_path_is_declared_one():
    named = [name for name in KEYS if name.endswith(("_path", "_folder", ".folder", "_file"))]
    assert set(named) == set(PATHS)


@pytest.mark.parametrize("name", [name for name in PATHS if name != "job.config_file"])
def test_home_folder(name, toml, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    allow = ["--training.dataset", "text", "--training.dataset_path", "d", "--validation.dataset", "text"]
    allow += ["--checkpoint.enable"]
    section, _, key = name.rpartition(".")
    assert value_of(load_config([*allow, f"--{name}=~/a/*.txt"]), name) == "/home/me/a/*.txt"
    if name != "training.dataset_path":
        assert value_of(load_config([*toml(f"[{section}]\n{key} = '~'\n"), *allow]), name) == "/home/me"
    assert value_of(load_config([*allow, f"--{name}=a/~/b"]), name) == "a/~/b"
    assert error_of([*allow, f"--{name}=~nobody-here/a"]) == (
        f"{name} (command line): found '~nobody-here/a', expected a user's name after ~; "
        "write ./~nobody-here/a for a file of that name"
    )


def test_home_folder_of_the_config_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text("[training]\nsteps = 300\n")
    assert load_config(["--job.config_file=~/c.toml"]).training.steps == 300
