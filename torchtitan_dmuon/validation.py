"""The loss on held-out data: summed over every valid token of every rank, divided by their number."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_dmuon.config.job_config import Validation
from torchtitan_dmuon.data import IGNORE_INDEX, TokenLoader
from torchtitan_dmuon.loss import LossFn


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: TokenLoader,
    loss_fn: LossFn,
    config: Validation,
    group: dist.ProcessGroup,
    device: torch.device,
) -> float:
    """Collective. The mean loss over ``config.steps`` batches (-1: all). Leaves ``model`` in training mode."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for index, batch in enumerate(loader):
        if index == config.steps:
            break
        labels = batch["labels"].to(device)
        total[0] += loss_fn(model(batch["input"].to(device)), labels)
        total[1] += (labels != IGNORE_INDEX).sum()
    dist.all_reduce(total, group=group)
    model.train()
    return (total[0] / total[1]).item()
