"""The matrices in an owned piece, and the passes over them as PyTorch operations: for devices without Triton, and for
layouts that the kernels of ``kernels/passes.py`` cannot take. The kernels give the same results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..ownership.blocks import put, take
from ..ownership.spec import Block, ParamSpec
from ..runtime.param import Piece


class MatrixView:
    """``count`` matrices of one ``shape`` (m, n): a piece (4096, 14336) is one matrix, a run of experts (8, 768, 3072)
    is eight. Of a fused weight the matrices are those of ``block``. ``state`` and ``momentum`` are the piece's."""

    def __init__(self, piece: Piece, block: Block | None, state: Mapping[str, torch.Tensor]) -> None:
        self.piece = piece
        self.state = state
        self.momentum = state["momentum_buffer"]
        self._block = block
        self._dim = piece.spec.blocks.dim if block is not None else 0
        self.shape = piece.shape[-2:] if block is None else piece.spec.blocks.shape_of(block, piece.shape)
        self.count = piece.numel // math.prod(piece.shape[-2:])

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrices in a tensor of the piece, [count, m, n]: a view where ``in_place``, else a copy."""
        matrices = tensor.view(-1, *tensor.shape[-2:])
        return matrices if self._block is None else take(matrices, self._block, self._dim)

    @property
    def in_place(self) -> bool:
        """Whether the block is one run of rows or columns, so that :meth:`take` gives a view."""
        return self._block is None or self._block.groups == 1

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write back the ``values`` that :meth:`take` gave and the caller changed."""
        if self._block is not None:
            put(tensor.view(-1, *tensor.shape[-2:]), self._block, self._dim, values)

    def moves(self, found_inf: torch.Tensor | None) -> torch.Tensor:
        """0-D float: 1 where some rank had a gradient and ``found_inf`` is zero, else 0."""
        moves = self.piece.grad_count.ne(0).float()
        return moves if found_inf is None else moves * (found_inf == 0)


def split(stack: torch.Tensor, views: Sequence[MatrixView]) -> Iterator[tuple[MatrixView, torch.Tensor]]:
    """Each view with its part of a [B, m, n] stack."""
    return zip(views, stack.split([view.count for view in views]), strict=True)


def neuron_dim(spec: ParamSpec) -> int:
    """The dimension that counts the output neurons of a weight: its rows, or columns where it is stored [in, out]."""
    return -1 if spec.transposed else -2


def nesterov_input(
    views: Sequence[MatrixView], mu: float, nesterov: bool, found_inf: torch.Tensor | None
) -> torch.Tensor:
    """Update the momenta, ``M = mu M + G``, and return ``G + mu M`` (or ``M``) as float32 [B, m, n]."""
    x = torch.empty((sum(view.count for view in views), *views[0].shape), device=views[0].momentum.device)
    for view, part in split(x, views):
        moves = view.moves(found_inf)
        grad = view.take(view.piece.grad)
        if found_inf is not None:  # a NaN times zero would still reach the momentum
            grad = torch.where(moves > 0, grad, 0.0)
        momentum = view.take(view.momentum)
        momentum.mul_(1.0 - (1.0 - mu) * moves).add_(grad)
        view.put(view.momentum, momentum)
        if nesterov:
            torch.add(grad, momentum, alpha=mu, out=part)
        else:
            part.copy_(momentum)
    return x


def move_weights(
    views: Sequence[MatrixView],
    update: torch.Tensor,
    step_size: float,
    decay: float,
    cautious: bool,
    found_inf: torch.Tensor | None,
) -> None:
    """``W -= decay * W``, then ``W -= step_size * update``, in masters and compute weights. ``update`` [B, m, n] is
    lost. Cautious weight decay (Chen et al., arXiv 2510.12402) decays only where the update and the weight have the
    same sign, or one of them is zero."""
    for view, part in split(update.float(), views):
        moves = view.moves(found_inf)
        part.mul_(step_size * moves)
        master = view.take(view.piece.master)
        kept = 1.0 - decay * moves
        if cautious:
            kept = torch.where(part * master >= 0, kept, 1.0)
        master.mul_(kept).sub_(part)
        view.put(view.piece.master, master)
        view.piece.refresh_compute_weight()
