"""Both forms of Newton-Schulz against scalar polynomials and a float64 computation (behaviour 24 of docs/design)."""

import importlib
import math

import pytest
import torch
import torch.utils._python_dispatch
from torch.utils.flop_counter import FlopCounterMode

from dmuon import COEFFICIENTS, NewtonSchulz
from torchtitan_dmuon.dmuon.kernels.kernel import Kernel
from torchtitan_dmuon.dmuon.kernels.newton_schulz import newton_schulz_flops

KJ = (3.4445, -4.7750, 2.0315)
# Written out from docs/design/formulas.md.
TRIPLES = {
    "kj": [KJ] * 5,
    "you": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    "polar_express": [
        (a / 1.05, b / 1.05**3, c / 1.05**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        )
    ],
    "deepseek_v4": [KJ] * 8 + [(2.0, -1.5, 0.5)] * 2,
}
SAFE = ["kj", "you", "polar_express"]  # sets with a restart that keeps the Gram form accurate
CHOICES = [(name, backend) for name in TRIPLES for backend in ("direct", "gram") if backend == "direct" or name in SAFE]
SHAPES = [(24, 24), (17, 40), (40, 17), (1, 30), (30, 1), (64, 200)]
NEAR_SQUARE = [(24, 24), (24, 36), (36, 24)]  # up to an aspect ratio of 1.5 the backend "gram" takes the direct form


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normalised(stack):
    return (stack / (torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True) + 1e-7)).contiguous()


def forms(newton_schulz, stack):
    """Both forms of a normalised stack, which they are free to overwrite."""
    return newton_schulz._gram(stack.clone(), Kernel()), newton_schulz._direct(stack.clone(), Kernel())


