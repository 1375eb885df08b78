"""The matrices of one shape that an owner updates together: momentum, Newton-Schulz, weight update. The factor 0 or 1
that says whether a matrix moves (had a gradient, all is finite) stays on the device, so the host never waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.newton_schulz import NORM_EPS, NewtonSchulz
from ..kernels.select import triton_passes
from .matrices import MatrixView, move_weights, nesterov_input, split

if TYPE_CHECKING:
    from ..kernels.passes import StackPasses  # needs Triton

# Most bytes of the matrices that go through Newton-Schulz together and of its workspace: larger batches are no faster.
BATCH_BYTES = 2 << 30

# Factors of an update [m, n], m outputs by n inputs.
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
    """The rule by which an optimizer updates all its matrices.

    Attributes:
        newton_schulz: orthogonalises.
        scale: a name of ``SCALES``.
        cautious_weight_decay: decay only where the update does not oppose it.
        adjust: ``adjust(view, update, moves)`` changes an update (float32 [count, m, n]) in place, after Newton-Schulz
            and before the weight moves. ``moves`` is that of ``MatrixView.moves``.
    """

    newton_schulz: NewtonSchulz
    scale: str
    cautious_weight_decay: bool
    adjust: Callable[[MatrixView, torch.Tensor, torch.Tensor], None] | None = None


class MatrixStack:
    """The matrices of one shape, orientation and dtype in one parameter ``group``, which has the hyperparameters."""

    def __init__(self, views: list[MatrixView], group: Mapping[str, Any], rule: UpdateRule) -> None:
        self.views = views
        self.shape = views[0].shape
        self.count = sum(view.count for view in views)
        self._group = group
        self._rule = rule
        self._passes: dict[int, StackPasses] = {}  # by batch: each keeps its table of addresses

    def __str__(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]} x{self.count}"

    def update(self, found_inf: torch.Tensor | None) -> None:
        """Update momenta, masters and compute weights. Each batch waits for its own gradients."""
        in_place = all(view.in_place for view in self.views)
        triton = triton_passes(self.views[0].momentum.device) if in_place else None
        for index, views in enumerate(self._batches(self._matrix_bytes(triton))):
            for view in views:
                view.piece.wait_gradient()
            passes = None if triton is None else self._pointed_passes(triton, index, views)
            self._update_batch(views, passes, found_inf)

    def _matrix_bytes(self, triton: ModuleType | None) -> int:
        """GPU memory for one matrix in its update: float16 twice and the four squares of the Gram form. PyTorch's
        passes take float32 three times more, an adjustment twice more."""
        element = (16 if triton is None else 4) + (0 if self._rule.adjust is None else 8)
        return element * math.prod(self.shape) + 8 * min(self.shape) ** 2

    def _batches(self, matrix_bytes: int) -> Iterator[list[MatrixView]]:
        """Runs of views, about equally many matrices each, that fit ``BATCH_BYTES``. A larger view is one alone."""
        limit = max(1, BATCH_BYTES // matrix_bytes)
        limit = math.ceil(self.count / math.ceil(self.count / limit))
        batch: list[MatrixView] = []
        for view in self.views:
            if batch and sum(v.count for v in batch) + view.count > limit:
                yield batch
                batch = []
            batch.append(view)
        yield batch

    def _pointed_passes(self, triton: ModuleType, index: int, views: list[MatrixView]) -> StackPasses | None:
        """The kernels of ``kernels/passes.py``, pointed at a batch; ``None`` where they cannot take its layout."""
        operands = [
            triton.Operand(
                view.take(piece.grad),
                view.take(view.momentum),
                view.take(piece.master),
                None if piece.compute_weight is None else view.take(piece.compute_weight),
                piece.grad_count,
            )
            for view, piece in ((view, view.piece) for view in views)
        ]
        passes = self._passes.setdefault(index, triton.StackPasses())
        return passes if passes.point_at(operands) else None

    def _update_batch(
        self, views: list[MatrixView], passes: StackPasses | None, found_inf: torch.Tensor | None
    ) -> None:
        """By the Triton ``passes``, or by PyTorch's operations without them."""
        rule, group = self._rule, self._group
        mu, nesterov = group["momentum"], group["nesterov"]
        if passes is None:
            x = rule.newton_schulz.normalize(nesterov_input(views, mu, nesterov, found_inf))
        else:
            dtype = rule.newton_schulz.compute_dtype(views[0].momentum.device)
            x = passes.nesterov_input(mu, nesterov, found_inf, dtype, NORM_EPS)
        update = rule.newton_schulz.iterate(x)
        del x  # its memory is free before the next pass needs some
        if rule.adjust is not None:
            update = update.float()
            for view, part in split(update, views):
                rule.adjust(view, part, view.moves(found_inf))
        neurons, inputs = reversed(self.shape) if views[0].piece.spec.transposed else self.shape
        step_size = group["lr"] * SCALES[rule.scale](neurons, inputs)
        decay = group["lr"] * group["weight_decay"]
        if passes is None:
            move_weights(views, update, step_size, decay, rule.cautious_weight_decay, found_inf)
        else:
            passes.move_weights(update, step_size, decay, rule.cautious_weight_decay, found_inf)
