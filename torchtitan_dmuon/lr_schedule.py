"""The learning-rate schedule: linear warm-up, stable phase, decay.

A pure factor per step and the `LambdaLR` that applies it. The keys are declared in `config.job_config`.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_dmuon.config.conflicts import schedule_conflicts
from torchtitan_dmuon.config.job_config import LRScheduler
from torchtitan_dmuon.config.key import ConfigError
from torchtitan_dmuon.logging import logger


def lr_factor(
    step: int,
    warmup_steps: int,
    total_steps: int,
    decay_ratio: float | None,
    decay_type: str,
    min_lr_factor: float,
) -> float:
    """The factor on the peak learning rate at optimizer step `step`, where 0 is the first step.

    Warm-up is (step + 1) / warmup_steps, so its last step is at the peak. The decay leaves from the peak: its
    first step still has factor 1 and each later one is 1 / decay_steps further along the curve. min_lr_factor
    is reached at index total_steps, one past the last step, so that no step is spent at zero, and holds from
    there.

    Args:
        decay_ratio: share of `total_steps` that decays; None for everything after warm-up. More than warm-up
            leaves is cut to what is left.
        decay_type: "linear", "sqrt" or "cosine".

    Raises:
        ConfigError: warm-up longer than `total_steps`, decay_ratio outside [0, 1], unknown decay_type.
    """
    for key, problem in schedule_conflicts(warmup_steps, total_steps, decay_ratio):
        raise ConfigError(key, None, problem)
    if decay_type not in ("linear", "sqrt", "cosine"):
        raise ConfigError("lr_scheduler.decay_type", None, f"found {decay_type!r}, expected linear, sqrt or cosine")

    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = min(_requested_decay_steps(warmup_steps, total_steps, decay_ratio), total_steps - warmup_steps)
    decayed = step - (total_steps - decay_steps)
    if decay_steps == 0 or decayed <= 0:
        return 1.0
    progress = min(decayed / decay_steps, 1.0)
    if decay_type == "linear":
        shape = 1.0 - progress
    elif decay_type == "sqrt":
        shape = 1.0 - math.sqrt(progress)
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_factor + (1.0 - min_lr_factor) * shape


def build_lr_scheduler(optimizer: Optimizer, config: LRScheduler, training_steps: int, start_step: int = 0) -> LambdaLR:
    """Schedule every param group of `optimizer` from its own initial lr; step it after each optimizer step.

    Args:
        training_steps: length of the schedule where `config.total_steps` is None.
        start_step: optimizer steps done before; the schedule has no other state.

    Raises:
        ConfigError: as `lr_factor`.
    """
    total_steps = training_steps if config.total_steps is None else config.total_steps

    def factor(step: int) -> float:
        return lr_factor(
            step,
            config.warmup_steps,
            total_steps,
            config.decay_ratio,
            config.decay_type,
            config.min_lr_factor,
        )

    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    scheduler = LambdaLR(optimizer, factor, last_epoch=start_step - 1)
    requested = _requested_decay_steps(config.warmup_steps, total_steps, config.decay_ratio)
    left = total_steps - config.warmup_steps
    if requested > left:
        logger.warning(
            "lr_scheduler.decay_ratio: %d decay steps do not fit after %d of %d steps of warm-up, cut to %d",
            *(requested, config.warmup_steps, total_steps, left),
        )
    return scheduler


def _requested_decay_steps(warmup_steps: int, total_steps: int, decay_ratio: float | None) -> int:
    return total_steps - warmup_steps if decay_ratio is None else round(total_steps * decay_ratio)
