"""Norms and clipping over dedicated and FSDP2 gradients, against one process (behaviour 14 of docs/design)."""

import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import dmuon
from tests.support.harness import (
    EVERY_ROUTE,
    assert_same,
    build,
    data_rank,
    flat_mesh,
    full_gradients,
    full_tensor,
    full_weights,
    weights_of,
)
from tests.support.meshes import mesh_of
from tests.support.oracle import OracleMuon, ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed
from tests.support.private import runtime_of
from torchtitan_dmuon.dmuon.optimizer.clip import clip_gradients_, combine_norms, local_parts

CPU = torch.device("cpu")
NORMS = [1.0, 2.0, 3.0, math.inf]
EVERYTHING = lambda name, param: True  # noqa: E731
GRIDS = {"2x2": (2, 2, 1), "4x1": (4, 1, 1), "dp2 tp2": (1, 2, 2), "tp4": (1, 1, 4), "2x1x2": (2, 1, 2)}
TYPE_SPLIT = {
    "defaults": {"route": "adamw"},
    "overrides": [
        {"name": "re:proj.weight$", "set": {"route": "muon"}},
        {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
    ],
}


def odd_model():
    """Sizes that neither 2 nor 4 divide, so that some shards are smaller or empty."""
    return ToyModel(dim=20, hidden=37)


def build_on_grid(world, mesh, routes):
    """Muon matrices dedicated and the rest under FSDP2, or everything dedicated on the three routes."""
    if routes:
        return build(world, odd_model(), EVERYTHING, shard=False, mesh=mesh, param_policy=TYPE_SPLIT)
    return build(world, odd_model(), mesh=mesh)


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
    mesh = mesh_of(dp=2, tp=2)
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
    lanes = runtime_of(build(world)[0]).lanes.covering
    everything = torch.cat([x.double().flatten() for x in [*full, *own, alike]])
    for p in NORMS:
        parts = [*local_parts([*shards, alike], world, "replicated"), *local_parts([own[rank]], world, "sharded")]
        (norm,) = combine_norms([parts], p, lanes, CPU)
        torch.testing.assert_close(norm.double(), everything.norm(p), atol=0, rtol=1e-6)
        for plain, mine, wholes, members in (
            ("replicated", [*shards, alike], [*full, alike], [*full, alike]),
            ("sharded", [*shards, own[rank]], [*full, own[rank]], [*full, *own]),
        ):
            whole_norm = torch.cat([x.double().flatten() for x in members]).norm(p)
            copies = [x.clone() for x in mine]
            for bound, factor in ((None, 1.0), (1e-2, 1e-2 / (whole_norm + 1e-6))):
                norm = clip_gradients_(copies, bound, [dist.group.WORLD], torch.device(CPU), p, plain=plain)
                torch.testing.assert_close(norm.double(), whole_norm, atol=0, rtol=1e-6)
                for copy, whole in zip(copies, wholes, strict=True):
                    torch.testing.assert_close(full_tensor(copy), whole * factor, atol=0, rtol=1e-6, check_dtype=False)
    for plain, message in ((None, r"shape \[3, 3\] is a plain tensor: say whether"), ("some", "must be one of")):
        with pytest.raises(ValueError, match=message):
            clip_gradients_([alike], 1.0, [dist.group.WORLD], torch.device(CPU), plain=plain)


@pytest.mark.parametrize("mesh", GRIDS)
@pytest.mark.parametrize("routes", [False, True])
@distributed(world=4)
def test_norms_and_clipping_on_a_grid(rank, world, mesh, routes):
    """HSDP, tensor parallelism and both: whatever is held in several copies counts once and is scaled everywhere."""
    shape = GRIDS[mesh]
    model, optimizer = build_on_grid(world, shape, routes)
    oracle = odd_model()
    backward(model, data_rank(rank, shape))
    oracle_backward(oracle, shape[0] * shape[1])
    before = full_gradients(model)
    assert_same(before, {name: param.grad for name, param in oracle.named_parameters()}, atol=2e-6)
    for p in NORMS:
        for clip, chosen in ((dmuon.clip_grad_norm_, is_proj), (dmuon.clip_total_grad_norm_, EVERYTHING)):
            norm = clip(optimizer, 1e9, norm_type=p)
            torch.testing.assert_close(norm.double(), norm_of(oracle, chosen, p), atol=0, rtol=3e-6)
            everywhere = [None] * world
            dist.all_gather_object(everywhere, norm.item())
            assert len(set(everywhere)) == 1
    assert_same(full_gradients(model), before, atol=0, rtol=0)
    factor = 1e-3 / (dmuon.clip_grad_norm_(optimizer, 1e-3).item() + 1e-6)
    expected = {name: grad * factor if is_proj(name, grad) else grad for name, grad in before.items()}
    after = full_gradients(model)
    assert_same(after, expected, atol=0, rtol=1e-6)
    for name in before:
        assert torch.equal(after[name], before[name]) == (not is_proj(name, before[name])), name
    factor = 1e-3 / (dmuon.clip_total_grad_norm_(optimizer, 1e-3).item() + 1e-6)
    assert_same(full_gradients(model), {name: grad * factor for name, grad in after.items()}, atol=0, rtol=1e-6)


@pytest.mark.parametrize("mesh", [(1, 4, 1), *GRIDS.values()])
@distributed(world=4)
def test_lanes_reach_every_rank_once(rank, world, mesh):
    lanes = runtime_of(build(world, mesh=mesh, shard=False)[0]).lanes.covering
    values = [torch.tensor(3.0 + r) for r in range(world)]
    for p in NORMS:
        norm, nothing = combine_norms([[(values[rank], 1)], []], p, lanes, CPU)
        torch.testing.assert_close(norm, torch.stack(values).norm(p), atol=0, rtol=1e-6)
        assert nothing == 0.0
        only_one = [(values[rank], 1)] if rank == 2 else []
        torch.testing.assert_close(combine_norms([only_one], p, lanes, CPU)[0], values[2], atol=0, rtol=1e-6)


@distributed(world=4)
def test_a_mesh_smaller_than_the_ranks_counts_once(rank, world):
    """What FSDP2 makes beside tensor parallelism: sharded over dp, held alike by every tp column."""
    grid = mesh_of(dp=2, tp=2)
    generator = torch.Generator().manual_seed(0)
    split, same, deep, pair = (torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (3, 8), (4, 2)))
    gradients = [
        distribute_tensor(split, grid["dp"], [Shard(0)], src_data_rank=None),
        distribute_tensor(same, grid["dp"], [Replicate()], src_data_rank=None),
        distribute_tensor(deep, grid["tp"], [Shard(1)], src_data_rank=None),
        distribute_tensor(pair, grid, [Shard(0), Replicate()], src_data_rank=None),
    ]
    for gradient, share in zip(gradients, (1 / 2, 1 / 4, 1 / 2, 1 / 2), strict=True):
        ((part, copies),) = local_parts([gradient], world, None)
        assert 1 / copies == share
        assert part.data_ptr() == gradient.to_local().data_ptr()
    everything = torch.cat([x.double().flatten() for x in (split, same, deep, pair)])
    for mesh in ((1, 2, 2), (1, 4, 1)):
        lanes = runtime_of(build(world, mesh=mesh, shard=False)[0]).lanes.covering
        assert len(lanes) == (2 if mesh[2] > 1 else 1)
        for p in NORMS:
            copies = [x.clone() for x in gradients]
            norm = clip_gradients_(copies, 1e-2, [lane.group for lane in lanes], torch.device(CPU), p)
            torch.testing.assert_close(norm.double(), everything.norm(p), atol=0, rtol=1e-6)
            factor = 1e-2 / (norm + 1e-6)
            for copy, whole in zip(copies, (split, same, deep, pair), strict=True):
                torch.testing.assert_close(copy.full_tensor(), whole * factor, atol=0, rtol=1e-6)


