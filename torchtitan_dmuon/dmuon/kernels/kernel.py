"""The products of Newton-Schulz on PyTorch, the base of every other kernel."""

from __future__ import annotations

import torch


class Kernel:
    """Products of stacks of matrices of one dtype, known to be symmetric, by PyTorch's batched products (cuBLAS on
    CUDA), which compute them in full."""

    name = "cublas"
    symmetric = False  # whether the kernel computes half of each product and mirrors it

    def unavailable(self, device: torch.device) -> str | None:
        """Why the kernel cannot run on ``device``; None where it can."""
        return None

    def gram(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """X X^T of a wide (or square) [B, m, n], X^T X of a tall one, into ``out`` [B, s, s] with s = min(m, n)."""
        left = x.mT if x.shape[1] > x.shape[2] else x
        return self.multiply(left, left.mT, None, out)

    def multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor | None,
        out: torch.Tensor,
        alpha: float = 1.0,
        beta: float = 1.0,
        diagonal: float = 0.0,
    ) -> torch.Tensor:
        """``beta * d + alpha * a @ b + diagonal * I`` into ``out`` [B, s, s], which must not overlap the others.

        Args:
            a, b: [B, s, k] and [B, k, s] with a symmetric product. With ``d``, both are symmetric themselves.
            d: [B, s, s], symmetric, or ``None`` to add nothing.
        """
        if d is None:
            torch.bmm(a, b, out=out)
        else:
            torch.baddbmm(d, a, b, beta=beta, alpha=alpha, out=out)
        if diagonal != 0.0:
            out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return out
