"""The checks before a run is built: first each process alone, then all of them together.

A process that finds a mistake alone ends before any other rank waits for it. ``config`` refuses keys that are wrong by
themselves or with each other; ``preflight`` checks a run as far as no data is needed. ``run_train.sh`` has asked both
before torchrun.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_dmuon.checkpoint import check_shared
from torchtitan_dmuon.config import ConfigError, JobConfig, Problems
from torchtitan_dmuon.config.sources import plan_sources
from torchtitan_dmuon.data import DataError, LoaderConfig, Mixture, PackedDataset, Stage, Tokenizer, build_dataset
from torchtitan_dmuon.parallel import ParallelDims
from torchtitan_dmuon.preflight import examine, training_loader, written_folders
from torchtitan_dmuon.run_folder import claim

_TOKEN_CACHE = Path(".cache/tokens")


@dataclass(frozen=True)
class Checked:
    """The parts of a run that one process makes from a configuration while it checks the configuration.

    Attributes:
        dims: ranks of each kind of parallelism.
        folder: ``job.dump_folder``, which this process can write to.
        model_args: the flavor's, with the vocabulary and the longest sequence of this run.
        mixture, loader: the training data and how ranks read it.
        validation_dataset, validation_loader: the same for validation; no dataset without it.
    """

    dims: ParallelDims
    folder: Path
    model_args: Any
    mixture: Mixture
    loader: LoaderConfig
    validation_dataset: PackedDataset | None
    validation_loader: LoaderConfig


def check_alone(config: JobConfig, world_size: int) -> Checked:
    """All checks that need no other rank. Opens the data.

    Raises:
        ConfigError: a line for each problem. DataError: one line.
    """
    examined = examine(config, world_size, Problems())
    _make_folders(config)
    mixture = _mixture(config, examined.tokenizer)
    validation_dataset = _validation_dataset(config, examined.tokenizer) if config.validation.enable else None
    loader = training_loader(config)
    validation_loader = LoaderConfig(
        config.validation.local_batch_size, infinite=False, seed=config.debug.seed, dataloader=loader.dataloader
    )
    return Checked(
        *(examined.dims, Path(config.job.dump_folder), examined.model_args),
        *(mixture, loader, validation_dataset, validation_loader),
    )


def check_together(config: JobConfig, checked: Checked) -> None:
    """Collective over all ranks. Check that all ranks see the same files, and take the run's folder.

    Raises:
        ConfigError, DataError: on every rank.
    """
    claim(config)
    for name, dataset in checked.mixture.sources.items():
        _check_same_samples(name, dataset)
    if folder := written_folders(config).get("checkpoint.folder"):
        check_shared(folder)
    if checked.validation_dataset is not None:
        _check_same_samples("validation.dataset", checked.validation_dataset)


def _make_folders(config: JobConfig) -> None:
    """Make the folders that the run writes to, and write to each."""
    for key, path in written_folders(config).items():
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise ConfigError(key, None, f"cannot write to {path}: {error.strerror}") from None


def _mixture(config: JobConfig, tokenizer: Tokenizer) -> Mixture:
    """The training data."""
    plan = plan_sources(config.training)
    single = not config.training.sources
    sources, problems = {}, Problems()
    for name, source in plan.sources.items():
        with problems.collect(DataError):
            sources[name] = build_dataset(
                *(source.dataset, source.dataset_path, source.text_key, tokenizer, config.training.seq_len),
                _TOKEN_CACHE,
                section="training" if single else f"training.sources, {name}",
            )
    problems.raise_if_any()
    stages = []
    for stage in plan.stages:
        weights = {name: Fraction(weight) for name, weight in stage.weights.items()}
        if stage.by_epochs:
            weights = {name: weight * len(sources[name]) for name, weight in weights.items()}
        stages.append(Stage(stage.first_step, weights))
    return Mixture(sources, stages)


def _validation_dataset(config: JobConfig, tokenizer: Tokenizer) -> PackedDataset:
    keys, text_key = config.validation, config.training.text_key
    source = (keys.dataset, keys.dataset_path, text_key, tokenizer, keys.seq_len)
    return build_dataset(*source, _TOKEN_CACHE, section="validation")


def _check_same_samples(key: str, dataset: PackedDataset) -> None:
    """Collective. Nodes with different files would train on different data without a word, and would validate in
    different numbers of batches, where one rank waits for a batch that another does not have."""
    content = int(dataset.fingerprint[:12], 16)  # 48 bits, exact in float64
    mine = [len(dataset), content]
    most, largest, least, smallest = _over_all_ranks([*mine, *(-number for number in mine)])
    if most != -least:
        raise DataError(f"{key}: ranks see between {-least} and {most} samples; give every node the same files")
    if largest != -smallest:
        raise DataError(f"{key}: the content differs between ranks; give every node the same files and tokenizer")


def _over_all_ranks(numbers: list[int]) -> list[int]:
    """Collective. The largest of each number."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [int(number) for number in largest]
