"""The learning-rate factor of every step, and the scheduler that applies it to each param group."""

import itertools
import math

import pytest
import torch

from torchtitan_dmuon.config import ConfigError
from torchtitan_dmuon.config.job_config import LRScheduler
from torchtitan_dmuon.lr_schedule import build_lr_scheduler, lr_factor


def factors(warmup_steps, total_steps, decay_ratio=None, decay_type="linear", min_lr_factor=0.0, count=None):
    count = total_steps if count is None else count
    return [lr_factor(step, warmup_steps, total_steps, decay_ratio, decay_type, min_lr_factor) for step in range(count)]


def test_two_warmup_steps_of_ten():
    assert factors(2, 10) == [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]


def test_warmup_stable_decay():
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert factors(2, 10, decay_ratio=0.5) == pytest.approx(expected, abs=1e-15)


def test_decay_shapes_leave_from_the_peak():
    progress = [0.0, 0.25, 0.5, 0.75]
    assert factors(0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert factors(0, 4, decay_type="sqrt") == [1 - math.sqrt(p) for p in progress]
    cosine = [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]
    assert factors(0, 4, decay_type="cosine") == pytest.approx(cosine, abs=1e-15)


def test_no_decay_and_no_warmup():
    assert factors(0, 3, decay_ratio=0.0, count=5) == [1.0] * 5
    assert factors(3, 3, count=5) == [1 / 3, 2 / 3, 1.0, 1.0, 1.0]
    assert factors(1, 2) == [1.0, 1.0]


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("minimum", [0.0, 0.1, 0.3, 1.0])
def test_never_below_the_minimum_which_holds_after_the_end(decay_type, minimum):
    values = factors(3, 20, None, decay_type, minimum, count=25)
    assert min(values[3:]) >= minimum
    assert values[20:] == [minimum] * 5
    assert values[2:4] == [1.0, 1.0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(values[2:]))


def test_minimum_scales_the_curve():
    assert factors(0, 4, min_lr_factor=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4], abs=1e-15)


def test_a_decay_that_does_not_fit_is_cut():
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert factors(5, 10, decay_ratio=0.8) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (11, 10, None, "linear"),
            "lr_scheduler.warmup_steps: found 11, expected 0 to 10, the length of the schedule",
        ),
        ((0, 10, 1.5, "linear"), "lr_scheduler.decay_ratio: found 1.5, expected 0 to 1"),
        ((0, 10, -0.1, "linear"), "lr_scheduler.decay_ratio: found -0.1, expected 0 to 1"),
        ((0, 10, None, "step"), "lr_scheduler.decay_type: found 'step', expected linear, sqrt or cosine"),
    ],
)
def test_bad_schedules(arguments, message):
    with pytest.raises(ConfigError) as info:
        lr_factor(0, *arguments, 0.0)
    assert str(info.value) == message


def two_groups():
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    return torch.optim.SGD([{"params": [first], "lr": 8.0}, {"params": [second], "lr": 0.5}])


def run(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def test_every_group_keeps_its_own_lr():
    optimizer = two_groups()
    scheduler = build_lr_scheduler(optimizer, LRScheduler(warmup_steps=2), training_steps=4)
    assert run(optimizer, scheduler, 4) == [[4.0, 0.25], [8.0, 0.5], [8.0, 0.5], [4.0, 0.25]]


def test_total_steps_over_training_steps():
    optimizer = two_groups()
    scheduler = build_lr_scheduler(optimizer, LRScheduler(warmup_steps=0, total_steps=2), training_steps=4)
    assert [rates[0] for rates in run(optimizer, scheduler, 4)] == [8.0, 4.0, 0.0, 0.0]


def test_state_resumes():
    config, optimizer = LRScheduler(warmup_steps=2, decay_type="cosine"), two_groups()
    scheduler = build_lr_scheduler(optimizer, config, 6)
    run(optimizer, scheduler, 3)
    again = two_groups()
    resumed = build_lr_scheduler(again, config, 6)
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert run(again, resumed, 3) == run(optimizer, scheduler, 3)


def test_build_refuses_and_warns(caplog, monkeypatch):
    with pytest.raises(ConfigError, match=r"^lr_scheduler.warmup_steps: found 200, expected 0 to 10, the length"):
        build_lr_scheduler(two_groups(), LRScheduler(), training_steps=10)
    # Another test may have called init_logger, which stops propagation to the handler of caplog.
    monkeypatch.setattr("torchtitan_dmuon.logging.logger.propagate", True)
    build_lr_scheduler(two_groups(), LRScheduler(warmup_steps=5, decay_ratio=0.5), training_steps=10)
    assert caplog.messages == []
    build_lr_scheduler(two_groups(), LRScheduler(warmup_steps=5, decay_ratio=0.8), training_steps=10)
    assert caplog.messages == [
        "lr_scheduler.decay_ratio: 8 decay steps do not fit after 5 of 10 steps of warm-up, cut to 5"
    ]
