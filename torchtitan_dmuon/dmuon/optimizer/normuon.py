"""NorMuon (Li et al., arXiv 2510.05491): every neuron's update is divided by the root of the running mean of its
squares. The update keeps its Frobenius norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..ownership.spec import COLUMNS, ParamSpec
from ..runtime.param import DedicatedParam
from .matrices import MatrixView, neuron_dim

_EPS = 1e-10  # keeps divisors away from zero; the authors' value


class NorMuon:
    """The ``adjust`` of an ``UpdateRule``. ``beta2`` is the decay of the mean of squares."""

    def __init__(self, beta2: float) -> None:
        if not 0.0 <= beta2 < 1.0:
            raise ValueError(f"normuon_beta2 is out of range: {beta2}")
        self.beta2 = beta2

    def check(self, params: Iterable[DedicatedParam]) -> None:
        """Raises ValueError for blocks that cut neurons apart: a mean must be over all inputs of a neuron."""
        for dp in params:
            blocks = dp.spec.blocks
            if dp.spec.route == "muon" and blocks is not None and (blocks.dim == COLUMNS) != dp.spec.transposed:
                raise ValueError(
                    f"normuon: the blocks of {dp.fqn} ({blocks}) cut along its inputs; leave blocks out for it"
                )

    def state_layout(self, spec: ParamSpec, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """One mean a neuron: (8, 768, 1) for a piece (8, 768, 3072), (8, 1, 3072) where it is stored [in, out]."""
        neurons = (*shape[:-2], 1, shape[-1]) if spec.transposed else (*shape[:-1], 1)
        return {"second_moment": (neurons, torch.float32)}

    def __call__(self, view: MatrixView, update: torch.Tensor, moves: torch.Tensor) -> None:
        """Adjust ``update`` (float32 [count, m, n]) in place. Where ``moves`` is zero, the means stay."""
        moment = view.state["second_moment"]
        inputs = -1 if neuron_dim(view.piece.spec) == -2 else -2
        mean = view.take(moment)
        mean.lerp_(update.square().mean(dim=inputs, keepdim=True).to(mean.dtype), (1.0 - self.beta2) * moves)
        view.put(moment, mean)
        norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
        update.div_(mean.sqrt().add_(_EPS))
        update.mul_(norm / torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True).clamp_(min=_EPS))
