"""Newton-Schulz iterations: the orthogonal factor of a stack of matrices, in the direct and in the Gram form.

Both forms compute the same odd polynomials of the normalised matrix. With X [s, l] (s <= l, wide) and R = X X^T:

- direct: ``X <- a X + (b R + c R^2) X`` per step (Jordan et al., "Muon", 2024).
- Gram: the polynomials act on R alone and a product Q [s, s] of them is applied to X at the end, and at restarts,
  where R is computed afresh so that rounding in R does not grow (Dao et al., "Gram Newton-Schulz", 2026). Exact
  arithmetic gives the same result; on wide matrices it needs fewer operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Coefficients = tuple[tuple[float, float, float], ...]

BACKENDS = ("gram", "direct")

_EPS = 1e-7

# Five steps cost 20a + 10 in the direct form and 8a + 28 in the Gram form, in units of s^3 for aspect ratio a.
_GRAM_MIN_ASPECT = 1.5


@dataclass(frozen=True)
class CoefficientSet:
    """(a, b, c) of every step.

    Attributes:
        steps: one triple a step.
        restarts: number of steps after which the Gram form recomputes R; ``None``: no restart is safe, use direct.
        repeats: the last triple may be repeated beyond the set's length.
    """

    steps: Coefficients
    restarts: tuple[int, ...] | None
    repeats: bool = False


_KJ = (3.4445, -4.7750, 2.0315)

# Polar Express (Amsel et al., arXiv 2505.16932), made safe against sigma slightly above 1 by evaluating at x / 1.05.
_POLAR_EXPRESS_SAFETY = 1.05
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)

COEFFICIENTS: dict[str, CoefficientSet] = {
    "polar_express": CoefficientSet(
        tuple(
            (a / _POLAR_EXPRESS_SAFETY, b / _POLAR_EXPRESS_SAFETY**3, c / _POLAR_EXPRESS_SAFETY**5)
            for a, b, c in _POLAR_EXPRESS
        ),
        restarts=(2,),
    ),
    # Keller Jordan's original triple.
    "kj": CoefficientSet((_KJ,) * 5, restarts=(3,), repeats=True),
    # Jiacheng You's five triples.
    "you": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        restarts=(2,),
    ),
    # DeepSeek-V4: eight steps of the original triple, then two that converge on sigma = 1.
    "deepseek_v4": CoefficientSet((_KJ,) * 8 + ((2.0, -1.5, 0.5),) * 2, restarts=None),
}


class NewtonSchulz:
    """A choice of form, coefficients and number of steps; calling it orthogonalises.

    Args:
        backend: ``direct``, or ``gram``: the Gram form where it needs fewer operations (long side more than 1.5 times
            the short one) and the direct form, which is then cheaper and more accurate, elsewhere.
        coefficients: a name of ``COEFFICIENTS`` or a sequence of (a, b, c).
        steps: how many; default all of the set. More than the set holds only where the set repeats.
        restart_iterations: steps after which the Gram form restarts; default the set's own.

    Raises:
        ValueError: unknown names, too many steps, restarts out of range, or Gram with a set it is not safe for.
    """

    def __init__(
        self,
        backend: str = "gram",
        coefficients: str | Sequence[tuple[float, float, float]] = "polar_express",
        steps: int | None = None,
        restart_iterations: Sequence[int] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"Newton-Schulz backend must be one of {BACKENDS}, got {backend!r}")
        if isinstance(coefficients, str):
            if coefficients not in COEFFICIENTS:
                raise ValueError(f"coefficients must be one of {tuple(COEFFICIENTS)}, got {coefficients!r}")
            chosen, name = COEFFICIENTS[coefficients], coefficients
        else:
            chosen, name = (
                CoefficientSet(tuple(tuple(map(float, abc)) for abc in coefficients), None),
                "custom",
            )
            if not chosen.steps or any(len(abc) != 3 for abc in chosen.steps):
                raise ValueError(f"coefficients must be a sequence of (a, b, c), got {coefficients!r}")
        steps = len(chosen.steps) if steps is None else steps
        if steps < 1:
            raise ValueError(f"ns_steps must be at least 1, got {steps}")
        if steps > len(chosen.steps) and not chosen.repeats:
            raise ValueError(f"ns_steps={steps}, but the coefficient set {name!r} has {len(chosen.steps)} steps")
        triples = chosen.steps + chosen.steps[-1:] * (steps - len(chosen.steps))
        restarts = chosen.restarts if restart_iterations is None else tuple(sorted(set(restart_iterations)))
        if backend == "gram" and restarts is None:
            raise ValueError(
                f"coefficient set {name!r} has no restart that keeps the Gram form accurate: use backend='direct' "
                "or give restart_iterations"
            )
        if any(not 0 < at < steps for at in restart_iterations or ()):
            raise ValueError(f"restart_iterations must lie between 1 and {steps - 1}, got {restart_iterations}")
        self.backend = backend
        self.name = name
        self.coefficients: Coefficients = triples[:steps]
        self.restarts = tuple(at for at in restarts or () if at < steps)

    @property
    def steps(self) -> int:
        return len(self.coefficients)

    def _gram_pays(self, m: int, n: int) -> bool:
        return self.backend == "gram" and max(m, n) > _GRAM_MIN_ASPECT * min(m, n)

    def flops(self, m: int, n: int) -> int:
        """Floating-point operations (2 a multiply-add) for one [m, n] matrix, symmetric products counted in full."""
        s, wide = min(m, n), max(m, n)
        if not self._gram_pays(m, n):
            return self.steps * (4 * s * s * wide + 2 * s**3)
        bounds = (0, *self.restarts, self.steps)
        small = sum(4 * (stop - start) - 3 for start, stop in itertools.pairwise(bounds))
        return (len(bounds) - 1) * 4 * s * s * wide + 2 * small * s**3

    @torch.no_grad()
    def __call__(self, matrices: torch.Tensor) -> torch.Tensor:
        """Orthogonalise ``matrices`` [..., m, n] (any floating dtype, not changed) and return float32 [..., m, n].

        The Frobenius norm is taken in float32 before any cast. The iteration runs in float16 with float32
        accumulation on CUDA and in float32 elsewhere. A zero matrix gives zero.
        """
        if matrices.ndim < 2:
            raise ValueError(f"Newton-Schulz needs matrices, got shape {list(matrices.shape)}")
        stack = matrices.reshape(-1, *matrices.shape[-2:])
        tall = stack.shape[-2] > stack.shape[-1]
        x = (stack.mT if tall else stack).float()
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        compute = torch.float16 if x.is_cuda else torch.float32
        x = (x / (norm + _EPS)).to(compute).contiguous()
        x = self._gram(x) if self._gram_pays(*x.shape[-2:]) else self._direct(x)
        x = x.mT if tall else x
        return x.reshape(matrices.shape).float()

    def _direct(self, x: torch.Tensor) -> torch.Tensor:
        for a, b, c in self.coefficients:
            r = x @ x.mT
            z = torch.baddbmm(r, r, r, beta=b, alpha=c)
            x = torch.baddbmm(x, z, x, beta=a)
        return x

    def _gram(self, x: torch.Tensor) -> torch.Tensor:
        bounds = (0, *self.restarts, self.steps)
        for start, stop in itertools.pairwise(bounds):
            r = x @ x.mT
            q: torch.Tensor | None = None  # None stands for the identity
            for step in range(start, stop):
                a, b, c = self.coefficients[step]
                z = torch.baddbmm(r, r, r, beta=b, alpha=c)
                if q is None:
                    q = z.clone()
                    q.diagonal(dim1=-2, dim2=-1).add_(a)
                else:
                    q = torch.baddbmm(q, q, z, beta=a)
                if step + 1 < stop:
                    # a is added outside the products: folded into z it would cancel in the small eigenvalues of r.
                    p = torch.baddbmm(r, r, z, beta=a)
                    r = torch.baddbmm(p, z, p, beta=a)
            x = q @ x
        return x


def newton_schulz_flops(m: int, n: int) -> int:
    """FLOPs of the default Newton-Schulz for one [m, n] matrix: the cost by which owners are chosen."""
    return NewtonSchulz().flops(m, n)


def newton_schulz(
    matrices: torch.Tensor,
    steps: int | None = None,
    backend: str = "gram",
    coefficients: str | Sequence[tuple[float, float, float]] = "polar_express",
) -> torch.Tensor:
    """Orthogonalise ``matrices`` [..., m, n]; see :class:`NewtonSchulz`. Returns float32 [..., m, n]."""
    return NewtonSchulz(backend, coefficients, steps)(matrices)
