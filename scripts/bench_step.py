"""Whole training steps of the Llama models under AdamW, the all-gather Muon, and DMuon Z2 and Z3.

``adamw-z2`` is the like of DMuon Z2: FSDP2 keeps the weights after forward. ``adamw-hot`` is a control: AdamW whose
step also multiplies matrices, to no end, for as long as DMuon's Newton-Schulz; what its forward and backward take
beyond AdamW's is the clock of a GPU that has come down under that load.

    python scripts/bench_step.py                                  one GPU
    torchrun --nproc-per-node 2 scripts/bench_step.py --profile   several, over NCCL

Every variant gets the same model, data, precision, checkpointing and compilation, is built with the trainer's own
functions, and is freed before the next. Times are medians of CUDA events on the slowest rank; memory is the largest
peak of a rank. `--profile` adds the exposed communication of a step: the time in which only NCCL kernels run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import environment  # noqa: F401
import torch
import torch.distributed as dist
from bench_common import describe, direct_bf16, reason, synchronize, table, write_json
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import dmuon
from dmuon import NewtonSchulz
from models import get_model_args, get_model_spec
from torchtitan_dmuon.config import JobConfig, load_config
from torchtitan_dmuon.distributed import init_distributed
from torchtitan_dmuon.loss import build_loss, whole
from torchtitan_dmuon.model import build_model
from torchtitan_dmuon.optimizer import build_optimizer
from torchtitan_dmuon.parallel import Meshes, ParallelDims

BATCHES = {"1B": 4, "3B": 2, "debugmodel": 1}  # sequences a rank
OPTIMIZERS = ("adamw", "adamw-z2", "adamw-hot", "allgather", "dmuon-z2", "dmuon-z3")


class AllGatherMuon(torch.optim.Optimizer):
    """The Muon people write first for FSDP2: sharded momentum, then every rank gathers every matrix, orthogonalises
    all of them with the direct form in bfloat16 and keeps its shard. AdamW for the rest."""

    def __init__(self, model: nn.Module, matrices: set[str], lr: float, momentum: float = 0.95) -> None:
        named = dict(model.named_parameters())
        self._matrices = [p for name, p in named.items() if name in matrices]
        others = [p for name, p in named.items() if name not in matrices]
        super().__init__(self._matrices, {"lr": lr, "momentum": momentum})
        fused = named[next(iter(named))].device.type == "cuda"
        self._adamw = torch.optim.AdamW(others, lr=lr, fused=fused)

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        for param in self._matrices:
            if "momentum" not in self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
            momentum = self.state[param]["momentum"].mul_(group["momentum"]).add_(param.grad)
            update = param.grad.add(momentum, alpha=group["momentum"])
            full = update.full_tensor() if isinstance(update, DTensor) else update
            orthogonal = direct_bf16(full[None])[0].contiguous()
            scale = 0.2 * math.sqrt(max(full.shape))
            if isinstance(param, DTensor):
                whole_update = DTensor.from_local(orthogonal, param.device_mesh, [Replicate()], run_check=False)
                orthogonal = whole_update.redistribute(placements=param.placements)
            param.add_(orthogonal.to(param.dtype), alpha=-group["lr"] * scale)
        self._adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._adamw.zero_grad(set_to_none)


class Heat:
    """Newton-Schulz on one matrix, again and again, as many operations as the matrices of a rank take.

    Args:
        matrices: shapes of all matrices that Muon would update.
        ranks: among which they are shared.
    """

    _SIZE = 4096

    def __init__(self, matrices: Iterable[tuple[int, ...]], ranks: int, device: torch.device) -> None:
        self._newton_schulz = NewtonSchulz()
        flops = sum(self._newton_schulz.flops(*shape, device) for shape in matrices) / ranks
        self._times = round(flops / self._newton_schulz.flops(self._SIZE, self._SIZE, device))
        self._x = self._newton_schulz.normalize(torch.randn(1, self._SIZE, self._SIZE, device=device))

    def __call__(self) -> None:
        for _ in range(self._times):
            self._newton_schulz.iterate(self._x.clone())


# ------------------------------------------------------------------ one variant


def configure(flavor: str, optimizer: str, arguments: argparse.Namespace) -> JobConfig:
    """The trainer's configuration of one variant."""
    precision = "float32" if arguments.cpu_smoke else "bfloat16"
    keys = {
        "model.flavor": flavor,
        "optimizer.name": "DMuon" if optimizer.startswith("dmuon") else "AdamW",
        "optimizer.lr": "1e-3",
        "dmuon.reshard_after_forward": str(optimizer != "dmuon-z2").lower(),
        "parallelism.fsdp_reshard_after_forward": "never" if optimizer == "adamw-z2" else "default",
        "training.mixed_precision_param": precision,
        "activation_checkpoint.mode": "selective" if arguments.ac == "op" else arguments.ac,
        "activation_checkpoint.selective_ac_option": "op",
        "compile.enable": str(arguments.compile).lower(),
    }
    return load_config([part for key, value in keys.items() for part in (f"--{key}", value)])


