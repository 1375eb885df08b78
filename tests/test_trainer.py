"""The whole program, run as users run it: train, stop, resume, and every way to be refused."""

import json
import os
import re
import shutil
import signal
import sys
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from models.llama3 import model as llama3
from tests.support.private import find_inf_on_device
from tests.support.training import ROOT, Torchrun, assert_refused, tiny, train, write_corpus
from torchtitan_dmuon.config import ConfigError, load_config
from torchtitan_dmuon.trainer import Trainer

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus")
    return tmp_path


def checkpoint_of(folder, step, out="out"):
    """All tensors of a checkpoint, by name."""
    path = folder / f"{out}-{step}.pt"
    dcp_to_torch_save(str(folder / out / "checkpoint" / f"step-{step}"), str(path))
    return torch.load(path)


def board(folder, axis=""):
    return EventAccumulator(str(folder / "out" / "tb" / axis)).Reload()


def scalars(folder, tag, axis=""):
    """[(step, value)] that TensorBoard shows."""
    return [(event.step, event.value) for event in board(folder, axis).Scalars(tag)]


def assert_bitwise(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("optimizer", ["DMuon", "AdamW"])
def test_resume_is_bitwise(folder, optimizer):
    """Stopped at 2 and at 4 and resumed, against a run that was never stopped; both logs and tensors."""
    whole = train(2, *tiny(folder, optimizer__name=optimizer, training__steps=6, lr_scheduler__total_steps=6))
    assert whole.codes == [0, 0], whole.output
    expected = checkpoint_of(folder, 6)
    shutil.rmtree(folder / "out")
    seen = {}
    for stop in (2, 4, 6):
        part = train(2, *tiny(folder, optimizer__name=optimizer, training__steps=stop, lr_scheduler__total_steps=6))
        assert part.codes == [0, 0], part.output
        seen |= part.steps
    assert seen == whole.steps and list(seen) == [1, 2, 3, 4, 5, 6]
    assert_bitwise(checkpoint_of(folder, 6), expected)
    assert json.loads((folder / "out/checkpoint/step-6/trainer.json").read_text())["loader"]["consumed_samples"] == 24
    assert "steps = 6" in (folder / "out/checkpoint/step-6/config.toml").read_text()


def test_resume_on_other_numbers_of_ranks(folder):
    """2 ranks, then 4, then 1, with one global batch: the losses of a run on 2. Of three sources, of which one is read
    less from step 4 on."""
    files = sorted((folder / "corpus").iterdir())
    sources = ", ".join(
        f"{{name = 's{number}', dataset = 'text', dataset_path = '{files[number]}', weight = {number + 1}}}"
        for number in range(3)
    )
    options = {
        "training__global_batch_size": 8,
        "lr_scheduler__total_steps": 6,
        "training__dataset": "stdlib",
        "training__dataset_path": "none",
        "training__sources": f"[{sources}]",
        "training__stages": "[{first_step = 4, sources = [{name = 's0', weight = 1}, {name = 's2', weight = 0.5}]}]",
    }
    whole = train(2, *tiny(folder, training__steps=6, **options))
    shutil.rmtree(folder / "out")
    seen = {}
    for world, stop in ((2, 2), (4, 4), (1, 6)):
        part = train(world, *tiny(folder, training__steps=stop, **options))
        assert part.codes == [0] * world, part.output
        seen |= part.steps
    for step, values in whole.steps.items():
        assert seen[step] == pytest.approx(values, abs=2e-4), step
    assert re.findall(r"tokens read: (.*)", part.output)[-1] == re.findall(r"tokens read: (.*)", whole.output)[-1]


MESHES = [
    {"parallelism__data_parallel_replicate_degree": 2},
    {"parallelism__tensor_parallel_degree": 2},
    {
        "parallelism__tensor_parallel_degree": 2,
        "parallelism__disable_loss_parallel": True,
        "dmuon__others": "dedicated",
    },
    {"parallelism__data_parallel_replicate_degree": 2, "parallelism__tensor_parallel_degree": 2},
]


def test_every_mesh_gives_the_same_losses_and_takes_up_the_others_checkpoints(folder):
    """4 ranks: 1-D, then each other mesh resumed from it (vocabulary 257: nothing divides it), the last also alone."""
    options = {"training__global_batch_size": 8, "lr_scheduler__total_steps": 4, "training__steps": 4}
    whole = train(4, *tiny(folder, **options))
    assert whole.codes == [0] * 4, whole.output
    for mesh in MESHES:
        shutil.rmtree(folder / "out" / "checkpoint" / "step-4", ignore_errors=True)
        resumed = train(4, *tiny(folder, **options, **mesh))
        assert resumed.codes == [0] * 4, resumed.output
        assert list(resumed.steps) == [3, 4]
        for step in (3, 4):
            assert resumed.steps[step] == pytest.approx(whole.steps[step], abs=2e-4), (mesh, step)
    alone = train(4, *tiny(folder, checkpoint__enable=False, **options, **MESHES[-1]))
    for step, values in whole.steps.items():
        assert alone.steps[step] == pytest.approx(values, abs=2e-4), step


def test_compiled_blocks_under_tensor_parallelism_give_the_losses_of_eager(folder):
    """Everything dedicated: what enters the first block is a collective's result that nobody has waited for."""
    mesh = {"parallelism__tensor_parallel_degree": 2, "dmuon__others": "dedicated", "checkpoint__enable": False}
    eager = train(2, *tiny(folder, **mesh))
    run = train(2, *tiny(folder, **mesh, compile__enable=True, compile__backend="aot_eager"))
    assert run.codes == [0, 0], run.output
    for step, values in eager.steps.items():
        assert run.steps[step] == pytest.approx(values, abs=2e-4), step


@pytest.mark.parametrize(("degree", "tokens"), [(1, 128), (2, 64)])
def test_tokens_and_mfu_are_those_of_all_devices(folder, degree, tokens):
    """Tokens a second times seconds a step: ranks of one tensor-parallel group share the tokens of a step."""
    options = {"checkpoint__enable": False, "parallelism__tensor_parallel_degree": degree, "metrics__peak_tflops": 0.1}
    run = train(2, *tiny(folder, **options, metrics__enable_tensorboard=True))
    assert run.codes == [0, 0], run.output
    flops = float(re.search(r"parameters, ([\d.e+]+) FLOPs a token", run.output)[1])
    for step in range(4):
        rate, ms, mfu = (
            scalars(folder, f"throughput/{name}")[step][1] for name in ("tokens_per_second", "step_ms", "mfu")
        )
        assert rate * ms / 1000 == pytest.approx(tokens, rel=1e-3)
        assert mfu == pytest.approx(rate * flops / 2 / 0.1e12, rel=0.01)
    lines = [line for line in run.output.splitlines() if "step: " in line]
    assert ["slowest: rank " in line for line in lines] == [False, False, True, True], run.output


def test_accumulation_does_not_change_the_losses(folder):
    """The same global batch in 1 and in 4 micro-batches a rank, ragged documents included."""
    runs = [
        train(
            2,
            *tiny(folder, training__local_batch_size=local, training__global_batch_size=16, checkpoint__enable=False),
        )
        for local in (8, 2)
    ]
    assert runs[0].codes == runs[1].codes == [0, 0], runs[1].output
    for step, values in runs[0].steps.items():
        assert runs[1].steps[step] == pytest.approx(values, abs=1.1e-4), step  # the log has four digits


def test_one_process_without_torchrun_equals_two(folder):
    options = {"training__global_batch_size": 4, "checkpoint__enable": False}
    alone = train(1, *tiny(folder, **options))
    both = train(2, *tiny(folder, **options))
    for step, values in both.steps.items():
        assert alone.steps[step] == pytest.approx(values, abs=2e-4), step


def test_a_preset_of_torchtitan_trains(folder):
    """With a shorter sequence, for time."""
    preset = ROOT / "tests/config/torchtitan/debug_model.toml"
    sizes = ["--training.seq_len", "32", "--training.steps", "2", "--job.dump_folder", str(folder / "out")]
    data = ["--training.dataset", "text", "--training.dataset_path", str(folder / "corpus")]
    run = train(2, "--job.config_file", str(preset), *sizes, *data)
    assert run.codes == [0, 0] and list(run.steps) == [1, 2], run.output


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_is_bitwise(folder, mode):
    options = {"checkpoint__enable": False, "training__steps": 3, "parallelism__tensor_parallel_degree": 2}
    plain = train(2, *tiny(folder, **options))
    for option in ("op", "2") if mode == "selective" else ("op",):
        recomputed = train(
            2,
            *tiny(
                folder, activation_checkpoint__mode=mode, activation_checkpoint__selective_ac_option=option, **options
            ),
        )
        assert recomputed.steps == plain.steps and len(plain.steps) == 3, recomputed.output


TAGS = {
    *(f"train/{name}" for name in ("loss", "grad_norm", "tokens", "skipped_steps")),
    *(f"throughput/{name}" for name in ("tokens_per_second", "tflops_per_device", "step_ms", "forward_ms")),
    *(f"throughput/{name}" for name in ("backward_ms", "data_share", "slowest_rank", "slowest_share")),
    *(f"memory/{name}" for name in ("reserved_gib", "reserved_share", "peak_gib", "peak_share", "allocator_retries")),
    *(f"optimizer/{name}" for name in ("ms", "clip_ms", "step_ms", "newton_schulz_ms", "newton_schulz_tflops")),
    *(f"optimizer/{name}" for name in ("owner_load_max_over_mean", "lr/muon", "lr/adamw")),
    *(f"optimizer/{name}/{route}" for name in ("weight_rms", "update_rms", "grad_norm") for route in ("muon", "fsdp2")),
    "validation/loss",
}


def test_bf16_validation_and_tensorboard(folder):
    run = train(
        2,
        *tiny(
            folder,
            model__flavor="debugmodel",
            training__mixed_precision_param="bfloat16",
            dmuon__reshard_after_forward=False,
            validation__enable=True,
            validation__dataset="text",
            validation__dataset_path=folder / "corpus" / "00[0-6].txt",
            validation__seq_len=32,
            validation__freq=2,
            metrics__enable_tensorboard=True,
        ),
    )
    assert run.codes == [0, 0], run.output
    assert run.output.count("validation: step:") == 2
    assert [round(value, 4) for _, value in scalars(folder, "train/loss")] == pytest.approx(
        [values[0] for values in run.steps.values()], abs=1e-4
    )
    assert [step for step, _ in scalars(folder, "validation/loss")] == [2, 4]
    assert [step for step, _ in scalars(folder, "validation/loss", "by_tokens")] == [2 * 128, 4 * 128]
    assert set(board(folder).Tags()["scalars"]) == TAGS
    table = json.loads((folder / "out/ownership.json").read_text())
    assert sum(row["route"] == "muon" for row in table) == 42 and [row["owners"] for row in table].count([0]) == 21


# ------------------------------------------------------------------ being refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training__sep_len": 3}, "training.sep_len (command line): unknown key, nearest is training.seq_len"),
        ({"training__steps": "many"}, "training.steps (command line): "),
        ({"training__global_batch_size": 7}, "training.global_batch_size = 7 is not a multiple of"),
        ({"training__dataset_path": "/nowhere/*.txt"}, "training.dataset_path"),
        ({"job__dump_folder": "/dev/null/out"}, "job.dump_folder: cannot write to /dev/null/out"),
        ({"model__flavor": "7B"}, "model: unknown flavor of llama3"),
        (
            {"parallelism__data_parallel_shard_degree": 3},
            "parallelism: data_parallel_replicate_degree 1 x data_parallel_shard_degree 3 x",
        ),
        ({"parallelism__tensor_parallel_degree": 2, "training__seq_len": 33}, "does not divide training.seq_len = 33"),
        (
            {
                "parallelism__tensor_parallel_degree": 2,
                "validation__enable": True,
                "validation__dataset": "stdlib",
                "validation__seq_len": 33,
            },
            "does not divide validation.seq_len = 33",
        ),
        ({"dmuon__include": "layers.*.nothing"}, "dmuon.include: 'layers.*.nothing' matches no parameter"),
        (
            {"dmuon__include": "*_norm.weight"},
            "dmuon.include: layers.0.attention_norm.weight is no matrix (shape [128]) and Muon takes only matrices",
        ),
        ({"dmuon__exclude": "*"}, "dmuon.exclude: no parameter of the model is left for Muon"),
        ({"dmuon__min_matrix_dim": 100000}, "dmuon.min_matrix_dim: no parameter of the model is left for Muon"),
        ({"dmuon__ns_coefficients": "deepseek_v4"}, "dmuon.ns_backend, ns_coefficients, ns_steps"),
        ({"checkpoint__load_step": 3}, "checkpoint.load_step: "),
    ],
)
def test_one_clear_line(folder, overrides, message):
    assert_refused(train(2, *tiny(folder, **overrides), timeout=60), message)


