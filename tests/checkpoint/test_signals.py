"""Signals to real runs: SIGTERM and SIGINT save and end, SIGUSR1 saves, whichever process gets them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.training import ROOT, start_torchrun, tiny, train, write_corpus

pytestmark = pytest.mark.dist

ENDLESS = {
    "model__flavor": "debugmodel",
    "training__steps": 100000,
    "lr_scheduler__total_steps": 100000,
    "checkpoint__interval": 50000,
}


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus")
    return tmp_path


class Process:
    """A run whose output is read while it goes on."""

    def __init__(self, world, *arguments, **options):
        self.process = start_torchrun(world, *arguments, **options)
        self.output = ""

    def wait_for(self, pattern, timeout=60):
        """Reads on until a new line has ``pattern``."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            self.output += line
            if match := re.search(pattern, line):
                return match
            assert line, self.output
        raise AssertionError(f"no {pattern} in time:\n{self.output}")

    def workers(self):
        listed = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def end(self, timeout=60):
        begin = time.monotonic()
        output, _ = self.process.communicate(timeout=timeout)
        self.output += output
        return self.process.returncode, time.monotonic() - begin


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in (folder / "out/checkpoint").iterdir())


def test_one_rank_is_told_to_save_and_the_launcher_to_stop(folder):
    """Tensor parallel: the ranks that read no data of their own have to be heard, too."""
    run = Process(2, *tiny(folder, parallelism__tensor_parallel_degree=2, **ENDLESS))
    run.wait_for(r"step:\s+3 ")
    os.kill(run.workers()[1], signal.SIGUSR1)
    saved = int(run.wait_for(r"Saved checkpoint .*step-(\d+)")[1])
    run.wait_for(rf"step:\s+{saved + 2} ")
    run.process.send_signal(signal.SIGTERM)
    code, seconds = run.end()
    assert code == 0 and seconds < 30, run.output
    stopped = int(re.search(r"Stopped by a signal after step (\d+), which is saved", run.output)[1])
    assert steps_in(folder) == [saved, stopped]
    again = train(2, *tiny(folder, **{**ENDLESS, "training__steps": stopped + 1}))
    assert again.codes == [0, 0] and list(again.steps) == [stopped + 1], again.output


def test_plain_torchrun_behind_an_asynchronous_save(folder):
    """Its agent passes SIGTERM on and then ends with an error of its own; the ranks have saved all the same."""
    options = {**ENDLESS, "checkpoint__interval": 2, "checkpoint__async_mode": "async", "checkpoint__keep_latest_k": 1}
    run = Process(2, *tiny(folder, **options), launcher="torch.distributed.run")
    run.wait_for(r"step:\s+5 ")
    run.process.send_signal(signal.SIGTERM)
    run.end()
    stopped = int(re.search(r"Stopped by a signal after step (\d+), which is saved", run.output)[1])
    assert steps_in(folder) == [stopped] and "Traceback" not in run.output.split("Stopped by")[0]


def test_without_checkpoints_it_ends_and_says_so(folder):
    run = Process(
        2, *tiny(folder, checkpoint__enable=False, **{k: v for k, v in ENDLESS.items() if "interval" not in k})
    )
    run.wait_for(r"step:\s+2 ")
    os.kill(run.workers()[0], signal.SIGUSR1)
    run.wait_for("A signal asked for a checkpoint after step .* NOTHING is saved")
    os.kill(run.workers()[1], signal.SIGINT)
    code, _ = run.end()
    assert code == 0 and "NOTHING is saved, checkpointing is off" in run.output.split("SIGUSR1")[-1], run.output
    assert not (folder / "out/checkpoint").exists()


def test_a_process_that_does_not_finish_in_time_is_ended():
    program = (
        "import os, signal, time\n"
        "from torchtitan_dmuon.logging import init_logger\n"
        "from torchtitan_dmuon.signals import SignalWatch\n"
        "init_logger(0, color=False)\n"
        "with SignalWatch(0.5) as watch:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert watch.stop\n"
        "    time.sleep(30)\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and time.monotonic() - begin < 25
    assert "not finished 0.5 s after the signal (checkpoint.grace_seconds)" in done.stderr


def test_a_scheduler_signals_every_process(folder):
    """Slurm's --signal reaches all processes of a step."""
    run = Process(2, *tiny(folder, **ENDLESS))
    run.wait_for("step:    5 ")
    tree, found = [], [run.process.pid]
    while found:
        tree += found
        listed = [subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout for pid in found]
        found = [int(pid) for text in listed for pid in text.split()]
    assert len(tree) >= 3, "the launcher and two ranks"
    for pid in reversed(tree):
        os.kill(pid, signal.SIGTERM)
    code, _ = run.end()
    assert code == 0, run.output
    assert len(steps_in(folder)) == 1 and "Stopped by a signal" in run.output
