"""The training loss: a sum over valid tokens, to be divided by their number in the whole step.

Dividing by the global count, and summing gradients over ranks and micro-batches, makes accumulation and ranks with
different numbers of valid tokens exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.config.job_config import Compile
from torchtitan_dmuon.data import IGNORE_INDEX

LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of -log p over labels that are not ``IGNORE_INDEX``, in float32.

    Args:
        logits: [B, S, V], any floating dtype.
        labels: [B, S] int64.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def whole(loss: torch.Tensor) -> torch.Tensor:
    """The loss as a plain tensor. Computed on logits that are split along the vocabulary, it is a DTensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def build_loss(config: Compile) -> LossFn:
    """The loss, compiled if ``[compile]`` says so."""
    if config.enable and "loss" in config.components:
        return torch.compile(cross_entropy_sum, backend=config.backend)
    return cross_entropy_sum
