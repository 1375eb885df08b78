"""Chooses the kernel on which Newton-Schulz runs. ``cublas`` computes symmetric products in full; ``triton`` and
``quack`` compute half of each and mirror it."""

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

KERNEL_CHOICES = ("auto", "cublas", "triton", "quack")
KERNEL_VARIABLE = "DMUON_NS_KERNEL"  # the environment variable that names the kernel of "auto"

# "auto" takes Triton from this short side on: smaller products do not fill the GPU, and cuBLAS launches faster.
_TRITON_MIN_SIZE = 512
# "auto" takes Triton only where both sides are multiples of this, 16 bytes: else Triton's loads are narrow.
_ALIGNED_ELEMENTS = 8


class TritonKernel(Kernel):
    """``symmetric.symmetric_product``."""

    name = "triton"
    symmetric = True

    def unavailable(self, device: torch.device) -> str | None:
        return _NO_TRITON if symmetric is None else symmetric.unavailable(device)

    def multiply(self, a, b, d, out, alpha=1.0, beta=1.0, diagonal=0.0) -> torch.Tensor:
        if d is not None:
            b = b.mT  # the symmetric b as its transpose: both operands then have a contiguous inner dimension
        return symmetric.symmetric_product(a, b, d, alpha=alpha, beta=beta, diagonal=diagonal, out=out)


def _kernel(name: str) -> Kernel:
    if name == "quack":  # a plug-in: imported on demand
        from .quack import QuackKernel

        return QuackKernel()
    return TritonKernel() if name == "triton" else Kernel()


def check_kernel(choice: str) -> str:
    """``choice``, or the value of ``DMUON_NS_KERNEL`` where that is set and ``choice`` is ``auto``. Raises ValueError
    for an unknown name, and for ``triton`` where Triton is missing."""
    source = "kernel"
    if choice == "auto" and KERNEL_VARIABLE in os.environ:
        choice, source = os.environ[KERNEL_VARIABLE], KERNEL_VARIABLE
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"{source} must be one of {KERNEL_CHOICES}, got {choice!r}")
    if choice == "triton" and symmetric is None:
        raise ValueError(f"{source}='triton' cannot be used: {_NO_TRITON}; use 'auto' or 'cublas'")
    return choice


def select_kernel(choice: str, device: torch.device, m: int, n: int) -> Kernel:
    """The kernel for [m, n] matrices, by a fixed rule: nothing is timed. Raises RuntimeError where ``choice`` names a
    kernel that cannot run on ``device``."""
    if choice == "auto":
        usable = device.type == "cuda" and TritonKernel().unavailable(device) is None
        pays = min(m, n) >= _TRITON_MIN_SIZE and m % _ALIGNED_ELEMENTS == n % _ALIGNED_ELEMENTS == 0
        return TritonKernel() if usable and pays else Kernel()
    kernel = _kernel(choice)
    if (why := kernel.unavailable(device)) is not None:
        raise RuntimeError(f"Newton-Schulz kernel {choice!r} cannot be used: {why}; use 'auto' or 'cublas'")
    return kernel


def triton_passes(device: torch.device) -> ModuleType | None:
    """The module ``passes`` where its kernels run on ``device``, else None."""
    return passes if device.type == "cuda" and TritonKernel().unavailable(device) is None else None


def default_device() -> torch.device:
    """The device for which Newton-Schulz answers where no tensor tells: this process's GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_backend_status() -> dict[str, dict]:
    """For ``cublas``, ``cpu``, ``triton`` and ``quack``: ``name``, whether ``available`` here, and the ``reason``."""
    device = default_device()
    cuda = device.type == "cuda"
    told = {"cublas": (cuda, "torch.matmul in float16" if cuda else "no CUDA device")}
    told["cpu"] = True, "torch.matmul in float32"
    for name, use in (("triton", "symmetric products"), ("quack", "used when asked for by name")):
        why = _kernel(name).unavailable(device)
        told[name] = (why is None, use if why is None else why)
    return {name: {"name": name, "available": usable, "reason": why} for name, (usable, why) in told.items()}


def get_ns_backend() -> str:
    """The default of Newton-Schulz on this machine, in one line. Raises as :func:`check_kernel`."""
    device = default_device()
    kernel = select_kernel(check_kernel("auto"), device, _TRITON_MIN_SIZE, _TRITON_MIN_SIZE)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"Gram NS · kernel={kernel.name} (SM{major}{minor}, float16)"
    return f"Gram NS · kernel={'cpu' if kernel.name == 'cublas' else kernel.name} (float32)"
