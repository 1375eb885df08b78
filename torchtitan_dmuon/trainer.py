"""The training loop, and what it takes to begin: check, distribute, build, resume."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.checkpoint import Checkpointer, Contents, TrainState
from torchtitan_dmuon.checks import Checked, check_alone, check_together
from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.data import IGNORE_INDEX, TokenLoader
from torchtitan_dmuon.distributed import all_reduce, init_distributed, set_determinism, world_from_env
from torchtitan_dmuon.families import get_model_spec
from torchtitan_dmuon.guard import NonFiniteError, StepGuard
from torchtitan_dmuon.hang import HangWatch
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.loss import build_loss, whole
from torchtitan_dmuon.lr_schedule import build_lr_scheduler
from torchtitan_dmuon.model import build_model, write_ownership
from torchtitan_dmuon.optimizer import build_optimizer, clip_gradients, guarded_step
from torchtitan_dmuon.parallel.parallelize import uses_loss_parallel
from torchtitan_dmuon.profiling import Recorder, maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan_dmuon.signals import Requests, SignalWatch
from torchtitan_dmuon.validation import validate
from torchtitan_dmuon.watch import build_metrics


class Trainer:
    """One run. Building it is collective; :meth:`train` runs to ``training.steps``.

    Args:
        config: resolved.
        signals: what this process is told from outside; without it nothing.

    Raises:
        ConfigError: a line for each problem, on every rank.
        DataError, CheckpointError, NonFiniteError: one line, on every rank.
    """

    def __init__(self, config: JobConfig, signals: SignalWatch | None = None) -> None:
        self.config = config
        self.rank, _, world_size = world_from_env()
        self.step = 0  # optimizer steps done; while one runs, its number
        checked = check_alone(config, world_size)
        self._distribute(checked)
        self._build(checked, signals)
        self._resume()

    # ---------------------------------------------------------------- before the first step

    def _distribute(self, checked: Checked) -> None:
        """Start the process group, lay the meshes over it, and check what takes more than one rank to find out."""
        set_determinism(self.config.debug)
        self.folder = checked.folder
        self.device = init_distributed(self.config.comm, self.folder)
        self.meshes = checked.dims.build(self.device)
        check_together(self.config, checked)

    def _build(self, checked: Checked, signals: SignalWatch | None) -> None:
        """Loaders, the model with its initial weights, loss, optimizer, and what watches over them."""
        config = self.config
        place = (self.meshes.dp_rank, checked.dims.dp_size)
        self.loader = TokenLoader(checked.mixture, checked.loader, *place)
        self.validation_loader = None
        if checked.validation_dataset is not None:
            self.validation_loader = TokenLoader(checked.validation_dataset, checked.validation_loader, *place)

        self.uses_muon = config.optimizer.name == "DMuon"
        self.model, self._flops_per_token = build_model(config, checked.model_args, self.meshes)
        if self.uses_muon and self.rank == 0:
            write_ownership(self.model, self.folder)
        self.loss_fn = build_loss(config.compile)
        self.loss_context = loss_parallel if uses_loss_parallel(config) else contextlib.nullcontext
        self.optimizer = build_optimizer(self.model, config)
        get_model_spec(config.model.name).after_build(self.model, self.optimizer, self.meshes)
        if self.uses_muon:
            logger.info("Newton-Schulz: %s", self.optimizer.newton_schulz)

        # Fused optimizers on CUDA leave out a step by themselves when the guard's flag on the device says so, and the
        # host looks when it waits anyway; for others it looks before every step.
        self.guard = StepGuard(config.training, self.meshes.groups, self.device)
        self._found_inf_on_device = self.device.type == "cuda" and config.optimizer.implementation == "fused"
        self.requests = Requests(signals, self.device)
        self.contents = Contents.of(self.model, self.optimizer, checked.model_args, config)
        folder = self.folder / config.checkpoint.folder
        self.checkpointer = Checkpointer(config.checkpoint, folder, self.contents, config.model.hf_assets_path)

    def _resume(self) -> None:
        """Take up a checkpoint, if there is one; schedule and figures begin where it ends."""
        config = self.config
        scheduled = 0
        state = self.checkpointer.load(config.training.steps)
        if state is not None:
            self.step = state.step
            if self.uses_muon:
                dmuon.check_muon_recipe(state.muon, self.optimizer, "the checkpoint")
            if state.loader:
                self.loader.load_state_dict(state.loader)
                self._skip_samples(config.training.skip_samples_on_resume)
            scheduled = state.lr_scheduler.get("last_epoch", 0)
        self.loader.steps = self.step  # the checkpoint's own, but for what was excluded from loading
        self.scheduler = build_lr_scheduler(self.optimizer, config.lr_scheduler, config.training.steps, scheduled)
        self.metrics = build_metrics(
            config,
            self.folder,
            self.meshes,
            self.model,
            self.optimizer,
            self._flops_per_token,
            self.step,
            self._tokens(),
        )
        self.hang_watch = HangWatch(
            self.metrics.place, self.rank, dist.get_world_size(), config.comm.init_timeout_seconds
        )

    def _skip_samples(self, samples: int) -> None:
        if samples and self.loader.skip(samples):
            logger.info("Skipped %d samples of the data (training.skip_samples_on_resume)", samples)

    # ---------------------------------------------------------------- training

    def train(self) -> None:
        """Run to ``training.steps``, or until a signal asks for the end."""
        config, steps = self.config, self.config.training.steps
        if config.checkpoint.create_seed_checkpoint:
            self.checkpointer.save(self._state(), stopping=True)
            self.checkpointer.close()
            return
        if self.step >= steps:
            self.checkpointer.close()
            logger.info("Nothing to do: step %d of %d is done", self.step, steps)
            return
        logger.info("Training from step %d to %d", self.step + 1, steps)
        gc.disable()  # collections at different times on different ranks make every rank wait for each
        gc.collect()
        with (
            maybe_enable_profiling(config.profiling, self.folder, self.step) as profiler,
            maybe_enable_memory_snapshot(config.profiling, self.folder, self.step) as snapshots,
            self.metrics.progress.running(),
            self.hang_watch,
        ):
            stopped = self._loop([recorder for recorder in (profiler, snapshots) if recorder is not None])
        self.metrics.close()
        self.checkpointer.close()
        if not stopped:
            logger.info("Training completed at step %d", self.step)
        elif self.checkpointer.can_save:
            logger.info("Stopped by a signal after step %d, which is saved", self.step)
        else:
            logger.warning("Stopped by a signal after step %d; NOTHING is saved, checkpointing is off", self.step)

    def _loop(self, recorders: Iterable[Recorder]) -> bool:
        """All steps, each with what follows it: log, checkpoint, validation. Returns whether a signal ended the run."""
        config, steps, first = self.config, self.config.training.steps, self.step + 1
        batches = iter(self.loader)
        stopped = False
        self.metrics.begin_window()
        while self.step < steps and not stopped:
            self.step += 1
            self.metrics.place.begin(self.step)
            lrs = self.scheduler.get_last_lr()
            loss, grad_norm = self.train_step(batches)

            if self.metrics.is_due(self.step):
                skipped = self._check_guard()
                self.metrics.log(self.step, self._tokens(), loss.item(), grad_norm.item(), lrs, skipped)
                self._log_sources()

            asked = self.requests.read()
            if asked.failed:
                self.checkpointer.wait()  # raises what went wrong, on every rank
            stopped, last = asked.stop, self.step == steps
            saving = self.checkpointer.due(self.step, wanted=last or asked.any)
            validating = self.validation_loader is not None and (last or self.step % config.validation.freq == 0)
            if saving or validating or stopped or last:
                self._check_guard()  # such weights are neither saved nor validated, and are no good end of a run
            if saving:
                with self.metrics.paused():
                    self.checkpointer.save(self._state(), last=last, stopping=stopped)
            elif asked.save and not self.checkpointer.can_save:
                logger.warning(
                    "A signal asked for a checkpoint after step %d: NOTHING is saved, checkpointing is off", self.step
                )

            if validating and not stopped:
                with self.metrics.paused():
                    held_out = validate(
                        self.model,
                        self.validation_loader,
                        self.loss_fn,
                        config.validation,
                        self.meshes,
                        self.loss_context,
                    )
                logger.info("validation: step: %d/%d  loss: %.4f", self.step, steps, held_out)
                self.metrics.write(self.step, self._tokens(), {"validation/loss": held_out})

            if self.step % config.training.gc_freq == 0:
                gc.collect()
            if self.step == first:  # building and compiling are over: from now on a rank that hangs is found sooner
                self._set_timeouts(timedelta(seconds=config.comm.train_timeout_seconds))
            for recorder in recorders:
                recorder.step()
        return stopped

    def train_step(self, batches: Iterator[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step, the ``self.step``-th. Returns (mean loss of a valid token over all ranks, gradient norm),
        0-D on the device."""
        with self.metrics.data.measure():
            micro_batches = [next(batches) for _ in range(self.loader.micro_batches_per_step)]

        # One all-reduce over all ranks sums the valid tokens, what signals ask for, and each rank's time in a place of
        # its own. Tensor-parallel ranks read the same tokens: the first of them counts.
        valid = 0
        if self.meshes.tp_rank == 0:
            valid = sum(int((mb["labels"] != IGNORE_INDEX).sum()) for mb in micro_batches)
        asked = self.requests.mine(self.checkpointer.has_failed)
        sums = torch.tensor([float(valid), *asked, *self.metrics.ranks.mine()])
        sums = all_reduce(sums.to(self.device, non_blocking=True), self.meshes.groups)
        valid_tokens = sums[0]
        self.requests.agreed(sums[1 : 1 + len(asked)])
        self.metrics.ranks.add(sums[1 + len(asked) :])

        loss = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            # Gradients add up along the shard dimension. Those of the last micro-batch take the sums on to replicas
            # and, with DMuon, to tensor-parallel owners.
            last = index + 1 == len(micro_batches)
            if self.uses_muon:
                dmuon.set_requires_all_reduce(self.model, last)
            else:
                self.model.set_requires_all_reduce(last)
            tokens = micro_batch["input"].to(self.device, non_blocking=True)
            labels = micro_batch["labels"].to(self.device, non_blocking=True)
            with self.loss_context():
                with self.metrics.forward.measure():
                    part = whole(self.loss_fn(self.model(tokens), labels)) / valid_tokens
                with self.metrics.backward.measure():
                    part.backward()
            loss += part.detach()
        all_reduce(loss, self.meshes.dp_groups)

        self.checkpointer.wait_staged()  # weights are about to change
        with self.metrics.clip.measure():
            grad_norm = clip_gradients(self.optimizer, self.config, self.meshes)
        skip = self.guard.judge(self.step, loss, grad_norm)
        with self.metrics.around_step(self.step), self.metrics.step.measure():
            if self._found_inf_on_device:
                guarded_step(self.optimizer, skip)
            else:
                self._check_guard()
                if not skip.item():
                    self.optimizer.step()
                self.optimizer.zero_grad()
        self.scheduler.step()
        self.metrics.count_step(sum(mb["input"].numel() for mb in micro_batches))
        return loss, grad_norm

    def _log_sources(self) -> None:
        """How much was read of each source, if there are several."""
        consumed = self.loader.consumed()
        if len(consumed) > 1:
            read = (f"{name}: {tokens:,} ({epochs:.2f} epochs)" for name, (tokens, epochs) in consumed.items())
            logger.info("tokens read: %s", "  ".join(read))
            figures = {f"tokens/{name}": tokens for name, (tokens, _) in consumed.items()}
            self.metrics.write(self.step, self._tokens(), figures)

    def _check_guard(self) -> int:
        """Waits for the device. Returns the number of skipped steps. Every rank has the same, so all of them stop."""
        try:
            return self.guard.check()
        except NonFiniteError:
            self.checkpointer.close()  # a save that runs behind the training becomes durable
            raise

    def _tokens(self) -> int:
        """Of all ranks since the first step of the run."""
        return self.loader.read_samples * self.config.training.seq_len

    def _state(self) -> TrainState:
        return TrainState(
            self.step,
            self.loader.state_dict(),
            {"last_epoch": self.scheduler.last_epoch},
            self.contents.optimizer_name,
            self.contents.model_name,
            muon=dmuon.muon_recipe(self.optimizer) if self.uses_muon else {},
        )

    def _set_timeouts(self, timeout: timedelta) -> None:
        self.hang_watch.set_timeout(timeout.total_seconds())
        for group in {dist.group.WORLD, *self.meshes.groups}:
            dmuon.set_group_timeout(group, self.device, timeout)
        if self.uses_muon:
            dmuon.set_timeout(self.model, timeout)