def test_ranks_with_other_data_are_told_at_start(folder):
    """Training as well as validation; a validation with another number of batches would wait for ever."""
    for rank, documents in enumerate((4, 7)):
        write_corpus(folder / f"corpus{rank}", documents)
    other = folder / "corpus%RANK%"
    for rank in range(2):
        (folder / f"text{rank}.txt").write_text(f"{rank}" * 2000)
    run = train(2, *tiny(folder, training__dataset_path=folder / "text%RANK%.txt"))
    assert_refused(run, "training.dataset: the content differs between ranks; give every node the same files and token")
    validation = {"enable": True, "dataset": "text", "dataset_path": other, "seq_len": 32, "freq": 1}
    run = train(2, *tiny(folder, **{f"validation__{name}": value for name, value in validation.items()}))
    assert_refused(run, "validation.dataset: ranks see between 179 and 314 samples; give every node the same files")


@pytest.mark.parametrize(
    ("key", "package"),
    [
        ("checkpoint.last_save_in_hf", "safetensors"),
        ("checkpoint.initial_load_in_hf", "safetensors"),
        ("metrics.enable_tensorboard", "tensorboard"),
        ("metrics.enable_wandb", "wandb"),
    ],
)
def test_a_missing_package_is_told_at_start(folder, monkeypatch, key, package):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = tiny(
        folder, **{key: True, "checkpoint.last_save_model_only": True, "checkpoint.initial_load_path": "x"}
    )
    with pytest.raises(ConfigError) as told:
        Trainer(load_config(arguments))
    (line,) = [line for line in told.value.lines if line.startswith(f"{key}: needs the package {package} (extra ")]
    assert line.endswith(f"): pip install {package}")
    assert not torch.distributed.is_initialized()


