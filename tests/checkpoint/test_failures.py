"""What can go wrong really goes wrong here; each time there is one clear error on every rank, and what was durable
before stays loadable."""

import contextlib
import os
import resource
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import assert_same, build
from tests.support.pool import distributed, free_port, warm_context
from tests.support.private import checksums_changed
from tests.support.toy import Toy, build_toy, checkpointer, everything, state_at, step
from tests.support.training import assert_refused, tiny, train, write_corpus
from torchtitan_dmuon.checkpoint import CheckpointError, saving

FLAT = (1, 2, 1)


def assert_loads(folder, world, expected, number=1):
    """The checkpoint ``number`` is the one to resume from and holds ``expected``. Collective."""
    model, optimizer = build_toy(world, seed=8)
    assert checkpointer(folder, model, optimizer).load().step == number
    assert_same(everything(model, optimizer), expected, atol=0, rtol=0)


def trained(rank, world):
    model, optimizer = build_toy(world)
    step(model, optimizer, 0, rank, (1, world, 1))
    return model, optimizer, everything(model, optimizer)


# ------------------------------------------------------------------ writing


@contextlib.contextmanager
def small_disk(path, mebibytes):
    """A file system of that size at ``path``."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk(tmp_path):
    """Of a real run. The full checkpoint of 5 MB fits the disk once, not twice."""
    write_corpus(tmp_path / "corpus")
    disk = tmp_path / "disk"
    with small_disk(disk, 8):
        run = train(2, *tiny(tmp_path, job__dump_folder=disk))
        assert_refused(run, f"cannot write checkpoint {disk}/checkpoint/step-4: rank ")
        assert "No space left on device" in run.output and "the checkpoints before it are untouched" in run.output
        assert [path.name for path in (disk / "checkpoint").iterdir()] == ["step-2"]
        again = train(2, *tiny(tmp_path, job__dump_folder=disk, training__steps=3, checkpoint__load_only=True))
        assert again.codes == [0, 0] and list(again.steps) == [3], again.output


@pytest.mark.parametrize("mode", ["disabled", "async"])
@distributed(world=2)
def test_one_rank_may_not_write_more(rank, world, mode, tmp_path):
    """A limit on the size of its files, as of a quota."""
    model, optimizer, held = trained(rank, world)
    saver = checkpointer(tmp_path, model, optimizer, async_mode=mode)
    saver.save(state_at(1))
    saver.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-2: rank 1: .*File too large"):
            saver.save(state_at(2))
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert [path.name for path in Path(tmp_path).iterdir()] == ["step-1"]
    assert_loads(tmp_path, world, held)


@distributed(world=2)
def test_the_folder_becomes_unwritable(rank, world, tmp_path):
    model, optimizer, _ = trained(rank, world)
    saver = checkpointer(tmp_path / "folder", model, optimizer)
    if rank == 0:
        (tmp_path / "folder").write_text("a file is where the folder should be")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*folder/step-1: .*File exists"):
        saver.save(state_at(1))


def test_an_unwritable_folder_is_found_before_the_first_step(tmp_path):
    write_corpus(tmp_path / "corpus")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoint").write_text("")
    assert_refused(train(2, *tiny(tmp_path)), "checkpoint.folder: cannot write to")


def test_a_folder_of_each_rank_is_found_before_the_first_step(tmp_path):
    write_corpus(tmp_path / "corpus")
    run = train(2, *tiny(tmp_path, job__dump_folder=tmp_path / "node%RANK%"))
    assert_refused(run, "job.dump_folder must be on a file system that all ranks share")
    assert not list(tmp_path.glob("node*/checkpoint/*")), "the probe leaves nothing"


@distributed(world=2)
def test_a_save_into_a_folder_of_each_rank_fails(rank, world, tmp_path):
    """Rank 0 would vouch for files that it does not have. So too when one of them is cut off."""
    model, optimizer, held = trained(rank, world)
    saver = checkpointer(tmp_path, model, optimizer)
    saver.save(state_at(1))
    own = checkpointer(tmp_path / f"node{rank}", model, optimizer)
    with pytest.raises(CheckpointError, match=r"no such file where another rank wrote __1_0.distcp.*all ranks share"):
        own.save(state_at(2))
    assert not list(tmp_path.glob("node0/step-*"))
    larger = checksums_changed(lambda sums: {name: (size + rank, crc) for name, (size, crc) in sums.items()})
    with larger, pytest.raises(CheckpointError, match=r"step-3: rank 0 finds \d+ bytes where another rank wrote __1_0"):
        saver.save(state_at(3))
    dist.barrier()
    assert_loads(tmp_path, world, held)


def _rank_that_may_die(rank, port, folder, mode, answers):
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    model, optimizer, _ = trained(rank, 2)
    saver = checkpointer(folder, model, optimizer, async_mode=mode)
    saver.save(state_at(1))
    saver.wait()
    if rank == 1:
        saving.dcp.FileSystemWriter.write_data = lambda *args, **kwargs: os._exit(9)
    try:
        saver.save(state_at(2))
        saver.wait()
    except CheckpointError as error:
        answers.put(str(error))
    answers.close()
    answers.join_thread()
    os._exit(0)


@distributed(world=2)
def loads_step_1(rank, world, folder):
    model, optimizer = build_toy(world, seed=8)
    assert checkpointer(folder, model, optimizer).load().step == 1


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_rank_dies_in_the_middle_of_a_save(tmp_path, mode):
    context = warm_context()
    answers, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=_rank_that_may_die, args=(rank, port, str(tmp_path), mode, answers)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    error = answers.get(timeout=60)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 9]
    assert "cannot write checkpoint" in error and "one of them may have died" in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2.incomplete"]
    loads_step_1(folder=str(tmp_path))


# ------------------------------------------------------------------ reading


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@distributed(world=2)
def test_a_flipped_byte_in_any_file(rank, world, tmp_path):
    model, optimizer, held = trained(rank, world)
    saver = checkpointer(tmp_path, model, optimizer)
    saver.save(state_at(1))
    saver.save(state_at(2))
    good = tmp_path / "good"
    if rank == 0:
        (tmp_path / "step-2").rename(good)
    dist.barrier()
    names = sorted(path.name for path in good.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "config.toml", "trainer.json"]
    for name in names:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
            shutil.copytree(good, tmp_path / "step-2")
            flip_a_byte(tmp_path / "step-2" / name)
        dist.barrier()
        other, its_optimizer = build_toy(world, seed=8)
        if name == "checksums.json":
            # Half-way in it is a name, a size or a sum: either the folder is no checkpoint, or a sum does not fit.
            with contextlib.suppress(CheckpointError):
                assert checkpointer(tmp_path, other, its_optimizer).load().step == 1
            continue
        with pytest.raises(CheckpointError, match=rf"step-2: rank \d: {name} is corrupted.*checkpoint.load_step"):
            checkpointer(tmp_path, other, its_optimizer).load()
        earlier = checkpointer(tmp_path, other, its_optimizer, load_step=1)
        assert earlier.load().step == 1
    assert_same(everything(other, its_optimizer), held, atol=0, rtol=0)


class Wider(Toy):
    def __init__(self):
        super().__init__()
        self.layers[0].up_proj = torch.nn.Linear(20, 38, bias=False)
        self.layers[0].down_proj = torch.nn.Linear(38, 20)


class Shallower(Toy):
    def __init__(self):
        super().__init__()
        del self.layers[1]


@distributed(world=2)
def test_a_checkpoint_of_another_model(rank, world, tmp_path):
    model, optimizer, held = trained(rank, world)
    checkpointer(tmp_path, model, optimizer).save(state_at(1))
    for other, message in (
        (Wider(), r"layers.0.down_proj.weight has shape \[20, 37\] in it and has shape \[20, 38\] in toy"),
        (Shallower(), r"layers.1.down_proj.bias has shape \[20\] in it and is absent in toy"),
    ):
        built = build(world, other)
        with pytest.raises(CheckpointError, match=f"it is of another model: {message}"):
            checkpointer(tmp_path, *built).load()
    with pytest.raises(CheckpointError, match="was written by toy, this run is llama3 8B"):
        checkpointer(tmp_path, *build_toy(world), name="llama3 8B").load()
    assert_loads(tmp_path, world, held)


@distributed(world=2)
def test_a_flipped_byte_where_it_would_mislead(rank, world, tmp_path):
    """`contents` decides whether a checkpoint is offered at all; an old unreadable one must not stop the next save."""
    model, optimizer, _ = trained(rank, world)
    saver = checkpointer(tmp_path, model, optimizer, keep_latest_k=2)
    saver.save(state_at(1))
    saver.save(state_at(2))
    dist.barrier()
    state = tmp_path / "step-2" / "trainer.json"
    if rank == 0:
        state.write_text(state.read_text().replace('"full"', '"fulm"'))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"step-2: rank \d: trainer.json is corrupted"):
        checkpointer(tmp_path, model, optimizer).load()
    if rank == 0:
        state.write_text("{" + state.read_text())
    dist.barrier()
    saver.save(state_at(3))
    dist.barrier()
    assert (tmp_path / "step-3").is_dir() and (tmp_path / "step-2").is_dir()
    if rank == 0:  # kept elsewhere, under a name that is no step's
        shutil.rmtree(tmp_path / "step-2")
        (tmp_path / "step-1").rename(tmp_path / "elsewhere")
        (tmp_path / "step-1").symlink_to(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "step-3", tmp_path / "step-0009")
    dist.barrier()
    assert checkpointer(tmp_path, model, optimizer).load().step == 3
    few = checkpointer(tmp_path, model, optimizer, keep_latest_k=1)
    few.save(state_at(4))
    dist.barrier()
    assert not os.path.lexists(tmp_path / "step-1") and (tmp_path / "elsewhere" / "trainer.json").is_file()
