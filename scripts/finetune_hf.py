"""Trains a causal language model of any local HuggingFace folder on text files, with DMuon's default predicate.

    torchrun --nproc-per-node 8 scripts/finetune_hf.py FOLDER OUT --data 'corpus/*.txt' [--steps 100] [--lr 2e-4]
    python3 scripts/finetune_hf.py ...     # one rank

FOLDER holds config.json, the weights as safetensors and a tokenizer; OUT gets the same, with the trained weights, and
``from_pretrained(OUT)`` loads it. The texts are one stream of tokens; its last windows are held out, and their loss is
printed before and after. Matrices get --lr, everything else --adamw-lr; both warm up linearly. Needs transformers.
"""

from __future__ import annotations

import argparse
import glob
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import environment  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ImportError:
    raise SystemExit("scripts/finetune_hf.py needs transformers (extra hf): pip install transformers") from None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="local HuggingFace folder")
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--data", required=True, help="glob of text files, UTF-8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=2e-4, help="of the matrices, as one would choose it for AdamW")
    parser.add_argument("--adamw-lr", type=float, default=2e-5, help="of everything else")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--batch", type=int, default=2, help="windows a rank and step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--held-out", type=int, default=8, help="windows that are not trained on")
    parser.add_argument("--max-norm", type=float, default=1.0, help="of all gradients together")
    options = parser.parse_args(arguments)
    if not (options.folder / "config.json").is_file():
        parser.error(f"{options.folder} has no config.json: give a HuggingFace folder")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty: give a new folder")
    if not glob.glob(options.data):
        parser.error(f"--data {options.data!r} matches no file")
    return options


def start() -> tuple[torch.device, DeviceMesh]:
    """The device and the mesh of all ranks; one rank where torchrun has started none."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.HashStore() if os.environ["WORLD_SIZE"] == "1" else None
    single = {"store": store, "rank": 0, "world_size": 1} if store is not None else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **single)
    return device, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def windows(folder: Path, pattern: str, length: int) -> torch.Tensor:
    """All texts as token windows [count, length]; documents end with the end-of-text token, if there is one."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    for path in sorted(glob.glob(pattern)):
        tokens += tokenizer(Path(path).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"] + end
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Give every matrix of the default predicate its owner, and the rest to FSDP2, wrapped at the same modules."""
    dmuon.dedicate_params(model, mesh, param_policy={"defaults": {"param_dtype": dtype}})
    rows = dmuon.ownership_table(model)
    if dist.get_rank() == 0:
        print(dmuon.format_ownership_table(rows, limit=20), dmuon.format_owners(model), sep="\n\n", flush=True)
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for unit in dict.fromkeys(row.unit for row in rows if row.owners and row.unit != "<root>"):
        fully_shard(model.get_submodule(unit), **options)
    fully_shard(model, **options)


def batches(data: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
    """Without end, this rank's windows [batch, length] of random order, the same order on every rank."""
    rank, world, generator = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(data), generator=generator)
        for first in range(0, len(data) - batch * world + 1, batch * world):
            yield data[order[first + rank * batch : first + (rank + 1) * batch]]


@torch.no_grad()
def evaluate(model: nn.Module, data: torch.Tensor, device: torch.device) -> float:
    """Mean loss over ``data``; every rank runs all of it."""
    model.eval()
    losses = [model(input_ids=each.to(device), labels=each.to(device)).loss for each in data.split(1)]
    model.train()
    return torch.stack(losses).mean().item()


def save(model: nn.Module, source: Path, out: Path) -> None:
    """Write the weights in the dtype of ``source``, with config and tokenizer. Collective."""
    state = dmuon.get_model_state_dict(model, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        dtype = config.dtype or torch.float32
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config)
        whole = {name: each.to(dtype) if each.is_floating_point() else each for name, each in state.items()}
        plain.save_pretrained(out, state_dict=whole)
        AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(out)
    dist.barrier()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    device, mesh = start()
    data = windows(options.folder, options.data, options.length)
    needed = options.held_out + options.batch * dist.get_world_size()
    if len(data) < needed:
        raise SystemExit(
            f"--data has {len(data)} windows of {options.length} tokens; {needed} are needed: shorten --length"
        )
    train, held_out = data[: -options.held_out], data[-options.held_out :]
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32, local_files_only=True)
    model.to(device).train()
    shard(model, mesh, torch.bfloat16 if device.type == "cuda" else torch.float32)
    decay = {"weight_decay": options.weight_decay, "adamw_weight_decay": options.weight_decay}
    optimizer = dmuon.Muon(model, lr=options.lr, adamw_lr=options.adamw_lr, **decay)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(options.warmup, 1)))
    before = evaluate(model, held_out, device)
    for step, tokens in zip(range(1, options.steps + 1), batches(train, options.batch), strict=False):
        tokens = tokens.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = dmuon.clip_total_grad_norm_(optimizer, options.max_norm)
        optimizer.step()
        warm.step()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}/{options.steps}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}", flush=True)
    after = evaluate(model, held_out, device)
    save(model, options.folder, options.out)
    if dist.get_rank() == 0:
        print(f"held-out loss: {before:.4f} before, {after:.4f} after; saved to {options.out}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
