"""What is checked before a run is built: first by each process alone, then by all of them together.

A process that finds a mistake alone ends before any other rank waits for it. Keys that are wrong by themselves or with
each other never get here: ``config`` refuses them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_dmuon.checkpoint import check_shared
from torchtitan_dmuon.config import ConfigError, JobConfig
from torchtitan_dmuon.data import (
    DataError,
    LoaderConfig,
    PackedDataset,
    Tokenizer,
    build_dataset,
    build_tokenizer,
)
from torchtitan_dmuon.families import get_model_args
from torchtitan_dmuon.optimizer import build_newton_schulz
from torchtitan_dmuon.parallel import ParallelDims

_TOKEN_CACHE = Path(".cache/tokens")


@dataclass(frozen=True)
class Checked:
    """What one process has made of a configuration while it checked it.

    Attributes:
        dims: ranks of each kind of parallelism.
        folder: ``job.dump_folder``, which this process can write to.
        model_args: the flavor's, with the vocabulary and the longest sequence of this run.
        dataset, loader: the training data and how ranks read it.
        validation_dataset, validation_loader: the same for validation; no dataset without it.
    """

    dims: ParallelDims
    folder: Path
    model_args: Any
    dataset: PackedDataset
    loader: LoaderConfig
    validation_dataset: PackedDataset | None
    validation_loader: LoaderConfig


def check_alone(config: JobConfig, world_size: int) -> Checked:
    """Check what needs no other rank.

    Raises:
        ConfigError, DataError: one line each.
    """
    dims = ParallelDims.from_config(config.parallelism, world_size)
    if config.checkpoint.create_seed_checkpoint and world_size > 1:
        problem = f"found true, expected one process to make it, but there are {world_size}: set NGPU=1"
        raise ConfigError("checkpoint.create_seed_checkpoint", None, problem)
    folder = _writable_folder(config)
    _check_packages(config)
    tokenizer = _tokenizer(config)
    model_args = _model_args(config, tokenizer.vocab_size)
    _check_split(config, model_args, dims.tp)
    build_newton_schulz(config)  # checks its keys
    dataset = _dataset(config, "training", tokenizer)
    validation_dataset = _dataset(config, "validation", tokenizer) if config.validation.enable else None
    reading = {"seed": config.debug.seed, "dataloader": config.training.dataloader}
    loader = LoaderConfig(config.training.local_batch_size, config.training.global_batch_size, **reading)
    loader.check(dims.dp_size)
    validation_loader = LoaderConfig(config.validation.local_batch_size, infinite=False, **reading)
    return Checked(dims, folder, model_args, dataset, loader, validation_dataset, validation_loader)


def check_together(config: JobConfig, checked: Checked) -> None:
    """Collective over all ranks. Check what each rank sees of files.

    Raises:
        ConfigError, DataError: on every rank.
    """
    _check_same_samples("training.dataset", checked.dataset)
    if _saves(config):
        check_shared(checked.folder / config.checkpoint.folder)
    if checked.validation_dataset is not None:
        _check_same_samples("validation.dataset", checked.validation_dataset)


def _saves(config: JobConfig) -> bool:
    return config.checkpoint.enable and not config.checkpoint.load_only


def _writable_folder(config: JobConfig) -> Path:
    folder = Path(config.job.dump_folder)
    needed = {"job.dump_folder": folder}
    if _saves(config):
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
    """Optional packages are imported when they are used, some of them only after the last step."""
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
    except ImportError as error:  # the message names the package
        raise ConfigError("model.hf_assets_path", None, str(error)) from None


def _model_args(config: JobConfig, tokenizer_vocab: int) -> Any:
    """The flavor's args, with the tokenizer's vocabulary where the flavor has none and the run's longest sequence."""
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


def _check_split(config: JobConfig, model_args: Any, degree: int) -> None:
    """Tensor parallelism splits heads, and between the blocks sequences."""
    sizes = {
        "the model's n_heads": model_args.n_heads,
        "the model's n_kv_heads": model_args.n_kv_heads,
        "training.seq_len": config.training.seq_len,
    }
    if config.validation.enable:
        sizes["validation.seq_len"] = config.validation.seq_len
    for name, size in sizes.items():
        if size % degree:
            raise ConfigError(
                "parallelism.tensor_parallel_degree",
                None,
                f"found {degree}, which does not divide {name} = {size} (the largest divisor they share is "
                f"{math.gcd(degree, size)})",
            )


def _dataset(config: JobConfig, section: str, tokenizer: Tokenizer) -> PackedDataset:
    """The samples of the section ``training`` or ``validation``."""
    keys = {"training": config.training, "validation": config.validation}[section]
    return build_dataset(
        keys.dataset,
        keys.dataset_path,
        config.training.text_key,
        tokenizer,
        keys.seq_len,
        _TOKEN_CACHE,
        section=section,
    )


def _check_same_samples(key: str, dataset: PackedDataset) -> None:
    """Collective. Nodes with different files would train on different orders without a word, and would validate in
    different numbers of batches, where one rank waits for a batch that another does not have."""
    samples = len(dataset)
    counts = torch.tensor([samples, -samples], dtype=torch.float64)
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    most, least = int(counts[0]), int(-counts[1])
    if most != least:
        raise DataError(f"{key}: ranks see between {least} and {most} samples; give every node the same files")