@distributed(world=2)
def test_a_partial_gradient_is_refused(rank, world):
    mesh = flat_mesh(world)
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="partial gradient"):
        local_parts([partial], 1, None)


@distributed(world=2)
def test_a_plain_parameter_counts_once(rank, world):
    """Neither dedicated nor sharded, alike on every rank, averaged by the user (pytorch 180346)."""
    model, _ = build(world, shard=False, optimizer=False)
    mesh = flat_mesh(world)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.norm.weight} | dmuon.ignored_params(model))
    with pytest.raises(ValueError, match=r"1 trainable parameters, norm\.weight among them"):
        dmuon.Muon(model)
    optimizer = dmuon.Muon(model, gradients_reduced_elsewhere=True)
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
    runtime_of(model).wait_gradients()
    if sharded:
        gradient = model.embed.weight.grad.to_local()
        mine, clips = rank == 1, (dmuon.clip_total_grad_norm_,)
    else:
        dp = dmuon.get_dedicated_params(model)[0]
        piece = dp.pieces[0]
        gradient, mine, clips = piece.grad, piece.is_owned, (dmuon.clip_grad_norm_, dmuon.clip_total_grad_norm_)
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
                others = [q.grad for q in model.parameters() if q.grad is not None] if everything else []
                parts = [(own.grad, 1) for own in dmuon.get_owned_params(model)] + local_parts(others, world, None)
                (norm,) = combine_norms([parts], p, runtime_of(model).lanes.covering, CPU)
                assert is_expected(norm), (value, p)
    if mine:
        gradient[0, 0] = healthy
    if not sharded:  # the Muon-only norm does not see what is bad elsewhere
        assert dmuon.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True).isfinite()


