"""The training loop and the objects it needs, built in the order they are used."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from models import get_model_args, get_model_spec
from models.layers import parameter_seed
from torchtitan_dmuon import dmuon
from torchtitan_dmuon.checkpoint import Checkpointer, Contents, TrainState, check_shared
from torchtitan_dmuon.config import ConfigError, JobConfig, config_to_toml
from torchtitan_dmuon.data import (
    IGNORE_INDEX,
    DataError,
    PackedDataset,
    Tokenizer,
    TokenLoader,
    build_dataset,
    build_loader,
    build_tokenizer,
)
from torchtitan_dmuon.distributed import init_distributed, set_determinism, world_from_env
from torchtitan_dmuon.flops import num_flops_per_token, num_matmul_parameters
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.loss import build_loss, whole
from torchtitan_dmuon.lr_schedule import build_lr_scheduler
from torchtitan_dmuon.metrics import MetricsLogger
from torchtitan_dmuon.optimizer import base_group, build_newton_schulz, build_optimizer, clip_gradients, guarded_step
from torchtitan_dmuon.parallel import ParallelDims, all_reduce, check_tensor_parallel, parallelize
from torchtitan_dmuon.parallel.parallelize import uses_loss_parallel
from torchtitan_dmuon.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan_dmuon.signals import Requests, SignalWatch
from torchtitan_dmuon.validation import validate

_TABLE_ROWS_ON_CONSOLE = 12
_CACHE = Path(".cache")


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm that is not finite: one line that names the step."""


