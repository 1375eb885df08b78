"""Several norms in one collective: every bucket as if it were clipped alone, against one process."""

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


@pytest.mark.parametrize("p", NORMS)
def test_one_process_alone(p):
    """Without a process group; the bound of one bucket is met already, a missing gradient is left out."""
    generator = torch.Generator().manual_seed(0)
    large, small = gradients(generator, (3, 4), (5,)), gradients(generator, (2, 2))
    expected = [torch.cat([x.flatten() for x in bucket]).double().norm(p) for bucket in (large, small)]
    wanted = [x * (0.5 / (expected[0] + 1e-6)).float() for x in large], [x.clone() for x in small]
    buckets = {"large": [large[0], None, large[1]], "small": small, "empty": []}
    norms = dmuon.clip_grad_norm_buckets_(buckets, {"large": 0.5, "small": 100.0, "empty": 1.0}, p)
    assert list(norms) == ["large", "small", "empty"] and norms["empty"] == 0.0
    for norm, value in zip(norms.values(), expected, strict=False):
        torch.testing.assert_close(norm.double(), value, rtol=1e-6, atol=0)
    for actual, value in zip([*large, *small], [*wanted[0], *wanted[1]], strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-6, atol=0)


@distributed(world=4)
def test_over_meshes_with_one_collective(rank, world):
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
        for p in NORMS:
            shards = [
                distribute_tensor(x.clone(), mesh, at, src_data_rank=None) for x, at in zip(full, places, strict=True)
            ]
            plain = [x.clone() for x in alike]
            counted.clear()
            norms = dmuon.clip_grad_norm_buckets_({"a": shards, "b": plain, "c": []}, 0.1, p)
            assert len(counted) == 1, "one collective for all buckets"
            for norm, bucket in zip(norms.values(), (full, alike), strict=False):
                torch.testing.assert_close(
                    norm.double(), torch.cat([x.double().flatten() for x in bucket]).norm(p), rtol=1e-6, atol=0
                )
            for actual, whole in zip(shards, full, strict=True):
                torch.testing.assert_close(full_tensor(actual), whole * (0.1 / (norms["a"] + 1e-6)), rtol=1e-6, atol=0)
            for actual, whole in zip(plain, alike, strict=True):
                torch.testing.assert_close(actual, whole * (0.1 / (norms["b"] + 1e-6)), rtol=1e-6, atol=0)
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
    bad = torch.tensor([float("nan") if rank == 0 else 1.0])
    for p in NORMS:
        with pytest.raises(RuntimeError, match=r"'regular': nan.*nothing was clipped"):
            # what every rank holds alike is not alike here: the sum carries rank 0's NaN to the other
            dmuon.try_clip_optimizer_grad_norm_buckets_(
                optimizer, regular_grads=[bad], max_norm=1e-3, norm_type=p, error_if_nonfinite=True
            )
        norms = dmuon.try_clip_optimizer_grad_norm_buckets_(optimizer, [bad.clone()], max_norm=1e9, norm_type=p)
        assert norms["regular"].isnan() and norms["muon"].isfinite()
    assert_same(full_gradients(model), before, atol=0, rtol=0)
    assert dmuon.clip_grad_norm_buckets_({}, 1.0) == {}
