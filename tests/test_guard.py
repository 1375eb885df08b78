"""Steps whose update is left out."""

import dataclasses
import math
import statistics

import pytest
import torch

from tests.support.private import find_inf_on_device
from tests.support.training import assert_refused, tiny, train, write_corpus
from torchtitan_dmuon.config.job_config import Training
from torchtitan_dmuon.guard import NonFiniteError, StepGuard
from torchtitan_dmuon.trainer import Trainer

NAN, INF = math.nan, math.inf


def judged(values, **keys):
    """(whether each of (loss, norm) is skipped, the guard)."""
    guard = StepGuard(dataclasses.replace(Training(), **keys), [], torch.device("cpu"))
    skips = [guard.judge(step, *torch.tensor(pair).double()).item() for step, pair in enumerate(values, start=1)]
    return [bool(skip) for skip in skips], guard


def test_steps_that_are_not_finite(caplog):
    skips, guard = judged([(1.0, 1.0), (NAN, 1.0), (1.0, -INF), (1.0, 1.0), (1.0, INF)], skip_max_steps=2)
    assert skips == [False, True, True, False, True]
    assert guard.check() == guard.check() == 3
    told = "Skipped 3 update(s), the last of them in step 5 (3 since the start): the loss or the gradient norm was not "
    assert caplog.messages == [told + "finite"]


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (0, "step 3: the loss or the gradient norm is not finite; no weight has moved since step 2."),
        (1, "step 4: the update of 2 steps in a row was to be skipped, .* no weight has moved since step 2."),
    ],
)
def test_the_limit_ends_the_run(most, message):
    """Until the host looks, nothing moves."""
    skips, guard = judged([(1.0, 1.0)] * 2 + [(NAN, 1.0)] * 3 + [(1.0, 1.0)], skip_max_steps=most)
    assert skips == [False] * 2 + [True] * 4
    with pytest.raises(NonFiniteError, match=message):
        guard.check()


@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_spikes(sigma):
    """Of either value, over the last four steps that were not skipped, against Python's own statistics."""
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(200, 2, generator=draw, dtype=torch.float64).exp().tolist()
    values[50] = (NAN, 1.0)
    kept, expected = [], []
    for pair in values:
        window = list(zip(*kept[-4:], strict=True))
        spike = len(kept) >= 4 and any(
            value > statistics.mean(past) + sigma * statistics.pstdev(past)
            for value, past in zip(pair, window, strict=True)
        )
        expected.append(spike or not math.isfinite(pair[0]))
        kept += [] if expected[-1] else [pair]
    skips, _ = judged(values, skip_max_steps=1000, skip_sigma=sigma, skip_window=4)
    assert skips == expected and 10 < sum(skips) < 190


class Hit(Trainer):
    """The loss of rank 1 is multiplied in some steps. ``description`` is "steps factor where"; on the device the flag
    stays there, as with fused optimizers on CUDA."""

    def __init__(self, config, signals):
        super().__init__(config, signals)
        steps, factor, where = config.job.description.split()
        hit, loss_fn = set(map(int, steps.split(","))), self.loss_fn
        self.loss_fn = lambda *args: loss_fn(*args) * (float(factor) if self.rank == 1 and self.step in hit else 1.0)
        if where == "device":
            find_inf_on_device(self)


def run_hit(folder, description, **keys):
    write_corpus(folder / "corpus")
    options = {"training__steps": 6, "checkpoint__enable": False, "training__skip_max_steps": 2}
    return train(2, *tiny(folder, job__description=description, **options, **keys), trainer=Hit)


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["DMuon", "AdamW"])
def test_a_training_goes_on_after_a_nan(tmp_path, optimizer):
    """Whoever looks, the host or the device: the same losses, from weights that the steps have not changed."""
    runs = [run_hit(tmp_path, f"3,4 nan {where}", optimizer__name=optimizer) for where in ("host", "device")]
    for run in runs:
        assert run.codes == [0, 0], run.output
        assert [math.isnan(values[0]) for values in run.steps.values()] == [False] * 2 + [True] * 2 + [False] * 2
        assert run.output.splitlines()[-2].endswith("skipped: 2"), run.output
        assert run.output.count("warning: Skipped 1 update(s)") == 2
    host, device = ({step: values for step, values in run.steps.items() if step not in (3, 4)} for run in runs)
    assert host == device


@pytest.mark.dist
def test_a_training_skips_a_spike_on_every_rank(tmp_path):
    run = run_hit(tmp_path, "5 1000 host", training__skip_sigma=50, training__skip_window=2)
    assert run.codes == [0, 0] and len(run.steps) == 6, run.output
    for output in run.outputs:
        assert "Skipped 1 update(s), the last of them in step 5" in output


@pytest.mark.dist
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_training_ends_at_the_limit(tmp_path, where):
    assert_refused(run_hit(tmp_path, f"3,4,5 nan {where}"), "step 5: the update of 3 steps in a row was to be skipped")
