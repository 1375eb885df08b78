"""What `run_train.sh` finds before torchrun: every problem of a run, a line each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.llama3 import Llama3HFNameMap
from tests.support.training import write_corpus
from torchtitan_dmuon import preflight
from torchtitan_dmuon.checkpoint.directory import CHECKSUMS_FILE
from torchtitan_dmuon.config import ConfigError, Problems, load_config

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus", documents=2)
    for name, files in {"hf": ["model.safetensors"], "half": ["trainer.json"], "empty": []}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    return tmp_path


def found(ranks: int, *argv: str) -> list[str]:
    """The lines of what is wrong with a run; none if nothing is."""
    try:
        preflight.examine(load_config(["--lr_scheduler.warmup_steps", "2", *argv]), ranks, Problems())
    except ConfigError as error:
        return error.lines
    return []


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("optimizer", ["DMuon", "AdamW"])
def test_a_run_without_a_problem(folder, ranks, optimizer):
    options = ["--training.dataset", "text", "--training.dataset_path", "corpus", "--checkpoint.enable"]
    patterns = ["--dmuon.exclude", "*.wo.weight", "--optimizer.param_groups", '[{patterns = ["*norm*"], lr = 1e-4}]']
    assert found(ranks, "--optimizer.name", optimizer, *options, *patterns) == []
    assert not (folder / "outputs").exists()  # it creates nothing


INITIAL = ["--checkpoint.enable", "--checkpoint.initial_load_path"]
MATCHES_NONE = "matches no trainable parameter of the model"


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--model.flavor", "7B"], ["model: unknown flavor of llama3 '7B': did you mean '70B'?"]),
        (["--model.name", "llama"], ["model: unknown model 'llama': did you mean 'llama3'?"]),
        (["--model.hf_assets_path", "no"], ["model.hf_assets_path: no does not exist: give a tokenizer.json"]),
        (["--model.hf_assets_path", "empty"], ["model.hf_assets_path: no tokenizer at empty/tokenizer.json"]),
        (
            ["--training.dataset", "text", "--training.dataset_path", "no/where"],
            ["training.dataset_path = 'no/where': does not exist; give a file, a folder or a glob"],
        ),
        (
            ["--validation.enable", "--validation.dataset", "bin", "--validation.dataset_path", "corpus"],
            ["validation.dataset_path = 'corpus': folder holds no '*.bin' file"],
        ),
        (
            ["--training.dataset", "text", "--training.dataset_path", "no/*.txt"],
            ["training.dataset_path = 'no/*.txt': matches no file"],
        ),
        (
            [
                "--training.sources",
                "[{name = 'a', dataset = 'bin', dataset_path = 'corpus', weight = 1},"
                " {dataset = 'text', dataset_path = 'no', weight = 1}]",
            ],
            [
                "training.sources, a.dataset_path = 'corpus': folder holds no '*.bin' file",
                "training.sources, no.dataset_path = 'no': does not exist",
            ],
        ),
        (["--training.global_batch_size", "7"], ["training.global_batch_size = 7 is not a multiple of"]),
        (
            ["--parallelism.data_parallel_shard_degree", "3"],
            ["parallelism: data_parallel_replicate_degree 1 x data_parallel_shard_degree 3 x"],
        ),
        (
            ["--parallelism.tensor_parallel_degree", "2", "--training.seq_len", "33"],
            ["parallelism.tensor_parallel_degree: found 2, which does not divide training.seq_len = 33"],
        ),
        (
            ["--dmuon.include", '["no.*", "*.wq.*", "none"]', "--dmuon.exclude", "nobody"],
            [
                f"dmuon.{key} matches no parameter"
                for key in ("include: 'no.*'", "include: 'none'", "exclude: 'nobody'")
            ],
        ),
        (
            ["--optimizer.param_groups", '[{patterns = ["a", "*norm*", "b"]}, {patterns = ["*ffn_norm*"]}]'],
            [
                f"optimizer.param_groups: table 0: pattern 'a' {MATCHES_NONE}",
                f"optimizer.param_groups: table 0: pattern 'b' {MATCHES_NONE}",
                "optimizer.param_groups: table 1: every parameter of its patterns is in an earlier table",
            ],
        ),
        (["--dmuon.ns_coefficients", "deepseek_v4"], ["dmuon.ns_backend, ns_coefficients, ns_steps"]),
        (["--job.dump_folder", "corpus/000.txt"], ["job.dump_folder: cannot write to corpus/000.txt: "]),
        (
            ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"],
            ["checkpoint.create_seed_checkpoint: found true, expected one process"],
        ),
        ([*INITIAL, "no"], ["checkpoint.initial_load_path: no does not exist"]),
        (
            [*INITIAL, "hf"],
            ["checkpoint.initial_load_path: hf is a HuggingFace folder: set checkpoint.initial"],
        ),
        ([*INITIAL, "half"], ["checkpoint.initial_load_path: half is no complete checkpoint (half-written, checksums"]),
        ([*INITIAL, "hf", "--checkpoint.initial_load_in_hf"], []),
        (
            [*INITIAL, "half", "--checkpoint.initial_load_in_hf"],
            ["checkpoint.initial_load_path: half is a checkpoint of a run: leave out checkpoint.initial_load_in_hf"],
        ),
        (
            [*INITIAL, "empty", "--checkpoint.initial_load_in_hf"],
            ["checkpoint.initial_load_path: empty holds no *.safetensors files"],
        ),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_each_problem_is_a_line(folder, argv, lines):
    told = found(2, *argv)
    assert len(told) == len(lines), told
    for line, expected in zip(told, lines, strict=True):
        assert line.startswith(expected), line


def test_a_run_that_goes_on_needs_its_first_weights_no_more(folder):
    (folder / "outputs" / "checkpoint" / "step-1").mkdir(parents=True)
    (folder / "outputs" / "checkpoint" / "step-1" / CHECKSUMS_FILE).write_text("{}")
    assert found(2, *INITIAL, "no") == []
    assert len(found(1, *INITIAL, "no", "--checkpoint.create_seed_checkpoint")) == 1


def test_a_parameter_without_a_huggingface_name(folder, monkeypatch):
    monkeypatch.delitem(Llama3HFNameMap.in_block, "attention.wo.weight")
    told = found(1)
    assert len(told) == 6 and told[0].startswith("model.name: 'layers.0.attention.wo.weight' is not a parameter of")


def test_everything_at_once_before_torchrun(folder):
    argv = ["--training.step", "5", "--optimizer.lr", "fast", "--dmuon.include", "no.*", "--model.hf_assets_path", "no"]
    argv += ["--training.global_batch_size", "7", "--training.gc_freq", "1e2", "--checkpoint.last_save_in_hf"]
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "NGPU": "4"}
    run = [str(ROOT / "run_train.sh"), *argv]
    done = subprocess.run(run, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    expected = [
        "training.step (command line): unknown key, nearest is training.steps",
        "optimizer.lr (command line): found 'fast', expected float >= 0",
        "checkpoint.last_save_in_hf (command line): found true, expected checkpoint.last_save_model_only = true",
        "training.global_batch_size = 7 is not a multiple of local_batch_size x data-parallel ranks = 8 x 4 = 32",
        "model.hf_assets_path: no does not exist",
        "dmuon.include: 'no.*' matches no parameter of the model",
    ]
    assert len(lines) == len(expected), done.stderr
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(f"error: {start}"), line


@pytest.mark.parametrize(
    ("ngpu", "nnodes", "code", "out"), [("3", "2", 0, "3 0 "), ("", "", 0, "2 0 "), ("x", "", 1, "")]
)
def test_the_number_of_processes(folder, monkeypatch, capsys, ngpu, nnodes, code, out):
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("NGPU", ngpu)
    monkeypatch.setenv("NNODES", nnodes)
    assert preflight.main(["--training.global_batch_size", "48" if nnodes else "16"]) == code
    captured = capsys.readouterr()
    assert captured.out.startswith(out)
    expected = "error: NGPU (environment): found 'x', expected a number of at least 1\n" if code else ""
    assert captured.err == expected
