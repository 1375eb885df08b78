"""How large weights, updates and gradients are on each route to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.distributed import all_reduce

# Those of dedicated parameters, and FSDP2 for all others.
_ROUTES = ("muon", "adamw", "sharded_adamw", "fsdp2")
# Most elements of one weight, its first ones on this rank, from which the RMS of weights and updates are estimated.
# Their values before the step take memory.
_SAMPLE = 16_384


class RouteFigures:
    """RMS of weights and updates, and norms of gradients, by route.

    Args:
        model, optimizer: of the run.
        groups: they span all ranks together, one after the other.
        device: on which they communicate.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        dedicated: set[nn.Parameter] = set()
        self._pieces: list[dmuon.Piece] = []
        if isinstance(optimizer, dmuon.Muon):
            dedicated = dmuon.ignored_params(model)
            self._pieces = [piece for piece in dmuon.get_owned_params(model) if piece.spec.trainable]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._others = [param for param in params if param not in dedicated]
        self._groups = groups
        # By route: elements, squares of weights and of updates, all of the sample; squares of gradients.
        self._sums = torch.zeros(len(_ROUTES), 4, dtype=torch.float64, device=device)

    def _held(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None, int]]:
        """(route, weight, gradient, ranks that hold the same) of everything that this rank updates."""
        for piece in self._pieces:
            yield piece.spec.route, piece.master, piece.grad, 1
        for param in self._others:
            copies = dist.get_world_size()
            if isinstance(param, DTensor):
                copies //= param.device_mesh.size()
                for dim, placement in enumerate(param.placements):
                    copies *= param.device_mesh.size(dim) if placement.is_replicate() else 1
            yield "fsdp2", _local(param), None if param.grad is None else _local(param.grad), copies

    @contextmanager
    @torch.no_grad()
    def around_step(self) -> Iterator[None]:
        """Around ``optimizer.step``, after clipping. The host does not wait."""
        self._sums.zero_()
        held = []
        for route, weight, grad, copies in self._held():
            sums = self._sums[_ROUTES.index(route)]
            if grad is not None:
                sums[3] += _squares(grad) / copies
            held.append((sums, weight, _sample(weight).clone(), copies))
        yield
        for sums, weight, before, copies in held:
            after = _sample(weight)
            sums[0] += after.numel() / copies
            sums[1] += _squares(after) / copies
            sums[2] += _squares(after - before) / copies

    def take(self) -> dict[str, float]:
        """Collective. The figures of the last step that :meth:`around_step` was around, by tag; the same on every rank.
        Gradient norms are those after clipping."""
        figures = {}
        sums = all_reduce(self._sums, self._groups).tolist()
        for route, (count, weights, updates, gradients) in zip(_ROUTES, sums, strict=True):
            if count > 0:
                figures[f"optimizer/weight_rms/{route}"] = math.sqrt(weights / count)
                figures[f"optimizer/update_rms/{route}"] = math.sqrt(updates / count)
                figures[f"optimizer/grad_norm/{route}"] = math.sqrt(gradients)
        return figures


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sample(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().reshape(-1)[:_SAMPLE]


def _squares(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of squares, 0-D float64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).double().square()
