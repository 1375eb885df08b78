"""Several norms in one collective: every bucket as if it were clipped alone, against one process."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dmuon
from tests.support.harness import EVERY_ROUTE, assert_same, build, data_rank, full_gradients, full_tensor
from tests.support.meshes import mesh_of
from tests.support.oracle import ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed

NORMS = [1.0, 2.0, 3.0, math.inf]


def gradients(generator, *shapes):
    return [torch.randn(shape, generator=generator) for shape in shapes]


@distributed(world=4)
def test_over_meshes_with_one_collective(rank, world):
    """DTensors on another mesh beside plain gradients. A missing gradient is left out, the norm of an empty bucket is
    zero, and a bucket within its bound stays as it is."""
    _, optimizer = build(world)
    mesh = mesh_of(dp=2, tp=2)
    generator = torch.Generator().manual_seed(0)
    full = gradients(generator, (5, 3), (3, 8), (7,))
    alike = gradients(generator, (4,))
    places = [(Shard(0), Shard(0)), (Replicate(), Shard(1)), (Replicate(), Replicate())]
    counted = []
    original = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (
        counted.append(tensor.numel()) or original(tensor, *args, **kwargs)
    )
    try:
        for p, bound in itertools.product(NORMS, (0.1, 100.0)):
            shards = [
                distribute_tensor(x.clone(), mesh, at, src_data_rank=None) for x, at in zip(full, places, strict=True)
            ]
            plain = [x.clone() for x in alike]
            counted.clear()
            bounds = {"regular": 0.1, "muon": 1.0, "adamw": bound}
            norms = dmuon.try_clip_optimizer_grad_norm_buckets_(
                optimizer, [shards[0], None, *shards[1:]], plain, bounds, p, plain="replicated"
            )
            assert len(counted) == 1, "one collective for all buckets"
            assert list(norms) == ["regular", "muon", "adamw"] and norms["muon"] == 0.0
            for name, bucket in (("regular", full), ("adamw", alike)):
                expected = torch.cat([x.double().flatten() for x in bucket]).norm(p)
                torch.testing.assert_close(norms[name].double(), expected, rtol=1e-6, atol=0)
            factor = 0.1 / (norms["regular"] + 1e-6)
            for actual, whole in zip(shards, full, strict=True):
                torch.testing.assert_close(full_tensor(actual), whole * factor, rtol=1e-6, atol=0)
            factor = 0.1 / (norms["adamw"] + 1e-6) if bound < 1 else 1.0
            for actual, whole in zip(plain, alike, strict=True):
                torch.testing.assert_close(actual, whole * factor, rtol=1e-6 if bound < 1 else 0, atol=0)
    finally:
        dist.all_reduce = original


@pytest.mark.parametrize("mesh", [None, (2, 2, 1), (1, 2, 2)], ids=["4", "2x2", "1x2x2"])
@pytest.mark.parametrize("dedicated", [False, True])
@distributed(world=4)
def test_the_optimizers_three_buckets(rank, world, mesh, dedicated):
    """Segments keep their own norms: Muon's, AdamW's (dedicated ones among them) and the rest."""
    model, optimizer = build(world, mesh=mesh, **(EVERY_ROUTE if dedicated else {}))
    tokens, labels = batch(0, data_rank(rank, mesh))
    loss_of(model(tokens), labels).backward()
    columns = mesh[2] if mesh else 1
    oracle = ToyModel()
    for data in range(world // columns):
        tokens, labels = batch(0, data)
        (loss_of(oracle(tokens), labels) / (world // columns)).backward()
    named = dict(model.named_parameters())
    embed = [] if dedicated else [named["embed.weight"].grad]
    rest = [] if dedicated else [p.grad for n, p in named.items() if n != "embed.weight" and not is_proj(n, p)]
    bounds = {"regular": 0.01, "muon": 0.02, "adamw": 0.03}
    norms = dmuon.try_clip_optimizer_grad_norm_buckets_(
        optimizer, regular_grads=embed, adamw_grads=rest, max_norm=bounds
    )

    def bucket(name, p):
        return "muon" if is_proj(name, p) else "regular" if name == "embed.weight" and not dedicated else "adamw"

    members = {key: {n: p.grad for n, p in oracle.named_parameters() if bucket(n, p) == key} for key in bounds}
    expected = {}
    for key, grads in members.items():
        total = torch.cat([g.flatten() for g in grads.values()]).norm() if grads else torch.zeros(())
        torch.testing.assert_close(norms[key], total, rtol=1e-5, atol=1e-8)
        expected |= {n: g * min(1.0, bounds[key] / (total.item() + 1e-6)) for n, g in grads.items()}
    order = [n for n, _ in oracle.named_parameters()]
    assert_same(full_gradients(model), {n: expected[n] for n in order}, atol=1e-7, rtol=1e-5)
    everyone = [None] * world
    dist.all_gather_object(everyone, {k: v.item() for k, v in norms.items()})
    assert all(other == everyone[0] for other in everyone)


@distributed(world=2)
def test_errors_are_raised_everywhere_and_change_nothing(rank, world):
    model, optimizer = build(world)
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    before = {n: g.clone() for n, g in full_gradients(model).items()}
    with pytest.raises(ValueError, match=r"max_norm is given for \['muon'\], the buckets are \['regular', 'muon'"):
        dmuon.try_clip_optimizer_grad_norm_buckets_(optimizer, max_norm={"muon": 1.0})
    with pytest.raises(ValueError, match="must be positive"):
        dmuon.try_clip_optimizer_grad_norm_buckets_(optimizer, max_norm=0.0)
    with pytest.raises(ValueError, match="plain='sharded'"):
        dmuon.try_clip_optimizer_grad_norm_buckets_(optimizer, adamw_grads=[torch.ones(3)])
    measured = dmuon.try_clip_optimizer_grad_norm_buckets_(
        optimizer, adamw_grads=[torch.full((2,), 3.0 + rank)], max_norm=None, plain="sharded"
    )
    torch.testing.assert_close(measured["adamw"], torch.tensor(50.0).sqrt())
    bad = torch.tensor([float("nan") if rank == 0 else 1.0])
    for p in NORMS:
        with pytest.raises(RuntimeError, match=r"'regular': nan.*nothing was clipped"):
            # what every rank holds alike is not alike here: the sum carries rank 0's NaN to the other
            dmuon.try_clip_optimizer_grad_norm_buckets_(
                optimizer, regular_grads=[bad], max_norm=1e-3, norm_type=p, error_if_nonfinite=True, plain="replicated"
            )
        norms = dmuon.try_clip_optimizer_grad_norm_buckets_(
            optimizer, [bad.clone()], max_norm=1e9, norm_type=p, plain="replicated"
        )
        assert norms["regular"].isnan() and norms["muon"].isfinite()
    assert_same(full_gradients(model), before, atol=0, rtol=0)
