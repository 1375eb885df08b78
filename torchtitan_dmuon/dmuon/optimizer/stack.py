"""The matrices an owner updates, and the passes over them before and after Newton-Schulz.

A piece is one matrix, a run of experts, or either cut into blocks; ``MatrixView`` is one block of it, ``MatrixStack``
the views of one shape, which go through Newton-Schulz together. What depends on the data (was there any gradient, is
everything finite) stays on the device as 0/1 factors, so the host never waits. On GPUs with Triton the passes are those
of ``passes.py``, elsewhere PyTorch operations, which are also what the former must agree with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..kernels.newton_schulz import NORM_EPS, NewtonSchulz
from ..kernels.select import triton_passes
from ..ownership.blocks import put, take
from ..ownership.spec import COLUMNS, Block
from ..runtime.param import DedicatedParam, Piece

if TYPE_CHECKING:
    from ..kernels.passes import StackPasses  # needs Triton

# Of the matrices that are orthogonalised together and of what that needs: more would not make them faster.
_STACK_BYTES = 2 << 30

# What NorMuon divides by is kept away from zero (the authors' value).
_NORMUON_EPS = 1e-10

# Of a matrix [m, n] stored [out, in].
SCALES: dict[str, Callable[[int, int], float]] = {
    # The update's RMS matches AdamW's (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982).
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    # Keller Jordan's, "Muon", 2024: tall matrices move more.
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    # Bernstein, "Deriving Muon", 2025: the update has spectral norm sqrt(out / in).
    "spectral": lambda m, n: math.sqrt(m / n),
    "unit": lambda m, n: 1.0,
}


@dataclass(frozen=True)
class UpdateRule:
    """What all matrices of an optimizer have in common.

    Attributes:
        scale: a name of ``SCALES``.
        normuon_beta2: decay of NorMuon's second moment; ``None`` without NorMuon.
        cautious_weight_decay: decay only where the update does not oppose it.
    """

    scale: str
    normuon_beta2: float | None
    cautious_weight_decay: bool


class MatrixView:
    """One block of an owned piece, or all of it: ``count`` matrices of one shape.

    Attributes:
        shape: [m, n] as stored.
        momentum: of the piece, in its shape and ``optim_dtype``.
        second_moment: of the piece, one value a neuron (a row; a column where the weight is stored transposed), or
            ``None``.
    """

    def __init__(
        self, piece: Piece, block: Block | None, momentum: torch.Tensor, second_moment: torch.Tensor | None
    ) -> None:
        self.piece = piece
        self.momentum = momentum
        self.second_moment = second_moment
        self._block = block
        self._dim = piece.spec.blocks.dim if block is not None else 0
        self.shape = piece.shape[-2:] if block is None else piece.spec.blocks.shape_of(block, piece.shape)
        self.count = piece.numel // math.prod(piece.shape[-2:])

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block of a tensor of the piece, [count, m, n]: shares memory where the block is one run."""
        matrices = tensor.view(-1, *tensor.shape[-2:])
        return matrices if self._block is None else take(matrices, self._block, self._dim)

    @property
    def in_place(self) -> bool:
        """Whether :meth:`take` gives a view."""
        return self._block is None or self._block.groups == 1

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what :meth:`take` gave and was changed in place."""
        if self._block is not None:
            put(tensor.view(-1, *tensor.shape[-2:]), self._block, self._dim, values)

    def refresh_compute_weight(self) -> None:
        """Bring the block of the piece's source weight up to date with its master."""
        source = self.piece.compute_weight
        if source is None:
            return
        values = self.take(self.piece.master)
        if self.in_place:
            self.take(source).copy_(values)
        else:
            self.put(source, values.to(source.dtype))

    def moves(self, found_inf: torch.Tensor | None) -> torch.Tensor:
        """0-D float: one where some rank had a gradient and everything is finite, else zero."""
        moves = self.piece.grad_count.ne(0).float()
        return moves if found_inf is None else moves * (found_inf == 0)


def neuron_dim(piece: Piece) -> int:
    """The dimension of a piece that counts its output neurons."""
    return -1 if piece.spec.transposed else -2


