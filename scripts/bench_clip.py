"""Clipping of three buckets of gradients on one GPU: ours against PyTorch's, and against the bytes it must move.

    python scripts/bench_clip.py [--flavor 1B]

Gradients in float32 of a Llama: matrices, embeddings, norms. `floor` is the time of a device copy that moves as many
bytes: read once for the norm, read and written once for scaling.
"""

from __future__ import annotations

import argparse

import torch
from bench_common import describe, table, time_ms

import dmuon
from models.llama3 import Llama3, flavors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="1B", choices=sorted(flavors))
    flavor = flavors[parser.parse_args().flavor]
    device = torch.device("cuda")
    with torch.device("meta"):
        model = Llama3(flavor)
    buckets: dict[str, list[torch.Tensor]] = {"regular": [], "muon": [], "adamw": []}
    decisions = dmuon.classify(model)
    for name, param in model.named_parameters():
        bucket = "muon" if decisions[name].muon else "regular" if param.ndim > 1 else "adamw"
        buckets[bucket].append(torch.randn(param.shape, device=device))
    holders = {name: [torch.nn.Parameter(torch.empty_like(g)) for g in grads] for name, grads in buckets.items()}
    for name, params in holders.items():
        for param, grad in zip(params, buckets[name], strict=True):
            param.grad = grad

    def pytorch(foreach: bool) -> None:
        for params in holders.values():
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach)

    elements = sum(grad.numel() for grads in buckets.values() for grad in grads)
    source = torch.empty(elements * 6, dtype=torch.uint8, device=device)  # a copy moves each byte twice
    target = torch.empty_like(source)
    rows = [
        ("ours, three buckets", time_ms(lambda: dmuon.clip_grad_norm_buckets_(buckets, 1.0), device)),
        ("torch.nn.utils, three calls, foreach", time_ms(lambda: pytorch(True), device)),
        ("torch.nn.utils, three calls, for-loop", time_ms(lambda: pytorch(False), device)),
        ("floor: a copy of the same bytes", time_ms(lambda: target.copy_(source), device)),
    ]
    tensors = sum(map(len, buckets.values()))
    print(f"{describe(device)}: {tensors} gradients, {elements / 1e9:.2f} G elements, {12 * elements / 1e9:.1f} GB")
    print(table(rows, ("what", "ms")))


if __name__ == "__main__":
    main()
