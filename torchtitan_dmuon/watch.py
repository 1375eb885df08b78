"""The metrics of a run, put together from what the trainer has built."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.families import get_model_spec
from torchtitan_dmuon.metrics import MetricsLogger, RunFacts
from torchtitan_dmuon.optimizer import base_group
from torchtitan_dmuon.parallel import Meshes
from torchtitan_dmuon.route_figures import RouteFigures
from torchtitan_dmuon.writers import open_writers


def build_metrics(
    config: JobConfig,
    folder: Path,
    meshes: Meshes,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    flops_per_token: int,
    step: int,
    tokens: int,
) -> MetricsLogger:
    """``optimizer`` is that of ``build_optimizer``.

    Args:
        folder: of the run.
        flops_per_token: model FLOPs of one token's forward and backward.
        step, tokens: done so far.
    """
    metrics = config.metrics
    uses_muon = isinstance(optimizer, dmuon.Muon)
    facts = RunFacts(
        dist.get_rank(),
        dist.get_world_size(),
        meshes.device,
        step,
        config.training.steps,
        flops_per_token,
        config.parallelism.tensor_parallel_degree,
        [group["group_name"] for group in optimizer.param_groups],
        base_group(optimizer),
        optimizer.newton_schulz_flops if uses_muon else 0,
        dmuon.summarize_comm_plan(model)["owner_load"]["flops"]["max_over_mean"] if uses_muon else None,
    )
    routes = None
    if metrics.enable_tensorboard or metrics.enable_wandb:
        routes = RouteFigures(model, optimizer, meshes.groups, meshes.device)
    writers = open_writers(config, folder, facts.rank, step, tokens)
    blocks = get_model_spec(config.model.name).parts(model).blocks
    return MetricsLogger(metrics, facts, blocks, writers, routes, optimizer.newton_schulz.watch if uses_muon else None)