def scalar(sigma, triples):
    """What the iteration does to one singular value, in float64."""
    sigma = sigma.double()
    for a, b, c in triples:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def by_svd(matrix, triples):
    """The result by its definition: the scalar polynomial on the singular values, in float64."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(scalar(s / (s.norm() + 1e-7), triples)) @ vt


def test_coefficient_sets_are_the_published_ones():
    assert COEFFICIENTS.keys() == TRIPLES.keys()
    for name, triples in TRIPLES.items():
        torch.testing.assert_close(
            torch.tensor(COEFFICIENTS[name].steps).double(),
            torch.tensor(triples).double(),
            atol=0,
            rtol=1e-12,
        )
    assert {name: NewtonSchulz("gram", name).restarts for name in SAFE} == {
        "kj": (3,),
        "you": (2,),
        "polar_express": (2,),
    }


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "backend"), CHOICES)
def test_equals_the_polynomial_of_the_singular_values(name, backend, shape):
    matrix = gaussian(*shape)
    actual = NewtonSchulz(backend, name)(matrix)
    assert actual.dtype == torch.float32
    expected = by_svd(matrix, TRIPLES[name])
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SAFE)
def test_gram_equals_direct(name, shape):
    """The two forms themselves, square matrices included. Gram works on the squares of the singular values: float32
    keeps fewer digits of the tiny ones that a square Gaussian matrix has."""
    newton_schulz, stack = NewtonSchulz("gram", name), gaussian(3, *shape, seed=1)
    wide = normalised(stack if shape[0] <= shape[1] else stack.mT)
    gram, direct = forms(newton_schulz, wide)
    atol = 1e-4 if shape[0] == shape[1] else 1e-5
    torch.testing.assert_close(gram, direct, atol=atol, rtol=0)
    expected = torch.stack([by_svd(matrix, TRIPLES[name]) for matrix in wide])
    torch.testing.assert_close(gram.double(), expected, atol=atol, rtol=1e-5)
    torch.testing.assert_close(direct.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(newton_schulz(stack), NewtonSchulz("direct", name)(stack), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [*NEAR_SQUARE, (24, 37), (37, 24), (17, 40)])
@pytest.mark.parametrize("name", SAFE)
def test_the_form_by_the_aspect_ratio(name, shape):
    newton_schulz, stack = NewtonSchulz("gram", name), gaussian(3, *shape, seed=1)
    gram, direct = forms(newton_schulz, normalised(stack))
    assert not torch.equal(gram, direct)  # so the two can be told apart
    assert torch.equal(newton_schulz(stack), direct if shape in NEAR_SQUARE else gram)
    assert torch.equal(NewtonSchulz("direct", name)(stack), direct)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "backend"), CHOICES)
def test_batched_equals_the_loop_bitwise(name, backend, shape):
    newton_schulz = NewtonSchulz(backend, name)
    stack = gaussian(5, *shape, seed=2)
    torch.testing.assert_close(
        newton_schulz(stack), torch.stack([newton_schulz(matrix) for matrix in stack]), atol=0, rtol=0
    )


@pytest.mark.parametrize(("name", "backend"), CHOICES)
def test_rank_one_has_the_sigma_of_the_scalar_polynomial(name, backend):
    """The Frobenius norm of a rank-1 matrix is its singular value, so the iteration starts at sigma = 1,
    where unsafe sets diverge."""
    expected = scalar(torch.tensor(1.0), TRIPLES[name])
    assert 0.6 < expected < 1.2
    newton_schulz = NewtonSchulz(backend, name)
    one_entry = torch.zeros(32, 56)
    one_entry[5, 7] = -1e3
    result = newton_schulz(one_entry).double()
    torch.testing.assert_close(result[5, 7], -expected, atol=2e-6, rtol=0)
    assert result.count_nonzero() == 1

    left = torch.nn.functional.normalize(gaussian(32, seed=3), dim=0).double()
    right = torch.nn.functional.normalize(gaussian(56, seed=4), dim=0).double()
    result = newton_schulz((1e3 * torch.outer(left, right)).float()).double()
    torch.testing.assert_close(left @ result @ right, expected, atol=1e-5, rtol=0)
    # What rounding made of the singular values that should be zero grows, by up to prod(a), and no more.
    rest = torch.linalg.matrix_norm(result - expected * torch.outer(left, right), 2)
    assert rest < 1e-6 * math.prod(a for a, _, _ in TRIPLES[name])


@pytest.mark.parametrize("backend", ["direct", "gram"])
@pytest.mark.parametrize(
    ("name", "low", "high"), [("kj", 0.682, 1.134), ("you", 0.978, 1.032), ("polar_express", 0.846, 1.124)]
)
def test_range_of_sigma(name, low, high, backend):
    """diag(x, sqrt(1 - x^2)) has Frobenius norm one, so together they sample every sigma in [.01, 1]."""
    x = torch.linspace(0.01, math.sqrt(0.5), 4000, dtype=torch.float64)
    sigma = torch.stack([x, (1 - x**2).sqrt()], dim=1)
    stack = torch.zeros(len(x), 2, 4)
    stack[:, [0, 1], [0, 1]] = sigma.float()
    result = NewtonSchulz(backend, name)(stack)
    diagonal = result[:, [0, 1], [0, 1]]
    torch.testing.assert_close(diagonal.double(), scalar(sigma, TRIPLES[name]), atol=5e-5, rtol=0)
    assert (result[:, 0, 1:] == 0).all() and (result[:, 1, [0, 2, 3]] == 0).all()
    assert diagonal.min().item() == pytest.approx(low, abs=6e-4)
    assert diagonal.max().item() == pytest.approx(high, abs=6e-4)


@pytest.mark.parametrize(("name", "backend"), CHOICES)
def test_zero_stays_zero_and_does_not_disturb_its_batch(name, backend):
    newton_schulz = NewtonSchulz(backend, name)
    stack = gaussian(3, 6, 10)
    stack[1] = 0
    result = newton_schulz(stack)
    assert (result[1] == 0).all()
    assert torch.equal(result[0], newton_schulz(stack[0])) and torch.equal(result[2], newton_schulz(stack[2]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", ["direct", "gram"])
def test_non_finite_input_is_not_hidden_and_stays_in_its_matrix(backend, value):
    stack = gaussian(3, 6, 10)
    stack[1, 2, 3] = value
    result = NewtonSchulz(backend)(stack)
    assert not result[1].isfinite().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", ["direct", "gram"])
def test_tall_is_the_transpose_of_wide(backend):
    newton_schulz, wide = NewtonSchulz(backend), gaussian(2, 5, 11)
    tall = wide.mT.contiguous()
    torch.testing.assert_close(newton_schulz(tall), newton_schulz(wide).mT, atol=1e-5, rtol=0)
    assert torch.equal(newton_schulz(wide.mT), newton_schulz(tall))  # a view with transposed strides


@pytest.mark.parametrize("scale", [1e-2, 1e4, 1e15])
def test_scale_does_not_matter(scale):
    matrix = gaussian(12, 20)
    torch.testing.assert_close(NewtonSchulz()(matrix * scale), NewtonSchulz()(matrix), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_input_dtype(dtype):
    """Converted to float32 before the norm is taken: squares of these values overflow float16."""
    matrix = (300 * gaussian(10, 16)).to(dtype)
    result = NewtonSchulz()(matrix)
    assert result.dtype == torch.float32
    assert torch.equal(result, NewtonSchulz()(matrix.float()))
    torch.testing.assert_close(result.double(), by_svd(matrix, TRIPLES["polar_express"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (0, 5, 8), (1, 1, 8, 5)])
@pytest.mark.parametrize("backend", ["direct", "gram"])
def test_leading_dimensions(backend, shape):
    newton_schulz, stack = NewtonSchulz(backend), gaussian(*shape)
    result = newton_schulz(stack)
    assert result.shape == shape
    for flat, one in zip(result.reshape(-1, *shape[-2:]), stack.reshape(-1, *shape[-2:]), strict=True):
        assert torch.equal(flat, newton_schulz(one))


@pytest.mark.parametrize("shape", [(8, 8), (5, 9), (9, 5)])
@pytest.mark.parametrize("backend", ["direct", "gram"])
def test_input_is_not_changed_and_not_returned(backend, shape):
    stack = gaussian(2, *shape)
    before = stack.clone()
    result = NewtonSchulz(backend)(stack)
    assert torch.equal(stack, before)
    assert result.untyped_storage().data_ptr() != stack.untyped_storage().data_ptr()


# ------------------------------------------------------------------ steps, sets, restarts


@pytest.mark.parametrize("backend", ["direct", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_fewer_steps_are_the_first_ones(backend, steps):
    matrix = gaussian(12, 20)
    newton_schulz = NewtonSchulz(backend, steps=steps)
    assert newton_schulz.steps == steps
    torch.testing.assert_close(
        newton_schulz(matrix).double(), by_svd(matrix, TRIPLES["polar_express"][:steps]), atol=1e-5, rtol=1e-5
    )


def test_only_kj_repeats():
    matrix = gaussian(12, 20)
    newton_schulz = NewtonSchulz("direct", "kj", steps=8)
    assert newton_schulz.coefficients == (KJ,) * 8
    torch.testing.assert_close(newton_schulz(matrix).double(), by_svd(matrix, [KJ] * 8), atol=2e-5, rtol=0)
    for name in ("you", "polar_express"):
        with pytest.raises(ValueError, match=f"ns_steps=6.*{name}.*has 5 steps"):
            NewtonSchulz("direct", name, steps=6)
    with pytest.raises(ValueError, match=r"ns_steps=11.*has 10 steps"):
        NewtonSchulz("direct", "deepseek_v4", steps=11)
    with pytest.raises(ValueError, match=r"ns_steps=2.*'custom'.*has 1 steps"):
        NewtonSchulz("direct", [KJ], steps=2)


def test_restarts():
    assert NewtonSchulz().restarts == (2,)
    assert NewtonSchulz(coefficients="kj").restarts == (3,)
    assert NewtonSchulz(steps=2).restarts == ()  # nothing is left to do after it
    assert NewtonSchulz(restart_iterations=[3, 1, 3]).restarts == (1, 3)
    matrix = gaussian(12, 20)
    for restarts in ([], [1], [1, 3], [1, 2, 3, 4]):
        result = NewtonSchulz("gram", restart_iterations=restarts)(matrix.clone()).double()
        # Without a restart rounding grows: that is what the set's own restart is for.
        atol = 1e-5 if restarts else 1e-2
        torch.testing.assert_close(result, by_svd(matrix, TRIPLES["polar_express"]), atol=atol, rtol=0)
    assert NewtonSchulz(steps=3, restart_iterations=[2]).restarts == (2,)


@pytest.mark.parametrize(
    ("steps", "wrong"), [(5, [0]), (5, [-1]), (5, [2, 0]), (5, [5]), (5, [2, 5]), (5, [6]), (3, [3]), (1, [1])]
)
def test_restarts_out_of_range_are_refused(steps, wrong):
    """A restart stands between two steps: after the last one nothing is left to do."""
    with pytest.raises(ValueError, match="restart_iterations"):
        NewtonSchulz(steps=steps, restart_iterations=wrong)


def test_gram_is_refused_where_no_restart_is_safe():
    with pytest.raises(ValueError, match=r"'deepseek_v4' has no restart.*backend='direct'"):
        NewtonSchulz("gram", "deepseek_v4")
    assert NewtonSchulz("gram", "deepseek_v4", restart_iterations=[3, 6]).restarts == (3, 6)
    assert NewtonSchulz("gram", [KJ] * 2, restart_iterations=[]).restarts == ()


def draw_triples(seed, steps):
    """Quintics that leave sigma = 1 nearly in place, with slopes at 0 from 1.5 to 3.4."""
    generator = torch.Generator().manual_seed(seed)
    slopes = 1.5 + 1.9 * torch.rand(steps, generator=generator).double()
    at_one = 0.2 * torch.rand(steps, generator=generator).double() - 0.1
    return [
        (a, (5 - 4 * a - d) / 2, (2 * a - 3 + d) / 2) for a, d in zip(slopes.tolist(), at_one.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("coefficients", "restarts"),
    [
        *((TRIPLES[name], (2,) if name != "kj" else (3,)) for name in SAFE),
        (TRIPLES["deepseek_v4"], (3, 6, 9)),
        ([KJ] * 10, (3, 6, 9)),
        ([(1.5, -0.5, 0.0)] * 8, (6,)),  # Newton's own cubic grows slowly
        ([(15.0, -35.0, 21.0)] * 3, (1, 2)),  # one step is too much
        ([(1e200, 1e200, 1e200)] * 3, (1, 2)),  # diverges
        ([KJ], ()),
    ],
)
def test_default_restarts_follow_the_growth_of_errors(coefficients, restarts):
    assert NewtonSchulz("gram", coefficients).restarts == restarts
    assert NewtonSchulz("gram", "kj", steps=10).restarts == (3, 6, 9)


@pytest.mark.parametrize(
    "triples", [*TRIPLES.values(), [KJ] * 10, *(draw_triples(seed, 5 + seed) for seed in range(5))]
)
def test_gram_with_default_restarts_is_as_accurate_as_direct(triples):
    """Within a factor of 5 in float32 and of 12 in float16, against float64; errors of R grow at tiny singular values.
    Without restarts the factor reaches 37 for ``kj``, 146 for ``polar_express``, and ten steps overflow."""
    newton_schulz = NewtonSchulz("gram", triples)
    stack = normalised(torch.stack([gaussian(48, 130, seed=7), ill_conditioned(48, 130)]))
    expected = torch.stack([by_svd(matrix, triples) for matrix in stack])

    def errors(form, stack, kernel):
        result = form(stack.clone(), kernel).double() - expected
        return torch.linalg.matrix_norm(result) / torch.linalg.matrix_norm(expected)

    for inputs, kernel, factor in ((stack, Kernel(), 5), (stack.half(), HalfKernel(), 12)):
        gram, direct = (errors(form, inputs, kernel) for form in (newton_schulz._gram, newton_schulz._direct))
        assert (gram < factor * direct).all(), (gram, direct)
    assert torch.equal(newton_schulz(stack), newton_schulz._gram(normalised(stack), Kernel()))


def test_custom_coefficients():
    triples = [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
    matrix = gaussian(7, 7)
    torch.testing.assert_close(
        NewtonSchulz("direct", triples)(matrix).double(), by_svd(matrix, triples), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "grams"}, "backend must be one of.*'grams'"),
        ({"coefficients": "polar"}, "coefficients must be one of.*'polar'"),
        ({"coefficients": []}, "sequence of"),
        ({"coefficients": [(1.0, 2.0)]}, "sequence of"),
        ({"steps": 0}, "at least 1, got 0"),
        ({"steps": -1}, "at least 1, got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        NewtonSchulz(**arguments)


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"needs matrices, got shape \[5\]"):
        NewtonSchulz()(torch.ones(5))


# ------------------------------------------------------------------ cost


@pytest.mark.parametrize("shape", [(64, 64), (64, 96), (64, 100), (64, 256), (96, 36)])
def test_flops_are_those_of_the_table_and_those_executed(shape):
    s, aspect = min(shape), max(shape) / min(shape)
    direct, gram = (20 * aspect + 10) * s**3, (22 + 12 * aspect) * s**3  # float32 restarts twice
    assert (gram < direct) == (aspect > 1.5)
    for backend, expected in {"direct": direct, "gram": min(direct, gram)}.items():
        for name in SAFE:
            newton_schulz = NewtonSchulz(backend, name, kernel="cublas")
            with FlopCounterMode(display=False) as counter:
                newton_schulz(gaussian(3, *shape))
            assert newton_schulz.flops(*shape) == round(expected), (backend, name)
            assert counter.get_total_flops() == 3 * newton_schulz.flops(*shape), (backend, name)
            with FlopCounterMode(display=False) as counter:
                newton_schulz._gram(gaussian(3, *shape), Kernel())
            assert counter.get_total_flops() == 3 * round(gram), (backend, name)


@pytest.mark.parametrize("shape", [(64, 64), (64, 65), (64, 96), (64, 256), (96, 36)])
def test_cost_with_symmetric_products_is_that_of_the_table(shape):
    """What owners are chosen by, whatever this machine runs."""
    s, wide = min(shape), max(shape)
    direct, gram = 15 * wide * s**2 + 5 * s**3, 14 * s**3 + 6 * wide * s**2
    assert (gram < direct) == (wide > s)
    # Up to 1.1 direct, for its accuracy.
    assert newton_schulz_flops(*shape) == (gram if wide > 1.1 * s else direct)


def test_flops_of_the_largest_matrix():
    """28 + 8a with every product in full, 14 + 6a, about 19 TFLOP, with half of the symmetric ones."""
    full = NewtonSchulz(kernel="cublas")
    cuda = torch.device("cuda")
    assert full.flops(8192, 28672, cuda) == full.flops(28672, 8192, cuda) == 28 * 8192**3 + 8 * 8192**2 * 28672
    assert newton_schulz_flops(8192, 28672) == 14 * 8192**3 + 6 * 8192**2 * 28672


# ------------------------------------------------------------------ the iteration alone, workspace, kernels


class HalfKernel:
    """A stand-in for a symmetric kernel on the CPU: float16 storage, float32 arithmetic, exactly symmetric. It
    remembers the largest magnitude it stored."""

    name, symmetric = "half", True

    def __init__(self):
        self.largest = 0.0

    def _store(self, value, out):
        assert value.isfinite().all()
        upper = value.triu()
        out.copy_(upper + upper.triu(1).mT)
        self.largest = max(self.largest, out.float().abs().max().item())
        return out

    def gram(self, x, out):
        x = (x.mT if x.shape[1] > x.shape[2] else x).float()
        return self._store(x @ x.mT, out)

    def multiply(self, a, b, d, out, alpha, beta, diagonal=0.0):
        assert out.data_ptr() not in (a.data_ptr(), b.data_ptr())
        assert torch.equal(a, a.mT) and torch.equal(b, b.mT) and torch.equal(d, d.mT)
        return self._store(beta * d.float() + alpha * a.float() @ b.float() + diagonal * torch.eye(a.shape[1]), out)


def ill_conditioned(m, n, seed=9):
    """Singular values from 1 down to 1e-6."""
    u, _, vt = torch.linalg.svd(gaussian(m, n, seed=seed).double(), full_matrices=False)
    return (u @ torch.diag(torch.logspace(0, -6, min(m, n), dtype=torch.float64)) @ vt).float()


@pytest.mark.parametrize("shape", [(48, 130), (130, 48), (64, 65)])
@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize(("form", "tolerance"), [("_gram", 2e-2), ("_direct", 3e-3)])
def test_float16_stays_in_range_and_close(name, shape, form, tolerance):
    """What CUDA does, on matrices that stress it: one singular value (sigma = 1 from the start), many tiny ones."""
    newton_schulz = NewtonSchulz("gram", name)
    rank_one = torch.outer(gaussian(shape[0], seed=5), gaussian(shape[1], seed=6))
    stack = normalised(torch.stack([gaussian(*shape, seed=7), ill_conditioned(*shape), rank_one]))
    kernel = HalfKernel()
    result = vars(NewtonSchulz)[form](newton_schulz, stack.half(), kernel)
    assert result.dtype == torch.float16 and result.shape == stack.shape
    assert kernel.largest < 100  # of 65504
    expected = torch.stack([by_svd(matrix, TRIPLES[name]) for matrix in stack[:1]])
    error = (result[:1].double() - expected).norm() / expected.norm()
    assert error < tolerance, error
    assert torch.linalg.matrix_norm(result.float(), 2).max() < 1.35
    left, right = (torch.nn.functional.normalize(v, dim=0) for v in (rank_one[:, 0], rank_one[0]))
    sigma = left.double() @ result[2].double() @ right.double()
    torch.testing.assert_close(sigma.abs(), scalar(torch.tensor(1.0), TRIPLES[name]), atol=3e-2, rtol=0)


@pytest.mark.parametrize("shape", [(24, 24), (17, 40), (40, 17)])
@pytest.mark.parametrize(("name", "backend"), CHOICES)
def test_iterate_is_the_call_without_the_norm(name, backend, shape):
    newton_schulz, stack = NewtonSchulz(backend, name), gaussian(3, *shape)
    assert newton_schulz.compute_dtype(torch.device("cpu")) == torch.float32
    assert newton_schulz.compute_dtype(torch.device("cuda")) == torch.float16
    result = newton_schulz.iterate(normalised(stack))
    assert result.dtype == torch.float32
    assert torch.equal(result, newton_schulz(stack))


def test_iterate_wants_a_stack_and_takes_an_empty_one():
    with pytest.raises(ValueError, match=r"needs a stack \[B, m, n\], got shape \[2, 3\]"):
        NewtonSchulz().iterate(torch.ones(2, 3))
    assert NewtonSchulz().iterate(torch.ones(0, 2, 3)).shape == (0, 2, 3)
    assert NewtonSchulz(deterministic=True)(torch.ones(0, 2, 3)).shape == (0, 2, 3)


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of every tensor made inside."""

    def __init__(self):
        super().__init__()
        self.bytes, self._known = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "out" not in (kwargs or {}):
            storage = result.untyped_storage()
            if storage.data_ptr() not in before:
                self.bytes += storage.nbytes()
        return result


