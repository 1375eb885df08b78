"""The symmetric kernel alone: right on every tile configuration, and timed over them. Run by bench_newton_schulz.py."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch
from bench_common import reason, table, time_ms, time_replayed_ms, write_json

from dmuon import NewtonSchulz

PRODUCT_SIZES = [(1, 1000, 2999), (3, 512, 1024)]  # each compiles every configuration twice: tests/gpu has more
SWEEP_SIZES = [1024, 2048, 3072, 4096, 8192]
SWEEP_ASPECTS = [8 / 3, 4.0]
SWEEP_BATCHES = [1, 8]

Case = tuple[str, int, int, int]  # kind, s, k, batch


def configurations(device: torch.device) -> list:
    """What the sweep tries. The tensor-descriptor ones need SM90."""
    from torchtitan_dmuon.dmuon.kernels.symmetric import TileConfig

    configs = [
        TileConfig(128, 128, 64, warps=8, stages=3),
        TileConfig(128, 128, 32, warps=4, stages=3),
        TileConfig(128, 256, 64, warps=8, stages=3),
        TileConfig(64, 64, 64, warps=4, stages=4),
    ]
    if device.type != "cuda":
        return [TileConfig(16, 16, 16), TileConfig(16, 32, 16, tma=True)]
    if torch.cuda.get_device_capability(device) >= (9, 0):
        tma = TileConfig(tma=True)
        configs += [
            dataclasses.replace(tma, warps=4, stages=3),
            dataclasses.replace(tma, warps=4, stages=4),
            dataclasses.replace(tma, stages=3),
            dataclasses.replace(tma, stages=4),
            dataclasses.replace(tma, stages=3, registers=128),
            dataclasses.replace(tma, block_n=256, stages=3),
            dataclasses.replace(tma, block_n=256, stages=4),
            dataclasses.replace(tma, block_k=128, stages=3),
            TileConfig(64, 128, 64, warps=4, stages=4, tma=True),
            TileConfig(64, 64, 64, warps=4, stages=4, tma=True),
            TileConfig(64, 64, 128, warps=4, stages=3, tma=True),
        ]
    return configs


def short(config: object) -> str:
    c = vars(config)
    registers = f" r{c['registers']}" if c["registers"] else ""
    return f"{c['block_m']}x{c['block_n']}x{c['block_k']} w{c['warps']} s{c['stages']} g{c['group']}{registers}" + (
        " tma" if c["tma"] else ""
    )


def check_products(device: torch.device) -> list[str]:
    """The configurations whose products are wrong, against float64 on fresh data."""
    try:
        from torchtitan_dmuon.dmuon.kernels.symmetric import unavailable

        why = unavailable(device)
    except ImportError as error:
        why = str(error)
    rows, failures = [], []
    for config in configurations(device) if why is None else []:
        try:
            worst, problem = _check_configuration(config, device)
        except Exception as error:
            worst, problem = 0.0, reason(error)
        rows.append([short(config), f"{worst:.1e}", problem or "ok"])
        if problem and not problem.startswith("failed"):
            failures.append(short(config))
    print(f"\nsymmetric product against float64 ({why or 'available'})")
    print(table(rows, ["configuration", "worst error", ""]))
    return failures


def _check_configuration(config: object, device: torch.device) -> tuple[float, str]:
    """(worst relative error, what is wrong)."""
    from torchtitan_dmuon.dmuon.kernels.symmetric import symmetric_product

    dtype = NewtonSchulz.compute_dtype(device)
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    worst, problem = 0.0, ""
    for batch, s, k in PRODUCT_SIZES if device.type == "cuda" else [(2, 33, 20)]:
        wide = torch.randn(batch, s, k, device=device).to(dtype)
        tall = wide.mT.contiguous()
        d = torch.randn(batch, s, s, device=device)
        d = (d + d.mT).to(dtype)
        expected = 0.5 * wide.double() @ wide.double().mT - 2 * d.double()
        for a, b in ((wide, wide.mT), (tall.mT, tall)):
            outs = [torch.full_like(d, math.nan) for _ in range(3)]
            for out in outs:
                symmetric_product(a, b, d, alpha=0.5, beta=-2.0, out=out, config=config)
            error = ((outs[0].double() - expected).norm() / expected.norm()).item()
            worst = max(worst, error)
            if not error < tolerance:  # NaN is not less either
                problem += f" {s}x{k}: error {error:.2e};"
            if not torch.equal(outs[0], outs[0].mT):
                problem += f" {s}x{k}: not symmetric;"
            if not all(torch.equal(outs[0], out) for out in outs[1:]):
                problem += f" {s}x{k}: differs between runs;"
    return worst, problem


def _cases(sizes: list[int], batches: list[int]) -> list[Case]:
    cases = []
    for s, aspect, batch in itertools.product(sizes, SWEEP_ASPECTS, batches):
        k = round(s * aspect / 64) * 64  # aligned, as a model's are
        cases.append(("X X^T", s, k, batch))
        if aspect == SWEEP_ASPECTS[0]:
            cases.append(("X^T X", s, k, batch))
    return cases + [("r+RZ", s, s, batch) for s in sizes for batch in batches]


def sweep(device: torch.device, sizes: list[int], batches: list[int], out: str | None) -> None:
    """The symmetric kernel over its configurations, against cuBLAS."""
    failed: dict[str, str] = {}
    rows, records = [], []
    header = ["kind", "s", "k", "batch", "cuBLAS ms", "TFLOP/s", "best ms", "half TFLOP/s", "speedup", "best",
              "rule ms", "rule"]  # fmt: skip
    print("\nsymmetric kernel; TFLOP/s of cuBLAS on the full product, of ours on half of it")
    for case in _cases(sizes, batches):
        kind, s, k, batch = case
        reference, times, chosen = _time_case(case, device, failed)
        record = {"kind": kind, "s": s, "k": k, "batch": batch, "cublas_ms": reference, "ms": times, "rule": chosen}
        records.append(record)
        if times:
            best, flops = min(times, key=times.get), batch * s * s * k
            rows.append(
                [kind, s, k, batch, reference, 2 * flops / reference / 1e9, times[best], flops / times[best] / 1e9,
                 reference / times[best], best, times.get(chosen, math.nan), chosen]
            )  # fmt: skip
            told = f"cuBLAS {reference:.3f} ms, best {times[best]:.3f} ms ({best})"
            print(f"{kind} {s}x{k} batch {batch}: {told}", flush=True)
        write_json(out, "symmetric_sweep", {"cases": records, "failed": failed})  # what a time limit cuts off is kept
    print(table(rows, header))
    for name, why in failed.items():
        print(f"{name}  {why}")


def _time_case(case: Case, device: torch.device, failed: dict[str, str]) -> tuple[float, dict[str, float], str]:
    """(ms of cuBLAS, ms by configuration, the configuration that the rule takes); notes what has ``failed``."""
    from torchtitan_dmuon.dmuon.kernels.symmetric import choose_tiles, symmetric_product

    kind, s, k, batch = case
    dtype = NewtonSchulz.compute_dtype(device)
    timed: Callable = functools.partial(time_ms, device=device, budget_ms=60)
    capability, multiprocessors = (9, 0), 4
    if device.type == "cuda":
        timed, properties = time_replayed_ms, torch.cuda.get_device_properties(device)
        capability, multiprocessors = (properties.major, properties.minor), properties.multi_processor_count
    x = torch.randn((batch, k, s) if kind == "X^T X" else (batch, s, k), device=device).div_(math.sqrt(k)).to(dtype)
    a, b, d = (x.mT, x, None) if kind == "X^T X" else (x, x.mT, None)
    if kind == "r+RZ":
        d = a = b = symmetric_product(x, x.mT)
    cublas_out = torch.empty(batch, s, s, dtype=dtype, device=device)
    result = torch.empty_like(cublas_out)

    def cublas() -> torch.Tensor:
        if d is None:
            return torch.bmm(a, b, out=cublas_out)
        return torch.baddbmm(d, a, b, beta=2.0, alpha=0.5, out=cublas_out)

    def ours(config: object) -> torch.Tensor:
        transposed = b if d is None else b.mT
        return symmetric_product(a, transposed, d, alpha=0.5, beta=2.0, out=result, config=config)

    reference = timed(cublas)
    times: dict[str, float] = {}
    for config in configurations(device):
        if short(config) not in failed:
            try:
                times[short(config)] = timed(functools.partial(ours, config))
            except Exception as error:
                failed[short(config)] = reason(error)
    return reference, times, short(choose_tiles(s, k, batch, capability, multiprocessors, addend=d is not None))
