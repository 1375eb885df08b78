"""Newton-Schulz on one GPU: right first, then how fast.

    python scripts/bench_newton_schulz.py --check           results against float64, on fresh data
    python scripts/bench_newton_schulz.py                   one table: every variant on every shape
    python scripts/bench_newton_schulz.py --model           all matrices of the 3B Llama
    python scripts/bench_newton_schulz.py --sweep --out DIR the symmetric kernel alone over its tile configurations

Options add up; the check runs first. A variant that fails says why in its row and the others go on. `eff. TFLOP/s` is
the work of the direct form (every product in full) over the time, `exec.` the operations the variant executes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch
from bench_common import (
    POLAR_EXPRESS,
    describe,
    direct_bf16,
    direct_flops,
    direct_fp64,
    gram_fp16,
    peak_bytes,
    reason,
    table,
    time_ms,
    time_replayed_ms,
    write_json,
)

from dmuon import NewtonSchulz

Variant = Callable[[torch.Tensor], torch.Tensor]

SHAPES = [(1, 4096, 4096), (1, 4096, 14336), (1, 2048, 8192), (1, 3072, 3072), (8, 1024, 4096), (1, 8192, 3072)]
# 28 layers: wq, wo; wk, wv; w1, w3; w2.
MODEL_3B = {(3072, 3072): 56, (1024, 3072): 56, (8192, 3072): 56, (3072, 8192): 28}
STACK_BYTES = 3 << 30  # of workspace and stack together

CHECK_SHAPES = [(1, 1000, 2999), (2, 768, 768), (3, 1536, 512), (2, 1024, 3072)]
PRODUCT_SIZES = [(1, 1000, 2999), (3, 512, 1024)]  # each compiles every configuration twice: tests/gpu has more

SWEEP_SIZES = [1024, 2048, 3072, 4096, 8192]
SWEEP_ASPECTS = [8 / 3, 4.0]
SWEEP_BATCHES = [1, 8]


# ------------------------------------------------------------------ variants


def ours(newton_schulz: NewtonSchulz) -> Variant:
    """As the optimizer uses it: normalise in float32, cast, iterate."""

    return lambda x: newton_schulz.iterate(newton_schulz.normalize(x))


def torch_muon() -> Variant:
    from torch.optim._muon import _zeropower_via_newtonschulz

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([_zeropower_via_newtonschulz(one, (3.4445, -4.775, 2.0315), 5, 1e-7) for one in x])

    return run


def gram_newton_schulz_package() -> Variant:
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(
        ns_coefficients=[list(abc) for abc in POLAR_EXPRESS], gram_newton_schulz_reset_iterations=[2]
    )


COMPILED = "direct bf16 compiled"
VARIANTS: dict[str, Callable[[], Variant]] = {
    "direct bf16 cuBLAS": lambda: direct_bf16,
    COMPILED: lambda: torch.compile(direct_bf16, dynamic=False),
    "Gram fp16 cuBLAS": lambda: gram_fp16,
    "torch.optim.Muon (kj)": torch_muon,
    "gram-newton-schulz": gram_newton_schulz_package,
    "ours auto": lambda: ours(NewtonSchulz()),
    "ours triton": lambda: ours(NewtonSchulz(kernel="triton")),
    "ours cublas": lambda: ours(NewtonSchulz(kernel="cublas")),
    "ours quack": lambda: ours(NewtonSchulz(kernel="quack")),
}
KERNELS = {"ours auto": "auto", "ours triton": "triton", "ours cublas": "cublas", "ours quack": "quack"}


def build_variants() -> dict[str, Variant | str]:
    """Each variant, or why it is not there."""
    built: dict[str, Variant | str] = {}
    for name, make in VARIANTS.items():
        try:
            built[name] = make()
        except Exception as error:
            built[name] = reason(error)
    return built


def ill_conditioned(m: int, n: int, device: torch.device) -> torch.Tensor:
    """[1, m, n] with singular values from 1 to 1e-4."""
    s = min(m, n)
    u = torch.linalg.qr(torch.randn(m, s, device=device))[0]
    v = torch.linalg.qr(torch.randn(n, s, device=device))[0]
    return ((u * torch.logspace(0, -4, s, device=device)) @ v.mT)[None]


def sigma_range(variant: Variant, x: torch.Tensor) -> str:
    sigma = torch.linalg.svdvals(variant(x)[0].double())
    return f"{sigma.min():.3f}-{sigma.max():.3f}"


# ------------------------------------------------------------------ parts


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


def check(device: torch.device, variants: dict[str, Variant | str]) -> bool:
    """Whether every variant that runs is right. Fresh data at every call."""
    failures, rows = [], []
    dtype = NewtonSchulz.compute_dtype(device)
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    try:
        from torchtitan_dmuon.dmuon.kernels.symmetric import symmetric_product, unavailable

        why = unavailable(device)
    except ImportError as error:
        why = str(error)
    for config in configurations(device) if why is None else []:
        worst, problem = 0.0, ""
        try:
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
        except Exception as error:
            problem = reason(error)
        rows.append([short(config), f"{worst:.1e}", problem or "ok"])
        if problem and not problem.startswith("failed"):
            failures.append(short(config))
    print(f"\nsymmetric product against float64 ({why or 'available'})")
    print(table(rows, ["configuration", "worst error", ""]))

    rows = []
    for name, variant in variants.items():
        if isinstance(variant, str) or name == COMPILED:  # compiling for every shape is only worth it to time it
            rows.append([name, "", variant if isinstance(variant, str) else "not checked"])
            continue
        worst, problem = 0.0, ""
        try:
            for batch, m, n in CHECK_SHAPES if device.type == "cuda" else [(2, 33, 70), (1, 40, 20)]:
                x = torch.randn(batch, m, n, device=device)
                result, expected = variant(x.clone()), direct_fp64(x)
                error = ((result.double() - expected).norm() / expected.norm()).item()
                worst = max(worst, error)
                if not torch.equal(result, variant(x.clone())):
                    problem += f" {m}x{n}: differs between runs;"
        except Exception as error:
            problem = reason(error)
        own_set = "kj" in name  # other coefficients: no comparison
        if not own_set and not worst < 5e-2:
            problem += f" error {worst:.2e};"
        rows.append([name, f"{worst:.1e}", problem or "ok"])
        if problem and name.startswith("ours") and not problem.startswith("failed"):
            failures.append(name)
    print("\nNewton-Schulz against float64 (bf16 and fp16 steps: relative error below 5e-2)")
    print(table(rows, ["variant", "worst error", ""]))
    print("CHECK", "FAILED: " + ", ".join(failures) if failures else "passed")
    return not failures


def compare(device: torch.device, variants: dict[str, Variant | str], shapes: list, out: str | None) -> None:
    """The table of every variant on every shape."""
    rows, records = [], []
    for batch, m, n in shapes:
        x, small = torch.randn(batch, m, n, device=device), (max(1, m // 4), max(1, n // 4))
        baseline = math.nan
        for name, variant in variants.items():
            label = f"{batch}x{m}x{n}" if batch > 1 else f"{m}x{n}"
            if isinstance(variant, str):
                rows.append([label, name, variant])
                continue
            try:
                if name == COMPILED:
                    torch.compiler.reset()  # beyond some shapes it would stop compiling without a word
                run, plain = functools.partial(variant, x), direct_bf16 if name == COMPILED else variant
                ms = time_ms(run, device)
                baseline = ms if name == "direct bf16 cuBLAS" else baseline
                executed = ""
                if name in KERNELS:
                    flops = batch * NewtonSchulz(kernel=KERNELS[name]).flops(m, n, device)
                    executed = flops / ms / 1e9
                record = [
                    label,
                    name,
                    ms,
                    direct_flops(batch, m, n) / ms / 1e9,
                    executed,
                    ms / baseline,
                    peak_bytes(run, device) / 2**20,
                    sigma_range(plain, torch.randn(1, *small, device=device)),
                    sigma_range(plain, ill_conditioned(*small, device)),
                ]
            except Exception as error:
                record = [label, name, reason(error)]
            rows.append(record)
            records.append(record)
        rows.append([""])
    header = ["shape", "variant", "ms", "eff. TFLOP/s", "exec.", "of direct", "MiB", "sigma random", "sigma 1..1e-4"]
    print("\nfrom the float32 stack to the result; sigma measured on a quarter of each side")
    print(table(rows, header))
    write_json(out, "newton_schulz", {"header": header, "rows": records})


def whole_model(device: torch.device, variants: dict[str, Variant | str], scale: int, out: str | None) -> None:
    """All matrices of the 3B Llama, stacked as far as the workspace limit lets them."""
    rows = []
    for name in ("direct bf16 cuBLAS", "Gram fp16 cuBLAS", *KERNELS):
        variant = variants[name]
        if isinstance(variant, str):
            rows.append([name, variant])
            continue
        try:
            total, peak, flops, parts = 0.0, 0, 0, []
            for (m, n), count in MODEL_3B.items():
                m, n = m // scale, n // scale
                one = NewtonSchulz().workspace_bytes(1, m, n, device) + 6 * m * n  # float32 in, float16 out
                batch = max(1, min(count, STACK_BYTES // one))
                chunks = -(-count // batch)
                batch = -(-count // chunks)  # equal chunks
                run = functools.partial(variant, torch.randn(batch, m, n, device=device))
                ms = time_ms(run, device, least=3) * count / batch
                peak = max(peak, peak_bytes(run, device))
                total += ms
                parts.append(ms)
                if name in KERNELS:
                    flops += count * NewtonSchulz(kernel=KERNELS[name]).flops(m, n, device)
                del run
            rate = flops / total / 1e9 if flops else ""
            rows.append([name, total, *parts, rate, peak / 2**30])
        except Exception as error:
            rows.append([name, reason(error)])
    shapes = [f"{count} of {m // scale}x{n // scale}" for (m, n), count in MODEL_3B.items()]
    header = ["variant", "ms", *shapes, "exec. TFLOP/s", "GiB"]
    print(f"\nall matrices of the 3B Llama (one side over {scale})" if scale > 1 else "\nall matrices of the 3B Llama")
    print(table(rows, header))
    write_json(out, "newton_schulz_3b", {"header": header, "rows": rows})


def sweep(device: torch.device, sizes: list[int], batches: list[int], out: str | None) -> None:
    """The symmetric kernel alone, against cuBLAS."""
    from torchtitan_dmuon.dmuon.kernels.symmetric import choose_tiles, symmetric_product

    dtype = NewtonSchulz.compute_dtype(device)
    capability, multiprocessors = (9, 0), 4
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability, multiprocessors = (properties.major, properties.minor), properties.multi_processor_count
    cases = []
    for s, aspect, batch in itertools.product(sizes, SWEEP_ASPECTS, batches):
        k = round(s * aspect / 64) * 64  # aligned, as a model's are
        cases.append(("X X^T", s, k, batch))
        if aspect == SWEEP_ASPECTS[0]:
            cases.append(("X^T X", s, k, batch))
    cases += [("r+RZ", s, s, batch) for s in sizes for batch in batches]
    timed = time_replayed_ms if device.type == "cuda" else functools.partial(time_ms, device=device, budget_ms=60)
    failed: dict[str, str] = {}
    rows, records = [], []
    header = ["kind", "s", "k", "batch", "cuBLAS ms", "TFLOP/s", "best ms", "half TFLOP/s", "speedup", "best",
              "rule ms", "rule"]  # fmt: skip
    print("\nsymmetric kernel; TFLOP/s of cuBLAS on the full product, of ours on half of it")
    for kind, s, k, batch in cases:
        shape = (batch, k, s) if kind == "X^T X" else (batch, s, k)
        x = torch.randn(shape, device=device).div_(math.sqrt(k)).to(dtype)
        a, b, d = x, x.mT, None
        if kind == "X^T X":
            a, b = x.mT, x
        if kind == "r+RZ":
            d = a = b = symmetric_product(x, x.mT)
        cublas_out = torch.empty(batch, s, s, dtype=dtype, device=device)
        result = torch.empty_like(cublas_out)

        def cublas(a=a, b=b, d=d, out=cublas_out) -> torch.Tensor:
            return torch.bmm(a, b, out=out) if d is None else torch.baddbmm(d, a, b, beta=2.0, alpha=0.5, out=out)

        reference = timed(cublas)
        flops = batch * s * s * k
        times: dict[str, float] = {}
        for config in configurations(device):
            if short(config) in failed:
                continue

            def run(a=a, b=b, d=d, out=result, config=config) -> torch.Tensor:
                transposed = b if d is None else b.mT
                return symmetric_product(a, transposed, d, alpha=0.5, beta=2.0, out=out, config=config)

            try:
                times[short(config)] = timed(run)
            except Exception as error:
                failed[short(config)] = reason(error)
        chosen = short(choose_tiles(s, k, batch, capability, multiprocessors, addend=d is not None))
        record = {"kind": kind, "s": s, "k": k, "batch": batch, "cublas_ms": reference, "ms": times, "rule": chosen}
        records.append(record)
        if times:
            best = min(times, key=times.get)
            ruled = times.get(chosen, math.nan)
            rows.append(
                [kind, s, k, batch, reference, 2 * flops / reference / 1e9, times[best], flops / times[best] / 1e9,
                 reference / times[best], best, ruled, chosen]
            )  # fmt: skip
            print(
                f"{kind} {s}x{k} batch {batch}: cuBLAS {reference:.3f} ms, best {times[best]:.3f} ms ({best})",
                flush=True,
            )
        write_json(out, "symmetric_sweep", {"cases": records, "failed": failed})  # what a time limit cuts off is kept
    print(table(rows, header))
    for name, why in failed.items():
        print(f"{name}  {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare results with float64 first")
    parser.add_argument("--sweep", action="store_true", help="time the symmetric kernel over its configurations")
    parser.add_argument("--model", action="store_true", help="time all matrices of the 3B Llama")
    parser.add_argument("--table", action="store_true", help="time every variant on every shape (the default)")
    parser.add_argument("--sizes", default=",".join(map(str, SWEEP_SIZES)), help="short sides of the sweep")
    parser.add_argument("--batches", default=",".join(map(str, SWEEP_BATCHES)), help="stack sizes of the sweep")
    parser.add_argument("--only", default="", help="variants whose name contains one of these, comma-separated")
    parser.add_argument("--out", help="folder for JSON files")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU: does the script run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.cpu_smoke:
        parser.error("needs a CUDA device (or --cpu-smoke)")
    device = torch.device("cpu") if arguments.cpu_smoke else torch.device("cuda")
    wanted = [part for part in arguments.only.split(",") if part]
    variants = {
        name: variant
        for name, variant in build_variants().items()
        if not wanted or name == "direct bf16 cuBLAS" or any(part in name for part in wanted)
    }
    for name in VARIANTS:
        variants.setdefault(name, "not asked for")
    if arguments.cpu_smoke:
        variants |= {COMPILED: "not on the CPU", "Gram fp16 cuBLAS": "not on the CPU"}
    print(describe(device))
    right = check(device, variants) if arguments.check else True
    asked = arguments.sweep or arguments.model or arguments.check
    if arguments.table or not asked:
        shown = {name: variant for name, variant in variants.items() if variant != "not asked for"}
        compare(device, shown, [(1, 32, 64), (2, 24, 24)] if arguments.cpu_smoke else SHAPES, arguments.out)
    if arguments.model:
        whole_model(device, variants, 64 if arguments.cpu_smoke else 1, arguments.out)
    if arguments.sweep:
        try:
            sizes, batches = ([int(n) for n in text.split(",")] for text in (arguments.sizes, arguments.batches))
            if arguments.cpu_smoke:
                sizes, batches = [64], [1]
            sweep(device, sizes, batches, arguments.out)
        except (ImportError, RuntimeError) as error:
            print(f"sweep {reason(error)}")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