def build(config: JobConfig, meshes: Meshes, optimizer: str, arguments: argparse.Namespace):
    """(model, optimizer, vocabulary) as the trainer makes them. Collective."""
    args = get_model_args(config.model.name, config.model.flavor)
    args = dataclasses.replace(args, vocab_size=args.vocab_size or 512, max_seq_len=arguments.seq_len)
    with torch.device("meta"):
        plain = get_model_spec(config.model.name).build(args)
    decisions = dmuon.classify(plain, config.dmuon.min_matrix_dim)
    matrices = {name: param.shape for name, param in plain.named_parameters() if decisions[name].muon}
    model, _ = build_model(config, args, meshes)
    if optimizer == "allgather":
        # torch.compile puts a module of its own around a block.
        names = {name for name, _ in model.named_parameters() if name.replace("_orig_mod.", "") in matrices}
        return model, AllGatherMuon(model, names, config.optimizer.lr), args.vocab_size
    made = build_optimizer(model, config)
    if optimizer == "adamw-hot":
        heat = Heat(matrices.values(), dist.get_world_size(), meshes.device)
        made.register_step_post_hook(lambda *_: heat())
    return model, made, args.vocab_size


class Marks:
    """Points in time of one step: CUDA events, or the host's clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Milliseconds between marks; the device must have passed the last."""
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        return [a.elapsed_time(b) if self._cuda else 1e3 * (b - a) for a, b in pairs]


def measure(flavor: str, name: str, meshes: Meshes, arguments: argparse.Namespace) -> list[float]:
    """[step, forward, backward, optimizer, peak GiB, exposed communication or NaN] over all ranks."""
    config, device = configure(flavor, name, arguments), meshes.device
    model, optimizer, vocab_size = build(config, meshes, name, arguments)
    loss_fn = build_loss(config.compile)
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    shape = (arguments.batch or BATCHES[flavor], arguments.seq_len + 1)
    tokens = torch.randint(vocab_size, shape, device=device, generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    count = labels.numel() * dist.get_world_size()

    def step() -> Marks:
        marks = Marks(device)
        marks.mark()
        loss = whole(loss_fn(model(inputs), labels)) / count
        marks.mark()
        loss.backward()
        marks.mark()
        optimizer.step()
        optimizer.zero_grad()
        marks.mark()
        return marks

    for _ in range(arguments.warmup):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    done = [step() for _ in range(arguments.steps)]  # the host runs ahead, as in training
    synchronize(device)
    spans = [marks.spans() for marks in done]
    times = [statistics.median(sum(s) for s in spans)] + [statistics.median(s[i] for s in spans) for i in range(3)]
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    exposed = profile(step, device) if arguments.profile else math.nan
    result = torch.tensor([*times, peak, exposed], dtype=torch.float64, device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.tolist()


# ------------------------------------------------------------------ exposed communication

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def exposed_time(communication: Iterable[Interval], computation: Iterable[Interval]) -> float:
    """Length of the time that lies in some interval of ``communication`` and in none of ``computation``."""
    busy = merged(computation)
    both = merged([*communication, *busy])
    return sum(b - a for a, b in both) - sum(b - a for a, b in busy)


def profile(step, device: torch.device, steps: int = 2) -> float:
    """Milliseconds a step in which NCCL kernels run and nothing else does on this rank's GPU."""
    if device.type != "cuda":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    communication, computation = [], []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = communication if "nccl" in event["name"].lower() else computation
            kind.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    return exposed_time(communication, computation) / 1e3 / steps


# ------------------------------------------------------------------ all variants


def release(device: torch.device) -> None:
    """Free what the last variant held."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1B,3B", help="flavors of llama3, comma-separated")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help=f"of {OPTIMIZERS}")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, help="sequences a rank; default 4 for 1B, 2 for 3B")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ac", choices=("none", "op", "full"), default="none", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="compile blocks and loss")
    parser.add_argument("--profile", action="store_true", help="measure exposed communication")
    parser.add_argument("--out", help="folder for a JSON file")
    parser.add_argument("--cpu-smoke", action="store_true", help="the debug model on the CPU: does the script run")
    arguments = parser.parse_args()
    optimizers = arguments.optimizers.split(",")
    if unknown := set(optimizers) - set(OPTIMIZERS):
        parser.error(f"--optimizers must be of {OPTIMIZERS}, got {sorted(unknown)}")
    if arguments.cpu_smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        arguments.models, arguments.seq_len, arguments.warmup, arguments.steps = "debugmodel", 32, 1, 2
    elif not torch.cuda.is_available():
        parser.error("needs CUDA devices (or --cpu-smoke)")
    device = init_distributed(JobConfig().comm)
    world, rank = dist.get_world_size(), dist.get_rank()
    meshes = ParallelDims.from_config(JobConfig().parallelism, world).build(device)
    header = ["model", "optimizer", "step ms", "forward", "backward", "opt. ms", "peak GiB", "exposed ms", "of AdamW",
              "opt. of AdamW"]  # fmt: skip
    rows = []
    if rank == 0:
        print(f"{world} x {describe(device)}; AC {arguments.ac}, compile {arguments.compile}", flush=True)
    for flavor in arguments.models.split(","):
        baseline = [math.nan] * 6
        for name in optimizers:
            try:
                row = measure(flavor, name, meshes, arguments)
            except Exception as error:
                if world > 1:
                    raise  # the other ranks wait in a collective: torchrun ends them
                rows.append([flavor, name, reason(error)])
            else:
                baseline = row if name == "adamw" else baseline
                rows.append([flavor, name, *row, row[0] / baseline[0], row[3] / baseline[3]])
            release(device)
            if rank == 0:
                print(*(f"{c:.3f}" if isinstance(c, float) else c for c in rows[-1]), flush=True)
                write_json(arguments.out, f"step_{world}", {"header": header, "rows": rows})
    if rank == 0:
        print("\n" + table(rows, header))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
