"""A rank that hangs is named: by the others when it does not answer, and by where it is when it does."""

import time

import pytest
import torch.distributed as dist

from tests.support.pool import free_port
from tests.support.training import tiny, train, write_corpus
from torchtitan_dmuon.hang import HangWatch, Place, describe
from torchtitan_dmuon.trainer import Trainer

FORWARD, DATA, LATER = (7, 4, "in forward"), (7, 1, "in data"), (8, 1, "in data")


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([FORWARD, DATA, FORWARD], "rank 1 did not arrive: in data of step 7, while others are further (ranks 0, 2: "),
        ([LATER, LATER, FORWARD], "rank 2 did not arrive: in forward of step 7, while others are further ("),
        ([FORWARD, None, None], "ranks 1, 2 did not answer: the process is stopped, or its host is gone"),
        ([FORWARD] * 3, "all ranks are in forward, so a device or the network hangs"),
        ([FORWARD] + [None] * 12, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more did not answer"),
    ],
)  # fmt: skip
def test_who_is_behind(places, told):
    answers = {rank: place for rank, place in enumerate(places) if place is not None}
    assert describe(answers, len(places)).startswith(told)


def test_a_rank_that_does_not_answer(monkeypatch, caplog):
    """Two of three ranks in this process. An answer to an earlier question does not count, and a pause is no hang."""
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    dist.PrefixStore("hang/0", store).set("2", '[2, 0, "in forward"]')
    places = [Place(), Place(), Place()]
    watches = [HangWatch(place, rank, 3, 1.0) for rank, place in enumerate(places)]
    places[2].pause(True)
    for place in places:
        place.begin(7)
        place.enter("in backward")
    with watches[0], watches[1], watches[2]:
        time.sleep(1.5)
    told = "rank 2 did not answer: the process is stopped, or its host is gone"
    assert len(caplog.messages) == 2 and all(told in message for message in caplog.messages), caplog.messages


class SleepsInData(Trainer):
    """On rank 1 the data of step 3 take longer than the timeout of collectives."""

    def train_step(self, batches):
        if self.step == 3 and self.rank == 1:
            read, first = self.loader, next(batches)

            def late():
                time.sleep(8)
                yield first
                yield from read

            batches = late()
        return super().train_step(batches)


@pytest.mark.dist
def test_a_training_that_hangs_ends_with_the_name_of_the_rank(tmp_path):
    write_corpus(tmp_path / "corpus")
    options = {"checkpoint__enable": False, "comm__train_timeout_seconds": 4}
    run = train(2, *tiny(tmp_path, **options), trainer=SleepsInData)
    assert 0 not in run.codes and list(run.steps) == [1, 2], run.output
    told = "rank 1 did not arrive: in data of step 3, while others are further (rank 0: after data of step 3)"
    warning, error = (line for line in run.output.splitlines() if told in line)
    assert "warning: step 3 has taken " in warning and "error: step 3 has taken " in error
