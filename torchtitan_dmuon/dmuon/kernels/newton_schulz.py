"""Newton-Schulz iterations: the orthogonal factor of a stack of matrices, in the direct and in the Gram form.

Both forms compute the same odd polynomials of the normalised matrix. With X [s, l] (s <= l, wide) and R = X X^T:

- direct: ``X <- (a I + b R + c R^2) X`` per step (Jordan et al., "Muon", 2024).
- Gram: the polynomials act on R alone and a product Q [s, s] of them is applied to X at the end, and at restarts,
  where R is computed afresh so that rounding in R does not grow (Dao et al., "Gram Newton-Schulz", 2026). Exact
  arithmetic gives the same result; on wide matrices it needs fewer operations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .kernel import Kernel
from .replay import Replay
from .select import check_kernel, default_device, select_kernel, triton_passes

Coefficients = tuple[tuple[float, float, float], ...]

BACKENDS = ("gram", "direct")

NORM_EPS = 1e-7  # added to the Frobenius norm

# A segment of n steps costs n (4a + 2) in the direct form and 4a + 8n - 6 in the Gram form, in units of s^3 for aspect
# ratio a: equal at 1.5. With half of each symmetric product it costs n (3a + 1) and 3a + 4n - 3: equal at 1. There the
# Gram form begins at 1.1 only: near the square direct is 10 to 20 times as accurate in float16, for at most 4% more.
_GRAM_MIN_ASPECT, _GRAM_MIN_ASPECT_SYMMETRIC = 1.5, 1.1

# [s, s] buffers of each form.
_DIRECT_SQUARES, _GRAM_SQUARES = 2, 4

# The Gram form restarts before an error of R has grown by more. float16 rounds to 2^-11, so an eigenvalue is then wrong
# by 0.1 at most: one that should be 0 stays above -0.1, where the polynomials are close to those of 0. float32 is for
# exactness, not for speed: half of that growth leaves the error of the direct form, all of it ten times that error.
_MAX_GROWTH = {torch.float16: 200, torch.float32: 100}

# Iterations of up to so many operations, 5 ms of a fast GPU, are recorded and replayed: the host may need longer
# to launch their kernels.
_REPLAY_MAX_FLOPS = 3e12


@dataclass(frozen=True)
class CoefficientSet:
    """(a, b, c) of every step.

    Attributes:
        steps: one triple a step.
        repeats: users may ask for more steps, which repeat the last triple.
        direct_only: the set's authors run it in the direct form. The Gram form needs ``restart_iterations``.
    """

    steps: Coefficients
    repeats: bool = False
    direct_only: bool = False


# Keller Jordan's triple.
_KJ = (3.4445, -4.7750, 2.0315)

# Polar Express (Amsel et al., arXiv 2505.16932), evaluated at sigma / 1.05: safe where rounding puts sigma above 1.
_POLAR_EXPRESS = tuple(
    (a / 1.05, b / 1.05**3, c / 1.05**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)

# Jiacheng You's five triples.
_YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

COEFFICIENTS: dict[str, CoefficientSet] = {
    "polar_express": CoefficientSet(_POLAR_EXPRESS),
    "kj": CoefficientSet((_KJ,) * 5, repeats=True),
    "you": CoefficientSet(_YOU),
    # DeepSeek-V4: eight steps of the original triple, then two that converge on sigma = 1.
    "deepseek_v4": CoefficientSet((_KJ,) * 8 + ((2.0, -1.5, 0.5),) * 2, direct_only=True),
}


@functools.cache
def safe_restarts(steps: Coefficients, dtype: torch.dtype = torch.float16) -> tuple[int, ...]:
    """Steps after which the Gram form computes R afresh: ``polar_express`` (2,), ten steps of ``kj`` (3, 6, 9). In
    float32 it does so more often, ``polar_express`` (2, 4): then it is as exact as the direct form.

    A step maps an eigenvalue r of R to r p(r)^2 with p(r) = a + b r + c r^2, multiplies the error that r has by the
    slope of that map, and adds a rounding. The largest error on a grid over [0, 1] decides.
    """
    restarts, points = [], [(i / 256, 1.0) for i in range(257)]  # (r, error of r in roundings)
    for index, (a, b, c) in enumerate(steps):
        if not all(error <= _MAX_GROWTH[dtype] for _, error in points):  # also where they diverge to NaN
            restarts.append(index)
            points = [(r, 1.0) for r, _ in points]
        polynomials = [(r, error, a + r * (b + r * c), b + 2 * r * c) for r, error in points]
        points = [(r * p * p, 1 + error * abs(p * (p + 2 * r * slope))) for r, error, p, slope in polynomials]
    return tuple(restarts)


class NewtonSchulz:
    """A choice of form, coefficients, number of steps and kernel; calling it orthogonalises.

    Args:
        backend: ``direct``, or ``gram``: the Gram form for matrices whose long side is more than 1.5 times the short
            one (1.1 times where the kernel computes half of each symmetric product), the more accurate direct form,
            which then needs hardly more operations, for others.
        coefficients: a name of ``COEFFICIENTS`` or a sequence of (a, b, c), one a step.
        steps: how many; default all of the set. Only a set that repeats has more.
        restart_iterations: steps after which the Gram form restarts; default :func:`safe_restarts`.
        kernel: ``cublas`` (PyTorch's products, on any device), ``triton``, ``quack``, or ``auto``: what the
            environment variable DMUON_NS_KERNEL names, else a fixed rule on the device and the shape.
        deterministic: each matrix is computed alone, which is slower for small ones. Its result then does not depend
            on what else is in its stack, hence not on how many ranks share the matrices. Without this, runs repeat too
            as long as they stack the same matrices.
        replay: on CUDA, replay small iterations as a CUDA graph when their tensors lie where they lay before.

    Raises:
        ValueError: unknown names, too many steps, restarts out of range, Gram without restarts for a set that its
            authors run in the direct form, or a kernel that is not installed.
    """

    def __init__(
        self,
        backend: str = "gram",
        coefficients: str | Sequence[tuple[float, float, float]] = "polar_express",
        steps: int | None = None,
        restart_iterations: Sequence[int] | None = None,
        kernel: str = "auto",
        deterministic: bool = False,
        replay: bool = True,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"Newton-Schulz backend must be one of {BACKENDS}, got {backend!r}")
        self.backend = backend
        self.name, self.coefficients, direct_only = _chosen(coefficients, steps)
        exact: tuple[int, ...] | None = None  # of float32, where they are not given
        if restart_iterations is None:
            if backend == "gram" and direct_only:
                raise ValueError(
                    f"coefficient set {self.name!r} has no restart that keeps the Gram form accurate: use "
                    "backend='direct' or give restart_iterations"
                )
            restart_iterations, exact = (safe_restarts(self.coefficients, dtype) for dtype in _MAX_GROWTH)
        elif any(not 0 < at < self.steps for at in restart_iterations):
            raise ValueError(f"restart_iterations must lie between 1 and {self.steps - 1}, got {restart_iterations}")
        self.restarts = tuple(sorted(set(restart_iterations)))
        # By dtype: the steps between two restarts.
        self._segments = {
            dtype: [self.coefficients[a:b] for a, b in itertools.pairwise((0, *restarts, self.steps))]
            for dtype, restarts in ((torch.float16, self.restarts), (torch.float32, exact or self.restarts))
        }
        self.kernel = check_kernel(kernel)
        self.deterministic = deterministic
        self._replay = Replay() if replay else None

    @property
    def steps(self) -> int:
        return len(self.coefficients)

    def __str__(self) -> str:
        segments = self._segments[self.compute_dtype(default_device())]
        at = ", ".join(map(str, itertools.accumulate(map(len, segments[:-1]))))
        restarts = f", restart after {at}" if self.backend == "gram" else ""
        return f"{self.backend}, {self.name}, {self.steps} steps{restarts}, kernel {self.kernel}"

    @staticmethod
    def compute_dtype(device: torch.device) -> torch.dtype:
        """Of the iteration: float16 (with float32 accumulation) on CUDA, float32 elsewhere."""
        return torch.float16 if device.type == "cuda" else torch.float32

    def _select(self, m: int, n: int, device: torch.device | None) -> Kernel:
        return select_kernel(self.kernel, default_device() if device is None else device, m, n)

    def _takes_gram(self, m: int, n: int, symmetric: bool) -> bool:
        min_aspect = _GRAM_MIN_ASPECT_SYMMETRIC if symmetric else _GRAM_MIN_ASPECT
        return self.backend == "gram" and max(m, n) > min_aspect * min(m, n)

    def _count(self, m: int, n: int, symmetric: bool, dtype: torch.dtype = torch.float16) -> int:
        s, wide = min(m, n), max(m, n)
        full, product = 2 * s * s, s * s if symmetric else 2 * s * s  # times the inner dimension
        if not self._takes_gram(m, n, symmetric):
            return self.steps * (product * wide + product * s + full * wide)
        segments = self._segments[dtype]
        squares = sum(4 * len(steps) - 3 for steps in segments)
        return len(segments) * (product + full) * wide + squares * product * s

    def flops(self, m: int, n: int, device: torch.device | None = None) -> int:
        """Floating-point operations (2 a multiply-add) that one [m, n] matrix takes on ``device`` (default: this
        process's). A kernel that computes half of a symmetric product is counted with half."""
        device = default_device() if device is None else device
        return self._count(m, n, self._select(m, n, device).symmetric, self.compute_dtype(device))

    def workspace_bytes(self, batch: int, m: int, n: int, device: torch.device | None = None) -> int:
        """Memory :meth:`iterate` allocates for a [batch, m, n] stack, beside the stack itself."""
        device = default_device() if device is None else device
        gram = self._takes_gram(m, n, self._select(m, n, device).symmetric)
        elements = (_GRAM_SQUARES if gram else _DIRECT_SQUARES) * min(m, n) ** 2 + m * n
        return (min(batch, 1) if self.deterministic else batch) * elements * self.compute_dtype(device).itemsize

    @torch.no_grad()
    def __call__(self, matrices: torch.Tensor) -> torch.Tensor:
        """Orthogonalise ``matrices`` [..., m, n] (any floating dtype, not changed) and return float32 [..., m, n]. The
        Frobenius norm is taken in float32 before any cast. A zero matrix gives zero."""
        if matrices.ndim < 2:
            raise ValueError(f"Newton-Schulz needs matrices, got shape {list(matrices.shape)}")
        x = self.normalize(matrices.reshape(-1, *matrices.shape[-2:]))
        return self.iterate(x).reshape(matrices.shape).float()

    @torch.no_grad()
    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, m, n] over its Frobenius norms, in ``compute_dtype``: a new tensor, for :meth:`iterate`."""
        dtype = self.compute_dtype(x.device)
        passes = triton_passes(x.device)
        if passes is not None and (result := passes.normalized(x, dtype, NORM_EPS)) is not None:
            return result
        x = x.float()
        if self.deterministic and len(x):
            norm = torch.stack([torch.linalg.vector_norm(matrix) for matrix in x])[:, None, None]
        else:
            norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        # Rounded as it is written: no float32 stack in between.
        return torch.div(x, norm + NORM_EPS, out=torch.empty(x.shape, dtype=dtype, device=x.device))

    @torch.no_grad()
    def iterate(self, x: torch.Tensor) -> torch.Tensor:
        """The iteration alone, for callers that normalise.

        Args:
            x: [B, m, n] in ``compute_dtype(x.device)``, each matrix of Frobenius norm at most 1. The iteration works
                in it, so its content is lost.

        Returns:
            [B, m, n] in the same dtype, ``x`` itself or a new tensor.
        """
        if x.ndim != 3:
            raise ValueError(f"iterate needs a stack [B, m, n], got shape {list(x.shape)}")
        if x.numel() == 0:
            return x
        kernel = self._select(*x.shape[1:], x.device)
        if not self.deterministic:
            return self._iterate(x, kernel)
        for one in x.split(1):
            one.copy_(self._iterate(one, kernel))
        return x

    def _iterate(self, x: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        """One of the two forms. Where that pays, its launches are replayed."""
        gram = self._takes_gram(*x.shape[1:], kernel.symmetric)
        form, squares = (self._gram, _GRAM_SQUARES) if gram else (self._direct, _DIRECT_SQUARES)
        flops = len(x) * self._count(*x.shape[1:], kernel.symmetric, x.dtype)
        if self._replay is None or x.device.type != "cuda" or flops > _REPLAY_MAX_FLOPS:
            return form(x, kernel)
        space = _space(x, squares)
        # The launches depend on nothing else but what never changes in this object.
        key = (x.shape, x.stride(), x.dtype, *(t.data_ptr() for t in (x, *space)))
        with torch.cuda.device_of(x):
            in_x = self._replay.run(key, lambda: int(form(x, kernel, space) is x))
        return x if in_x else space[0]

    def _direct(self, x: torch.Tensor, kernel: Kernel, space: list[torch.Tensor] | None = None) -> torch.Tensor:
        y, r, z = space or _space(x, _DIRECT_SQUARES)
        for a, b, c in self.coefficients:
            kernel.gram(x, out=r)
            # a is put on the diagonal of z, which is as accurate here: without an addend cuBLAS applies z 20% faster.
            kernel.multiply(r, r, r, alpha=c, beta=b, diagonal=a, out=z)
            torch.bmm(*_applied(z, x), out=y)
            x, y = y, x
        return x

    def _gram(self, x: torch.Tensor, kernel: Kernel, space: list[torch.Tensor] | None = None) -> torch.Tensor:
        y, r, z, p, q = space or _space(x, _GRAM_SQUARES)
        for steps in self._segments[x.dtype]:
            kernel.gram(x, out=r)
            for index, (a, b, c) in enumerate(steps):
                kernel.multiply(r, r, r, alpha=c, beta=b, out=z)
                if index + 1 < len(steps):
                    # a is added outside the products: on the diagonal of z it would round small eigenvalues away.
                    kernel.multiply(r, z, r, alpha=1.0, beta=a, out=p)
                    kernel.multiply(z, p, p, alpha=1.0, beta=a, out=r)
                if index == 0:
                    q.copy_(z).diagonal(dim1=-2, dim2=-1).add_(a)  # q was the identity
                else:
                    kernel.multiply(q, z, q, alpha=1.0, beta=a, out=p)
                    p, q = q, p
            torch.bmm(*_applied(q, x), out=y)
            x, y = y, x
        return x


def _chosen(
    coefficients: str | Sequence[tuple[float, float, float]], steps: int | None
) -> tuple[str, Coefficients, bool]:
    """(name, one triple a step, whether the set is ``direct_only``)."""
    if not isinstance(coefficients, str):
        name, chosen = "custom", CoefficientSet(tuple(tuple(map(float, abc)) for abc in coefficients))
        if not chosen.steps or any(len(abc) != 3 for abc in chosen.steps):
            raise ValueError(f"coefficients must be a sequence of (a, b, c), got {coefficients!r}")
    elif coefficients in COEFFICIENTS:
        name, chosen = coefficients, COEFFICIENTS[coefficients]
    else:
        raise ValueError(f"coefficients must be one of {tuple(COEFFICIENTS)}, got {coefficients!r}")
    known = len(chosen.steps)
    steps = known if steps is None else steps
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"ns_steps must be an integer of at least 1, got {steps}")
    if steps > known and not chosen.repeats:
        raise ValueError(f"ns_steps={steps}, but the coefficient set {name!r} has {known} steps")
    return name, (chosen.steps + chosen.steps[-1:] * (steps - known))[:steps], chosen.direct_only


def _space(x: torch.Tensor, squares: int) -> list[torch.Tensor]:
    """Workspace of a form: a tensor like ``x`` [B, m, n], and buffers [B, s, s]."""
    s = min(x.shape[1:])
    return [torch.empty_like(x), *(x.new_empty(len(x), s, s) for _ in range(squares))]


def _applied(square: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the product of a symmetric ``square`` with ``x``: from the left of a wide ``x``, from the right of
    a tall one, which then needs no transposed copy."""
    return (x, square) if x.shape[1] > x.shape[2] else (square, x)


def newton_schulz_flops(m: int, n: int) -> int:
    """FLOPs of the default Newton-Schulz for one [m, n] matrix with half of each symmetric product: the cost by which
    owners are chosen. It is the same on every machine, whatever kernel runs there."""
    return NewtonSchulz(kernel="cublas")._count(m, n, symmetric=True)


def newton_schulz(
    matrices: torch.Tensor,
    steps: int | None = None,
    backend: str = "gram",
    coefficients: str | Sequence[tuple[float, float, float]] = "polar_express",
    kernel: str = "auto",
) -> torch.Tensor:
    """Orthogonalise ``matrices`` [..., m, n]; see :class:`NewtonSchulz`. Returns float32 [..., m, n]."""
    return NewtonSchulz(backend, coefficients, steps, kernel=kernel)(matrices)
