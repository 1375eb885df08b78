"""Memory of a run by kind, planned and measured: two optimizer steps of the real trainer.

    NGPU=1 python scripts/measure_memory.py --job.config_file train_configs/llama3_1b.toml [--section.key value ...]
    torchrun --nproc-per-node 2 scripts/measure_memory.py ... [--out FILE.json]

Rank 0 counts its live tensors in the second step and compares them with its own plan. On CUDA the allocator is asked,
on the CPU PyTorch's operations are watched. Checkpoints are off, and the dump folder is a temporary one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import ConfigError, JobConfig, Problems, load_config
from torchtitan_dmuon.distributed import world_from_env
from torchtitan_dmuon.plan.activations import LiveBytes, plan_activations
from torchtitan_dmuon.plan.layout import build_layout
from torchtitan_dmuon.plan.memory import Memory, plan_memory
from torchtitan_dmuon.plan.text import gib, table
from torchtitan_dmuon.preflight import examine
from torchtitan_dmuon.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


class Counter:
    """Bytes of tensors now and at most since :meth:`reset`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._live = LiveBytes()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.nullcontext() if self._cuda else self._live:
            yield

    def now(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else self._live.now

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._cuda else self._live.peak

    def reset(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self._live.peak = self._live.now


class Measured:
    """Hooks on a built trainer that fill ``found``: kind -> bytes."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.counter = Counter(trainer.device)
        self.found: dict[str, int] = {}
        self._begin = self._blocks = 0
        trainer.model.register_forward_pre_hook(self._forward_begins)
        trainer.model.norm.register_forward_pre_hook(self._blocks_end)
        trainer.optimizer.register_step_pre_hook(self._step_begins)
        trainer.optimizer.register_step_post_hook(self._step_ends)

    def _forward_begins(self, *_: Any) -> None:
        self._begin = self.counter.now()

    def _blocks_end(self, module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        self._blocks = self.counter.now()
        self.counter.reset()
        self.found["forward"] = self._blocks - self._begin - _size(args)  # the last block's output goes soon
        if args[0].requires_grad:
            args[0].register_hook(self._head_ends)

    def _head_ends(self, gradient: torch.Tensor) -> None:
        """The gradient of the last block's output is there."""
        self.found["logits and loss"] = self.counter.peak() - self._blocks
        self.found["peak at the loss"] = self.counter.peak()
        self.counter.reset()

    def _step_begins(self, *_: Any) -> None:
        self.found["peak in backward"] = self.counter.peak()
        self.found |= self._held()
        self.counter.reset()
        self._begin = self.counter.now()

    def _step_ends(self, *_: Any) -> None:
        self.found["Newton-Schulz"] = max(0, self.counter.peak() - self._begin)
        self.found["peak in the step"] = self.counter.peak()

    def _held(self) -> dict[str, int]:
        """What stays from step to step, and the gradients."""
        trainer, optimizer = self.trainer, self.trainer.optimizer
        found: dict[str, int] = {}
        dedicated = set()
        if trainer.uses_muon:
            dedicated = {dp.param for dp in dmuon.get_dedicated_params(trainer.model)}
            pieces = dmuon.get_owned_params(trainer.model)
            muon = [piece for piece in pieces if piece.spec.route == "muon"]
            adamw = [piece for piece in pieces if piece.spec.route != "muon"]
            found = {
                "masters": _size(piece.master for piece in pieces),
                "momentum": _size(t for piece in muon for t in optimizer.state_of(piece).values()),
                "AdamW moments": _size(optimizer.state_of(piece)[name] for piece in adamw for name in MOMENTS),
                "compute weights": _size(piece.compute_weight for piece in pieces),
                "gradients": _size(piece.grad for piece in pieces),
            }
        sharded = [param for param in trainer.model.parameters() if param not in dedicated]
        states = [optimizer.state[param][name] for param in sharded for name in MOMENTS if optimizer.state[param]]
        return {
            **found,
            "FSDP2 weights": _size(sharded),
            "FSDP2 AdamW moments": _size(states),
            "FSDP2 gradients": _size(param.grad for param in sharded),
        }


def _size(tensors: Any) -> int:
    """Bytes on this rank."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def plan_rank(config: JobConfig, ranks: int, rank: int) -> Memory:
    examined = examine(config, ranks, Problems(), only_model=True)
    layout = build_layout(config, examined.model_args, examined.dims)
    return plan_memory(layout, config, plan_activations(layout.parts, config), 1, slot=rank)


def compare(memory: Memory, found: dict[str, int], on_cuda: bool) -> dict[str, list[int]]:
    """Kind -> [planned, measured]; ``forward`` is what forward has added before the head runs. The CPU has other passes
    around Newton-Schulz, and there only what operations return is counted: not what was there before, nor unsharded
    weights, which live in storages that are made once."""
    kinds = {name: dict(zip(("loss", "begins", "ends", "step"), m, strict=True)) for name, m in memory.kinds.items()}
    planned = {name: max(moments.values()) for name, moments in kinds.items()}
    of_forward = ["activations"]
    if on_cuda:
        of_forward += ["packed weights", "FSDP2 unsharded"]
        planned["peak at the loss"] = memory.totals[0]
        planned["peak in backward"] = max(memory.totals[1:3])
        planned["peak in the step"] = memory.totals[3]
    else:
        planned.pop("Newton-Schulz", None)
    planned["forward"] = sum(kinds[name]["loss"] for name in of_forward if name in kinds)
    return {name: [planned[name], found[name]] for name in found if name in planned}


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write {kind: [planned, measured]} as JSON")
    options, rest = parser.parse_known_args(argv)
    rank, _, ranks = world_from_env()
    with tempfile.TemporaryDirectory() as folder:
        rest += ["--training.steps", "2", "--lr_scheduler.warmup_steps", "1", "--job.dump_folder", folder]
        try:
            config = load_config([*rest, "--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false"])
            trainer = Trainer(config)
        except ConfigError as error:
            print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
            return 1
        measured = Measured(trainer)
        with measured.counter.watching():
            trainer.train()
    rows = compare(plan_rank(config, ranks, rank), measured.found, trainer.device.type == "cuda")
    if options.out is not None and rank == 0:
        options.out.write_text(json.dumps(rows))
    if rank == 0:
        cells = [[name, gib(a), gib(b), f"{a / b:.3f}" if b else "-"] for name, (a, b) in rows.items()]
        print(*table([["rank 0", "planned", "measured", "ratio"], *cells]), sep="\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
