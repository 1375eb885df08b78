"""Reading a checkpoint into the live tensors of a run, on whatever ranks it has now. All functions are collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_dmuon.checkpoint.directory import (
    METADATA_FILE,
    CheckpointError,
    corrupted_because,
    read_checksums,
)
from torchtitan_dmuon.checkpoint.huggingface import check_tied_head, is_tied
from torchtitan_dmuon.checkpoint.random_state import get_random_state, seed_random_state, set_random_state
from torchtitan_dmuon.checkpoint.state import Contents, Tensors, TrainState
from torchtitan_dmuon.distributed import first_problem
from torchtitan_dmuon.logging import logger

_NAMES_IN_A_LINE = 3


def verify(path: Path, group: dist.ProcessGroup) -> None:
    """Read every file of a complete checkpoint, each by one rank, and compare it with its checksum.

    Raises:
        CheckpointError: on every rank, naming the file.
    """
    problem = None
    try:
        checksums = read_checksums(path)
        names = sorted(checksums)[dist.get_rank() :: dist.get_world_size()]
        problem = corrupted_because(path, names, checksums)
    except CheckpointError as error:
        problem = str(error)
    if problem := first_problem(problem, group):
        raise CheckpointError(
            f"cannot load checkpoint {path}: {problem}; choose an earlier one with checkpoint.load_step, or remove it"
        )


def read_state(path: Path, group: dist.ProcessGroup) -> TrainState:
    """``trainer.json`` of a checkpoint. Raises CheckpointError on every rank."""
    state, problem = None, None
    try:
        state = TrainState.read(path)
    except CheckpointError as error:
        problem = str(error)
    if problem := first_problem(problem, group):
        raise CheckpointError(problem)
    return state


def load_checkpoint(
    path: Path, contents: Contents, saved: TrainState, parts: set[str], group: dist.ProcessGroup
) -> None:
    """Fill what ``parts`` names (of ``model``, ``optimizer``, ``rng``) of the live tensors, in place.

    Where the checkpoint has no state of a parameter, because another kind of optimizer updated it, the live state stays
    as it is, and the log says so.

    Raises:
        CheckpointError: on every rank: the checkpoint is unreadable, or of another model.
    """
    metadata = _read_metadata(path, group)
    tensors: Tensors = {}
    if "model" in parts:
        _check_model(path, metadata, contents)
        tensors |= {f"model.{name}": tensor for name, tensor in contents.model().items()}
    if "optimizer" in parts:
        if saved.optimizer != contents.optimizer_name:
            logger.warning(
                "%s was written by %s, this run has %s: its optimizer state is NOT loaded, only parameters are; "
                "momentum and moments start at zero",
                *(path, saved.optimizer, contents.optimizer_name),
            )
        else:
            tensors |= _optimizer_tensors(path, metadata, contents, group)
    random_state: Tensors = {}
    rank = dist.get_rank()
    if "rng" in parts:
        found = {name: f"rng.{rank}.{name}" for name in get_random_state()}
        found = {name: key for name, key in found.items() if key in metadata.state_dict_metadata}
        random_state = {name: tensor for name, tensor in get_random_state().items() if name in found}
        tensors |= {found[name]: tensor for name, tensor in random_state.items()}
    _read(path, tensors, group)
    contents.loaded()
    if "rng" in parts:
        if "torch" in random_state:
            set_random_state(random_state)
        else:
            seed_random_state(contents.seed, saved.step, rank)
            missing = dist.get_world_size() - saved.world_size
            message = (
                "The checkpoint has the random state of %d ranks: ranks %d to %d start from debug.seed and the step"
            )
            if missing > 0 and rank == saved.world_size:
                logger.info(message, saved.world_size, rank, dist.get_world_size() - 1)


def load_huggingface(path: Path, contents: Contents, group: dist.ProcessGroup) -> None:
    """Fill the live model from HuggingFace safetensors.

    Raises:
        CheckpointError: on every rank: no such files, or weights of another model.
    """
    problem, names = None, {}
    try:
        reader = dcp.HuggingFaceStorageReader(str(path))
        if not sorted(path.glob("*.safetensors")):
            problem = "there are no *.safetensors files"
        else:
            metadata = reader.read_metadata()
            names = _hf_names(metadata, contents)
            _check_hf_config(path, contents)
            head = contents.hf_names.head
            stores_head = contents.hf_names.to_hf(head) in metadata.state_dict_metadata
            if stores_head and (head not in names or is_tied(path)):
                check_tied_head(path, contents.hf_names, dist.get_rank(), dist.get_world_size())
    except ImportError:
        problem = "reading it needs the package safetensors (extra hf): pip install safetensors"
    except Exception as error:  # safetensors raises errors of its own for files that are cut off
        problem = str(error)
    if problem := first_problem(problem, group):
        raise CheckpointError(f"cannot load HuggingFace weights from {path}: {problem}")
    live = contents.model()
    tensors = {hf: live[fqn] for fqn, hf in names.items() if fqn in live}
    _read(path, tensors, group, reader)
    contents.loaded()


# Keys of config.json that tell models apart whose weights have equal shapes.
_HF_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_factor")


def _check_hf_config(path: Path, contents: Contents) -> None:
    """Raises ValueError when a ``config.json`` is there and says that the weights are of another model."""
    file = path / "config.json"
    if not file.is_file():
        return
    there, here = (_flat_rope(config) for config in (json.loads(file.read_text()), contents.hf_config))
    for key in _HF_KEYS:
        if there.get(key) is not None and here.get(key) is not None and there[key] != here[key]:
            raise ValueError(f"its config.json has {key} {there[key]}, {contents.model_name} has {here[key]}")


def _flat_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The config with ``rope_theta`` and ``rope_factor`` (1 without scaling) at the top, wherever transformers 4 or 5
    puts them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": rope.get("rope_theta"), **config, "rope_factor": float(rope.get("factor", 1.0))}


def _hf_names(metadata: Metadata, contents: Contents) -> dict[str, str]:
    """Our name -> name in the files, for the whole model. Raises ValueError when the files are of another model."""
    there = {}
    for name, entry in metadata.state_dict_metadata.items():
        fqn = contents.hf_names.from_hf(name)
        if fqn is not None:
            there[fqn] = (name, tuple(entry.size))
    shapes, head = contents.shapes(), contents.hf_names.head
    for fqn, shape in shapes.items():
        if fqn not in there:
            advice = "; its head is its embedding: choose a model.flavor that ties them" if fqn == head else ""
            raise ValueError(f"it lacks {contents.hf_names.to_hf(fqn)}, which {contents.model_name} has{advice}")
        if there[fqn][1] != shape:
            raise ValueError(f"{there[fqn][0]} is {list(there[fqn][1])} there, {contents.model_name} has {list(shape)}")
    # A tied head may be stored all the same (``check_tied_head``); anything else that is left over is another model's.
    tied = {head} - shapes.keys()
    if extra := sorted(there.keys() - shapes.keys() - tied):
        raise ValueError(f"it has {there[extra[0]][0]}, which {contents.model_name} lacks")
    return {fqn: there[fqn][0] for fqn in shapes}


def _read_metadata(path: Path, group: dist.ProcessGroup) -> Metadata:
    metadata, problem = None, None
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:  # unpickling raises anything
        problem = f"{METADATA_FILE} cannot be read ({type(error).__name__}: {error})"
    if problem := first_problem(problem, group):
        raise CheckpointError(f"cannot load checkpoint {path}: {problem}")
    return metadata


def _check_model(path: Path, metadata: Metadata, contents: Contents) -> None:
    """The same on every rank, without communication. Raises CheckpointError."""
    there = {
        name.removeprefix("model."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    here = contents.shapes()
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            what = [f"has shape {list(s[name])}" if name in s else "is absent" for s in (there, here)]
            raise CheckpointError(
                f"cannot load checkpoint {path}: it is of another model: {name} {what[0]} in it and {what[1]} in "
                f"{contents.model_name}"
            )


def _optimizer_tensors(path: Path, metadata: Metadata, contents: Contents, group: dist.ProcessGroup) -> Tensors:
    """Those of the live optimizer tensors that the checkpoint has."""
    tensors, missing = {}, []
    for name, tensor in contents.optimizer().items():
        entry = metadata.state_dict_metadata.get(f"optimizer.{name}")
        if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == tuple(tensor.size()):
            tensors[f"optimizer.{name}"] = tensor
        else:
            missing.append(name)
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, missing, group=group)
    if names := {name for found in everyone for name in found}:
        logger.warning(
            "%s has no optimizer state of that kind for %d tensors of this run (their parameters were frozen, or "
            "another route or option of the optimizer wrote it): they start at zero: %s",
            *(path, len(names), _first(names)),
        )
    stored = (name.removeprefix("optimizer.") for name in metadata.state_dict_metadata if name.startswith("optimizer."))
    if frozen := {name.rpartition(".")[0] for name in stored} & contents.frozen():
        logger.info(
            "%s has optimizer state of %d parameters that are frozen in this run: it is left out: %s",
            *(path, len(frozen), _first(frozen)),
        )
    return tensors


def _first(names: set[str]) -> str:
    """A few of the names for a line of the log."""
    return ", ".join(sorted(names)[:_NAMES_IN_A_LINE]) + (", ..." if len(names) > _NAMES_IN_A_LINE else "")


def _read(path: Path, tensors: Tensors, group: dist.ProcessGroup, reader: dcp.StorageReader | None = None) -> None:
    reader = dcp.FileSystemReader(path) if reader is None else reader
    try:
        with torch.no_grad():
            dcp.load(tensors, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        rank, (exception, _) = sorted(error.failures.items())[0]
        raise CheckpointError(f"cannot load checkpoint {path}: rank {rank}: {exception}") from error
