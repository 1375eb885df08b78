"""Norms and clipping over dedicated and FSDP2 gradients, against one process (scenario 14)."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import dmuon
from tests.dmuon.harness import assert_same, build, full_gradients, full_tensor, full_weights, weights_of
from tests.oracle import OracleMuon, ToyModel, batch, is_proj, loss_of
from tests.pool import distributed
from torchtitan_dmuon.dmuon.clip import clip_gradients_, combine_norms, local_norms

NORMS = [1.0, 2.0, 3.0, math.inf]
EVERYTHING = lambda name, param: True  # noqa: E731


def backward(model, rank, step=0, scale=1.0):
    tokens, labels = batch(step, rank)
    (scale * loss_of(model(tokens), labels)).backward()


def oracle_backward(model, world, step=0, scale=1.0):
    tokens, labels = (torch.cat(x) for x in zip(*(batch(step, rank) for rank in range(world)), strict=True))
    (scale * loss_of(model(tokens), labels)).backward()


def norm_of(model, chosen, p):
    """In float64, on one process."""
    return torch.cat([q.grad.double().flatten() for n, q in model.named_parameters() if chosen(n, q)]).norm(p)


def clip_oracle(model, chosen, max_norm, p=2.0):
    factor = min(1.0, max_norm / (norm_of(model, chosen, p).item() + 1e-6))
    for name, param in model.named_parameters():
        if chosen(name, param):
            param.grad.mul_(factor)


# ------------------------------------------------------------------ norms


def check_norms(rank, world, mode):
    model, optimizer = build(world, mode=mode)
    oracle = ToyModel()
    backward(model, rank)
    oracle_backward(oracle, world)
    for p in NORMS:
        for clip, chosen in ((dmuon.clip_grad_norm_, is_proj), (dmuon.clip_total_grad_norm_, EVERYTHING)):
            norm = clip(optimizer, 1e9, norm_type=p)
            assert norm.shape == () and norm.dtype == torch.float32
            torch.testing.assert_close(norm.double(), norm_of(oracle, chosen, p), atol=0, rtol=1e-6)
            everywhere = [None] * world
            dist.all_gather_object(everywhere, norm.item())
            assert len(set(everywhere)) == 1  # to the last bit, for every rank must scale alike
    gradients = {name: param.grad for name, param in oracle.named_parameters()}
    assert_same(full_gradients(model), gradients, atol=2e-6)  # 1e9 clipped nothing


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=2)
def test_norms_equal_one_process_on_2(rank, world, mode):
    check_norms(rank, world, mode)


@distributed(world=4)
def test_norms_equal_one_process_on_4(rank, world):
    check_norms(rank, world, "z3")


@distributed(world=4)
def test_ranks_that_own_nothing_know_the_norm(rank, world):
    predicate = lambda name, param: name == "layers.1.up_proj.weight"  # noqa: E731
    model, optimizer = build(world, predicate=predicate)
    oracle = ToyModel()
    backward(model, rank)
    oracle_backward(oracle, world)
    assert len(dmuon.get_owned_params(model)) == (rank == dmuon.get_dedicated_params(model)[0].owner_rank)
    for p in NORMS:
        norm = dmuon.clip_grad_norm_(optimizer, 1e9, norm_type=p)
        torch.testing.assert_close(norm.double(), norm_of(oracle, predicate, p), atol=0, rtol=1e-6)


@distributed(world=2)
def test_without_gradients_the_norm_is_zero(rank, world):
    _, optimizer = build(world)
    for p in NORMS:
        assert dmuon.clip_grad_norm_(optimizer, 1.0, norm_type=p).item() == 0.0
        assert dmuon.clip_total_grad_norm_(optimizer, 1.0, norm_type=p).item() == 0.0


@distributed(world=4)
def test_norm_over_different_meshes(rank, world):
    """One sharded over both dimensions, two sharded and replicated, one replicated, a plain one that this rank alone
    has, a plain one that all have alike; some ranks hold empty shards (pytorch 150862 and 180346)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator) for shape in ((5, 3), (3, 8), (7,), (1, 2))]
    placements = [
        (Shard(0), Shard(0)),
        (Replicate(), Shard(1)),
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
    ]
    shards = [distribute_tensor(x, mesh, where, src_data_rank=None) for x, where in zip(full, placements, strict=True)]
    own = [torch.full((2, 2), float(r + 1)) for r in range(world)]
    alike = torch.randn(3, 3, generator=generator)
    everything = torch.cat([x.double().flatten() for x in [*full, *own, alike]])
    lane = build(world)[0]._dmuon_runtime.lanes.reduce
    for p in NORMS:
        norm = combine_norms(local_norms([*shards, own[rank]], p, 1) + local_norms([alike], p, world), p, lane)
        torch.testing.assert_close(norm.double(), everything.norm(p), atol=0, rtol=1e-6)
        copies = [x.clone() for x in (*shards, alike, own[rank])]
        norm = clip_gradients_(copies[:-1], 1e-2, lane, p, owned=copies[-1:])
        torch.testing.assert_close(norm.double(), everything.norm(p), atol=0, rtol=1e-6)
        for copy, whole in zip(copies, [*full, alike, own[rank]], strict=True):
            torch.testing.assert_close(full_tensor(copy), whole * (1e-2 / (norm + 1e-6)), atol=0, rtol=1e-6)