def test_half_written_checkpoints_are_skipped(folder):
    run = train(2, *tiny(folder, training__steps=6))
    assert run.codes == [0, 0], run.output
    checkpoints = folder / "out" / "checkpoint"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-4", "step-6"]  # keep_latest_k = 2
    shard = next((checkpoints / "step-6").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-10])
    (checkpoints / "step-8").mkdir()
    (checkpoints / "step-9.incomplete").mkdir()
    run = train(2, *tiny(folder, training__steps=6))
    assert run.codes == [0, 0], run.output
    assert "step-6: half-written" in run.output and "step-8: half-written, checksums.json is missing" in run.output
    assert "Resumed from checkpoint" in run.output and "step-4" in run.output.split("Resumed from checkpoint")[1]
    assert list(run.steps) == [5, 6]


def test_a_checkpoint_of_another_optimizer_gives_its_parameters_and_says_so(folder):
    first = train(2, *tiny(folder, training__steps=2, optimizer__name="AdamW"))
    assert first.codes == [0, 0], first.output
    run = train(2, *tiny(folder, training__steps=4, checkpoint__interval=1))
    assert run.codes == [0, 0], run.output
    assert "was written by AdamW, this run has DMuon: its optimizer state is NOT loaded" in run.output
    assert list(run.steps) == [3, 4]


