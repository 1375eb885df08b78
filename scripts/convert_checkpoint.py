"""Convert between checkpoints and HuggingFace folders: one process, no GPU, one shard (or tensor) in memory at a time.

    python scripts/convert_checkpoint.py to-hf outputs/run/checkpoint/step-1000 my-model [--dtype bfloat16]
    python scripts/convert_checkpoint.py from-hf my-model my-checkpoint --model llama3 [--dtype float32]

What `from-hf` writes is a model-only checkpoint for `checkpoint.initial_load_path`. The tokenizer's files are not part
of a checkpoint: copy them beside `config.json`.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import environment  # noqa: F401
import torch

from models import get_model_spec, model_names
from torchtitan_dmuon.checkpoint.directory import (
    CheckpointError,
    checksum,
    corrupted_because,
    incomplete_because,
    publish,
    read_checksums,
    temporary_folder,
    write_durably,
)
from torchtitan_dmuon.checkpoint.huggingface import read_huggingface, write_huggingface
from torchtitan_dmuon.checkpoint.state import HUGGINGFACE, MODEL_ONLY, TrainState

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_hf(checkpoint: Path, folder: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Raises CheckpointError, ValueError, ImportError, OSError; on each of them `folder` is not there."""
    if (problem := incomplete_because(checkpoint)) is not None:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint ({problem}); name a step-N folder")
    checksums = read_checksums(checkpoint)
    if (problem := corrupted_because(checkpoint, sorted(checksums), checksums)) is not None:
        raise CheckpointError(f"{checkpoint}: {problem}")
    state = TrainState.read(checkpoint)
    if state.contents == HUGGINGFACE:
        raise CheckpointError(f"{checkpoint} holds HuggingFace files already: use it as it is")
    names = get_model_spec(state.model.split()[0]).hf
    with _appearing(folder) as temporary:
        write_huggingface(checkpoint, temporary, names, state.hf_config, dtype, max_shard_bytes)


def from_hf(folder: Path, checkpoint: Path, model: str, dtype: torch.dtype | None) -> None:
    """Raises ValueError, ImportError, OSError; on each of them `checkpoint` is not there."""
    config = folder / "config.json"
    hf_config = json.loads(config.read_text()) if config.is_file() else {}
    with _appearing(checkpoint) as temporary:
        read_huggingface(folder, temporary, get_model_spec(model).hf, dtype)
        state = TrainState(0, {}, {}, "none", f"{model} from {folder.name}", contents=MODEL_ONLY, hf_config=hf_config)
        write_durably(temporary / "trainer.json", state.to_json())


class _appearing:
    """Context: a temporary folder that becomes `final`, with checksums, when the block ends without error."""

    def __init__(self, final: Path):
        self._final = final
        self._temporary = temporary_folder(final)

    def __enter__(self) -> Path:
        if self._final.exists():
            raise CheckpointError(f"{self._final} exists already: choose another name or remove it")
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            publish(self._temporary, self._final, {p.name: checksum(p) for p in sorted(self._temporary.iterdir())})
        else:
            shutil.rmtree(self._temporary, ignore_errors=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("to-hf", help="checkpoint -> HuggingFace safetensors with index and config.json")
    out.add_argument("checkpoint", type=Path)
    out.add_argument("folder", type=Path)
    out.add_argument("--max_shard_gb", type=float, default=5.0, help="largest size of one file (default 5)")
    back = commands.add_parser("from-hf", help="HuggingFace safetensors -> model-only checkpoint")
    back.add_argument("folder", type=Path)
    back.add_argument("checkpoint", type=Path)
    back.add_argument("--model", required=True, choices=model_names(), help="model family")
    for command in (out, back):
        command.add_argument("--dtype", choices=sorted(_DTYPES), help="of the written tensors (default: as they are)")
    arguments = parser.parse_args(argv)
    dtype = _DTYPES.get(arguments.dtype)
    try:
        if arguments.command == "to-hf":
            to_hf(arguments.checkpoint, arguments.folder, dtype, int(arguments.max_shard_gb * 2**30))
        else:
            from_hf(arguments.folder, arguments.checkpoint, arguments.model, dtype)
    except (CheckpointError, ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