@distributed(world=2)
def test_a_partial_gradient_is_refused(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="partial gradient"):
        local_norms([partial], 2.0, 1)


@distributed(world=2)
def test_a_plain_parameter_counts_once(rank, world):
    """Neither dedicated nor sharded, alike on every rank, averaged by the user (pytorch 180346)."""
    model, _ = build(world, shard=False, optimizer=False)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.norm.weight} | dmuon.ignored_params(model))
    optimizer = dmuon.Muon(model)
    oracle = ToyModel()
    backward(model, rank)
    oracle_backward(oracle, world)
    dist.all_reduce(model.norm.weight.grad)
    model.norm.weight.grad.div_(world)
    torch.testing.assert_close(model.norm.weight.grad, oracle.norm.weight.grad, atol=1e-6, rtol=1e-5)
    for p in NORMS:
        norm = dmuon.clip_total_grad_norm_(optimizer, 1e9, norm_type=p)
        torch.testing.assert_close(norm.double(), norm_of(oracle, EVERYTHING, p), atol=0, rtol=1e-6)


# ------------------------------------------------------------------ clipping


@pytest.mark.parametrize("p", NORMS)
@distributed(world=2)
def test_the_muon_clip_leaves_adamw_gradients_alone(rank, world, p):
    model, optimizer = build(world)
    backward(model, rank)
    before = {name: grad.clone() for name, grad in full_gradients(model).items()}
    norm = dmuon.clip_grad_norm_(optimizer, 1e-3, norm_type=p)
    factor = 1e-3 / (norm.item() + 1e-6)
    expected = {name: grad * factor if is_proj(name, grad) else grad for name, grad in before.items()}
    actual = full_gradients(model)
    assert_same(actual, expected, atol=0, rtol=1e-6)
    for name in before:
        assert torch.equal(actual[name], before[name]) == (not is_proj(name, before[name])), name


@pytest.mark.parametrize("p", NORMS)
@distributed(world=2)
def test_the_total_clip_scales_everything(rank, world, p):
    model, optimizer = build(world)
    backward(model, rank)
    before = {name: grad.clone() for name, grad in full_gradients(model).items()}
    norm = dmuon.clip_total_grad_norm_(optimizer, 1e-3, norm_type=p)
    factor = 1e-3 / (norm.item() + 1e-6)
    assert_same(full_gradients(model), {name: grad * factor for name, grad in before.items()}, atol=0, rtol=1e-6)
    again = dmuon.clip_total_grad_norm_(optimizer, 1e-3, norm_type=p)
    torch.testing.assert_close(again.item(), factor * norm.item(), atol=0, rtol=1e-5)


@pytest.mark.parametrize("mode", ["z2", "z3"])
@pytest.mark.parametrize("total", [False, True])
@distributed(world=2)
def test_clip_backward_step(rank, world, total, mode):
    """Both batches count: the first clipped, the second as it is."""
    hyper = {"lr": 0.01, "weight_decay": 0.1}
    model, optimizer = build(world, mode=mode, muon=hyper)
    oracle = ToyModel()
    oracle_optimizer = OracleMuon(oracle, is_proj, **hyper)
    clip, chosen = (dmuon.clip_total_grad_norm_, EVERYTHING) if total else (dmuon.clip_grad_norm_, is_proj)
    for step in (0, 2):
        backward(model, rank, step, scale=100.0)
        clip(optimizer, 0.5)
        backward(model, rank, step + 1)
        oracle_backward(oracle, world, step, scale=100.0)
        clip_oracle(oracle, chosen, 0.5)
        oracle_backward(oracle, world, step + 1)
        gradients = {name: param.grad for name, param in oracle.named_parameters()}
        assert_same(full_gradients(model), gradients, atol=2e-6 if total else 2e-4)
        optimizer.step()
        oracle_optimizer.step()
        assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_clipping_does_not_touch_the_direction_of_the_update(rank, world):
    """DeepSpeed 8439: clipping belongs before the orthogonalisation, which forgets the scale."""
    updates = []
    for scale, max_norm in ((1.0, None), (1e6, 1.0)):
        model, optimizer = build(world, muon={"adamw_lr": 0.0})
        before = full_weights(model)
        backward(model, rank, scale=scale)
        if max_norm:
            assert dmuon.clip_grad_norm_(optimizer, max_norm) > 1e4
        optimizer.step()
        after = full_weights(model)
        updates.append({name: after[name] - before[name] for name in before if is_proj(name, before[name])})
    for name, update in updates[0].items():
        assert update.norm() > 0.05, name
    # 1e-7 is added to the Frobenius norm, so small gradients are scaled a little.
    assert_same(updates[1], updates[0], atol=2e-5, rtol=1e-3)


