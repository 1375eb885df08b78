"""What a run starts from and what of it: load_step, initial_load_path, exclude_from_loading, seeds, load_only."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.harness import assert_same
from tests.support.pool import distributed
from tests.support.toy import build_toy, checkpointer, everything, read_checkpoint, state_at, step
from tests.support.training import assert_refused, tiny, train, write_corpus
from torchtitan_dmuon.checkpoint import CheckpointError


def only(tensors, part):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"{part}.")}


def trained(rank, world):
    model, optimizer = build_toy(world)
    step(model, optimizer, 0, rank, (1, world, 1))
    return model, optimizer, everything(model, optimizer)


@distributed(world=2)
def test_excluded_parts_stay_as_they_are(rank, world, tmp_path):
    model, optimizer, held = trained(rank, world)
    checkpointer(tmp_path, model, optimizer).save(state_at(1))
    for excluded in (["optimizer", "lr_scheduler"], ["model"], ["dataloader", "train_state", "rng"], []):
        other, its_optimizer = build_toy(world, seed=8)
        before = everything(other, its_optimizer)
        state = checkpointer(tmp_path, other, its_optimizer, exclude_from_loading=excluded).load()
        after = everything(other, its_optimizer)
        for part in ("model", "optimizer"):
            assert_same(only(after, part), only(before if part in excluded else held, part), atol=0, rtol=0)
        assert state.step == (0 if "train_state" in excluded else 1)
        assert state.loader == ({} if "dataloader" in excluded else {"consumed_samples": 1})
        assert state.lr_scheduler == ({} if "lr_scheduler" in excluded else {"last_epoch": 1})


@distributed(world=2)
def test_initial_checkpoints(rank, world, tmp_path):
    model, optimizer, held = trained(rank, world)
    checkpointer(tmp_path / "first", model, optimizer).save(state_at(1))
    first = str(tmp_path / "first" / "step-1")
    mine = tmp_path / "mine"
    if rank == 0:  # an empty folder, and one that a killed run has left, hold no checkpoint
        (mine / "step-5.incomplete").mkdir(parents=True)
        (mine / "step-6").mkdir()
    dist.barrier()

    other, its_optimizer = build_toy(world, seed=8)
    zero = everything(other, its_optimizer)
    assert checkpointer(mine, other, its_optimizer, initial_load_path=first).load() is None  # step 0
    loaded = everything(other, its_optimizer)
    assert_same(only(loaded, "model"), only(held, "model"), atol=0, rtol=0)
    assert_same(only(loaded, "optimizer"), only(zero, "optimizer"), atol=0, rtol=0)

    other, its_optimizer = build_toy(world, seed=8)
    options = {"initial_load_path": first, "initial_load_model_only": False}
    saver = checkpointer(mine, other, its_optimizer, **options)
    assert saver.load().step == 1
    assert_same(everything(other, its_optimizer), held, atol=0, rtol=0)
    step(other, its_optimizer, 1, rank, (1, world, 1))
    assert saver.due(2, wanted=True)
    saver.save(state_at(2))
    later = everything(other, its_optimizer)

    other, its_optimizer = build_toy(world, seed=9)  # its own checkpoint wins over the initial one
    assert checkpointer(mine, other, its_optimizer, **options).load().step == 2
    assert_same(everything(other, its_optimizer), later, atol=0, rtol=0)

    with pytest.raises(CheckpointError, match=r"checkpoint.load_step: .*mine has no complete step 7, only \[2\]"):
        checkpointer(mine, other, its_optimizer, load_step=7).load()
    with pytest.raises(CheckpointError, match=r"initial_load_path: .*step-6 is no complete checkpoint .*half-written"):
        checkpointer(tmp_path / "new", other, its_optimizer, initial_load_path=str(mine / "step-6")).load()


@distributed(world=2)
def test_when_a_checkpoint_is_due(rank, world, tmp_path):
    model, optimizer = build_toy(world)
    saver = checkpointer(tmp_path, model, optimizer, interval=3)
    assert [number for number in range(1, 9) if saver.due(number, wanted=number == 8)] == [3, 6, 8]
    saver.save(state_at(8))
    assert not saver.due(8, wanted=True)
    saver = checkpointer(tmp_path, model, optimizer, interval=3, enable_first_step_checkpoint=True)
    assert [number for number in range(1, 9) if saver.due(number, wanted=False)] == [1, 3, 6]
    saver = checkpointer(tmp_path, model, optimizer, interval=1, load_only=True)
    assert not any(saver.due(number, wanted=number == 8) for number in range(1, 9))


@distributed(world=2)
def test_old_checkpoints_are_counted_along_the_branch_of_load_step(rank, world, tmp_path):
    """Steps 6 and 7 are of the branch that was left, twice."""
    model, optimizer = build_toy(world)
    saver = checkpointer(tmp_path, model, optimizer, keep_latest_k=0)
    for number in (1, 2, 6, 7):
        saver.save(state_at(number))
    checkpointer(tmp_path, model, optimizer, load_step=2, load_only=True).load()
    assert (Path(tmp_path) / "step-7").is_dir()  # a run that saves nothing moves nothing
    for number in (1, 2):
        again = checkpointer(tmp_path, model, optimizer, keep_latest_k=2, load_step=2)
        assert again.load().step == 2
        again.save(state_at(4))
        aside = Path(tmp_path) / f"after-step-2-{number}"
        assert sorted(path.name for path in aside.iterdir()) == [["step-6", "step-7"], ["step-4"]][number - 1]
        assert sorted(path.name for path in Path(tmp_path).glob("step-*")) == ["step-2", "step-4"]
    assert checkpointer(tmp_path, model, optimizer).load().step == 4


@pytest.mark.dist
def test_a_finished_run_that_kept_only_weights_does_not_train_again(tmp_path):
    write_corpus(tmp_path / "corpus")
    keys = {"checkpoint__last_save_model_only": True, "checkpoint__interval": 1}
    assert list(train(1, *tiny(tmp_path, **keys, training__steps=3)).steps) == [1, 2, 3]
    again = train(1, *tiny(tmp_path, **keys, training__steps=3))
    assert again.codes == [0] and not again.steps, again.output
    assert "step-3 holds its weights" in again.output and "Nothing to do: step 3 of 3 is done" in again.output
    assert list(train(1, *tiny(tmp_path, **keys, training__steps=4)).steps) == [3, 4]  # prolonged from step 2


@pytest.mark.parametrize("keep", [0, 1, 2])
@distributed(world=2)
def test_keep_latest_k(rank, world, keep, tmp_path):
    model, optimizer = build_toy(world)
    if rank == 0:
        (Path(tmp_path) / "step-3").mkdir()  # half-written: never counted
    dist.barrier()
    saver = checkpointer(tmp_path, model, optimizer, keep_latest_k=keep)
    for number in (1, 2, 4, 5):
        saver.save(state_at(number))
    kept = sorted(path.name for path in Path(tmp_path).iterdir() if path.name != "step-3")
    assert kept == [f"step-{number}" for number in (1, 2, 4, 5)][-keep:]


@pytest.mark.dist
def test_seed_checkpoint_and_load_only(tmp_path):
    write_corpus(tmp_path / "corpus")
    assert_refused(
        train(2, *tiny(tmp_path, checkpoint__create_seed_checkpoint=True)), "expected one process to make it"
    )
    seed = train(1, *tiny(tmp_path, checkpoint__create_seed_checkpoint=True))
    assert seed.codes == [0] and not seed.steps, seed.output
    assert [path.name for path in (tmp_path / "out/checkpoint").iterdir()] == ["step-0"]
    fresh = train(2, *tiny(tmp_path, job__dump_folder=tmp_path / "fresh"))
    # Other initial weights without the seed checkpoint, whose parameters are of debug.seed 0.
    run = train(2, *tiny(tmp_path, checkpoint__load_only=True))
    assert run.codes == [0, 0] and run.steps == fresh.steps, run.output
    assert [path.name for path in (tmp_path / "out/checkpoint").iterdir()] == ["step-0"]
    excluded = train(2, *tiny(tmp_path, checkpoint__exclude_from_loading="modle"))
    assert_refused(
        excluded, "checkpoint.exclude_from_loading (command line): found ['modle'], expected list of 'model'"
    )
    shutil.rmtree(tmp_path / "out")
    wrong = {"checkpoint__initial_load_path": tmp_path / "nowhere"}
    assert_refused(train(2, *tiny(tmp_path, **wrong)), "checkpoint.initial_load_path: ")
    only_weights = read_checkpoint(tmp_path / "fresh/checkpoint/step-4")
    assert only_weights.keys() > {"rng.0.torch", "rng.1.python", "rng.1.numpy"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"last_save_in_hf": True}, "checkpoint.last_save_in_hf (command line): found true, expected"),
        ({"export_dtype": "bfloat16"}, "checkpoint.export_dtype (command line): found 'bfloat16', expected"),
        ({"initial_load_in_hf": True}, "checkpoint.initial_load_in_hf (command line): found true, expected a folder"),
        (
            {"initial_load_in_hf": True, "initial_load_path": "x", "initial_load_model_only": False},
            "checkpoint.initial_load_model_only (command line): found false, expected true",
        ),
        ({"enable": False, "initial_load_path": "x"}, "expected checkpoint.enable = true with it"),
        (
            {"enable": False, "load_step": 3},
            "checkpoint.load_step (command line): found 3, expected checkpoint.enable =",
        ),
        (
            {"enable": False, "exclude_from_loading": "rng"},
            "checkpoint.exclude_from_loading (command line): found ['rng'], expected checkpoint.enable = true with it",
        ),
        (
            {"enable": False, "load_only": True},
            "checkpoint.load_only (command line): found True, expected checkpoint.en",
        ),
        (
            {"enable": False, "enable_first_step_checkpoint": True},
            "checkpoint.enable_first_step_checkpoint (command line): found True, expected checkpoint.enable = true",
        ),
        (
            {"enable": False, "initial_load_model_only": False},
            "checkpoint.initial_load_model_only (command line): found False, expected checkpoint.enable = true with it",
        ),
        ({"async_mode": "Async"}, "checkpoint.async_mode (command line): found 'Async', expected one of 'disabled'"),
        ({"initial_load_in_hf_quantized": True}, "this TorchTitan feature does not exist"),
    ],
)
def test_keys_that_do_not_go_together(tmp_path, overrides, message):
    from torchtitan_dmuon.config import ConfigError, load_config

    arguments = tiny(tmp_path, **{f"checkpoint__{name}": value for name, value in overrides.items()})
    with pytest.raises(ConfigError) as raised:
        load_config(arguments)
    assert message in str(raised.value)