@pytest.mark.parametrize("shape", [(24, 24), (17, 40), (40, 17)])
@pytest.mark.parametrize("backend", ["direct", "gram"])
def test_workspace_is_what_it_says(backend, shape):
    newton_schulz, x = NewtonSchulz(backend, kernel="cublas"), normalised(gaussian(3, *shape))
    with Allocations() as allocations:
        newton_schulz.iterate(x)
    assert allocations.bytes == newton_schulz.workspace_bytes(3, *shape)
    alone = NewtonSchulz(backend, kernel="cublas", deterministic=True)
    assert alone.workspace_bytes(3, *shape) == alone.workspace_bytes(1, *shape) == allocations.bytes // 3


@pytest.mark.parametrize("shape", [(200, 200), (96, 300), (300, 96)])
@pytest.mark.parametrize("backend", ["direct", "gram"])
def test_deterministic_results_do_not_depend_on_the_stack(backend, shape):
    newton_schulz = NewtonSchulz(backend, deterministic=True)
    stack = gaussian(5, *shape, seed=2)
    alone = torch.stack([newton_schulz(matrix) for matrix in stack])
    assert torch.equal(newton_schulz(stack), alone)
    assert torch.equal(newton_schulz(stack.flip(0)), alone.flip(0))
    assert torch.equal(newton_schulz(stack[1:3]), alone[1:3])
    assert torch.equal(newton_schulz.iterate(normalised(stack[:1]).repeat(4, 1, 1)), alone[:1].expand(4, -1, -1))
    torch.testing.assert_close(alone, NewtonSchulz(backend)(stack), atol=1e-4, rtol=0)


def test_deterministic_gives_every_product_one_matrix(monkeypatch):
    """Whatever library multiplies: it cannot choose by the size of the stack."""
    batches = []

    class Recording(Kernel):
        def gram(self, x, out):
            batches.append(len(x))
            return super().gram(x, out)

    module = importlib.import_module(
        "torchtitan_dmuon.dmuon.kernels.newton_schulz"
    )  # the package has a function of this name
    monkeypatch.setattr(module, "select_kernel", lambda *_: Recording())
    stack = gaussian(3, 20, 50)
    result = NewtonSchulz(deterministic=True)(stack)
    assert batches == [1] * 9  # three segments of three matrices
    assert torch.equal(result, torch.stack([NewtonSchulz(deterministic=True)(matrix) for matrix in stack]))
