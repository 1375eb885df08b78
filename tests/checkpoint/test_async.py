"""Saving behind the training: what is written is the state of the step it was asked for; nothing old goes before the
new is durable; a failure ends every rank."""

import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.harness import assert_same
from tests.support.pool import distributed
from tests.support.toy import build_toy, checkpointer, everything, read_checkpoint, state_at, step
from torchtitan_dmuon.checkpoint import CheckpointError, saving

MODES = ["disabled", "async", "async_with_pinned_mem"]
TP = (1, 2, 2)


class Gate:
    """Holds DCP's writing until it is opened."""

    def __init__(self):
        self.open = threading.Event()
        self.reached = threading.Event()

    def __enter__(self):
        original = self.original = saving.dcp.FileSystemWriter.write_data

        def write_data(*args, **kwargs):
            self.reached.set()
            assert self.open.wait(60)
            return original(*args, **kwargs)

        saving.dcp.FileSystemWriter.write_data = write_data
        return self

    def __exit__(self, *_):
        saving.dcp.FileSystemWriter.write_data = self.original


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", [(2, 2, 1), TP], ids=["2x2", "tp"])
@distributed(world=4)
def test_the_state_is_that_of_the_step(rank, world, mode, mesh, tmp_path):
    """A publish is pending when the save begins, and training goes on while it is written."""
    model, optimizer = build_toy(world, mesh)
    step(model, optimizer, 0, rank, mesh)
    saver = checkpointer(tmp_path, model, optimizer, async_mode=mode)
    held = {}
    for number in (1, 2):  # the second reuses the first one's host memory
        step(model, optimizer, number, rank, mesh)
        saver.save(state_at(number))
        held[number] = everything(model, optimizer)
        saver.wait_staged()
        step(model, optimizer, 10 + number, rank, mesh)
    saver.close()
    if rank == 0:
        for number, expected in held.items():
            found = read_checkpoint(tmp_path / f"step-{number}")
            assert_same({k: t for k, t in found.items() if not k.startswith("rng.")}, expected, atol=0, rtol=0)


@pytest.mark.parametrize("mode", MODES[1:])
@distributed(world=2)
def test_training_goes_on_and_old_ones_stay_until_the_new_one_is_durable(rank, world, mode, tmp_path):
    model, optimizer = build_toy(world)
    saver = checkpointer(tmp_path, model, optimizer, async_mode=mode, keep_latest_k=1)
    saver.save(state_at(1), stopping=True)
    with Gate() as gate:
        saver.save(state_at(2))
        saver.wait_staged()
        assert gate.reached.wait(30)
        step(model, optimizer, 0, rank, (1, world, 1))  # with collectives of its own
        assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["step-1", "step-2.incomplete"]
        dist.barrier()
        gate.open.set()
        saver.close()
    assert [p.name for p in Path(tmp_path).iterdir()] == ["step-2"]


@distributed(world=2)
def test_a_failure_behind_the_training_is_told_by_all(rank, world, tmp_path):
    model, optimizer = build_toy(world)
    saver = checkpointer(tmp_path, model, optimizer, async_mode="async")
    saver.save(state_at(1))
    saver.wait()

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    original = saving.dcp.FileSystemWriter.write_data
    if rank == 1:
        saving.dcp.FileSystemWriter.write_data = no_space
    try:
        saver.save(state_at(2))
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-2: rank 1: No space left on device"):
            saver.wait()
    finally:
        saving.dcp.FileSystemWriter.write_data = original
    assert not saver.has_failed
    dist.barrier()
    assert [p.name for p in Path(tmp_path).iterdir()] == ["step-1"]
    saver.save(state_at(3))
    saver.close()
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["step-1", "step-3"]


@distributed(world=2)
def test_a_step_that_is_saved_again_replaces_the_old_one(rank, world, tmp_path):
    """A run that was resumed from step 2 saves it a second time; step 3 is of the other branch and was moved aside."""
    model, optimizer = build_toy(world)
    saver = checkpointer(tmp_path, model, optimizer, keep_latest_k=2)
    for number in (1, 2, 3):
        saver.save(state_at(number))
    step(model, optimizer, 0, rank, (1, world, 1))
    again = checkpointer(tmp_path, model, optimizer, keep_latest_k=2, load_step=2)
    assert again.load().step == 2
    aside = Path(tmp_path) / "after-step-2-1"
    step(model, optimizer, 1, rank, (1, world, 1))
    again.save(state_at(2))
    held = everything(model, optimizer)
    names = sorted(p.name for p in Path(tmp_path).iterdir())
    assert names == [aside.name, "step-2"] and [p.name for p in aside.iterdir()] == ["step-3"]
    if rank == 0:
        found = read_checkpoint(tmp_path / "step-2")
        assert_same({k: t for k, t in found.items() if not k.startswith("rng.")}, held, atol=0, rtol=0)
        # Killed between the two renames of a replacement: the old one is there again for the next run.
        (aside / "step-3").rename(tmp_path / "step-3.replaced")
        shutil.copytree(tmp_path / "step-2", tmp_path / "step-3.incomplete")
    dist.barrier()
    assert checkpointer(tmp_path, model, optimizer).load().step == 3


@distributed(world=2)
def test_random_state(rank, world, tmp_path):
    def draw():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]

    random.seed(rank)
    draw()
    model, optimizer = build_toy(world)
    checkpointer(tmp_path, model, optimizer).save(state_at(1))
    expected = draw()
    random.seed(7)
    np.random.seed(8)
    torch.manual_seed(9)
    checkpointer(tmp_path, model, optimizer).load()
    assert draw() == expected
    everyone = [None] * world
    dist.all_gather_object(everyone, expected)
    assert everyone[0] != everyone[1]


@distributed(world=2)
def save_on_two(rank, world, folder):
    model, optimizer = build_toy(world)
    checkpointer(folder, model, optimizer).save(state_at(1))


@distributed(world=4)
def load_on_four(rank, world, folder):
    drawn = []
    for _ in range(2):
        model, optimizer = build_toy(world)
        checkpointer(folder, model, optimizer).load()
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    everyone = [None] * world
    dist.all_gather_object(everyone, str(drawn[0]))
    assert len({*everyone[1:]}) == world - 1


def test_more_ranks_than_the_checkpoint_has_random_states_of(tmp_path):
    """The others start from seed, step and rank: the same at every load, different from each other."""
    save_on_two(folder=str(tmp_path))
    load_on_four(folder=str(tmp_path))
