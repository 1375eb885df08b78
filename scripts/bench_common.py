"""What the bench_*.py scripts share: timing with device events, tables, and the Newton-Schulz people write first."""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import environment  # noqa: F401
import torch

from dmuon import COEFFICIENTS

POLAR_EXPRESS = COEFFICIENTS["polar_express"].steps


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ms(run: Callable[[], object], device: torch.device, budget_ms: float = 200.0, least: int = 5) -> float:
    """Median milliseconds of ``run``, after warming up, over about ``budget_ms`` and at least ``least`` runs."""

    def once() -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    run()  # compiles
    synchronize(device)
    estimate = min(once(), once())
    count = max(least, min(200, int(budget_ms / max(estimate, 1e-3))))
    if device.type != "cuda":
        return statistics.median(once() for _ in range(count))
    # Events of one queue, read at the end: the host does not stand between two runs.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def time_replayed_ms(run: Callable[[], object], budget_ms: float = 60.0) -> float:
    """Median milliseconds of ``run`` on the GPU, replayed as a CUDA graph: what the host takes to launch is left out.
    It must allocate nothing."""
    estimate = time_ms(run, torch.device("cuda"), budget_ms=0.0)  # compiles, warms up
    many = max(1, min(20, int(2.0 / estimate)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(many):
            run()
    return time_ms(graph.replay, torch.device("cuda"), budget_ms) / many


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most memory ``run`` holds at once beyond what was there before; its result counts. 0 on the CPU."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def reason(error: BaseException) -> str:
    """An error in one short cell of a table."""
    lines = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {lines[0][:80] if lines else ''}"


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Aligned columns; floats with three digits after the point."""
    cells = [list(header)] + [[f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    columns = max(len(row) for row in cells)
    # The last cell of a short row says why there are no more; it does not widen its column.
    widths = [max([len(row[i]) for row in cells if i < len(row) - (len(row) < columns)] or [0]) for i in range(columns)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in cells)


def describe(device: torch.device) -> str:
    """The machine in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    return f"{name}, torch {torch.__version__}, triton {version}"


def write_json(path: str | None, name: str, value: object) -> None:
    """``value`` into the folder ``path``, if there is one."""
    if path is not None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(value, indent=1))


# ------------------------------------------------------------------ the reference implementations


def direct_bf16(x: torch.Tensor) -> torch.Tensor:
    """The direct form in bfloat16 on PyTorch's products: [B, m, n] of any dtype to bfloat16."""
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        r = x @ x.mT
        z = torch.baddbmm(r, r, r, beta=b, alpha=c)
        x = torch.baddbmm(x, z, x, beta=a)
    return x.mT if tall else x


def gram_fp16(x: torch.Tensor) -> torch.Tensor:
    """The Gram form in float16 on PyTorch's products, a new tensor for every result."""
    tall = x.shape[1] > x.shape[2]
    x = (x.mT if tall else x).float()
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).half()
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for steps in (POLAR_EXPRESS[:2], POLAR_EXPRESS[2:]):
        r, q = x @ x.mT, None
        for a, b, c in steps:
            z = torch.baddbmm(r, r, r, beta=b, alpha=c)
            q = z + a * eye if q is None else torch.baddbmm(q, q, z, beta=a)
            p = torch.baddbmm(r, r, z, beta=a)
            r = torch.baddbmm(p, z, p, beta=a)
        x = q @ x
    return x.mT if tall else x


def direct_fp64(x: torch.Tensor) -> torch.Tensor:
    """What all of them approximate."""
    x = x.double()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.shape[1] > x.shape[2]:
        return direct_fp64(x.mT).mT
    for a, b, c in POLAR_EXPRESS:
        r = x @ x.mT
        x = a * x + (b * r + c * (r @ r)) @ x
    return x


def direct_flops(batch: int, m: int, n: int) -> int:
    """Of five direct steps with every product in full, (20a + 10) s^3 a matrix: the work by which effective rates
    are stated, so that a faster algorithm shows as a higher rate."""
    s, wide = min(m, n), max(m, n)
    return batch * len(POLAR_EXPRESS) * (4 * s * s * wide + 2 * s**3)
