"""Saving and resuming: directories of ``torch.distributed.checkpoint`` that are complete or not there.

A checkpoint ``step-N`` holds the model and the optimizer as logical tensors by name (whatever the ranks that wrote
them), ``trainer.json`` with everything else the run needs, and ``config.toml`` with the resolved config. It is written
under a temporary name and renamed when every rank has finished.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchtitan_dmuon.config.job_config import Checkpoint
from torchtitan_dmuon.distributed import agree
from torchtitan_dmuon.logging import logger

_NAME = re.compile(r"step-(\d+)")
_INCOMPLETE = ".incomplete"
_TRAINER_FILE = "trainer.json"
_METADATA_FILE = ".metadata"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: one line that says which and what to do."""


@dataclass
class TrainState:
    """What a checkpoint holds beside tensors.

    Attributes:
        step: optimizer steps done.
        loader: the data loader's state.
        optimizer: name of the optimizer that wrote it.
        model: name and flavor of the model.
    """

    step: int
    loader: dict[str, int]
    optimizer: str
    model: str


Tensors = dict[str, torch.Tensor]


class Checkpointer:
    """Saves to and resumes from ``folder``.

    Args:
        config: the ``[checkpoint]`` section.
        folder: where the checkpoints of this run are.
        tensors: returns the live tensors of this rank, model and optimizer; loading fills them in place.
        loaded: called after they were filled.
        config_toml: the resolved config, stored beside every checkpoint.
    """

    def __init__(
        self,
        config: Checkpoint,
        folder: Path,
        tensors: Callable[[], Tensors],
        loaded: Callable[[], None],
        config_toml: str,
    ) -> None:
        self.config = config
        self.folder = folder
        self._tensors = tensors
        self._loaded = loaded
        self._config_toml = config_toml
        self._last_saved = -1

    # ---------------------------------------------------------------- saving

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is to be written after ``step``."""
        return self.config.enable and step != self._last_saved and (last or step % self.config.interval == 0)

    def save(self, state: TrainState) -> None:
        """Collective. Write ``step-N``; it appears under its name only when it is complete.

        Raises:
            CheckpointError: on every rank, when any rank could not write.
        """
        final = self.folder / f"step-{state.step}"
        temporary = final.with_name(final.name + _INCOMPLETE)
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # left over from a run that was killed
        dist.barrier()
        try:
            dcp.save(self._tensors(), checkpoint_id=str(temporary))
        except dcp.api.CheckpointException as error:  # raised on every rank, naming the ranks that failed
            reasons = "; ".join(f"rank {rank}: {exc[0]}" for rank, exc in sorted(error.failures.items()))
            raise CheckpointError(f"cannot write checkpoint {final}: {reasons}") from error
        problem = None
        if dist.get_rank() == 0:
            try:
                self._finish(temporary, final, state)
            except OSError as error:
                problem = str(error)
        problem = agree(problem)
        if problem:
            raise CheckpointError(f"cannot write checkpoint {final}: {problem}")
        self._last_saved = state.step
        logger.info("Saved checkpoint %s", final)

    def _finish(self, temporary: Path, final: Path, state: TrainState) -> None:
        files = {path.name: path.stat().st_size for path in temporary.iterdir()}
        (temporary / "config.toml").write_text(self._config_toml)
        (temporary / _TRAINER_FILE).write_text(json.dumps({**vars(state), "files": files}, indent=1))
        if final.exists():  # written by a run that was resumed from an earlier step
            shutil.rmtree(final)
        temporary.rename(final)
        if self.config.keep_latest_k > 0:
            for step in self._complete_steps()[: -self.config.keep_latest_k]:
                shutil.rmtree(self.folder / f"step-{step}")

    # ---------------------------------------------------------------- resuming

    def _complete_steps(self, warn: bool = False) -> list[int]:
        """Steps of the complete checkpoints, ascending; with ``warn`` the others are named."""
        steps = []
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            problem = _incomplete_because(path)
            if problem is None:
                steps.append(int(match[1]))
            elif warn:
                logger.warning("Skipping checkpoint %s: %s", path, problem)
        return sorted(steps)

    def load(self, optimizer: str, model: str) -> TrainState | None:
        """Collective. Resume from ``load_step`` or the newest complete checkpoint; ``None`` when there is none.

        Raises:
            CheckpointError: on every rank: the step asked for is not there, or the checkpoint is of another model or
                optimizer, or cannot be read.
        """
        if not self.config.enable:
            return None
        steps = agree(self._complete_steps(warn=True) if dist.get_rank() == 0 else None)
        wanted = self.config.load_step
        if wanted == -1 and not steps:
            return None
        if wanted != -1 and wanted not in steps:
            raise CheckpointError(f"checkpoint.load_step: {self.folder} has no complete step {wanted}, only {steps}")
        path = self.folder / f"step-{steps[-1] if wanted == -1 else wanted}"
        saved = json.loads((path / _TRAINER_FILE).read_text())
        saved.pop("files")
        state = TrainState(**saved)
        if (state.model, state.optimizer) != (model, optimizer):
            raise CheckpointError(
                f"{path} was written by {state.model} with {state.optimizer}, this run is {model} with {optimizer}: "
                "choose another job.dump_folder or checkpoint.folder"
            )
        try:
            dcp.load(self._tensors(), checkpoint_id=str(path))
        except dcp.api.CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {exc[0]}" for rank, exc in sorted(error.failures.items()))
            raise CheckpointError(f"cannot read checkpoint {path}: {reasons}") from error
        self._loaded()
        self._last_saved = state.step
        logger.info("Resumed from checkpoint %s", path)
        return state


def _incomplete_because(path: Path) -> str | None:
    """Why ``path`` is not a complete checkpoint; ``None`` when it is."""
    for name in (_METADATA_FILE, _TRAINER_FILE):
        if not (path / name).is_file():
            return f"half-written, {name} is missing"
    try:
        saved: dict[str, Any] = json.loads((path / _TRAINER_FILE).read_text())
        files = saved["files"].items()
    except (ValueError, KeyError, OSError) as error:
        return f"{_TRAINER_FILE} is unreadable ({error})"
    for name, size in files:
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"half-written, {name} should have {size} bytes"
    return None
