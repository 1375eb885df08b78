"""The loss on held-out data: summed over every valid token of every rank, divided by their number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from torchtitan_dmuon.config.job_config import Validation
from torchtitan_dmuon.data import IGNORE_INDEX, TokenLoader
from torchtitan_dmuon.distributed import all_reduce
from torchtitan_dmuon.loss import LossFn, whole
from torchtitan_dmuon.parallel import Meshes


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: TokenLoader,
    loss_fn: LossFn,
    config: Validation,
    meshes: Meshes,
    loss_context: Callable[[], AbstractContextManager],
) -> float:
    """Collective over the ranks that read different data. Leaves ``model`` in training mode.

    Args:
        loader: a finite one.
        config: ``steps`` of it are the batches read; -1 is all.
        loss_context: in which model and loss run.

    Returns:
        The mean loss of a valid token, the same on every rank.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=meshes.device)  # summed loss, valid tokens
    for index, batch in enumerate(loader):
        if index == config.steps:
            break
        labels = batch["labels"].to(meshes.device)
        with loss_context():
            total[0] += whole(loss_fn(model(batch["input"].to(meshes.device)), labels))
        total[1] += (labels != IGNORE_INDEX).sum()
    all_reduce(total, meshes.dp_groups)
    model.train()
    return (total[0] / total[1]).item()