def test_non_finite_loss_stops_every_rank_before_anything_moves(folder):
    run = train(2, *tiny(folder, optimizer__lr="1e30", lr_scheduler__warmup_steps=0, checkpoint__interval=1))
    assert_refused(run, "the loss or the gradient norm is not finite")


class LooksLater(Trainer):
    """As with fused optimizers on CUDA: the flag is on the device, and the host does not look at it every step. A
    signal asks for the end in step 3 if the description says so."""

    def __init__(self, config, signals):
        super().__init__(config, signals)
        find_inf_on_device(self)
        self.watch = signals

    def train_step(self, batches):
        self.watch.stop = self.step == 3 and self.config.job.description == "stop"
        return super().train_step(batches)


@pytest.mark.parametrize("end", ["last step", "validation", "signal"])
@pytest.mark.parametrize("optimizer", ["DMuon", "AdamW"])
def test_non_finite_loss_is_found_before_the_run_looks_good(folder, optimizer, end):
    options = {"optimizer__name": optimizer, "optimizer__lr": "1e30", "lr_scheduler__warmup_steps": 0}
    options |= {"metrics__log_freq": 1000, "checkpoint__enable": False, "training__steps": 3}
    if end == "validation":
        options |= {"training__steps": 5, "validation__enable": True, "validation__freq": 3, "validation__seq_len": 32}
        options |= {"validation__dataset": "text", "validation__dataset_path": folder / "corpus" / "000.txt"}
    if end == "signal":
        options |= {"training__steps": 5, "job__description": "stop"}
    run = train(1, *tiny(folder, **options), trainer=LooksLater)
    assert_refused(run, "the loss or the gradient norm is not finite; no weight has moved since")
    assert list(run.steps) == [1] and "validation: step" not in run.output


