"""The fused passes around Newton-Schulz, run by Triton's interpreter: TRITON_INTERPRET=1 python -m pytest ..."""

import pytest
import torch

from tests.support.stacks import (
    GROUP,
    LAYOUTS,
    assert_same_updates,
    expected_momentum,
    pieces,
    relative,
    stack_of,
    update,
)
from torchtitan_dmuon.dmuon.optimizer import stack as stack_module

passes = pytest.importorskip("torchtitan_dmuon.dmuon.kernels.passes", reason="needs Triton", exc_type=ImportError)
symmetric = pytest.importorskip("torchtitan_dmuon.dmuon.kernels.symmetric", reason="needs Triton", exc_type=ImportError)

pytestmark = pytest.mark.skipif(not symmetric._INTERPRETED, reason="needs TRITON_INTERPRET=1")

CPU = torch.device("cpu")
RULES = [{}, {"cautious_weight_decay": True}, {"normuon_beta2": 0.9}]


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    """Small matrices in several blocks, and several blocks a program."""
    monkeypatch.setattr(passes, "_BLOCK", 64)
    monkeypatch.setattr(passes, "_PROGRAMS", 3)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_plain_passes(layout, rule, monkeypatch):
    if "normuon_beta2" in rule and "columns" in layout:
        pytest.skip("NorMuon's neurons must not be cut apart")
    ours, plain = (pieces(layout, "float32", CPU) for _ in range(2))
    before = [piece.master.clone() for piece in ours]
    for step in range(2):
        found_inf = torch.zeros(()) if step else None
        stack = update(ours, layout, found_inf, passes=passes, monkeypatch=monkeypatch, **rule)
        assert bool(stack._passes) == (layout != "interleaved")
        update(plain, layout, found_inf, monkeypatch=monkeypatch, **rule)
    assert_same_updates(ours, plain, 1e-5)
    assert torch.equal(ours[1].master, before[1]) and not torch.equal(ours[0].master, before[0])


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_against_float64(nesterov, monkeypatch):
    made = pieces("odd", "float32", CPU)
    expected = [expected_momentum(piece) for piece in made]
    kept = made[1].momentum.clone()
    update(made, "odd", group=GROUP | {"nesterov": nesterov}, passes=passes, monkeypatch=monkeypatch)
    assert relative(made[0].momentum, expected[0]) < 1e-6 and relative(made[2].momentum, expected[2]) < 1e-6
    assert torch.equal(made[1].momentum, kept)


def test_nothing_moves_where_something_is_not_finite(monkeypatch):
    made, before = (pieces("columns", "float32", CPU) for _ in range(2))
    made[0].grad[0, 20] = float("nan")
    made[2].grad[5, 40] = float("inf")
    update(made, "columns", torch.ones(()), passes=passes, monkeypatch=monkeypatch)
    for a, b in zip(made, before, strict=True):
        assert torch.equal(a.master, b.master) and torch.equal(a.momentum, b.momentum)


def test_other_elements_stay(monkeypatch):
    made, before = (pieces("columns", "float32", CPU) for _ in range(2))
    update(made, "columns", passes=passes, monkeypatch=monkeypatch)
    assert torch.equal(made[0].master[:, :16], before[0].master[:, :16])
    assert not torch.equal(made[0].master[:, 16:], before[0].master[:, 16:])


@pytest.mark.parametrize("dtypes", ["bfloat16", "mixed"])
def test_narrow_dtypes(dtypes, monkeypatch):
    """Rounded once, so closer to float64 than the plain passes, which round at every operation."""
    made, exact = pieces("matrices", dtypes, CPU), pieces("matrices", dtypes, CPU)
    for piece in exact:
        piece.grad, piece.momentum, piece.master = piece.grad.float(), piece.momentum.float(), piece.master.float()
    update(made, "matrices", passes=passes, monkeypatch=monkeypatch)
    update(exact, "matrices", monkeypatch=monkeypatch)
    assert_same_updates(made, exact, 4e-3)


def test_different_dtypes_go_the_plain_way(monkeypatch):
    mixed, plain = (pieces("matrices", "float32", CPU) for _ in range(2))
    mixed[0].grad = mixed[0].grad.double()
    stack = stack_of(mixed, "matrices")
    assert stack._pointed_passes(passes, 0, stack.views) is None
    update(mixed, "matrices", passes=passes, monkeypatch=monkeypatch)
    update(plain, "matrices", monkeypatch=monkeypatch)
    assert_same_updates(mixed, plain, 1e-6)


def test_batches_are_of_about_one_size(monkeypatch):
    stack = stack_of(pieces("matrices", "float32", CPU, count=7), "matrices")
    for limit, sizes in ((7, [7]), (6, [4, 3]), (3, [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setattr(stack_module, "BATCH_BYTES", limit * 1000)
        assert [len(views) for views in stack._batches(matrix_bytes=1000)] == sizes


@pytest.mark.parametrize("shape", [(3, 16, 24), (1, 23, 37), (2, 1, 5)])
def test_normalized(shape):
    x = torch.randn(shape)
    x[0] = 0.0
    result = passes.normalized(x, torch.float32, 1e-7)
    expected = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    torch.testing.assert_close(result, expected, atol=1e-7, rtol=1e-5)
    assert passes.normalized(x.mT, torch.float32, 1e-7) is None or 1 in shape


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("numel", [64, 100, 257])
def test_accumulate(dtypes, numel, monkeypatch):
    monkeypatch.setattr(passes, "_LARGE", 65)
    into, grad = (torch.randn(300).to(dtype) for dtype in dtypes)
    expected = into.clone()
    taken = [passes.accumulate(into[:numel], grad[:numel], add=add) for add in (True, False)]
    assert taken == [numel > 64] * 2
    if taken[0]:
        expected[:numel] = grad[:numel].to(expected.dtype)
    assert torch.equal(into, expected)
    if numel > 64:
        passes.accumulate(into[:numel], grad[:numel], add=True)
        sums = expected[:numel].float() + grad[:numel].float()
        assert torch.equal(into[:numel], sums.to(into.dtype)) and torch.equal(into[numel:], expected[numel:])
    assert not passes.accumulate(into[::2], grad[::2], add=False)
    assert not passes.accumulate(into, into, add=False)
