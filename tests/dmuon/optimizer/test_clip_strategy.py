"""Clip strategies of the user's own."""

import pytest
import torch

import dmuon
from tests.support.harness import assert_same, build, full_gradients
from tests.support.oracle import ToyModel, batch, is_proj, loss_of
from tests.support.pool import distributed


def each_matrix(entries, max_norm, norm_type, lanes):
    """Every matrix by its own norm, the query projections to half of it. Reports the largest norm."""
    device = lanes[0].device
    largest = torch.zeros((), device=device)
    for entry in entries:
        bound = max_norm / 2 if entry.fqn.endswith("q_proj.weight") else max_norm
        norm = torch.linalg.vector_norm(entry.gradient, norm_type)
        entry.gradient.mul_((bound / norm).clamp(max=1.0))
        largest = torch.maximum(largest, norm)
    for lane in lanes:
        lane.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


@distributed(world=4)
def test_a_strategy_sees_names_and_shapes_and_scales_in_place(rank, world):
    seen = []

    def spying(entries, *rest):
        seen.extend((entry.fqn, entry.shape) for entry in entries)
        return each_matrix(entries, *rest)

    dmuon.register_muon_grad_clip_strategy("each matrix", spying)
    dmuon.register_muon_grad_clip_strategy("each matrix", spying)  # again is no harm
    model, optimizer = build(world, mesh=(2, 2, 1))
    tokens, labels = batch(0, rank)
    loss_of(model(tokens), labels).backward()
    total = dmuon.clip_grad_norm_(optimizer, 0.01, strategy="each matrix")

    oracle = ToyModel()
    for r in range(world):
        tokens, labels = batch(0, r)
        (loss_of(oracle(tokens), labels) / world).backward()
    expected, norms = {}, []
    for name, p in oracle.named_parameters():
        expected[name] = p.grad
        if is_proj(name, p):
            norms.append(p.grad.norm())
            bound = 0.005 if name.endswith("q_proj.weight") else 0.01
            expected[name] = p.grad * min(1.0, bound / p.grad.norm().item())
    torch.testing.assert_close(total.cpu(), max(norms), rtol=1e-5, atol=0)
    assert_same(full_gradients(model), expected, atol=1e-7)
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, seen)
    shapes = {name: tuple(p.shape) for name, p in oracle.named_parameters() if is_proj(name, p)}
    assert sorted(entry for entries in everyone for entry in entries) == sorted(shapes.items())


@distributed(world=2)
def test_unknown_and_taken_names(rank, world):
    _, optimizer = build(world)
    with pytest.raises(ValueError, match=r"unknown clip strategy 'globl_norm' \(did you mean 'global_norm'\?\)"):
        dmuon.clip_grad_norm_(optimizer, 1.0, strategy="globl_norm")
    for name in ("global_norm", "mine"):
        if name == "mine":
            dmuon.register_muon_grad_clip_strategy(name, each_matrix)
        with pytest.raises(ValueError, match="registered already"):
            dmuon.register_muon_grad_clip_strategy(name, lambda *_: None)
