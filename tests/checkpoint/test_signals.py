"""Signals to real runs: SIGTERM and SIGINT save and end, SIGUSR1 saves, whichever process gets them."""

import os
import re
import signal
import time

import pytest

from tests.support.pool import warm_context
from tests.support.training import Torchrun, tiny, train, write_corpus
from torchtitan_dmuon.logging import init_logger
from torchtitan_dmuon.signals import SignalWatch
from torchtitan_dmuon.trainer import Trainer

pytestmark = pytest.mark.dist

ENDLESS = {
    "training__steps": 100000,
    "lr_scheduler__total_steps": 100000,
    "checkpoint__interval": 50000,
}
FRESH = {**ENDLESS, "model__flavor": "debugmodel"}


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus")
    return tmp_path


class Signalled(Trainer):
    """Gets SIGUSR1 on rank 0 in step 2, and SIGINT on rank 1 in step 4."""

    def train_step(self, batches):
        for rank, step, number in ((0, 2, signal.SIGUSR1), (1, 4, signal.SIGINT)):
            if (rank, step) == (self.rank, self.step):
                os.kill(os.getpid(), number)
        return super().train_step(batches)


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in (folder / "out/checkpoint").iterdir())


def test_one_rank_is_told_to_save_and_the_launcher_to_stop(folder):
    """Tensor parallel: the ranks that read no data of their own have to be heard, too."""
    with Torchrun(folder, 2, *tiny(folder, parallelism__tensor_parallel_degree=2, **FRESH), fresh=True) as run:
        run.wait_for(r"step: 3/")
        os.kill(run.ranks()[1], signal.SIGUSR1)
        saved = int(run.wait_for(r"Saved checkpoint .*step-(\d+)")[1])
        run.wait_for(f"step: {saved + 2}/")
        os.kill(run.pid, signal.SIGTERM)
        code, seconds = run.end()
    assert code == 0 and seconds < 30, run.output
    stopped = int(re.search(r"Stopped by a signal after step (\d+), which is saved", run.output)[1])
    assert steps_in(folder) == [saved, stopped]
    again = train(2, *tiny(folder, **{**FRESH, "training__steps": stopped + 1}))
    assert again.codes == [0, 0] and list(again.steps) == [stopped + 1], again.output


def test_plain_torchrun_behind_an_asynchronous_save(folder):
    """Its agent passes SIGTERM on and then ends with an error of its own; the ranks have saved all the same."""
    options = {**FRESH, "checkpoint__interval": 2, "checkpoint__async_mode": "async", "checkpoint__keep_latest_k": 1}
    with Torchrun(folder, 2, *tiny(folder, **options), launcher="torch.distributed.run", fresh=True) as run:
        run.wait_for(r"step: 5/")
        os.kill(run.pid, signal.SIGTERM)
        run.end()
    stopped = int(re.search(r"Stopped by a signal after step (\d+), which is saved", run.output)[1])
    assert steps_in(folder) == [stopped] and "Traceback" not in run.output.split("Stopped by")[0]


def test_without_checkpoints_it_ends_and_says_so(folder):
    options = {key: value for key, value in ENDLESS.items() if "interval" not in key}
    run = train(2, *tiny(folder, checkpoint__enable=False, **options), trainer=Signalled)
    assert run.codes == [0, 0], run.output
    assert "A signal asked for a checkpoint after step 2: NOTHING is saved, checkpointing is off" in run.output
    assert "Stopped by a signal after step 4; NOTHING is saved, checkpointing is off" in run.output
    assert list(run.steps) == [1, 2, 3, 4]
    assert not (folder / "out/checkpoint").exists()


def does_not_finish(output):
    """Gets SIGTERM while it watches for signals, and goes on; its errors go to the file ``output``."""
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), 2)
    init_logger(0, color=False)
    with SignalWatch(0.5) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.stop
        time.sleep(30)


def test_a_process_that_does_not_finish_in_time_is_ended(tmp_path):
    output = tmp_path / "output"
    process = warm_context().Process(target=does_not_finish, args=(str(output),), daemon=True)
    begin = time.monotonic()
    process.start()
    process.join(60)
    assert process.exitcode == 1 and time.monotonic() - begin < 25
    assert "not finished 0.5 s after the signal (checkpoint.grace_seconds)" in output.read_text()


def test_a_scheduler_signals_every_process(folder):
    """Slurm's --signal reaches all processes of a step."""
    with Torchrun(folder, 2, *tiny(folder, **ENDLESS)) as run:
        run.wait_for("step: 5/")
        tree = run.tree()
        assert len(tree) >= 3, "the launcher and two ranks"
        for pid in reversed(tree):
            os.kill(pid, signal.SIGTERM)
        code, _ = run.end()
    assert code == 0, run.output
    assert len(steps_in(folder)) == 1 and "Stopped by a signal" in run.output
