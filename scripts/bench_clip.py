"""Clipping of three buckets of gradients on one GPU: ours against PyTorch's, and against the bytes it must move.

    python scripts/bench_clip.py [--flavor 1B]

Gradients in float32 of a Llama: the owned matrices, embeddings, norms. `floor` is the time of a device copy that moves
as many bytes: read once for the norm, read and written once for scaling.
"""

from __future__ import annotations

import argparse
import dataclasses

import environment  # noqa: F401
import torch
from bench_common import describe, table, time_ms

import dmuon
from models.llama3 import Llama3, flavors
from torchtitan_dmuon.config.job_config import Comm
from torchtitan_dmuon.distributed import init_distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="1B", choices=sorted(flavors))
    args = flavors[parser.parse_args().flavor]
    args = dataclasses.replace(args, vocab_size=args.vocab_size or 128256)
    device = init_distributed(Comm())
    with torch.device("meta"):
        model = Llama3(args)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    dmuon.dedicate_params(model, mesh)
    dmuon.materialize(model, lambda _, tensor: tensor.normal_(std=0.02), device)
    optimizer = dmuon.Muon(model)
    muon = []
    for piece in dmuon.get_owned_params(model):  # as a backward leaves them
        piece.grad, piece.grad_count = torch.randn(piece.shape, device=device), torch.ones((), device=device)
        muon.append(piece.grad)
    dedicated = dmuon.ignored_params(model)
    shapes = [param.shape for param in model.parameters() if param not in dedicated]
    regular = [torch.randn(shape, device=device) for shape in shapes if len(shape) > 1]
    adamw = [torch.randn(shape, device=device) for shape in shapes if len(shape) == 1]
    buckets = [[torch.nn.Parameter(torch.empty_like(grad)) for grad in grads] for grads in (regular, muon, adamw)]
    for params, grads in zip(buckets, (regular, muon, adamw), strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    def pytorch(foreach: bool) -> None:
        for params in buckets:
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach)

    def ours() -> None:
        dmuon.try_clip_optimizer_grad_norm_buckets_(optimizer, regular, adamw)

    elements = sum(grad.numel() for grads in (regular, muon, adamw) for grad in grads)
    original = torch.empty(elements * 6, dtype=torch.uint8, device=device)  # a copy moves each byte twice
    target = torch.empty_like(original)
    rows = [
        ("ours, three buckets", time_ms(ours, device)),
        ("torch.nn.utils, three calls, foreach", time_ms(lambda: pytorch(foreach=True), device)),
        ("torch.nn.utils, three calls, for-loop", time_ms(lambda: pytorch(foreach=False), device)),
        ("floor: a copy of the same bytes", time_ms(lambda: target.copy_(original), device)),
    ]
    tensors = sum(map(len, buckets))
    print(f"{describe(device)}: {tensors} gradients, {elements / 1e9:.2f} G elements, {12 * elements / 1e9:.1f} GB")
    print(table(rows, ("what", "ms")))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