def test_deterministic_runs_are_bitwise(folder):
    seen, kept = [], []
    for out in ("out", "again"):
        options = {"debug__deterministic": True, "model__flavor": "debugmodel", "job__dump_folder": folder / out}
        run = train(2, *tiny(folder, **options))
        assert run.codes == [0, 0] and len(run.steps) == 4, run.output
        seen.append(run.steps)
        kept.append(checkpoint_of(folder, 4, out))
    assert seen[0] == seen[1]
    assert_bitwise(*kept)


def test_samples_are_skipped_on_resume(folder):
    """Also by a run that is started again with the key, which skips no more."""
    for stop, consumed in ((2, 8), (4, 16 + 10), (6, 24 + 10)):
        keys = {"training__skip_samples_on_resume": 10, "training__steps": stop, "lr_scheduler__total_steps": 6}
        run = train(2, *tiny(folder, **keys))
        assert run.codes == [0, 0], run.output
        assert ("Skipped 10 samples of the data" in run.output) == (stop == 4)
        state = json.loads((folder / f"out/checkpoint/step-{stop}/trainer.json").read_text())["loader"]
        assert state["consumed_samples"] == consumed


def test_a_killed_rank_ends_the_run_and_the_next_one_resumes(folder):
    options = {"lr_scheduler__total_steps": 5000}
    checkpoints = folder / "out" / "checkpoint"
    with Torchrun(folder, 2, *tiny(folder, training__steps=5000, metrics__log_freq=1000, **options)) as run:
        run.wait_for("Saved checkpoint")
        os.kill(run.ranks()[1], signal.SIGKILL)
        code, _ = run.end()
    assert code != 0, run.output
    last = max(
        int(path.parent.name[5:]) for path in checkpoints.glob("step-*/checksums.json") if "incomplete" not in str(path)
    )
    run = train(2, *tiny(folder, training__steps=last + 2, **options))
    assert run.codes == [0, 0], run.output
    assert list(run.steps) == [last + 1, last + 2]


class Freezes(Trainer):
    """The first block and the embedding are not trained."""

    def __init__(self, config, signals):
        init = llama3.Llama3.__init__

        def frozen(model, *args):
            init(model, *args)
            model.layers[0].requires_grad_(False)
            model.tok_embeddings.requires_grad_(False)

        with mock.patch.object(llama3.Llama3, "__init__", frozen):
            super().__init__(config, signals)


@pytest.mark.parametrize(("optimizer", "others"), [("DMuon", "fsdp2"), ("DMuon", "dedicated"), ("AdamW", "fsdp2")])
def test_a_layer_frozen_between_two_runs(folder, optimizer, others):
    options = {"optimizer__name": optimizer, "dmuon__others": others}
    assert train(2, *tiny(folder, training__steps=2, **options)).codes == [0, 0]
    run = train(2, *tiny(folder, training__steps=4, **options), trainer=Freezes)
    assert run.codes == [0, 0] and list(run.steps) == [3, 4], run.output
    left_out = "has optimizer state of 10 parameters that are frozen in this run: it is left out: layers.0."
    assert run.output.count(left_out) == 1 and "they start at zero" not in run.output, run.output
    run = train(2, *tiny(folder, training__steps=6, **options))  # and trained again
    assert run.codes == [0, 0] and list(run.steps) == [5, 6], run.output
    assert run.output.count("their parameters were frozen, or another route") == 1, run.output


def test_nothing_to_do(folder):
    train(2, *tiny(folder, training__steps=2))
    run = train(2, *tiny(folder, training__steps=2))
    assert run.codes == [0, 0] and "Nothing to do: step 2 of 2 is done" in run.output


def test_another_recipe_is_said_on_resume(folder):
    """Momentum goes on; what turns it into updates has changed, and the log must say so."""
    first = train(2, *tiny(folder, training__steps=2, job__dump_folder=folder / "out"))
    assert first.codes == [0, 0], first.output
    assert "Newton-Schulz: gram, polar_express, 5 steps, restart after 2, 4, kernel" in first.output
    options = {"dmuon__scale": "original", "optimizer__lr": "0.02", "dmuon__ns_coefficients": "you"}
    second = train(2, *tiny(folder, training__steps=4, job__dump_folder=folder / "out", **options))
    assert second.codes == [0, 0], second.output
    assert "the checkpoint was made with scale match_rms_adamw, this optimizer has original" in second.output
    assert "the checkpoint was made with coefficients" in second.output
