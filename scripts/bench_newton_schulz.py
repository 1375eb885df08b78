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
import functools
import math
from collections.abc import Callable

import environment  # noqa: F401
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
    write_json,
)
from symmetric_sweep import SWEEP_BATCHES, SWEEP_SIZES, check_products, sweep

from dmuon import NewtonSchulz

Variant = Callable[[torch.Tensor], torch.Tensor]

SHAPES = [(1, 4096, 4096), (1, 4096, 14336), (1, 2048, 8192), (1, 3072, 3072), (8, 1024, 4096), (1, 8192, 3072)]
# 28 layers: wq, wo; wk, wv; w1, w3; w2.
MODEL_3B = {(3072, 3072): 56, (1024, 3072): 56, (8192, 3072): 56, (3072, 8192): 28}
STACK_BYTES = 3 << 30  # of workspace and stack together

CHECK_SHAPES = [(1, 1000, 2999), (2, 768, 768), (3, 1536, 512), (2, 1024, 3072)]


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


def check(device: torch.device, variants: dict[str, Variant | str]) -> bool:
    """Whether every variant that runs is right. Fresh data at every call."""
    failures = check_products(device)
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
