"""The launcher: what the console shows when a rank fails, and ranks that start again."""

import json
import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.support.training import Torchrun, tiny, write_corpus
from torchtitan_dmuon.launch import report
from torchtitan_dmuon.trainer import Trainer

pytestmark = pytest.mark.dist


@pytest.fixture
def folder(tmp_path):
    write_corpus(tmp_path / "corpus")
    return tmp_path


def options(folder, *more):
    return ["--log-dir", str(folder / "out/logs"), "--local-ranks-filter", "0", "--tee", "3", *more]


class RaisesOnRank1(Trainer):
    """An exception on rank 1 in step 3, when the run was not resumed."""

    def train_step(self, batches):
        if (self.rank, self.step) == (1, 3) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("the disk of rank 1 is on fire")
        return super().train_step(batches)


def test_the_message_of_the_rank_that_failed_ends_the_console(folder):
    """Only rank 0 is shown, and it fails as well: its peer is gone."""
    with Torchrun(folder, 2, *tiny(folder), options=options(folder), trainer=RaisesOnRank1) as run:
        code, _ = run.end()
    assert code == 1
    lines = run.output.splitlines()
    assert lines[-1] == "RuntimeError: the disk of rank 1 is on fire", run.output
    report = next(line for line in lines if line.startswith("error: rank 1 on "))
    log = report.partition(" its log is ")[2].removesuffix(":")
    assert log.startswith(str(folder / "out/logs")) and "loss" in Path(log, "stderr.log").read_text()
    assert "ChildFailedError" not in run.output


def failure(folder, local_rank, exitcode):
    return ProcessFailure(local_rank, pid=7, exitcode=exitcode, error_file=str(folder / f"{local_rank}/error.json"))


@pytest.mark.parametrize(
    ("exitcodes", "shown", "line"),
    [
        ([1, -signal.SIGKILL], {0}, "error: rank 5 on HOST: Signal 9 (SIGKILL) received by PID 7"),
        ([-signal.SIGTERM, 1], {1}, ""),
        ([1, 1], {0}, ""),
        ([1, 1], {2}, "error: rank 4 on HOST ended with exit code 1; show its output with LOG_RANK"),
    ],
)
def test_ranks_that_record_no_exception(tmp_path, monkeypatch, exitcodes, shown, line):
    """Of the second node. A rank that was killed is the cause, one that ended by itself has said why."""
    monkeypatch.setattr("socket.gethostname", lambda: "HOST")
    failures = {4 + rank: failure(tmp_path, rank, code) for rank, code in enumerate(exitcodes)}
    assert report(failures, shown).strip() == line


def test_an_error_that_every_rank_knows_is_one_line(folder):
    (folder / "corpus/bad.jsonl").write_text("{")
    data = {"training__dataset": "jsonl", "training__dataset_path": folder / "corpus/*.jsonl"}
    with Torchrun(folder, 2, *tiny(folder, **data), options=options(folder)) as run:
        code, _ = run.end()
    assert code == 1 and "Traceback" not in run.output, run.output
    lines = [line for line in run.output.splitlines() if "spawn.py" not in line]  # of forked ranks alone
    assert [line for line in lines if "error" in line.lower()] == lines[-1:], run.output


def test_ranks_are_started_again_and_resume_from_the_newest_checkpoint(folder):
    """Also where load_step named an older one for the first start."""
    first = tiny(folder, training__steps=1, lr_scheduler__total_steps=4, lr_scheduler__warmup_steps=1)
    with Torchrun(folder, 2, *first) as run:
        assert run.end()[0] == 0, run.output
    arguments = tiny(folder, checkpoint__load_step=1)
    with Torchrun(folder, 2, *arguments, options=options(folder, "--max-restarts", "1"), trainer=RaisesOnRank1) as run:
        code, _ = run.end()
    assert code == 0, run.output
    assert "Training from step 2 to 4" in run.output and "Training from step 3 to 4" in run.output
    assert json.loads((folder / "out/checkpoint/step-4/trainer.json").read_text())["step"] == 4
