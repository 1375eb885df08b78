"""The checks of a run that one process makes without reading data, starting ranks or touching a device.

    python -m torchtitan_dmuon.preflight [--section.key value ...]

`run_train.sh` calls this before torchrun. It prints the number of processes on this node, its GPUs, its cores and
`job.dump_folder` on one line; or an `error:` line for each problem on stderr, and exits 1. NGPU and NNODES are read as
`run_train.sh` documents them. Every rank of a run calls `examine` again, so that plain torchrun finds the
same problems.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchtitan_dmuon.checkpoint.directory import STATE_FILE, complete_steps, incomplete_because
from torchtitan_dmuon.config import ConfigError, JobConfig, Problems, read_config
from torchtitan_dmuon.config.sources import plan_sources
from torchtitan_dmuon.data import DataError, LoaderConfig, Tokenizer, build_tokenizer, find_corpus
from torchtitan_dmuon.families import get_model_args, get_model_spec, undescribed
from torchtitan_dmuon.optimizer import build_newton_schulz, clipped_heads, group_parameters
from torchtitan_dmuon.parallel import ParallelDims
from torchtitan_dmuon.parallel.parallelize import plan_dedication
from torchtitan_dmuon.run_folder import held_by_another

_T = TypeVar("_T")
_NEWTON_SCHULZ = ("backend", "coefficients", "steps", "restart_iterations", "kernel")
_INITIAL_KEYS = [f"checkpoint.{name}" for name in ("enable", "folder", "create_seed_checkpoint")]
_INITIAL_KEYS += ["checkpoint.initial_load_path", "checkpoint.initial_load_in_hf", "job.dump_folder"]
_INITIAL_KEYS += ["model.hf_assets_path"]


@dataclass(frozen=True)
class Examined:
    """The facts about a run without a problem.

    Attributes:
        dims: ranks of each kind of parallelism.
        tokenizer: of `model.hf_assets_path`.
        model_args: the flavor's, with the vocabulary and the longest sequence of this run.
    """

    dims: ParallelDims
    tokenizer: Tokenizer
    model_args: Any


def examine(config: JobConfig, world_size: int, problems: Problems, only_model: bool = False) -> Examined:
    """Check flavor, tokenizer, degrees, batch sizes, paths, patterns and HuggingFace names of a run on `world_size`
    ranks. A check that reads a key of `problems` is left out: `config` has that key's default. With `only_model`, data,
    folders and packages are left out, which are those of the machines that will train.

    Raises:
        ConfigError: the lines of `problems`, and a line for each new problem.
    """
    found = Problems()

    def attempt(check: Callable[[], _T], *keys: str) -> _T | None:
        """The result of a check that reads `keys`; None where it finds a problem or cannot be made."""
        if problems.sound(*keys):
            with found.collect(DataError):
                return check()
        return None

    dims = attempt(lambda: ParallelDims.from_config(config.parallelism, world_size), "parallelism")
    attempt(lambda: _check_seed_checkpoint(config, world_size), "checkpoint.create_seed_checkpoint")
    if not only_model:
        attempt(lambda: _check_folders(config), "job.dump_folder", "checkpoint.folder")
        attempt(lambda: _check_packages(config))
        attempt(lambda: build_newton_schulz(config), *(f"dmuon.ns_{name}" for name in _NEWTON_SCHULZ))
        for section in ("training", "validation"):
            keys = [f"{section}.{name}" for name in ("dataset", "dataset_path")]
            keys += ["training.sources", "training.stages"] if section == "training" else []
            attempt(lambda section=section: _check_data(config, section), *keys)
        attempt(lambda: _check_initial_checkpoint(config), *_INITIAL_KEYS)
    if dims is not None:
        sizes = ("training.local_batch_size", "training.global_batch_size", "training.dataloader")
        attempt(lambda: training_loader(config).check(dims.dp_size), *sizes)

    tokenizer = attempt(lambda: _tokenizer(config), "model.hf_assets_path", "training.add_bos", "training.add_eos")
    model_args = attempt(lambda: _model_args(config, tokenizer), "model.name", "model.flavor")
    if model_args is not None:
        attempt(lambda: _check_vocabulary(config, model_args, tokenizer))
        sizes = ("training.seq_len", "validation.seq_len", "validation.enable")
        attempt(lambda: _check_split(config, model_args), "parallelism.tensor_parallel_degree", *sizes)
        attempt(lambda: _check_names(config, model_args, problems))
    problems.lines += found.lines
    problems.keys |= found.keys
    problems.raise_if_any()
    return Examined(dims, tokenizer, model_args)


def training_loader(config: JobConfig) -> LoaderConfig:
    """How ranks read the training data."""
    training = config.training
    return LoaderConfig(
        *(training.local_batch_size, training.global_batch_size, config.debug.seed),
        accept_changed_data=training.accept_changed_data,
        dataloader=training.dataloader,
    )


def written_folders(config: JobConfig) -> dict[str, Path]:
    """The folders that a run writes to, by the key that names each."""
    folder = Path(config.job.dump_folder)
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    return {"job.dump_folder": folder, **({"checkpoint.folder": folder / config.checkpoint.folder} if saves else {})}


def _check_seed_checkpoint(config: JobConfig, world_size: int) -> None:
    if config.checkpoint.create_seed_checkpoint and world_size > 1:
        problem = f"found true, expected one process to make it, but there are {world_size}: set NGPU=1"
        raise ConfigError("checkpoint.create_seed_checkpoint", None, problem)


def _check_folders(config: JobConfig) -> None:
    """The run can write. Nothing is created: a run that is refused leaves no folder behind."""
    for key, folder in written_folders(config).items():
        above = (folder.absolute(), *folder.absolute().parents)
        nearest = next(path for path in above if os.path.exists(path))
        if not nearest.is_dir():
            raise ConfigError(key, None, f"cannot write to {folder}: {nearest} is no folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(key, None, f"cannot write to {folder}: no permission in {nearest}")
    if held := held_by_another(Path(config.job.dump_folder)):
        raise ConfigError("job.dump_folder", None, held)


def _check_packages(config: JobConfig) -> None:
    """Optional packages are imported when they are used, some of them only after the last step."""
    checkpoint = config.checkpoint
    needed = {
        "checkpoint.last_save_in_hf": (checkpoint.last_save_in_hf, "safetensors", "hf"),
        "checkpoint.initial_load_in_hf": (checkpoint.initial_load_in_hf, "safetensors", "hf"),
        "metrics.enable_tensorboard": (config.metrics.enable_tensorboard, "tensorboard", "train"),
        "metrics.enable_wandb": (config.metrics.enable_wandb, "wandb", "wandb"),
    }
    missing = Problems()
    for key, (wanted, package, extra) in needed.items():
        if wanted and importlib.util.find_spec(package) is None:
            problem = f"needs the package {package} (extra {extra}): pip install {package}"
            missing.add(ConfigError(key, None, problem))
    missing.raise_if_any()


def _check_data(config: JobConfig, section: str) -> None:
    """The files are there. Their content is read when the run starts."""
    if section == "validation":
        used = {"validation.dataset_path": config.validation} if config.validation.enable else {}
    elif config.training.sources:
        sources = plan_sources(config.training).sources
        used = {f"training.sources, {name}.dataset_path": source for name, source in sources.items()}
    else:
        used = {"training.dataset_path": config.training}
    missing = Problems()
    for key, data in used.items():
        if data.dataset_path:
            with missing.collect(DataError):
                find_corpus(data.dataset, data.dataset_path, key=key)
    missing.raise_if_any()


def _check_initial_checkpoint(config: JobConfig) -> None:
    """The weights that a run starts from, if its own folder has no checkpoint to go on from."""
    checkpoint = config.checkpoint
    own = Path(config.job.dump_folder) / checkpoint.folder
    in_assets = checkpoint.initial_load_in_hf and checkpoint.initial_load_path is None
    found = config.model.hf_assets_path if in_assets else checkpoint.initial_load_path
    if found is None or not checkpoint.enable or (complete_steps(own) and not checkpoint.create_seed_checkpoint):
        return
    path, key = Path(found), "model.hf_assets_path" if in_assets else "checkpoint.initial_load_path"
    is_huggingface = any(path.glob("*.safetensors"))
    problem = None
    if not path.exists():
        problem = "does not exist"
    elif checkpoint.initial_load_in_hf and not is_huggingface:
        problem = "holds no *.safetensors files, which checkpoint.initial_load_in_hf asks for"
        if (path / STATE_FILE).exists():
            problem = "is a checkpoint of a run: leave out checkpoint.initial_load_in_hf"
    elif is_huggingface and not checkpoint.initial_load_in_hf:
        problem = "is a HuggingFace folder: set checkpoint.initial_load_in_hf"
    elif not is_huggingface and (because := incomplete_because(path)):
        problem = f"is no complete checkpoint ({because}); name a step-N folder"
    if problem:
        raise ConfigError(key, None, f"{path} {problem}")


def _tokenizer(config: JobConfig) -> Tokenizer:
    try:
        training = config.training
        return build_tokenizer(config.model.hf_assets_path, add_bos=training.add_bos, add_eos=training.add_eos)
    except (ImportError, DataError) as error:  # the message of an ImportError names the package
        raise ConfigError("model.hf_assets_path", None, str(error)) from None


def _model_args(config: JobConfig, tokenizer: Tokenizer | None) -> Any:
    """The flavor's args, with the tokenizer's vocabulary where the flavor has none and the run's longest sequence.
    ``tokenizer`` is None when it has a problem; no other check then reads the vocabulary."""
    try:
        args = get_model_args(config.model.name, config.model.flavor)
    except ValueError as error:
        raise ConfigError("model", None, str(error)) from None
    if args.vocab_size is None:
        args = dataclasses.replace(args, vocab_size=1 if tokenizer is None else tokenizer.vocab_size)
    validation = [config.validation.seq_len] if config.validation.enable else []
    return dataclasses.replace(args, max_seq_len=max([config.training.seq_len, *validation]))


def _check_vocabulary(config: JobConfig, model_args: Any, tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and model_args.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            "model.hf_assets_path",
            None,
            f"the tokenizer has {tokenizer.vocab_size} tokens, {config.model.name} {config.model.flavor} only "
            f"{model_args.vocab_size}",
        )


def _check_split(config: JobConfig, model_args: Any) -> None:
    """Tensor parallelism splits sizes of the model, and between the blocks sequences."""
    degree = config.parallelism.tensor_parallel_degree
    divisible = get_model_spec(config.model.name).divisible(model_args)
    sizes = {f"the model's {name}": size for name, size in divisible.items()}
    sizes["training.seq_len"] = config.training.seq_len
    if config.validation.enable:
        sizes["validation.seq_len"] = config.validation.seq_len
    uneven = Problems()
    for name, size in sizes.items():
        if size % degree:
            problem = (
                f"found {degree}, which does not divide {name} = {size} (the largest divisor they share is "
                f"{math.gcd(degree, size)})"
            )
            uneven.add(ConfigError("parallelism.tensor_parallel_degree", None, problem))
    uneven.raise_if_any()


def _check_names(config: JobConfig, model_args: Any, problems: Problems) -> None:
    """Patterns match parameters of the model, QK-clip acts on it, and its family describes each parameter."""
    spec = get_model_spec(config.model.name)
    with torch.device("meta"):
        model = spec.build(model_args)
    found = Problems()
    for problem in undescribed(spec, model, model_args):
        found.add(ConfigError("model.name", None, problem))
    patterns = ("dmuon.include", "dmuon.exclude", "dmuon.min_matrix_dim")
    if config.optimizer.name == "DMuon" and problems.sound("optimizer.name", *patterns):
        with found.collect():
            plan_dedication(model, config.dmuon)
    if problems.sound("optimizer.param_groups"):
        with found.collect():
            group_parameters(model, config.optimizer.param_groups)
    if config.optimizer.name == "DMuon" and config.dmuon.qk_clip_threshold is not None:
        with found.collect():
            clipped_heads(model, config)
    found.raise_if_any()


# ---- before torchrun


def _number_from(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(variable, "environment", f"found {text!r}, expected a number of at least 1")
    return int(text)


def count_processes() -> tuple[int, int]:
    """(processes of this node, of all nodes) from the environment: by default one a GPU, two on the CPU. Raises
    ConfigError."""
    processes = _number_from("NGPU", torch.cuda.device_count() or 2)
    return processes, processes * _number_from("NNODES", 1)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        processes, ranks = count_processes()
        config, problems = read_config(argv)
        examine(config, ranks, problems)
    except ConfigError as error:
        print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return 1
    print(processes, torch.cuda.device_count(), os.cpu_count(), config.job.dump_folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
