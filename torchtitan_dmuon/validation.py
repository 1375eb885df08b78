"""The loss on held-out data: summed over every valid token of every rank, divided by their number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from torchtitan_dmuon.config.job_config import Validation
from torchtitan_dmuon.data import IGNORE_INDEX, TokenLoader
from torchtitan_dmuon.dmuon import Lane
from torchtitan_dmuon.loss import LossFn, whole
from torchtitan_dmuon.parallel import all_reduce


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: TokenLoader,
    loss_fn: LossFn,
    config: Validation,
    lanes: list[Lane],
    context: Callable[[], AbstractContextManager],
) -> float:
    """Collective over ``lanes``, the ranks that read different data. The mean loss over ``config.steps`` batches (-1:
    all). ``context`` is what the loss runs under. Leaves ``model`` in training mode."""
    device = lanes[0].device
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for index, batch in enumerate(loader):
        if index == config.steps:
            break
        labels = batch["labels"].to(device)
        with context():
            total[0] += whole(loss_fn(model(batch["input"].to(device)), labels))
        total[1] += (labels != IGNORE_INDEX).sum()
    all_reduce(lanes, total)
    model.train()
    return (total[0] / total[1]).item()
