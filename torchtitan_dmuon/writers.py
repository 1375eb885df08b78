"""Where figures go beside the log: TensorBoard files and Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torchtitan_dmuon.config import JobConfig, config_to_dict, config_to_toml
from torchtitan_dmuon.logging import logger


class Writer(Protocol):
    """Takes the figures of a run."""

    def write(self, figures: Mapping[str, float], step: int, tokens: int) -> None:
        """``figures`` by tag, after ``step`` steps and ``tokens`` tokens of all ranks."""

    def close(self) -> None:
        """Everything is written when this returns."""


class TensorBoard:
    """Event files in ``folder`` with steps as axis, and of the losses in ``folder/by_tokens`` with tokens as axis. What
    an earlier process wrote of later steps is hidden, so that a run that goes on from an earlier checkpoint draws one
    line."""

    def __init__(self, folder: Path, config_toml: str, step: int, tokens: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._by_step = SummaryWriter(str(folder), purge_step=step + 1)
        self._by_tokens = SummaryWriter(str(folder / "by_tokens"), purge_step=tokens + 1)
        indented = "".join(f"    {line}\n" for line in config_toml.splitlines())  # Markdown for text as it is
        self._by_step.add_text("config", indented, step + 1)
        logger.info("TensorBoard files in %s", folder)

    def write(self, figures: Mapping[str, float], step: int, tokens: int) -> None:
        for tag, value in figures.items():
            self._by_step.add_scalar(tag, value, step)
            if tag.endswith("/loss"):
                self._by_tokens.add_scalar(tag, value, tokens)
        for file in (self._by_step, self._by_tokens):  # a process that is killed writes nothing more
            file.flush()

    def close(self) -> None:
        self._by_step.close()
        self._by_tokens.close()


class WeightsAndBiases:
    """A run at Weights & Biases, which reads its own environment variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME,
    WANDB_MODE and others."""

    def __init__(self, folder: Path, config: JobConfig) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "torchtitan_dmuon")
        self._run = wandb.init(project=project, dir=str(folder), config=config_to_dict(config))
        logger.info("Weights & Biases project %s", project)

    def write(self, figures: Mapping[str, float], step: int, tokens: int) -> None:
        self._run.log({**figures, "train/tokens": tokens}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_writers(config: JobConfig, folder: Path, rank: int, step: int, tokens: int) -> list[Writer]:
    """The writers of this rank: those that ``[metrics]`` asks for, on rank 0 or with ``save_for_all_ranks`` on all.

    Args:
        folder: of the run.
        step, tokens: done so far.
    """
    metrics = config.metrics
    if rank != 0 and not metrics.save_for_all_ranks:
        return []
    writers: list[Writer] = []
    if metrics.enable_tensorboard:
        place = folder / metrics.save_tb_folder
        place = place / f"rank_{rank}" if metrics.save_for_all_ranks else place
        writers.append(TensorBoard(place, config_to_toml(config), step, tokens))
    if metrics.enable_wandb:
        folder.mkdir(parents=True, exist_ok=True)
        writers.append(WeightsAndBiases(folder, config))
    return writers
