"""Checkpoints to HuggingFace folders and back, one process, one tensor (or one shard of them) in memory at a time.

A HuggingFace folder has ``config.json``, ``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``;
with a single shard, ``model.safetensors`` alone. Names are mapped by the model family; tensors are never permuted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torchtitan_dmuon.checkpoint.directory import sync_folder, write_durably
from torchtitan_dmuon.families import HFNameMap

_NEEDS = "needs the package safetensors (extra hf): pip install safetensors"
_MAX_SHARD_BYTES = 5 << 30  # as transformers does


def write_huggingface(
    checkpoint: Path,
    folder: Path,
    names: HFNameMap,
    config: dict[str, Any],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write the weights of a DCP ``checkpoint`` as a HuggingFace ``folder``, durably. At most one shard is in memory.

    Args:
        names: of the model family.
        config: content of ``config.json``; ``torch_dtype`` is added.
        dtype: of the files; ``None`` keeps what is stored.

    Raises:
        ImportError: the package safetensors is missing. ValueError: a tensor without a HuggingFace name. OSError.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise ImportError(f"writing HuggingFace files {_NEEDS}") from None
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    stored = {
        name: entry
        for name, entry in metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    shards = _into_shards(stored, dtype, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in shard}
        _alone(lambda tensors=tensors: dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True))
        named = {
            names.to_hf(name.removeprefix("model.")): tensor if dtype is None else tensor.to(dtype)
            for name, tensor in tensors.items()
        }
        _write_shard(folder / file, named)
        index |= dict.fromkeys(named, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2)
        write_durably(folder / "model.safetensors.index.json", text)
    kind = dtype or next(iter(stored.values())).properties.dtype
    text = json.dumps({**config, "torch_dtype": str(kind).removeprefix("torch.")}, indent=2)
    write_durably(folder / "config.json", text + "\n")
    sync_folder(folder)


def _into_shards(
    stored: dict[str, TensorStorageMetadata], dtype: torch.dtype | None, max_shard_bytes: int
) -> list[list[str]]:
    """The names, in order, in runs of at most ``max_shard_bytes`` (a tensor that is larger has a shard of its own)."""
    shards: list[list[str]] = []
    room = 0
    for name, entry in stored.items():
        size = math.prod(entry.size) * (dtype or entry.properties.dtype).itemsize
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_shard(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file and bring it to disk. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from None
    with file.open("rb") as written:
        os.fsync(written.fileno())


def read_huggingface(folder: Path, checkpoint: Path, names: HFNameMap, dtype: torch.dtype | None = None) -> None:
    """Write the weights of a HuggingFace ``folder`` as the DCP tensors ``model.<fqn>`` in ``checkpoint``. One tensor is
    in memory at a time.

    Raises:
        ImportError: the package safetensors is missing. ValueError: no such files, a weight that the family has no
        name for, or a tied head that is not the embedding. OSError.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(f"reading HuggingFace files {_NEEDS}") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors files")
    places: dict[str, tuple[Path, str]] = {}
    state: dict[str, torch.Tensor] = {}
    tied = is_tied(folder)
    for file in files:
        try:
            opening = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is cut off or no safetensors file ({error})") from None
        with opening as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                fqn = names.from_hf(name)
                if fqn is None:
                    continue
                part = opened.get_slice(name)
                kind = dtype or opened.get_tensor(name).dtype
                state[f"model.{fqn}"] = torch.empty(part.get_shape(), dtype=kind, device="meta")
                places[f"model.{fqn}"] = (file, name)

    if tied and f"model.{names.head}" in state:
        check_tied_head(folder, names)
        del state[f"model.{names.head}"]

    def read(fqn: str) -> torch.Tensor:
        file, name = places[fqn]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name).to(state[fqn].dtype)

    writer = dcp.FileSystemWriter(checkpoint)
    _alone(lambda: dcp.save(state, storage_writer=writer, planner=_ReadingPlanner(read), no_dist=True))


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """Plans with tensors on meta, and reads each one when the writer asks for it."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._read(index.fqn)


def is_tied(folder: Path) -> bool:
    """Whether ``config.json`` says that the head is the embedding."""
    config = folder / "config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("tie_word_embeddings"))


def check_tied_head(folder: Path, names: HFNameMap, part: int = 0, parts: int = 1) -> None:
    """Check that a head which is stored although it is tied is the embedding, or loading would drop a weight without a
    word. Compares the run of rows ``part`` of ``parts``. Raises ValueError."""
    from safetensors import safe_open

    head, embedding = names.to_hf(names.head), names.to_hf(names.embedding)
    with contextlib.ExitStack() as stack:
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            found |= {name: opened.get_slice(name) for name in (head, embedding) if name in opened.keys()}  # noqa: SIM118
        shapes = [found[name].get_shape() for name in (head, embedding)]
        rows = slice(shapes[0][0] * part // parts, shapes[0][0] * (part + 1) // parts)
        if shapes[0] != shapes[1] or not torch.equal(*(found[name][rows].float() for name in (head, embedding))):
            raise ValueError(
                f"{head} is a head of its own, not {embedding}, to which the model ties its head: choose a model whose "
                f"head is not tied (and say so in config.json), or remove {head} from the files if it is stale"
            )


def _alone(call: Callable[[], object]) -> None:
    """Let DCP run without a process group, and without its warning that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        call()
