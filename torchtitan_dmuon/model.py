"""The model of a run: built on meta, prepared for its ranks, and filled with its initial weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.families import get_model_spec
from torchtitan_dmuon.initialization import seeded_init
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.parallel import Meshes, parallelize

_TABLE_ROWS_ON_CONSOLE = 12


def build_model(config: JobConfig, args: Any, meshes: Meshes) -> tuple[nn.Module, int]:
    """Collective. (the parallelized model with its initial weights, model FLOPs of one token).

    Args:
        args: of the model family, with nothing left to fill in.

    Raises:
        ConfigError: as :func:`torchtitan_dmuon.parallel.parallelize`.
    """
    spec = get_model_spec(config.model.name)
    with torch.device("meta"):
        model = spec.build(args)
    flops_per_token = spec.flops_per_token(model, args, config.training.seq_len)
    total = sum(param.numel() for param in model.parameters())
    logger.info(
        "Model %s %s: %s parameters, %.3g FLOPs a token",
        *(config.model.name, config.model.flavor, f"{total:,}", flops_per_token),
    )
    parallelize(model, meshes, spec, config)
    dmuon.materialize(model, seeded_init(model.init_parameter, config.debug.seed), meshes.device)
    model.init_buffers(meshes.device)
    return model, flops_per_token


def write_ownership(model: nn.Module, folder: Path) -> None:
    """Write who owns each parameter into ``ownership.json`` and ``ownership.txt`` of ``folder``, and log the top of the
    table. On one rank."""
    rows = dmuon.ownership_table(model)
    (folder / "ownership.json").write_text(json.dumps([row.as_dict() for row in rows], indent=1))
    (folder / "ownership.txt").write_text(f"{dmuon.format_ownership_table(rows)}\n\n{dmuon.format_owners(model)}\n")
    table = dmuon.format_ownership_table(rows, limit=_TABLE_ROWS_ON_CONSOLE)
    logger.info("Ownership (whole table in %s):\n%s", folder / "ownership.txt", table)