class Trainer:
    """One run. Building it is collective; :meth:`train` runs to ``training.steps``.

    Args:
        config: resolved.
        signals: what this process is told from outside; without it nothing.

    Raises:
        ConfigError, DataError, CheckpointError, NonFiniteError: one line each, on every rank.
    """

    def __init__(self, config: JobConfig, signals: SignalWatch | None = None) -> None:
        self.config = config
        self.rank, _, world_size = world_from_env()
        training = config.training

        # Everything that can be wrong without another rank is found before any of them waits for this one.
        dims = ParallelDims.from_config(config.parallelism, world_size)
        if config.checkpoint.create_seed_checkpoint and world_size > 1:
            problem = f"found true, expected one process to make it, but there are {world_size}: set NGPU=1"
            raise ConfigError("checkpoint.create_seed_checkpoint", None, problem)
        self.folder = _writable_folder(config)
        _check_packages(config)
        tokenizer = _tokenizer(config)
        model_args = _model_args(config, tokenizer.vocab_size)
        split = {"the model's n_heads": model_args.n_heads, "the model's n_kv_heads": model_args.n_kv_heads}
        split["training.seq_len"] = training.seq_len
        if config.validation.enable:
            split["validation.seq_len"] = config.validation.seq_len
        check_tensor_parallel(dims.tp, split)
        build_newton_schulz(config)  # checks its keys
        loader_options = {**vars(training.dataloader), "dp_size": dims.dp_size, "seed": config.debug.seed}

        def dataset_of(section: str, seq_len: int) -> PackedDataset:
            data = vars(config)[section]
            key = training.text_key
            return build_dataset(
                data.dataset, data.dataset_path, key, tokenizer, seq_len, _CACHE / "tokens", section=section
            )

        dataset = dataset_of("training", training.seq_len)
        validation_set = dataset_of("validation", config.validation.seq_len) if config.validation.enable else None

        def training_loader(dp_rank: int) -> TokenLoader:
            return build_loader(
                dataset,
                local_batch_size=training.local_batch_size,
                global_batch_size=training.global_batch_size,
                dp_rank=dp_rank,
                **loader_options,
            )

        training_loader(dp_rank=0)  # checks the batch sizes; the data-parallel rank is known when the mesh is

        set_determinism(config.debug)
        self.device = init_distributed(config.comm)
        self.meshes = dims.build(self.device)
        self.dp_lanes, self.lanes = self.meshes.dp_lanes, self.meshes.lanes
        self.loss_context = loss_parallel if uses_loss_parallel(config) else contextlib.nullcontext
        _same_everywhere("training.dataset", len(dataset))
        if config.checkpoint.enable and not config.checkpoint.load_only:
            check_shared(self.folder / config.checkpoint.folder)

        self.loader = training_loader(self.meshes.dp_rank)
        self.validation_loader = None
        if validation_set is not None:
            _same_everywhere("validation.dataset", len(validation_set))
            self.validation_loader = build_loader(
                validation_set,
                local_batch_size=config.validation.local_batch_size,
                infinite=False,
                dp_rank=self.meshes.dp_rank,
                **loader_options,
            )

        self.model, flops_per_token = self._build_model(model_args)
        self.loss_fn = build_loss(config.compile)
        self.optimizer = build_optimizer(self.model, config)
        if isinstance(self.optimizer, dmuon.Muon):
            logger.info("Newton-Schulz: %s", self.optimizer.newton_schulz)
        self.step = 0
        # Non-finite losses are found on the device; the host looks when it has to wait anyway.
        self._found_inf_on_device = self.device.type == "cuda" and config.optimizer.implementation == "fused"
        self._bad_step = torch.zeros((), dtype=torch.int64, device=self.device)

        self.requests = Requests(signals, self.device)
        self.checkpointer = Checkpointer(
            config.checkpoint,
            self.folder / config.checkpoint.folder,
            self._contents(model_args),
            config.model.hf_assets_path,
        )
        scheduled = self._resume()
        self.scheduler = build_lr_scheduler(self.optimizer, config.lr_scheduler, training.steps, scheduled)
        ns_flops = 0
        if isinstance(self.optimizer, dmuon.Muon):
            ns_flops = self.optimizer.newton_schulz_flops
        self.metrics = MetricsLogger(
            config.metrics, self.folder, self.rank, self.device, flops_per_token, ns_flops, dims.tp
        )

    # ---------------------------------------------------------------- building

    def _build_model(self, model_args: object) -> tuple[nn.Module, int]:
        """(parallelized model with its initial weights, model FLOPs of one token)."""
        config = self.config
        with torch.device("meta"):
            spec = get_model_spec(config.model.name)
            model = spec.build(model_args)
        matmul_parameters = num_matmul_parameters(model)
        flops_per_token = num_flops_per_token(
            matmul_parameters,
            n_layers=model_args.n_layers,
            n_heads=model_args.n_heads,
            qk_dim=model_args.head_dim,
            v_dim=model_args.head_dim,
            seq_len=config.training.seq_len,
        )
        total = sum(p.numel() for p in model.parameters())
        logger.info(
            "Model %s %s: %s parameters, %.3g FLOPs a token",
            *(config.model.name, config.model.flavor, f"{total:,}", flops_per_token),
        )
        init_parameter = model.init_parameter
        parallelize(model, self.meshes, spec, config)

        def init(fqn: str, tensor: torch.Tensor) -> None:
            seed = parameter_seed(config.debug.seed, fqn)
            init_parameter(fqn, tensor, torch.Generator(tensor.device).manual_seed(seed))

        dmuon.materialize(model, init, self.device)
        model.init_buffers(self.device)
        if config.optimizer.name == "DMuon" and self.rank == 0:
            rows = dmuon.ownership_table(model)
            (self.folder / "ownership.json").write_text(json.dumps([row.as_dict() for row in rows], indent=1))
            (self.folder / "ownership.txt").write_text(dmuon.format_ownership_table(rows) + "\n")
            table = dmuon.format_ownership_table(rows, limit=_TABLE_ROWS_ON_CONSOLE)
            logger.info("Ownership (whole table in %s):\n%s", self.folder / "ownership.txt", table)
        return model, flops_per_token

    def _contents(self, model_args: object) -> Contents:
        """The run as checkpoints see it."""
        config = self.config
        spec = get_model_spec(config.model.name)
        # The length this run trains with is not what the model is made for.
        made_for = get_model_args(config.model.name, config.model.flavor).max_seq_len
        return Contents(
            model=lambda: dmuon.get_model_state_dict(self.model),
            optimizer=lambda: dmuon.get_optimizer_state_dict(self.model, self.optimizer),
            shapes=lambda: dmuon.get_model_shapes(self.model),
            loaded=lambda: dmuon.publish_weights(self.model),
            model_name=f"{config.model.name} {config.model.flavor}",
            optimizer_name=config.optimizer.name,
            config_toml=config_to_toml(config),
            seed=config.debug.seed,
            hf_names=spec.hf,
            hf_config=spec.hf.hf_config(dataclasses.replace(model_args, max_seq_len=made_for)),
        )

    def _state(self) -> TrainState:
        return TrainState(
            self.step,
            self.loader.state_dict(),
            {"last_epoch": self.scheduler.last_epoch},
            self.config.optimizer.name,
            f"{self.config.model.name} {self.config.model.flavor}",
            muon=dmuon.muon_recipe(self.optimizer) if isinstance(self.optimizer, dmuon.Muon) else {},
        )

    def _resume(self) -> int:
        """Take up a checkpoint, if there is one. Returns the steps its schedule has made."""
        state = self.checkpointer.load()
        if state is None:
            return 0
        self.step = state.step
        if isinstance(self.optimizer, dmuon.Muon):
            dmuon.check_muon_recipe(state.muon, self.optimizer, "the checkpoint")
        if state.loader:
            self.loader.load_state_dict(state.loader)
        return state.lr_scheduler.get("last_epoch", 0)

    # ---------------------------------------------------------------- training

    def train(self) -> None:
        """Run to ``training.steps``, or until a signal asks for the end."""
        config = self.config
        if config.checkpoint.create_seed_checkpoint:
            self.checkpointer.save(self._state(), stopping=True)
            self.checkpointer.close()
            return
        if self.step >= config.training.steps:
            self.checkpointer.close()
            logger.info("Nothing to do: step %d of %d is done", self.step, config.training.steps)
            return
        logger.info("Training from step %d to %d", self.step + 1, config.training.steps)
        batches = iter(self.loader)
        gc.disable()  # collections at different times on different ranks make every rank wait for each
        gc.collect()
        first = self.step + 1
        dump = str(self.folder)
        with (
            maybe_enable_profiling(config.profiling, dump, self.step) as profiler,
            maybe_enable_memory_snapshot(config.profiling, dump, self.step) as snapshots,
        ):
            self.metrics.begin_window()
            stopped = False
            while self.step < config.training.steps and not stopped:
                self.step += 1
                lr = self.scheduler.get_last_lr()[base_group(self.optimizer)]
                loss, grad_norm = self._train_step(batches)
                if self.step == first or self.step % config.metrics.log_freq == 0:
                    self._raise_if_bad()
                    self.metrics.log(self.step, loss.item(), grad_norm.item(), lr)
                stopped = self._after_step()
                if self.step == first:
                    self._set_timeouts(timedelta(seconds=config.comm.train_timeout_seconds))
                for recorder in (profiler, snapshots):
                    if recorder is not None:
                        recorder.step()
        self.metrics.close()
        self.checkpointer.close()
        if not stopped:
            logger.info("Training completed at step %d", self.step)
        elif self.checkpointer.can_save:
            logger.info("Stopped by a signal after step %d, which is saved", self.step)
        else:
            logger.warning("Stopped by a signal after step %d; NOTHING is saved, checkpointing is off", self.step)

    def _train_step(self, batches: Iterator[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step. Returns (global mean loss, gradient norm) as tensors on the device."""
        with self.metrics.data.measure():
            micro_batches = [next(batches) for _ in range(self.loader.micro_batches_per_step)]
        # One all-reduce over all ranks sums the valid tokens and what signals ask for. Tensor-parallel ranks read the
        # same tokens: the first of them counts.
        counts = self.meshes.tp is None or self.meshes.tp.get_local_rank() == 0
        valid_tokens = sum(int((mb["labels"] != IGNORE_INDEX).sum()) for mb in micro_batches) if counts else 0
        sums = torch.tensor([float(valid_tokens), *self.requests.mine(self.checkpointer.has_failed)])
        sums = sums.to(self.device, non_blocking=True)
        all_reduce(self.lanes, sums)
        valid = sums[0]
        self.requests.agreed(sums[1:])

        loss = torch.zeros((), device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            self._send_gradients_on(index + 1 == len(micro_batches))
            tokens = micro_batch["input"].to(self.device, non_blocking=True)
            labels = micro_batch["labels"].to(self.device, non_blocking=True)
            with self.loss_context():
                part = whole(self.loss_fn(self.model(tokens), labels)) / valid
                part.backward()
            loss += part.detach()
        all_reduce(self.dp_lanes, loss)

        self.checkpointer.wait_staged()  # weights are about to change
        with self.metrics.optimizer.measure():
            grad_norm = clip_gradients(self.optimizer, self.config, self.lanes)
            bad = ~(loss.isfinite() & grad_norm.isfinite())
            self._bad_step = torch.where(bad & (self._bad_step == 0), self.step, self._bad_step)
            if self._found_inf_on_device:
                guarded_step(self.optimizer, (self._bad_step > 0).float())
            else:
                self._raise_if_bad()
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.scheduler.step()
        self.metrics.count_step(sum(mb["input"].numel() for mb in micro_batches))
        return loss, grad_norm

    def _send_gradients_on(self, required: bool) -> None:
        """Only the last micro-batch of a step does; the ones before add up along the shard dimension. With DMuon
        gradients go on to replicas and to tensor-parallel owners, with FSDP2 alone to replicas."""
        if self.config.optimizer.name == "DMuon":
            dmuon.set_requires_all_reduce(self.model, required)
        else:
            self.model.set_requires_all_reduce(required)

    def _raise_if_bad(self) -> None:
        """Waits for the device. Every rank has the same flag, so all of them stop."""
        if bad_step := int(self._bad_step.item()):
            self.checkpointer.close()  # a save that runs behind the training becomes durable
            raise NonFiniteError(
                f"step {bad_step}: the loss or the gradient norm is not finite; no weight has moved since step "
                f"{bad_step - 1}. Resume from the last checkpoint with a lower optimizer.lr or other data"
            )

    def _after_step(self) -> bool:
        """Checkpoint and validation when they are due. Returns whether the run is to end here."""
        config = self.config
        last = self.step == config.training.steps
        asked = self.requests.read()
        if asked.failed:
            self.checkpointer.wait()  # raises what went wrong, on every rank
        saving = self.checkpointer.due(self.step, last) or (asked.any and self.checkpointer.due(self.step, True))
        validating = self.validation_loader is not None and (last or self.step % config.validation.freq == 0)
        if saving or validating or asked.stop or last:
            self._raise_if_bad()  # neither saved nor validated, and no end of a run that would look like a good one
        if saving:
            with self.metrics.paused():
                self.checkpointer.save(self._state(), last=last, stopping=asked.stop)
        elif asked.save and not self.checkpointer.can_save:
            logger.warning(
                "A signal asked for a checkpoint after step %d: NOTHING is saved, checkpointing is off", self.step
            )
        if asked.stop:
            return True
        if validating:
            with self.metrics.paused():
                loss = validate(
                    self.model,
                    self.validation_loader,
                    self.loss_fn,
                    config.validation,
                    self.dp_lanes,
                    self.loss_context,
                )
            logger.info("validation: step: %4d  loss: %.4f", self.step, loss)
            self.metrics.write(self.step, {"loss": loss}, prefix="validation")
        if self.step % config.training.gc_freq == 0:
            gc.collect()
        return False

    def _set_timeouts(self, timeout: timedelta) -> None:
        """Shorter from now on: building and compiling are over."""
        for group in {dist.group.WORLD, *(lane.group for lane in self.lanes)}:
            dmuon.set_group_timeout(group, self.device, timeout)
        if self.config.optimizer.name == "DMuon":
            dmuon.set_timeout(self.model, timeout)


# -------------------------------------------------------------------- checks before the first collective


def _writable_folder(config: JobConfig) -> Path:
    folder = Path(config.job.dump_folder)
    needed = {"job.dump_folder": folder}
    if config.checkpoint.enable and not config.checkpoint.load_only:
        needed["checkpoint.folder"] = folder / config.checkpoint.folder
    for key, path in needed.items():
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise ConfigError(key, None, f"cannot write to {path}: {error.strerror}") from None
    return folder


def _check_packages(config: JobConfig) -> None:
    """Optional packages that are imported only later, some of them after the last step."""
    checkpoint = config.checkpoint
    needed = {
        "checkpoint.last_save_in_hf": (checkpoint.last_save_in_hf, "safetensors"),
        "checkpoint.initial_load_in_hf": (checkpoint.initial_load_in_hf, "safetensors"),
        "metrics.enable_tensorboard": (config.metrics.enable_tensorboard, "tensorboard"),
    }
    for key, (wanted, package) in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(key, None, f"needs the package {package}: pip install {package}")


def _tokenizer(config: JobConfig) -> Tokenizer:
    try:
        return build_tokenizer(config.model.hf_assets_path)
    except ImportError as error:  # an optional package, which the message names
        raise ConfigError("model.hf_assets_path", None, str(error)) from None


def _model_args(config: JobConfig, tokenizer_vocab: int) -> object:
    """The flavor's args, with what only the run knows."""
    try:
        args = get_model_args(config.model.name, config.model.flavor)
    except ValueError as error:
        raise ConfigError("model", None, str(error)) from None
    if args.vocab_size is None:
        args = dataclasses.replace(args, vocab_size=tokenizer_vocab)
    elif args.vocab_size < tokenizer_vocab:
        raise ConfigError(
            "model.hf_assets_path",
            None,
            f"the tokenizer has {tokenizer_vocab} tokens, {config.model.name} {config.model.flavor} only "
            f"{args.vocab_size}",
        )
    seq_len = config.training.seq_len
    if config.validation.enable:
        seq_len = max(seq_len, config.validation.seq_len)
    return dataclasses.replace(args, max_seq_len=seq_len)


def _same_everywhere(key: str, samples: int) -> None:
    """Collective. Nodes with different files would otherwise train on different orders without a word, and validate in
    different numbers of batches, where one waits for another that has none left."""
    counts = torch.tensor([samples, -samples], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    most, least = int(counts[0]), int(-counts[1])
    if most != least:
        raise DataError(f"{key}: ranks see between {least} and {most} samples; give every node the same files")
