"""The Triton kernel and Newton-Schulz on it, compiled for the GPU at hand, against float64."""

import pytest
import torch

import dmuon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
symmetric = pytest.importorskip("torchtitan_dmuon.dmuon.kernels.symmetric", reason="needs Triton", exc_type=ImportError)
from torchtitan_dmuon.dmuon.kernels.symmetric import TileConfig, symmetric_product  # noqa: E402

CONFIGS = [
    None,
    TileConfig(128, 128, 64, warps=8, stages=3),
    TileConfig(128, 256, 64, warps=8, stages=3),
    TileConfig(64, 64, 32, warps=4, stages=3),
    TileConfig(128, 128, 64, warps=8, stages=3, tma=True),
    TileConfig(128, 128, 64, warps=8, stages=3, tma=True, registers=128),
    TileConfig(128, 256, 64, warps=8, stages=3, tma=True),
    TileConfig(64, 64, 64, warps=4, stages=4, tma=True),
]
SIZES = [(1, 256, 256), (3, 512, 1024), (2, 1000, 2999), (1, 136, 72), (5, 33, 17), (1, 1024, 4096)]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2}


def fits(config):
    return config is None or not config.tma or torch.cuda.get_device_capability() >= (9, 0)


def fresh(*shape):
    return torch.randn(*shape, device="cuda")


def assert_right(out, expected):
    assert ((out.double() - expected).norm() / expected.norm()).item() < TOLERANCE[out.dtype]
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_against_float64(config, dtype):
    if not fits(config):
        pytest.skip("needs SM90")
    for batch, s, k in SIZES:
        wide = fresh(batch, s, k).to(dtype)
        tall = wide.mT.contiguous()
        d = fresh(batch, s, s)
        d = (d + d.mT).to(dtype)
        product = wide.double() @ wide.double().mT
        for a, b in ((wide, wide.mT), (tall.mT, tall)):
            poison = torch.full((batch, s, s), float("nan"), dtype=dtype, device="cuda")
            out = symmetric_product(a, b, out=poison, config=config)
            assert_right(out, product)
            assert torch.equal(out, symmetric_product(a, b, config=config))
            out = symmetric_product(a, b, d, alpha=0.5, beta=-2.0, diagonal=3.5, config=config)
            assert_right(out, 0.5 * product - 2 * d.double() + 3.5 * torch.eye(s, device="cuda"))


@pytest.mark.parametrize("shape", [(2, 768, 768), (3, 512, 1536), (3, 1536, 512), (1, 1000, 2999), (1, 520, 600)])
@pytest.mark.parametrize("backend", ["gram", "direct"])
def test_newton_schulz(backend, shape):
    stack = fresh(*shape)
    u, s, vt = torch.linalg.svd(stack.double(), full_matrices=False)
    sigma = s / s.norm(dim=-1, keepdim=True)
    for a, b, c in dmuon.COEFFICIENTS["polar_express"].steps:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    expected = u @ torch.diag_embed(sigma) @ vt
    for kernel in ("auto", "triton", "cublas"):
        result = dmuon.NewtonSchulz(backend, kernel=kernel)(stack)
        error = ((result.double() - expected).norm() / expected.norm()).item()
        assert error < 3e-2, (kernel, error)
        assert torch.equal(result, dmuon.NewtonSchulz(backend, kernel=kernel)(stack))


@pytest.mark.parametrize("kernel", ["triton", "cublas"])
@pytest.mark.parametrize("shape", [(768, 768), (512, 1536), (1536, 512)])
def test_deterministic_results_do_not_depend_on_the_stack(kernel, shape):
    newton_schulz, stack = dmuon.NewtonSchulz(kernel=kernel, deterministic=True), fresh(5, *shape)
    alone = torch.stack([newton_schulz(matrix) for matrix in stack])
    assert torch.equal(newton_schulz(stack), alone)
    assert torch.equal(newton_schulz(stack[1:3]), alone[1:3])


def test_float16_does_not_overflow():
    rank_one = torch.outer(fresh(1024), fresh(2048))
    one_entry = torch.zeros(1024, 2048, device="cuda")
    one_entry[3, 5] = -1e3
    result = dmuon.NewtonSchulz()(torch.stack([rank_one, one_entry, torch.zeros_like(one_entry)]))
    assert result.isfinite().all()
    assert torch.linalg.matrix_norm(result[:2], 2).max() < 1.35
    assert (result[2] == 0).all()


def test_workspace():
    newton_schulz = dmuon.NewtonSchulz()
    for shape in ((4, 1024, 2048), (4, 2048, 1024), (2, 1024, 1024)):
        x = fresh(*shape)
        x = (x / x.norm(dim=(-2, -1), keepdim=True)).half()
        newton_schulz.iterate(x.clone())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        newton_schulz.iterate(x)
        used = torch.cuda.max_memory_allocated() - before
        # cuBLAS takes its own workspace once, before; the allocator rounds each tensor up.
        assert used <= newton_schulz.workspace_bytes(*shape) + (1 << 20)