# ------------------------------------------------------------------ what is not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
@distributed(world=2)
def test_bad_data_on_one_rank_is_known_everywhere(rank, world, value):
    for clip in (dmuon.clip_grad_norm_, dmuon.clip_total_grad_norm_):
        for p in NORMS:
            model, optimizer = build(world)
            backward(model, rank, scale=value if rank == 1 else 1.0)
            norm = clip(optimizer, 1.0, norm_type=p)
            assert not norm.isfinite(), (clip.__name__, p)


@pytest.mark.parametrize("sharded", [False, True])
@distributed(world=2)
def test_one_bad_element_is_known_everywhere(rank, world, sharded):
    """The owner, or the rank with the shard, is the only one that sees it."""
    model, optimizer = build(world)
    backward(model, rank)
    model._dmuon_runtime.wait_gradients()
    if sharded:
        gradient = model.embed.weight.grad.to_local()
        mine, clips = rank == 1, (dmuon.clip_total_grad_norm_,)
    else:
        dp = dmuon.get_dedicated_params(model)[0]
        gradient, mine, clips = dp.grad, dp.is_owned, (dmuon.clip_grad_norm_, dmuon.clip_total_grad_norm_)
    healthy = gradient[0, 0].item() if mine else None
    for value, is_expected in (
        (math.nan, torch.isnan),
        (math.inf, torch.isposinf),
        (-math.inf, torch.isposinf),
    ):
        if mine:
            gradient[0, 0] = value
        before = {name: grad.clone() for name, grad in full_gradients(model).items()}
        for clip in clips:
            for p in NORMS:
                with pytest.raises(RuntimeError, match=r"gradient norm .* nothing was clipped"):
                    clip(optimizer, 1e-3, norm_type=p, error_if_nonfinite=True)
                for name, grad in full_gradients(model).items():
                    torch.testing.assert_close(grad, before[name], atol=0, rtol=0, equal_nan=True)
                everything = clip is dmuon.clip_total_grad_norm_
                gradients = [dp.grad for dp in dmuon.get_owned_params(model)]
                gradients += [q.grad for q in model.parameters() if q.grad is not None] if everything else []
                norm = combine_norms(local_norms(gradients, p, 1), p, model._dmuon_runtime.lanes.reduce)
                assert is_expected(norm), (value, p)
    if mine:
        gradient[0, 0] = healthy
    if not sharded:  # the Muon-only norm does not see what is bad elsewhere
        assert dmuon.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True).isfinite()


@distributed(world=2)
def test_bad_adamw_gradients_are_none_of_the_muon_clip(rank, world):
    model, optimizer = build(world)
    backward(model, rank)
    model.embed.weight.grad.to_local().fill_(math.nan)
    assert dmuon.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True).isfinite()
    assert dmuon.clip_total_grad_norm_(optimizer, 1.0).isnan()


# ------------------------------------------------------------------ arguments


@distributed(world=2)
def test_bad_arguments(rank, world):
    model, optimizer = build(world)
    backward(model, rank)
    before = {name: grad.clone() for name, grad in full_gradients(model).items()}
    for clip in (dmuon.clip_grad_norm_, dmuon.clip_total_grad_norm_):
        for arguments in (
            (0.0,),
            (-1.0,),
            (math.nan,),
            (1.0, 0.0),
            (1.0, -2.0),
            (1.0, -math.inf),
            (1.0, math.nan),
        ):
            with pytest.raises(ValueError, match="must be positive"):
                clip(optimizer, *arguments)
    assert_same(full_gradients(model), before, atol=0, rtol=0)


@distributed(world=2)
def test_an_infinite_max_norm_only_measures(rank, world):
    model, optimizer = build(world)
    backward(model, rank)
    before = {name: grad.clone() for name, grad in full_gradients(model).items()}
    assert dmuon.clip_total_grad_norm_(optimizer, math.inf) > 0
    assert_same(full_gradients(model), before, atol=0, rtol=0)
