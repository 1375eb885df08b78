"""The fused passes around Newton-Schulz, compiled for the GPU at hand, and the replay of its launches."""

import pytest
import torch

import dmuon
from tests.support.stacks import DTYPES, LAYOUTS, assert_same_updates, expected_momentum, pieces, relative, update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
passes = pytest.importorskip("torchtitan_dmuon.dmuon.kernels.passes", reason="needs Triton", exc_type=ImportError)

RULES = [{}, {"cautious_weight_decay": True}, {"normuon_beta2": 0.9}]
# The float16 iteration of slightly different inputs, times a small step.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "mixed": 2e-2}
CUDA = torch.device("cuda")


@pytest.mark.parametrize("scale", [1, 9])  # of several programs, and of several blocks a program
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_plain_passes(layout, dtypes, rule, scale, monkeypatch):
    if "normuon_beta2" in rule and "columns" in layout:
        pytest.skip("NorMuon's neurons must not be cut apart")
    if scale > 1:
        monkeypatch.setattr(passes, "_PROGRAMS", 5)
    ours, plain = (pieces(layout, dtypes, CUDA, scale=scale) for _ in range(2))
    expected, before = [expected_momentum(piece) for piece in ours], [piece.master.clone() for piece in ours]
    whole = LAYOUTS[layout][1] is None
    for step in range(2):
        found_inf = torch.zeros((), device=CUDA) if step else None
        stack = update(ours, layout, found_inf, passes=passes, monkeypatch=monkeypatch, **rule)
        assert bool(stack._passes) == (layout != "interleaved")
        update(plain, layout, found_inf, monkeypatch=monkeypatch, **rule)
        if step == 0 and whole:
            tolerance = 1e-6 if dtypes != "bfloat16" else 4e-3
            assert relative(ours[0].momentum, expected[0]) < tolerance
            assert relative(ours[2].momentum, expected[2]) < tolerance
    assert_same_updates(ours, plain, TOLERANCE[dtypes])
    assert torch.equal(ours[1].master, before[1]) and not torch.equal(ours[0].master, before[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_moves_where_something_is_not_finite(layout, monkeypatch):
    made, before = (pieces(layout, "float32", CUDA) for _ in range(2))
    made[0].grad.view(-1)[::3] = float("nan")
    made[2].grad.view(-1)[::5] = float("inf")
    update(made, layout, torch.ones((), device=CUDA), passes=passes, monkeypatch=monkeypatch)
    for a, b in zip(made, before, strict=True):
        assert torch.equal(a.master, b.master) and torch.equal(a.momentum, b.momentum)


def test_repeats_bitwise(monkeypatch):
    one, two = (pieces("matrices", "float32", CUDA, scale=20) for _ in range(2))
    update(one, "matrices", passes=passes, monkeypatch=monkeypatch)
    update(two, "matrices", passes=passes, monkeypatch=monkeypatch)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.master, b.master) and torch.equal(a.momentum, b.momentum)


@pytest.mark.parametrize("kernel", ["triton", "cublas"])
@pytest.mark.parametrize("shape", [(1, 512, 1536), (2, 1536, 512), (1, 768, 768)])
def test_replayed_launches_give_what_launches_give(shape, kernel):
    plain, replayed = (dmuon.NewtonSchulz(kernel=kernel, replay=replay) for replay in (False, True))
    for _ in range(5):  # an ordinary run, a recording, replays, each on fresh data
        stack = torch.randn(shape, device=CUDA)
        assert torch.equal(replayed(stack), plain(stack))
    graphs = [graph for graph, _ in replayed._replay._recordings.values()]
    assert any(graph is not None for graph in graphs)
    # Elsewhere in memory: no replay of what was recorded for other addresses.
    held = [torch.randn(shape, device=CUDA) for _ in range(3)]
    assert torch.equal(replayed(held[0]), plain(held[0]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for stack in held:
            assert torch.equal(replayed(stack), plain(stack))


@pytest.mark.parametrize("shape", [(3, 1024, 2048), (1, 23, 37), (2, 1, 5), (1, 4096, 4096)])
def test_normalized(shape):
    x = torch.randn(shape, device=CUDA)
    x[0] = 0.0
    result = passes.normalized(x, torch.float16, 1e-7)
    expected = x.double() / (torch.linalg.vector_norm(x.double(), dim=(-2, -1), keepdim=True) + 1e-7)
    torch.testing.assert_close(result.double(), expected, atol=6e-8, rtol=1e-3)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_accumulate(dtypes, add):
    numel = passes._LARGE + 77
    into, grad = (torch.randn(numel + 3, device="cuda").to(dtype) for dtype in dtypes)
    expected = into.float()
    expected[3:] = grad[3:].float() + (expected[3:] if add else 0.0)
    assert passes.accumulate(into[3:], grad[3:], add=add)  # not aligned
    assert torch.equal(into, expected.to(into.dtype))