def check_normuon(dp: DedicatedParam) -> None:
    """Raises ValueError for blocks that cut neurons apart, whose statistics would not be per neuron."""
    blocks = dp.spec.blocks
    if dp.spec.route == "muon" and blocks is not None and (blocks.dim == COLUMNS) != dp.spec.transposed:
        raise ValueError(f"normuon: the blocks of {dp.fqn} ({blocks}) cut along its inputs; leave blocks out for it")


class MatrixStack:
    """The matrices of one shape, orientation and dtype in one parameter group."""

    def __init__(self, views: list[MatrixView]) -> None:
        self.views = views
        self.shape = views[0].shape
        self._transposed = views[0].piece.spec.transposed
        self._passes: dict[int, StackPasses] = {}  # one a chunk: they keep their tables of addresses

    @property
    def count(self) -> int:
        return sum(view.count for view in self.views)

    def update(
        self,
        group: dict,
        rule: UpdateRule,
        newton_schulz: Callable[[torch.Tensor], torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> None:
        """Momentum, Newton-Schulz and weight update, by the hyperparameters of the parameter group. Each part of the
        stack waits for its own gradients; masters and source weights are written.

        Args:
            newton_schulz: a ``NewtonSchulz``, or any [B, m, n] -> float32 [B, m, n].
        """
        fused = triton_passes(self.views[0].momentum.device) if isinstance(newton_schulz, NewtonSchulz) else None
        if not all(view.in_place for view in self.views):
            fused = None
        for index, views in enumerate(self._chunks(fused is not None, rule.normuon_beta2 is not None)):
            for view in views:
                view.piece.wait_gradient()
            passes = None if fused is None else self._pointed_passes(fused, index, views)
            if passes is None:
                self._update_plain(views, group, rule, newton_schulz, found_inf)
            else:
                self._update_triton(passes, views, group, rule, newton_schulz, found_inf)

    def _chunks(self, fused: bool, normuon: bool) -> Iterator[list[MatrixView]]:
        """Runs of views of about one size that fit the workspace (or one view that does not)."""
        limit = max(1, _STACK_BYTES // _workspace_bytes(self.shape, fused, normuon))
        limit = math.ceil(self.count / math.ceil(self.count / limit))
        chunk: list[MatrixView] = []
        for view in self.views:
            if chunk and sum(v.count for v in chunk) + view.count > limit:
                yield chunk
                chunk = []
            chunk.append(view)
        yield chunk

    def _step_size(self, group: dict, rule: UpdateRule) -> float:
        neurons, inputs = reversed(self.shape) if self._transposed else self.shape
        return group["lr"] * SCALES[rule.scale](neurons, inputs)

    # ---------------------------------------------------------------- with Triton

    def _pointed_passes(self, fused: ModuleType, index: int, views: list[MatrixView]) -> StackPasses | None:
        """The kernels of the module ``fused``, pointed at a chunk; None where they cannot take its layout."""
        if index not in self._passes:
            self._passes[index] = fused.StackPasses()
        operands = [
            fused.Operand(
                view.take(piece.grad),
                view.take(view.momentum),
                view.take(piece.master),
                None if piece.compute_weight is None else view.take(piece.compute_weight),
                piece.grad_count,
            )
            for view, piece in ((view, view.piece) for view in views)
        ]
        return self._passes[index] if self._passes[index].point_at(operands) else None

    def _update_triton(
        self,
        passes: StackPasses,
        views: list[MatrixView],
        group: dict,
        rule: UpdateRule,
        newton_schulz: NewtonSchulz,
        found_inf: torch.Tensor | None,
    ) -> None:
        dtype = newton_schulz.compute_dtype(views[0].momentum.device)
        x = passes.nesterov_input(group["momentum"], group["nesterov"], found_inf, dtype, NORM_EPS)
        update = newton_schulz.iterate(x)
        del x
        if rule.normuon_beta2 is not None:
            update = update.float()
            for view, part in zip(views, _split(update, views), strict=True):
                _equalize_neurons(view, part, view.moves(found_inf), rule.normuon_beta2)
        decay = group["lr"] * group["weight_decay"]
        passes.move_weights(update, self._step_size(group, rule), decay, rule.cautious_weight_decay, found_inf)

    # ---------------------------------------------------------------- with PyTorch

    def _update_plain(
        self,
        views: list[MatrixView],
        group: dict,
        rule: UpdateRule,
        newton_schulz: Callable[[torch.Tensor], torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> None:
        moves = [view.moves(found_inf) for view in views]
        x = self._nesterov_input(views, moves, group["momentum"], group["nesterov"], found_inf is not None)
        update = newton_schulz(x)
        step_size = self._step_size(group, rule)
        for view, move, part in zip(views, moves, _split(update, views), strict=True):
            if rule.normuon_beta2 is not None:
                _equalize_neurons(view, part, move, rule.normuon_beta2)
            part.mul_(step_size * move)
            _apply(view, part, group["lr"] * group["weight_decay"] * move, rule.cautious_weight_decay)
            view.refresh_compute_weight()

    def _nesterov_input(
        self, views: list[MatrixView], moves: list[torch.Tensor], mu: float, nesterov: bool, mask: bool
    ) -> torch.Tensor:
        """Update the momenta, ``M = mu M + G``, and return ``G + mu M`` (or ``M``) as float32 [B, m, n]."""
        x = torch.empty((sum(view.count for view in views), *self.shape), device=views[0].momentum.device)
        for view, move, part in zip(views, moves, _split(x, views), strict=True):
            grad = view.take(view.piece.grad)
            if mask:  # what is not finite must not reach the momentum, not even times zero
                grad = torch.where(move > 0, grad, 0.0)
            momentum = view.take(view.momentum)
            momentum.mul_(1.0 - (1.0 - mu) * move).add_(grad)
            view.put(view.momentum, momentum)
            if nesterov:
                torch.add(grad, momentum, alpha=mu, out=part)
            else:
                part.copy_(momentum)
        return x


def _workspace_bytes(shape: tuple[int, int], fused: bool, normuon: bool) -> int:
    """What one matrix takes on its way on a GPU: float16 twice and the squares of the Gram form; with PyTorch's passes
    float32 three times more, with NorMuon once or twice more."""
    elements = shape[0] * shape[1]
    return elements * ((4 if fused else 16) + (8 if normuon else 0)) + 8 * min(shape) ** 2


def _split(stack: torch.Tensor, views: list[MatrixView]) -> Iterator[torch.Tensor]:
    """The part of a [B, m, n] stack that belongs to each view."""
    ends = itertools.accumulate(view.count for view in views)
    return (stack[end - view.count : end] for view, end in zip(views, ends, strict=True))


def _equalize_neurons(view: MatrixView, update: torch.Tensor, move: torch.Tensor, beta2: float) -> None:
    """NorMuon (Li et al., arXiv 2510.05491): divide every neuron's update [count, m, n] by the root of the running mean
    of its squares, and give the result the Frobenius norm it had."""
    dim = neuron_dim(view.piece)
    along = -1 if dim == -2 else -2
    second = view.take(view.second_moment)
    second.lerp_(update.square().mean(dim=along, keepdim=True).to(second.dtype), (1.0 - beta2) * move)
    view.put(view.second_moment, second)
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
    update.div_(second.sqrt().add_(_NORMUON_EPS))
    update.mul_(norm / torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True).clamp_(min=_NORMUON_EPS))


def _apply(view: MatrixView, update: torch.Tensor, decay: torch.Tensor, cautious: bool) -> None:
    """``W -= decay * W``, then ``W -= update``. Cautious weight decay (Chen et al., arXiv 2510.12402) decays only where
    the update and the weight have the same sign, or one of them is zero."""
    master = view.take(view.piece.master)
    kept = 1.0 - decay
    if cautious:
        kept = torch.where(update * master >= 0, kept, 1.0)
    master.mul_(kept).sub_(update)
    view.put(view.piece.master, master)
