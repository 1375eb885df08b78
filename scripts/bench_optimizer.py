"""The optimizer step alone, on one GPU that owns every matrix of a model: dmuon.Muon, torch.optim.Muon, AdamW (fused).

    python scripts/bench_optimizer.py --models 1B,3B

`ms` is `step()` from gradients that are there to weights that have moved, `NS ms` the part of it in Newton-Schulz, and
`workspace` the most memory a step holds beyond weights, state and gradients. The floor is what arithmetic and memory
traffic cannot go below: see scripts/notes/newton_schulz.md.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time

import environment  # noqa: F401
import torch
from bench_common import describe, peak_bytes, reason, synchronize, table, write_json
from torch import nn

import dmuon
from torchtitan_dmuon.config.job_config import Comm
from torchtitan_dmuon.distributed import init_distributed
from torchtitan_dmuon.dmuon.kernels.newton_schulz import newton_schulz_flops

# (shape, how many) of one layer; layers.
MODELS = {
    "1B": ([((2048, 2048), 2), ((512, 2048), 2), ((8192, 2048), 2), ((2048, 8192), 1)], 16),
    "3B": ([((3072, 3072), 2), ((1024, 3072), 2), ((8192, 3072), 2), ((3072, 8192), 1)], 28),
    "tiny": ([((32, 32), 2), ((16, 32), 2), ((64, 32), 2), ((32, 64), 1)], 2),
}


class Block(nn.Module):
    """The matrices of a layer, and a forward whose gradient is whatever ``noise`` says: no model to run."""

    def __init__(self, shapes: list[tuple[tuple[int, int], int]], noise: dict[tuple[int, ...], torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(s)) for s, count in shapes for _ in range(count))
        self._noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + (weight * self._noise[tuple(weight.shape)]).sum().float()
        return x


class Matrices(nn.Module):
    """All matrices of a model."""

    def __init__(self, name: str, noise: dict[tuple[int, ...], torch.Tensor]) -> None:
        super().__init__()
        shapes, layers = MODELS[name]
        self.layers = nn.ModuleList(Block(shapes, noise) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Timed(dmuon.NewtonSchulz):
    """Remembers how long each iteration took."""

    def __init__(self, device: torch.device, **options: object) -> None:
        super().__init__(**options)
        self._device, self._spans = device, []

    def iterate(self, x: torch.Tensor) -> torch.Tensor:
        start = mark(self._device)
        result = super().iterate(x)
        self._spans.append((start, mark(self._device)))
        return result

    def take_ms(self) -> float:
        """Milliseconds since the last call; the device must be idle."""
        total = sum(elapsed(*span) for span in self._spans)
        self._spans = []
        return total


def mark(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
    return 1e3 * (stop - start) if isinstance(start, float) else start.elapsed_time(stop)


def dmuon_step(name: str, kernel: str, device: torch.device):
    """(what fills the gradients, the step, Newton-Schulz with its times)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    noise = {shape: torch.randn(shape, device=device, dtype=dtype) for shape, _ in MODELS[name][0]}
    with torch.device("meta"):
        model = Matrices(name, noise)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    policy = {"defaults": {"param_dtype": dtype, "grad_dtype": torch.float32}}
    dmuon.dedicate_params(model, mesh, predicate=lambda *_: True, param_policy=policy)
    dmuon.materialize(model, lambda _, t: nn.init.normal_(t, std=0.02), device)
    newton_schulz = Timed(device, kernel=kernel)
    optimizer = dmuon.Muon(model, lr=1e-3, ns_backend=newton_schulz)
    x = torch.zeros(1, device=device, requires_grad=True)
    return lambda: model(x).sum().backward(), optimizer.step, newton_schulz


def torch_step(name: str, optimizer: str, device: torch.device):
    """The same for an optimizer of PyTorch on plain float32 parameters."""
    shapes, layers = MODELS[name]
    params = [
        nn.Parameter(torch.randn(shape, device=device) * 0.02)
        for _ in range(layers)
        for shape, count in shapes
        for _ in range(count)
    ]
    if optimizer == "torch.optim.Muon":
        made = torch.optim.Muon(params, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    else:
        made = torch.optim.AdamW(params, lr=1e-3, fused=device.type == "cuda")
    for param in params:
        param.grad = torch.randn_like(param)
    return lambda: None, made.step, None


def measure(build, device: torch.device, steps: int) -> list[object]:
    """[ms, NS ms, rest, GiB]."""
    fill, step, newton_schulz = build()
    times, parts = [], []
    for index in range(steps + 2):
        fill()
        synchronize(device)
        start = mark(device)
        step()
        stop = mark(device)
        synchronize(device)
        part = newton_schulz.take_ms() if newton_schulz is not None else math.nan
        if index >= 2:
            times.append(elapsed(start, stop))
            parts.append(part)
    fill()
    peak = peak_bytes(step, device) / 2**30
    ms, part = statistics.median(times), statistics.median(parts)
    return [ms, part, ms - part, peak]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1B,3B")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", help="folder for a JSON file")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU: does the script run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.cpu_smoke:
        parser.error("needs a CUDA device (or --cpu-smoke)")
    device = init_distributed(Comm())
    names = ["tiny"] if arguments.cpu_smoke else arguments.models.split(",")
    print(describe(device))
    rows = []
    for name in names:
        shapes, layers = MODELS[name]
        tflop = layers * sum(count * newton_schulz_flops(*shape) for shape, count in shapes) / 1e12
        elements = layers * sum(count * math.prod(shape) for shape, count in shapes)
        print(f"{name}: {elements / 1e9:.2f}e9 elements, {tflop:.1f} TFLOP of Newton-Schulz with symmetric products")
        builds = {
            "AdamW fused": lambda name=name: torch_step(name, "AdamW", device),
            "torch.optim.Muon": lambda name=name: torch_step(name, "torch.optim.Muon", device),
            **{
                f"dmuon.Muon ({kernel})": lambda name=name, kernel=kernel: dmuon_step(name, kernel, device)
                for kernel in ("auto", "cublas")
            },
        }
        for label, build in builds.items():
            try:
                rows.append([name, label, *measure(build, device, 2 if arguments.cpu_smoke else arguments.steps)])
            except Exception as error:
                rows.append([name, label, reason(error)])
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(*rows[-1], flush=True)
    header = ["model", "optimizer", "ms", "NS ms", "rest ms", "workspace GiB"]
    print("\n" + table(rows, header))
    write_json(arguments.out, "optimizer", {"header": header, "rows": rows})
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
