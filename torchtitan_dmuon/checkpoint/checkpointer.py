"""When a run saves and what it starts from: the ``[checkpoint]`` section."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_dmuon.checkpoint import huggingface
from torchtitan_dmuon.checkpoint.directory import (
    STATE_FILE,
    CheckpointError,
    complete_steps,
    corrupted_because,
    incomplete_because,
    move_aside,
    read_checksums,
    recover,
    remove,
    step_folder,
)
from torchtitan_dmuon.checkpoint.loading import load_checkpoint, load_huggingface, read_state, verify
from torchtitan_dmuon.checkpoint.random_state import get_random_state
from torchtitan_dmuon.checkpoint.saving import Saver, model_only_tensors
from torchtitan_dmuon.checkpoint.state import FULL, HUGGINGFACE, MODEL_ONLY, Contents, TrainState
from torchtitan_dmuon.config.job_config import Checkpoint
from torchtitan_dmuon.distributed import agree, checkpoint_group
from torchtitan_dmuon.logging import logger

_TENSORS = {"model", "optimizer", "rng"}
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Checkpointer:
    """Saves to and resumes from ``folder``. Building it is collective.

    Args:
        config: the ``[checkpoint]`` section.
        folder: where the checkpoints of this run are.
        contents: the run.
        hf_assets_path: where initial HuggingFace weights are when ``initial_load_path`` does not say.
    """

    def __init__(self, config: Checkpoint, folder: Path, contents: Contents, hf_assets_path: str | None = None) -> None:
        # torchrun starts failed ranks again with the same arguments: the newest checkpoint is this run's own by then.
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        self.config = dataclasses.replace(config, load_step=-1) if restarted else config
        self.folder = folder
        self._contents = contents
        self._initial_path = config.initial_load_path
        if self._initial_path is None and config.initial_load_in_hf:
            self._initial_path = hf_assets_path
        self._last_saved = -1
        self._saver: Saver | None = None
        if config.enable:
            self._group = checkpoint_group()
            self._saver = Saver(folder, config.async_mode, self._group)

    @property
    def can_save(self) -> bool:
        """Whether this run writes checkpoints at all."""
        return self.config.enable and not self.config.load_only

    # ---------------------------------------------------------------- saving

    def due(self, step: int, wanted: bool) -> bool:
        """Whether a checkpoint is to be written after ``step``: the interval says so, or somebody wants one that is not
        there yet. Not collective."""
        if not self.can_save or step == self._last_saved:
            return False
        first = step == 1 and self.config.enable_first_step_checkpoint
        return first or wanted or step % self.config.interval == 0

    def save(self, state: TrainState, last: bool = False, stopping: bool = False) -> None:
        """Collective. Write ``step-N``, in the way ``async_mode`` says; it appears when it is durable.

        Args:
            last: the run has made its last step. The checkpoint is written before this returns, with only the weights
                if ``last_save_model_only`` says so.
            stopping: the run ends before its last step. The checkpoint is whole, and written before this returns.

        Raises:
            CheckpointError: on every rank, when any rank could not write this checkpoint or the one before.
        """
        final = step_folder(self.folder, state.step)
        config = self.config
        exported = last and config.last_save_model_only
        tensors = {f"model.{name}": tensor for name, tensor in self._contents.model().items()}
        convert = None
        if exported:
            tensors = model_only_tensors(tensors, _DTYPES[config.export_dtype])
            state = dataclasses.replace(state, contents=MODEL_ONLY)
            if config.last_save_in_hf:
                state = dataclasses.replace(state, contents=HUGGINGFACE)
                convert = self._convert
        else:
            tensors |= {f"optimizer.{name}": tensor for name, tensor in self._contents.optimizer().items()}
            tensors |= {f"rng.{dist.get_rank()}.{name}": tensor for name, tensor in get_random_state().items()}
        state = dataclasses.replace(state, world_size=dist.get_world_size(), hf_config=self._contents.hf_config)

        def done() -> None:
            logger.info("Saved checkpoint %s", final)
            if state.contents == FULL:
                self._keep_latest(state.step)

        behind = not (last or stopping)
        self._saver.save(final, tensors, state, self._contents.config_toml, done, behind=behind, convert=convert)
        self._last_saved = state.step

    def _convert(self, written: Path) -> None:
        """Replace the tensors in ``written`` by the HuggingFace files made of them. On rank 0."""
        contents = self._contents
        try:
            huggingface.write_huggingface(written, written, contents.hf_names, contents.hf_config)
        except ImportError as error:
            raise OSError(str(error)) from error
        for path in [*written.glob("*.distcp"), written / ".metadata"]:
            path.unlink()

    def _keep_latest(self, step: int) -> None:
        """Remove older checkpoints, now that ``step`` is durable. Model-only ones stay (they are results), and
        so do later ones: this run has begun again at step 1 beside them."""
        if self.config.keep_latest_k == 0:
            return
        older = []
        for found in complete_steps(self.folder):
            try:
                if found <= step and TrainState.read(step_folder(self.folder, found)).contents == FULL:
                    older.append(found)
            except CheckpointError as error:
                logger.warning("Keeping a checkpoint that cannot be read: %s", error)
        for found in older[: -self.config.keep_latest_k]:
            try:
                remove(step_folder(self.folder, found))
            except OSError as error:
                logger.warning("Cannot remove the old checkpoint step-%d: %s", found, error)

    @property
    def has_failed(self) -> bool:
        """Whether a save behind the training failed on this rank. Not collective."""
        return self._saver is not None and self._saver.has_failed

    def wait_staged(self) -> None:
        """To be called before weights change: returns when a save under way has its copy of them. Not collective."""
        if self._saver is not None:
            self._saver.wait_staged()

    def wait(self) -> None:
        """Collective. Return when the last save is durable. Raises CheckpointError when it failed."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Collective. As :meth:`wait`, and end the threads."""
        if self._saver is not None:
            self._saver.close()

    # ---------------------------------------------------------------- resuming

    def load(self, total_steps: int | None = None) -> TrainState | None:
        """Collective. Resume from ``load_step`` or the newest complete checkpoint, else from the initial one.

        Args:
            total_steps: of the run. When its last checkpoint is there and holds only weights, nothing is loaded.

        Returns:
            ``trainer.json`` of the checkpoint that the run goes on from. Fields of excluded parts are empty, ``step``
            0. ``None`` when the run begins anew, be it from loaded weights.

        Raises:
            CheckpointError: on every rank: the step asked for is not there, or the checkpoint is of another model, or
                cannot be read.
        """
        config = self.config
        if not config.enable:
            return None
        steps, weights, problem = agree(self._listed_steps() if dist.get_rank() == 0 else None, group=self._group)
        if problem:
            raise CheckpointError(f"cannot list the checkpoints in {self.folder}: {problem}")
        if weights and total_steps is not None and max(weights) >= total_steps and config.load_step == -1:
            logger.info("The run is finished: %s holds its weights", step_folder(self.folder, max(weights)))
            return read_state(step_folder(self.folder, max(weights)), self._group)
        if config.load_step != -1 and config.load_step not in steps:
            raise CheckpointError(
                f"checkpoint.load_step: {self.folder} has no complete step {config.load_step}, only {steps}"
            )
        if steps and not config.create_seed_checkpoint:
            return self._load_own(steps)
        return None if self._initial_path is None else self._load_initial(Path(self._initial_path))

    def _load_own(self, steps: list[int]) -> TrainState:
        """Of this run's checkpoints, the one asked for."""
        step = steps[-1] if self.config.load_step == -1 else self.config.load_step
        state = self._load(step_folder(self.folder, step), "Resumed from checkpoint")
        if self.config.load_step != -1 and self.can_save:
            self._move_later_aside(step)
        self._last_saved = state.step
        return state

    def _move_later_aside(self, step: int) -> None:
        """Collective. What this run saves from now on is the only branch in its folder: the next run resumes from it,
        and old checkpoints are counted along it."""
        moved = problem = None
        if dist.get_rank() == 0:
            try:
                if any(later > step for later in complete_steps(self.folder)):
                    moved = move_aside(self.folder, step)
            except OSError as error:
                problem = str(error)
        if problem := agree(problem, group=self._group):
            raise CheckpointError(f"cannot move the checkpoints after step {step} aside: {problem}")
        if moved is not None:
            logger.warning("checkpoint.load_step: the checkpoints of later steps are now in %s", moved)

    def _load_initial(self, path: Path) -> TrainState | None:
        """The weights of a HuggingFace folder; or of a checkpoint the weights, or all of it."""
        if self.config.initial_load_in_hf:
            load_huggingface(path, self._contents, self._group)
            logger.info("Loaded HuggingFace weights from %s", path)
            return None
        problem = agree(incomplete_because(path) if dist.get_rank() == 0 else None, group=self._group)
        if problem:
            raise CheckpointError(
                f"checkpoint.initial_load_path: {path} is no complete checkpoint ({problem}); name a step-N folder"
            )
        if not self.config.initial_load_model_only:
            return self._load(path, "Started from checkpoint")
        verify(path, self._group)
        saved = read_state(path, self._group)
        if saved.contents == HUGGINGFACE:
            raise CheckpointError(
                f"checkpoint.initial_load_path: {path} holds HuggingFace files; set checkpoint.initial_load_in_hf"
            )
        load_checkpoint(path, self._contents, saved, {"model"}, self._group)
        logger.info("Loaded the weights of %s", path)
        return None

    def _load(self, path: Path, what: str) -> TrainState:
        """Load all of the checkpoint ``path`` but ``exclude_from_loading``. ``what`` begins the log line."""
        verify(path, self._group)
        saved = read_state(path, self._group)
        if saved.contents != FULL:
            raise CheckpointError(
                f"{path} holds only weights: name it in checkpoint.initial_load_path, with initial_load_model_only"
            )
        if saved.model != self._contents.model_name:
            raise CheckpointError(
                f"{path} was written by {saved.model}, this run is {self._contents.model_name}: choose another "
                "job.dump_folder or checkpoint.folder"
            )
        excluded = set(self.config.exclude_from_loading)
        if "train_state" in excluded and path.parent == self.folder:
            logger.warning(
                "Training begins at step 1 beside the checkpoints of %s, the latest of which the next run takes up "
                "again: name it in checkpoint.initial_load_path and choose another folder to keep both",
                self.folder,
            )
        load_checkpoint(path, self._contents, saved, _TENSORS - excluded, self._group)
        logger.info("%s %s%s", what, path, f", without {', '.join(sorted(excluded))}" if excluded else "")
        return dataclasses.replace(
            saved,
            step=0 if "train_state" in excluded else saved.step,
            loader={} if "dataloader" in excluded else saved.loader,
            lr_scheduler={} if "lr_scheduler" in excluded else saved.lr_scheduler,
        )

    def _listed_steps(self) -> tuple[list[int], list[int], str | None]:
        """On rank 0. (what :meth:`_resumable_steps` gives, why it cannot)."""
        try:
            return *self._resumable_steps(), None
        except OSError as error:
            return [], [], str(error)

    def _resumable_steps(self) -> tuple[list[int], list[int]]:
        """On rank 0. Steps of the complete checkpoints a run can go on from, and of those that hold only weights."""
        if self.can_save:
            recover(self.folder)
        steps, weights = [], []
        for step in complete_steps(self.folder, warn=True):
            path = step_folder(self.folder, step)
            try:
                corrupted = corrupted_because(path, [STATE_FILE], read_checksums(path))
                contents = FULL if corrupted else TrainState.read(path).contents
            except (CheckpointError, KeyError):
                contents = FULL  # complete but corrupted: loading it says so
            if contents == FULL or step == self.config.load_step:
                steps.append(step)
            else:
                weights.append(step)
                logger.info("Not resuming from %s: it holds only weights", path)
        return steps, weights
