"""The kernels Newton-Schulz can run on: which there are, which one runs here, and what each says about itself.

A kernel multiplies stacks of matrices whose product is known to be symmetric. ``cublas`` computes such a product in
full; ``triton`` and ``quack`` compute half of it and mirror that.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Protocol

import torch

try:
    from . import passes, symmetric
except ImportError as error:  # Triton is optional
    passes = symmetric = None
    _NO_TRITON = f"Triton cannot be imported: {error}"

# Read where the kernel is left to us ("auto"); the only environment variable of Newton-Schulz.
KERNEL_VARIABLE = "DMUON_NS_KERNEL"

# "auto" takes Triton from this short side on: below it a product is over before the GPU is full, and what counts is
# the launch, which is cheaper for cuBLAS.
_TRITON_MIN_SIZE = 512

# ... and where every row begins at a multiple of 16 bytes: without that its loads are narrow.
_ALIGNED_ELEMENTS = 8


class Kernel(Protocol):
    """Symmetric products of stacks [B, s, s] in one dtype. ``out`` may overlap neither ``a``, ``b`` nor ``x``."""

    name: str
    symmetric: bool  # computes half of each product

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``; None where it can."""

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """X X^T of a wide (or square) [B, m, n], X^T X of a tall one, into ``out`` [B, s, s]."""

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        *,
        alpha: float,
        beta: float,
        out: torch.Tensor,
        diagonal: float = 0.0,
    ) -> torch.Tensor:
        """``beta * d + alpha * a @ b + diagonal * I`` into ``out``, all symmetric, ``a`` and ``b`` commuting."""


class TorchKernel:
    """PyTorch's own batched products: cuBLAS on CUDA, the CPU's library there."""

    name = "cublas"
    symmetric = False

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        left = _rows_short(x)
        return torch.bmm(left, left.mT, out=out)

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        *,
        alpha: float,
        beta: float,
        out: torch.Tensor,
        diagonal: float = 0.0,
    ) -> torch.Tensor:
        torch.baddbmm(d, a, b, beta=beta, alpha=alpha, out=out)
        return _add_diagonal(out, diagonal)


class TritonKernel:
    """``symmetric.symmetric_product``."""

    name = "triton"
    symmetric = True

    def unavailable(self, device: torch.device) -> str | None:
        return _NO_TRITON if symmetric is None else symmetric.unavailable(device)

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        left = _rows_short(x)
        return symmetric.symmetric_product(left, left.mT, out=out)

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        *,
        alpha: float,
        beta: float,
        out: torch.Tensor,
        diagonal: float = 0.0,
    ) -> torch.Tensor:
        # b is exactly symmetric; transposed, both operands have the inner dimension contiguous.
        return symmetric.symmetric_product(a, b.mT, d, alpha=alpha, beta=beta, diagonal=diagonal, out=out)


class QuackKernel:
    """``quack.gemm_interface.gemm_symmetric`` of quack-kernels (Dao-AILab/quack), as it stood in 2026: (A [L, M, K],
    B [L, K, M], C=None, out=None, ..., alpha=1.0, beta=1.0), scalars as Python floats, SM90 and later. Small matrices
    and rows that are not 16-byte aligned go to PyTorch."""

    name = "quack"
    symmetric = True
    _MIN_SIZE = 256  # one tile of its triangular schedule

    def __init__(self) -> None:
        self._plain = TorchKernel()

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"quack-kernels does not run on {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 9:
            return f"needs SM90 or later, this is SM{major}{minor}"
        try:
            from quack.gemm_interface import gemm_symmetric  # noqa: F401
        except ImportError as error:
            try:
                version = f"version {importlib.metadata.version('quack-kernels')} is installed"
            except importlib.metadata.PackageNotFoundError:
                version = "quack-kernels is not installed"
            return f"looked for quack.gemm_interface.gemm_symmetric, {version} ({error})"
        return None

    def _fits(self, *operands: torch.Tensor) -> bool:
        return all(
            min(t.shape[1:]) > self._MIN_SIZE and max(t.stride()[1:]) * t.element_size() % 16 == 0 for t in operands
        )

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not self._fits(x, out):
            return self._plain.gram(x, out)
        from quack.gemm_interface import gemm_symmetric

        left = _rows_short(x)
        gemm_symmetric(left, left.mT, out=out)
        return out

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        *,
        alpha: float,
        beta: float,
        out: torch.Tensor,
        diagonal: float = 0.0,
    ) -> torch.Tensor:
        if not self._fits(a, out):
            return self._plain.product(a, b, d, alpha=alpha, beta=beta, out=out, diagonal=diagonal)
        from quack.gemm_interface import gemm_symmetric

        gemm_symmetric(a, b, C=d, out=out, alpha=float(alpha), beta=float(beta))
        return _add_diagonal(out, diagonal)


_KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (TorchKernel(), TritonKernel(), QuackKernel())}
KERNEL_CHOICES = ("auto", *_KERNELS)


def _rows_short(x: torch.Tensor) -> torch.Tensor:
    """A view [B, s, l] with s <= l."""
    return x.mT if x.shape[1] > x.shape[2] else x


def _add_diagonal(square: torch.Tensor, diagonal: float) -> torch.Tensor:
    if diagonal != 0.0:
        square.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return square


def check_kernel(choice: str) -> str:
    """The kernel asked for, with ``auto`` replaced by the environment's ``DMUON_NS_KERNEL`` if that is set.

    Raises:
        ValueError: an unknown name, or a kernel whose package is missing.
    """
    source = "kernel"
    if choice == "auto" and KERNEL_VARIABLE in os.environ:
        choice, source = os.environ[KERNEL_VARIABLE], KERNEL_VARIABLE
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"{source} must be one of {KERNEL_CHOICES}, got {choice!r}")
    if choice == "triton" and symmetric is None:
        raise ValueError(f"{source}='triton' cannot be used: {_NO_TRITON}; use 'auto' or 'cublas'")
    return choice


def select_kernel(choice: str, device: torch.device, m: int, n: int) -> Kernel:
    """The kernel that runs for [m, n] matrices: a fixed rule, nothing is timed.

    Raises:
        RuntimeError: the kernel asked for by name cannot run on ``device``.
    """
    if choice == "auto":
        triton = _KERNELS["triton"]
        usable = device.type == "cuda" and triton.unavailable(device) is None
        pays = min(m, n) >= _TRITON_MIN_SIZE and m % _ALIGNED_ELEMENTS == n % _ALIGNED_ELEMENTS == 0
        return triton if usable and pays else _KERNELS["cublas"]
    kernel = _KERNELS[choice]
    if (why := kernel.unavailable(device)) is not None:
        raise RuntimeError(f"Newton-Schulz kernel {choice!r} cannot be used: {why}; use 'auto' or 'cublas'")
    return kernel


def triton_passes(device: torch.device) -> ModuleType | None:
    """The module ``passes`` where its kernels run, None where PyTorch's own operations have to do."""
    if passes is None or device.type != "cuda" or symmetric.unavailable(device) is not None:
        return None
    return passes


@dataclass(frozen=True)
class BackendStatus:
    """One kernel family: whether it can be used on this machine, and why or why not."""

    name: str
    available: bool
    reason: str


def default_device() -> torch.device:
    """Where Newton-Schulz runs unless tensors say otherwise."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_backend_status() -> dict[str, dict]:
    """Every kernel family by name, as plain data."""
    device = default_device()
    cuda = device.type == "cuda"
    statuses = [
        BackendStatus("cublas", cuda, "torch.matmul in float16" if cuda else "no CUDA device"),
        BackendStatus("cpu", True, "torch.matmul in float32"),
    ]
    for name, use in (("triton", "symmetric products"), ("quack", "used when asked for by name")):
        why = _KERNELS[name].unavailable(device)
        statuses.append(BackendStatus(name, why is None, use if why is None else why))
    return {status.name: asdict(status) for status in statuses}


def get_ns_backend() -> str:
    """What Newton-Schulz uses by default on this machine, in one line. Raises as :func:`check_kernel`."""
    device = default_device()
    kernel = select_kernel(check_kernel("auto"), device, _TRITON_MIN_SIZE, _TRITON_MIN_SIZE)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"Gram NS · kernel={kernel.name} (SM{major}{minor}, float16)"
    return f"Gram NS · kernel={'cpu' if kernel.name == 'cublas' else kernel.name} (float32)"
