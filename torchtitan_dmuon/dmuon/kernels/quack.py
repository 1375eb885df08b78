"""A plug-in: ``quack.gemm_interface.gemm_symmetric`` of quack-kernels (Dao-AILab/quack), as it stood in 2026."""

from __future__ import annotations

import importlib

import torch

from .kernel import Kernel

_MIN_SIZE = 256  # one tile of its triangular schedule


class QuackKernel(Kernel):
    """SM90 and later. Small matrices, and rows that are not 16-byte aligned, go to PyTorch."""

    name = "quack"
    symmetric = True

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"quack-kernels does not run on {device.type}"
        if (capability := torch.cuda.get_device_capability(device)) < (9, 0):
            return f"needs SM90 or later, this is SM{capability[0]}{capability[1]}"
        try:
            importlib.import_module("quack.gemm_interface").gemm_symmetric  # noqa: B018
        except (ImportError, AttributeError) as error:
            return f"looked for quack.gemm_interface.gemm_symmetric of quack-kernels ({error})"
        return None

    def multiply(self, a, b, d, out, alpha=1.0, beta=1.0, diagonal=0.0) -> torch.Tensor:
        if any(min(t.shape[1:]) <= _MIN_SIZE or max(t.stride()[1:]) * t.element_size() % 16 for t in (a, out)):
            return super().multiply(a, b, d, out, alpha, beta, diagonal)
        from quack.gemm_interface import gemm_symmetric

        gemm_symmetric(a, b, C=d, out=out, alpha=float(alpha), beta=float(beta))
        if diagonal != 0.0:
            out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return out