@pytest.mark.parametrize("mesh", ["2x2", "2x1x2"])
@pytest.mark.parametrize("route", ["muon", "adamw", "sharded_adamw"])
@distributed(world=4)
def test_one_bad_element_in_the_grid_is_known_everywhere(rank, world, mesh, route):
    """One rank alone has it, and every stage has to carry it to the others."""
    shape = GRIDS[mesh]
    name = {"muon": "layers.1.up_proj.weight", "adamw": "layers.1.norm.weight", "sharded_adamw": "lm_head.weight"}
    for value, is_expected in ((math.nan, torch.isnan), (-math.inf, torch.isposinf)):
        model, optimizer = build_on_grid(world, shape, routes=True)
        backward(model, data_rank(rank, shape))
        runtime_of(model).wait_gradients()
        mine = [piece for piece in dmuon.get_owned_params(model) if piece.fqn == name[route]]
        bad_rank = min(r for r, has in enumerate(everyones(bool(mine), world)) if has)
        if rank == bad_rank:
            assert mine[0].spec.route == route
            mine[0].grad.view(-1)[0] = value
        for p in NORMS:
            for clip in (dmuon.clip_total_grad_norm_, dmuon.clip_grad_norm_):
                if clip is dmuon.clip_total_grad_norm_ or route == "muon":
                    with pytest.raises(RuntimeError, match="nothing was clipped"):
                        clip(optimizer, 1e-3, norm_type=p, error_if_nonfinite=True)
                else:
                    assert clip(optimizer, 1e-3, norm_type=p).isfinite()
        assert is_expected(dmuon.clip_total_grad_norm_(optimizer, math.inf))


def everyones(value, world):
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


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


@distributed(world=2)
def test_gradients_that_the_guides_clip_leaves_out_are_told_once(rank, world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("torchtitan_dmuon.dmuon.optimizer.clip").addHandler(handler)
    try:
        for options, told in (({}, 0), (EVERY_ROUTE, 1)):
            model, optimizer = build(world, **options)
            for _ in range(2):
                backward(model, rank)
                before = full_gradients(model)
                measured = dmuon.clip_grad_norm_(optimizer, None)
                assert_same(full_gradients(model), before, atol=0, rtol=0)
                torch.testing.assert_close(dmuon.clip_grad_norm_(optimizer, 1e-3), measured, atol=0, rtol=0)
                optimizer.step()
            assert len(records) == told
        assert "embed.weight among them: call clip_total_grad_norm_" in records[0]
    finally:
        logging.getLogger("torchtitan_dmuon.dmuon.optimizer.clip").removeHandler(handler)
