"""Newton-Schulz iterations: the orthogonal factor of a stack of matrices, in the direct and in the Gram form.

Both forms compute the same odd polynomials of the normalised matrix. With X [s, l] (s <= l, wide) and R = X X^T:

- direct: ``X <- (a I + b R + c R^2) X`` per step (Jordan et al., "Muon", 2024).
- Gram: the polynomials act on R alone and a product Q [s, s] of them is applied to X at the end, and at restarts,
  where R is computed afresh so that rounding in R does not grow (Dao et al., "Gram Newton-Schulz", 2026). Exact
  arithmetic gives the same result; on wide matrices it needs fewer operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .kernel import Kernel
from .replay import Replay
from .select import check_kernel, default_device, select_kernel, triton_passes

Coefficients = tuple[tuple[float, float, float], ...]

_Space = tuple[torch.Tensor, list[torch.Tensor]]  # of one form: see _space

BACKENDS = ("gram", "direct")

NORM_EPS = 1e-7  # added to the Frobenius norm

# Five steps cost 20a + 10 in the direct form and 8a + 28 in the Gram form, in units of s^3 for aspect ratio a.
_GRAM_MIN_ASPECT = 1.5
# With half of each symmetric product 15a + 5 and 6a + 14: equal at 1. Near the square direct is 10 to 20 times as
# accurate in float16, for 4% more operations at most.
_GRAM_MIN_ASPECT_SYMMETRIC = 1.1

# [s, s] buffers of each form.
_DIRECT_SQUARES, _GRAM_SQUARES = 2, 4

# Up to so many operations, about 5 ms of a fast GPU, the launches of one iteration may take the host longer than the
# products take the GPU: those are recorded and replayed.
_REPLAY_MAX_FLOPS = 3e12


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
    """A choice of form, coefficients, number of steps and kernel; calling it orthogonalises.

    Args:
        backend: ``direct``, or ``gram``: the Gram form where it needs fewer operations, and the direct form, which is
            then no dearer and more accurate, elsewhere. Gram needs fewer when the long side is more than 1.5 times the
            short one, or more than 1.1 times where the kernel computes half of each symmetric product.
        coefficients: a name of ``COEFFICIENTS`` or a sequence of (a, b, c).
        steps: how many; default all of the set. More than the set holds only where the set repeats.
        restart_iterations: steps after which the Gram form restarts; default the set's own.
        kernel: ``cublas`` (PyTorch's products, on any device), ``triton``, ``quack``, or ``auto``: what the
            environment variable DMUON_NS_KERNEL names, else a fixed rule on the device and the shape.
        deterministic: the result of a matrix depends on nothing but itself: not on what else is in its stack, hence
            not on how many ranks share the matrices. Each is then computed alone, which is slower for small ones.
            Without it runs repeat too, as long as the same matrices are stacked.
        replay: on CUDA, replay small iterations as a CUDA graph when their tensors lie where they lay before.

    Raises:
        ValueError: unknown names, too many steps, restarts out of range, Gram with a set it is not safe for, or a
            kernel that is not installed.
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
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"ns_steps must be an integer of at least 1, got {steps}")
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
        self.kernel = check_kernel(kernel)
        self.deterministic = deterministic
        self._replay = Replay() if replay else None

    @property
    def steps(self) -> int:
        return len(self.coefficients)

    def __str__(self) -> str:
        restarts = f", restart after {', '.join(map(str, self.restarts))}" if self.backend == "gram" else ""
        return f"{self.backend}, {self.name}, {self.steps} steps{restarts}, kernel {self.kernel}"

    @staticmethod
    def compute_dtype(device: torch.device) -> torch.dtype:
        """Of the iteration: float16 (with float32 accumulation) on CUDA, float32 elsewhere."""
        return torch.float16 if device.type == "cuda" else torch.float32

    def _gram_pays(self, m: int, n: int, symmetric: bool) -> bool:
        min_aspect = _GRAM_MIN_ASPECT_SYMMETRIC if symmetric else _GRAM_MIN_ASPECT
        return self.backend == "gram" and max(m, n) > min_aspect * min(m, n)

    def _plan(self, m: int, n: int, device: torch.device | None) -> tuple[Kernel, bool]:
        """The kernel for [m, n] matrices, and whether the Gram form is taken."""
        kernel = select_kernel(self.kernel, default_device() if device is None else device, m, n)
        return kernel, self._gram_pays(m, n, kernel.symmetric)

    def _segments(self) -> list[Coefficients]:
        """The steps between two restarts."""
        return [self.coefficients[a:b] for a, b in itertools.pairwise((0, *self.restarts, self.steps))]

    def _count(self, m: int, n: int, symmetric: bool) -> int:
        s, wide = min(m, n), max(m, n)
        full, product = 2 * s * s, s * s if symmetric else 2 * s * s  # times the inner dimension
        if not self._gram_pays(m, n, symmetric):
            return self.steps * (product * wide + product * s + full * wide)
        segments = self._segments()
        return len(segments) * (product + full) * wide + sum(4 * len(steps) - 3 for steps in segments) * product * s

    def flops(self, m: int, n: int, device: torch.device | None = None) -> int:
        """Floating-point operations (2 a multiply-add) that one [m, n] matrix takes on ``device`` (default: this
        process's). A kernel that computes half of a symmetric product is counted with half."""
        return self._count(m, n, self._plan(m, n, device)[0].symmetric)

    def workspace_bytes(self, batch: int, m: int, n: int, device: torch.device | None = None) -> int:
        """Memory :meth:`iterate` allocates for a [batch, m, n] stack, beside the stack itself."""
        device = default_device() if device is None else device
        squares = _GRAM_SQUARES if self._plan(m, n, device)[1] else _DIRECT_SQUARES
        elements = squares * min(m, n) ** 2 + m * n
        return (min(batch, 1) if self.deterministic else batch) * elements * self.compute_dtype(device).itemsize

    @torch.no_grad()
    def __call__(self, matrices: torch.Tensor) -> torch.Tensor:
        """Orthogonalise ``matrices`` [..., m, n] (any floating dtype, not changed) and return float32 [..., m, n].

        The Frobenius norm is taken in float32 before any cast. A zero matrix gives zero.
        """
        if matrices.ndim < 2:
            raise ValueError(f"Newton-Schulz needs matrices, got shape {list(matrices.shape)}")
        x = self.normalize(matrices.reshape(-1, *matrices.shape[-2:]))
        return self.iterate(x).reshape(matrices.shape).float()

    @torch.no_grad()
    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """What :meth:`iterate` takes: ``x`` [B, m, n] over its Frobenius norms, in ``compute_dtype``. A new tensor."""
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
            x: [B, m, n] in ``compute_dtype(x.device)``, each matrix of Frobenius norm at most 1. It is used as
                workspace: its content is lost.

        Returns:
            [B, m, n] in the same dtype, ``x`` itself or a new tensor.
        """
        if x.ndim != 3:
            raise ValueError(f"iterate needs a stack [B, m, n], got shape {list(x.shape)}")
        if x.numel() == 0:
            return x
        kernel, gram = self._plan(*x.shape[1:], x.device)
        if not self.deterministic:
            return self._iterate(x, kernel, gram)
        for index in range(len(x)):
            one = x[index : index + 1]
            one.copy_(self._iterate(one, kernel, gram))
        return x

    def _iterate(self, x: torch.Tensor, kernel: Kernel, gram: bool) -> torch.Tensor:
        """One of the two forms, its launches replayed where that pays."""
        form = self._gram if gram else self._direct
        flops = len(x) * self._count(*x.shape[1:], kernel.symmetric)
        if self._replay is None or x.device.type != "cuda" or flops > _REPLAY_MAX_FLOPS:
            return form(x, kernel)
        y, squares = space = _space(x, gram)
        # All the launches depend on, beside what never changes in this object.
        key = (x.shape, x.stride(), x.dtype, *(t.data_ptr() for t in (x, y, *squares)))
        with torch.cuda.device_of(x):
            in_y = self._replay.run(key, lambda: int(form(x, kernel, space) is y))
        return y if in_y else x

    def _direct(self, x: torch.Tensor, kernel: Kernel, space: _Space | None = None) -> torch.Tensor:
        y, (r, z) = space or _space(x, gram=False)
        for a, b, c in self.coefficients:
            kernel.gram(x, out=r)
            # a on the diagonal, not beside the product: as accurate here, and cuBLAS is 20% faster without an addend.
            kernel.multiply(r, r, r, alpha=c, beta=b, diagonal=a, out=z)
            torch.bmm(*_applied(z, x), out=y)
            x, y = y, x
        return x

    def _gram(self, x: torch.Tensor, kernel: Kernel, space: _Space | None = None) -> torch.Tensor:
        y, (r, z, p, q) = space or _space(x, gram=True)
        for steps in self._segments():
            kernel.gram(x, out=r)
            for index, (a, b, c) in enumerate(steps):
                kernel.multiply(r, r, r, alpha=c, beta=b, out=z)
                if index + 1 < len(steps):
                    # a is added outside the products: folded into z it would cancel in the small eigenvalues of r.
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


def _space(x: torch.Tensor, gram: bool) -> _Space:
    """Workspace of a form: a tensor like ``x``, and its buffers [B, s, s]."""
    s, count = min(x.shape[1:]), _GRAM_SQUARES if gram else _DIRECT_SQUARES
    return torch.empty_like(x), [x.new_empty(len(x), s, s) for _ in range(count)]


def _applied(square: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the product of a symmetric ``square`` with ``x``: from the left of a wide one, from the right of
    a tall one, which so needs no transposed copy."""
    return (x, square) if x.shape[1] > x.shape[2] else (square, x)


def newton_schulz_flops(m: int, n: int) -> int:
    """FLOPs of the default Newton-Schulz for one [m, n] matrix on a GPU with symmetric products: the cost by which
    owners are chosen. The same on every machine, whatever kernel runs there."""
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
