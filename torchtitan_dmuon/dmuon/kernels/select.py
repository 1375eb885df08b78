"""The kernels on which Newton-Schulz runs, and the rule that chooses one.

A kernel multiplies stacks of matrices whose product is known to be symmetric. ``cublas`` computes such a product in
full; ``triton`` and ``quack`` compute half of it and mirror that half.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch

from .kernel import Kernel

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


class TritonKernel(Kernel):
    """``symmetric.symmetric_product``."""

    name = "triton"
    symmetric = True

    def unavailable(self, device: torch.device) -> str | None:
        return _NO_TRITON if symmetric is None else symmetric.unavailable(device)

    def multiply(self, a, b, d, out, alpha=1.0, beta=1.0, diagonal=0.0) -> torch.Tensor:
        if d is not None:
            b = b.mT  # b is exactly symmetric; transposed, both operands have the inner dimension contiguous
        return symmetric.symmetric_product(a, b, d, alpha=alpha, beta=beta, diagonal=diagonal, out=out)


def _kernel(name: str) -> Kernel:
    if name == "quack":  # a plug-in: loaded when it is asked for
        from .quack import QuackKernel

        return QuackKernel()
    return TritonKernel() if name == "triton" else Kernel()


KERNEL_CHOICES = ("auto", "cublas", "triton", "quack")


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
        triton = TritonKernel()
        usable = device.type == "cuda" and triton.unavailable(device) is None
        pays = min(m, n) >= _TRITON_MIN_SIZE and m % _ALIGNED_ELEMENTS == n % _ALIGNED_ELEMENTS == 0
        return triton if usable and pays else Kernel()
    kernel = _kernel(choice)
    if (why := kernel.unavailable(device)) is not None:
        raise RuntimeError(f"Newton-Schulz kernel {choice!r} cannot be used: {why}; use 'auto' or 'cublas'")
    return kernel


def triton_passes(device: torch.device) -> ModuleType | None:
    """The module ``passes`` where its kernels run, None where PyTorch's own operations have to do."""
    if passes is None or device.type != "cuda" or symmetric.unavailable(device) is not None:
        return None
    return passes


def default_device() -> torch.device:
    """Where Newton-Schulz runs unless tensors say otherwise."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_backend_status() -> dict[str, dict]:
    """Every kernel family by name: ``name``, whether it is ``available`` on this machine, and the ``reason``."""
    device = default_device()
    cuda = device.type == "cuda"
    told = {
        "cublas": (cuda, "torch.matmul in float16" if cuda else "no CUDA device"),
        "cpu": (True, "torch.matmul in float32"),
    }
    for name, use in (("triton", "symmetric products"), ("quack", "used when asked for by name")):
        why = _kernel(name).unavailable(device)
        told[name] = (why is None, use if why is None else why)
    return {name: {"name": name, "available": usable, "reason": why} for name, (usable, why) in told.items()}


def get_ns_backend() -> str:
    """What Newton-Schulz uses by default on this machine, in one line. Raises as :func:`check_kernel`."""
    device = default_device()
    kernel = select_kernel(check_kernel("auto"), device, _TRITON_MIN_SIZE, _TRITON_MIN_SIZE)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"Gram NS · kernel={kernel.name} (SM{major}{minor}, float16)"
    return f"Gram NS · kernel={'cpu' if kernel.name == 'cublas' else kernel.name} (float32)"
