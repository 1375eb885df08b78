"""The passes over memory around Newton-Schulz: Triton's over a whole stack, torch.compile's, and PyTorch's eager ones.

    python scripts/bench_passes.py --models 1B,3B          one GPU
    python scripts/bench_passes.py --models tiny --cpu     does the script run

Per stack of matrices of one shape: ``input`` updates the momenta and gives the normalised Nesterov inputs (at least 22
bytes an element: the norm must be known first, so gradient and momentum are read twice), ``weights`` moves masters and
compute weights (at least 12). Every variant is checked against float64. ``first s`` is the first call, compilation
included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import environment  # noqa: F401
import torch
from bench_common import describe, peak_bytes, synchronize, table, time_ms, write_json
from bench_optimizer import MODELS

from torchtitan_dmuon.dmuon.kernels import select
from torchtitan_dmuon.dmuon.kernels.newton_schulz import NORM_EPS

MU, STEP_SIZE, DECAY, LARGEST_STACK = 0.95, 1e-3, 1e-4, 1 << 29  # elements
INPUT_BYTES, WEIGHT_BYTES = 12 + 8 + 2, 2 + 4 + 4 + 2


class Stack:
    """``count`` matrices [m, n] with everything an owner keeps of them."""

    def __init__(self, count: int, m: int, n: int, device: torch.device) -> None:
        self.grads, self.momenta, self.masters = (
            [torch.randn(m, n, device=device) for _ in range(count)] for _ in range(3)
        )
        self.dtype = torch.float16 if device.type == "cuda" else torch.float32
        self.compute_weights = [master.to(torch.bfloat16) for master in self.masters]
        self.counts = [torch.ones((), device=device) for _ in range(count)]
        self.update = torch.randn(count, m, n, device=device).to(self.dtype)
        self.elements = count * m * n


Passes = tuple[Callable[[], torch.Tensor], Callable[[], None]]  # input, weights


def triton_passes(stack: Stack) -> Passes:
    module = select.triton_passes(stack.update.device)
    if module is None:
        raise RuntimeError("no Triton here")
    passes = module.StackPasses()
    rows = zip(stack.grads, stack.momenta, stack.masters, stack.compute_weights, stack.counts, strict=True)
    passes.point_at([module.Operand(g[None], mo[None], ma[None], c[None], count) for g, mo, ma, c, count in rows])
    return (
        lambda: passes.nesterov_input(MU, True, None, stack.dtype, NORM_EPS),
        lambda: passes.move_weights(stack.update, STEP_SIZE, DECAY, False, None),
    )


def input_of_one(grad: torch.Tensor, momentum: torch.Tensor, count: torch.Tensor, out: torch.Tensor) -> None:
    moves = (count != 0).float()
    momentum.copy_(momentum * (1.0 - (1.0 - MU) * moves) + grad)
    value = grad + MU * momentum
    out.copy_(value * (moves / (torch.linalg.vector_norm(value) + NORM_EPS)))


def weights_of_one(
    update: torch.Tensor, master: torch.Tensor, weight: torch.Tensor, count: torch.Tensor, step: torch.Tensor
) -> None:
    moves = (count != 0).float()
    master.copy_(master * (1.0 - DECAY * moves) - step * moves * update.float())
    weight.copy_(master)


def input_of_all(grads: list, momenta: list, counts: list, out: torch.Tensor) -> None:
    for operands in zip(grads, momenta, counts, out.unbind(), strict=True):
        input_of_one(*operands)


def weights_of_all(update: torch.Tensor, masters: list, weights: list, counts: list, step: torch.Tensor) -> None:
    for operands in zip(update.unbind(), masters, weights, counts, strict=True):
        weights_of_one(*operands, step)


def eager(stack: Stack) -> Passes:
    return _over(stack, input_of_all, weights_of_all)


def compiled_each(stack: Stack) -> Passes:
    one, other = (torch.compile(f, fullgraph=True, dynamic=False) for f in (input_of_one, weights_of_one))

    def inputs(grads: list, momenta: list, counts: list, out: torch.Tensor) -> None:
        for operands in zip(grads, momenta, counts, out.unbind(), strict=True):
            one(*operands)

    def weights(update: torch.Tensor, masters: list, to: list, counts: list, step: torch.Tensor) -> None:
        for operands in zip(update.unbind(), masters, to, counts, strict=True):
            other(*operands, step)

    return _over(stack, inputs, weights)


def compiled_stack(stack: Stack) -> Passes:
    options = {"fullgraph": True, "dynamic": False, "options": {"combo_kernels": True}}
    return _over(stack, torch.compile(input_of_all, **options), torch.compile(weights_of_all, **options))


def _over(stack: Stack, inputs: Callable, weights: Callable) -> Passes:
    step = torch.tensor(STEP_SIZE, device=stack.update.device)

    def run_inputs() -> torch.Tensor:
        out = torch.empty_like(stack.update)
        inputs(stack.grads, stack.momenta, stack.counts, out)
        return out

    return run_inputs, lambda: weights(stack.update, stack.masters, stack.compute_weights, stack.counts, step)


VARIANTS = {"triton": triton_passes, "compile each": compiled_each, "compile stack": compiled_stack, "eager": eager}


def error_of(stack: Stack, passes: Passes) -> float:
    """Largest relative error against float64 of what one call of both passes gives."""
    inputs, weights = passes
    index = len(stack.grads) // 2
    momentum = MU * stack.momenta[index].double() + stack.grads[index].double()
    value = stack.grads[index].double() + MU * momentum
    master = stack.masters[index].double() * (1.0 - DECAY) - STEP_SIZE * stack.update[index].double()
    out = inputs()[index].double()
    weights()
    pairs = [(stack.momenta[index], momentum), (out, value / value.norm()), (stack.masters[index], master)]
    pairs.append((stack.compute_weights[index], stack.masters[index].to(torch.bfloat16).double()))
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def bench(name: str, device: torch.device, chosen: list[str]) -> list[list[object]]:
    shapes, layers = MODELS[name]
    rows = []
    for (m, n), count in shapes:
        count = min(count * layers, max(1, LARGEST_STACK // (m * n)))
        for variant, make in ((variant, VARIANTS[variant]) for variant in chosen):
            torch._dynamo.reset()
            stack = Stack(count, m, n, device)
            try:
                passes = make(stack)
                start = time.monotonic()
                error = error_of(stack, passes)
                synchronize(device)
            except RuntimeError as failure:
                rows.append([f"{count} x {m}x{n}", variant, str(failure)[:40], *[""] * 6])
                continue
            first = time.monotonic() - start
            inputs, weights = (time_ms(run, device) for run in passes)
            extra = peak_bytes(passes[0], device) / 2**20
            rates = [stack.elements * size / ms / 1e6 for size, ms in ((INPUT_BYTES, inputs), (WEIGHT_BYTES, weights))]
            rows.append([f"{count} x {m}x{n}", variant, inputs, rates[0], weights, rates[1], first, extra, error])
            print(name, *rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1B,3B", help=f"of {tuple(MODELS)}, comma-separated")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, comma-separated")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: does the script run")
    parser.add_argument("--out", help="folder for a JSON file")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    header = ("stack", "variant", "input ms", "GB/s", "weights ms", "GB/s", "first s", "extra MiB", "error")
    print(describe(device))
    for name in arguments.models.split(","):
        rows = bench(name, device, arguments.variants.split(","))
        print(f"\n{name}\n{table(rows, header)}")
        write_json(arguments.out, f"passes_{name}", [dict(zip(header, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
