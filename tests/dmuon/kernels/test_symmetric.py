"""The Triton kernel for symmetric products, run by Triton's interpreter: TRITON_INTERPRET=1 python -m pytest ...

tests/gpu/test_symmetric.py has what only a GPU shows."""

import itertools

import pytest
import torch

import dmuon

symmetric = pytest.importorskip("torchtitan_dmuon.dmuon.kernels.symmetric", reason="needs Triton", exc_type=ImportError)
from torchtitan_dmuon.dmuon.kernels.symmetric import TileConfig, choose_tiles, symmetric_product  # noqa: E402

interpreted = pytest.mark.skipif(not symmetric._INTERPRETED, reason="needs TRITON_INTERPRET=1")

CONFIGS = [
    TileConfig(16, 16, 16),
    TileConfig(16, 32, 16, group=3),
    TileConfig(16, 16, 16, tma=True),
    TileConfig(16, 32, 32, tma=True, group=2),
]
# One tile; tiles and inner dimension that end inside a block; a whole inner dimension, by descriptors for tall operands
# too; rows that are not aligned; one row, and an inner dimension shorter than a block.
SIZES = [(16, 16), (40, 24), (72, 48), (33, 17), (1, 5)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}  # the interpreter cannot multiply bfloat16


def gaussian(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_right(out, expected):
    assert relative(out, expected) < TOLERANCE[out.dtype]
    assert torch.equal(out, out.mT)


@interpreted
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("s", "k"), SIZES)
def test_gram_of_wide_and_tall(config, s, k):
    for seed, (batch, dtype) in enumerate(((1, torch.float16), (3, torch.float32))):
        wide = gaussian(batch, s, k, seed=seed).to(dtype)
        expected = wide.double() @ wide.double().mT
        assert_right(symmetric_product(wide, wide.mT, out=poisoned(batch, s, s, dtype=dtype), config=config), expected)
        tall = wide.mT.contiguous()
        assert_right(symmetric_product(tall.mT, tall, out=poisoned(batch, s, s, dtype=dtype), config=config), expected)


@interpreted
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("s", [16, 33, 40])
def test_products_of_commuting_matrices(config, s):
    scalars = {"alpha": -2.0, "beta": 1.5, "diagonal": 2.25}
    for seed, dtype in enumerate(TOLERANCE):
        r = gaussian(2, s, s, seed=seed)
        r = (r @ r.mT / s).to(dtype)
        z = (0.5 * r.double() - 0.25 * r.double() @ r.double()).to(dtype)
        out = poisoned(2, s, s, dtype=dtype)
        expected = 1.5 * r.double() - 2 * r.double() @ z.double() + 2.25 * torch.eye(s)
        # Of the upper triangle: r @ z is symmetric only up to the rounding of z.
        expected = expected.triu() + expected.triu(1).mT
        assert_right(symmetric_product(r, z.mT, r, **scalars, out=out, config=config), expected)
        assert torch.equal(symmetric_product(r, z.mT, r, **scalars, config=config), out)


@interpreted
def test_every_tile_of_the_triangle_once():
    """Bands of every height, sizes that end inside a band."""
    for blocks, group, ratio in itertools.product((1, 2, 3, 5, 8), (1, 3, 8), (1, 2)):
        config = TileConfig(16, 16 * ratio, 16, group=group)
        s = 16 * blocks
        x = gaussian(1, s, 16, seed=blocks)
        out = symmetric_product(x, x.mT, out=poisoned(1, s, s, dtype=torch.float32), config=config)
        assert_right(out, x.double() @ x.double().mT)


@interpreted
def test_strides_and_in_place_addition():
    wide = gaussian(40, 3, 24, seed=1).transpose(0, 1)[:, 2:35, 1:20]  # no stride is that of a contiguous tensor
    d = gaussian(3, 33, 66, seed=2)[:, :, ::2]
    d = d + d.mT
    expected = 2 * d.double() + wide.double() @ wide.double().mT
    for config in CONFIGS:
        big = poisoned(3, 33, 80, dtype=torch.float32)
        out = big[:, :, 5:38]
        assert symmetric_product(wide, wide.mT, d, beta=2.0, out=out, config=config) is out
        assert_right(out, expected)
        assert big[:, :, :5].isnan().all() and big[:, :, 38:].isnan().all()
        in_place = d.clone()
        symmetric_product(wide, wide.mT, in_place, beta=2.0, out=in_place, config=config)
        assert_right(in_place, expected)


@interpreted
def test_a_non_finite_matrix_stays_in_its_place():
    x = gaussian(3, 40, 24, seed=3)
    x[1] = float("nan")
    for config in CONFIGS:
        out = symmetric_product(x, x.mT, config=config)
        assert out[[0, 2]].isfinite().all() and out[1].isnan().all()


@interpreted
def test_newton_schulz_on_it():
    for shape in ((2, 40, 72), (2, 72, 40), (1, 33, 33)):
        stack = gaussian(*shape, seed=4)
        for backend in ("gram", "direct"):
            result = dmuon.NewtonSchulz(backend, kernel="triton")(stack)
            expected = dmuon.NewtonSchulz("direct", kernel="cublas")(stack)
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


@interpreted
def test_empty():
    assert symmetric_product(torch.ones(0, 4, 3), torch.ones(0, 3, 4)).shape == (0, 4, 4)
    d = torch.eye(4)[None]
    assert torch.equal(symmetric_product(torch.ones(1, 4, 0), torch.ones(1, 0, 4), d, beta=3.0), 3 * d)
    assert torch.equal(symmetric_product(torch.ones(1, 4, 0), torch.ones(1, 0, 4), diagonal=2.0), 2 * d)


def test_errors_name_the_shapes():
    x = torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match=r"\[2, 4, 3\] and \[2, 4, 3\]"):
        symmetric_product(x, x)
    with pytest.raises(ValueError, match=r"d must be \[2, 4, 4\], got \[2, 3, 3\]"):
        symmetric_product(x, x.mT, torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="one dtype"):
        symmetric_product(x, x.mT, out=torch.ones(2, 4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="dtype must be one of"):
        symmetric_product(x.double(), x.double().mT)
    with pytest.raises(ValueError, match="block_n"):
        TileConfig(64, 256)


@interpreted
def test_out_must_not_be_an_operand():
    r = torch.eye(4)[None]
    with pytest.raises(ValueError, match="share memory"):
        symmetric_product(r, r, out=r)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_rule_is_fixed_and_fits_shared_memory(capability):
    for s, k, batch, addend in itertools.product((512, 1024, 3072, 8192), (1024, 4096, 8192), (1, 8), (True, False)):
        config = choose_tiles(s, k, batch, capability, 132, addend)
        assert config == choose_tiles(s, k, batch, capability, 132, addend)
        stage = 2 * (config.block_m + config.block_n) * config.block_k
        assert config.stages * stage < (220_000 if capability >= (9, 0) else 99_000)
        assert not config.tma or capability >= (9, 0)
