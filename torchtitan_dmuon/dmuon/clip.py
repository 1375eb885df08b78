"""Gradient norms and clipping over gradients that live in different places.

A dedicated gradient exists once, on its owner. An FSDP2 gradient is a DTensor: sharded over some mesh dimensions,
replicated over others. One number comes out of both, with one collective and without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .lanes import Lane
from .muon import Muon
from .policy import nearest


def local_norms(gradients: Iterable[torch.Tensor], norm_type: float, ranks: int) -> list[tuple[torch.Tensor, float]]:
    """(p-norm of the local part, share that counts) of each gradient among ``ranks`` ranks. A part that r of them hold
    alike counts 1/r on each: r is ``ranks`` for a plain tensor, and follows from mesh and placements for a DTensor."""
    result = []
    for grad in gradients:
        copies = ranks
        if isinstance(grad, DTensor):
            copies = ranks // grad.device_mesh.size()  # ranks outside its mesh hold the same again
            for dim, placement in enumerate(grad.placements):
                if placement.is_partial():
                    raise ValueError("a partial gradient has no norm before it is reduced")
                copies *= grad.device_mesh.size(dim) if placement.is_replicate() else 1
            grad = grad.to_local()
        result += _norm(grad, norm_type, copies)
    return result


def _norm(grad: torch.Tensor, norm_type: float, copies: int) -> list[tuple[torch.Tensor, float]]:
    if not grad.numel():
        return []
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return [(torch.linalg.vector_norm(grad, norm_type, dtype=dtype), 1.0 / copies)]


def combine_norms(norms: list[tuple[torch.Tensor, float]], norm_type: float, lanes: Sequence[Lane]) -> torch.Tensor:
    """Collective over ``lanes``, one after the other. The p-norm of everything, a 0-D float32 tensor, the same on every
    rank."""
    device = lanes[0].device

    def everywhere(value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        for lane in lanes:
            value = lane.all_reduce(value, op)
        return value

    if norm_type == math.inf:
        values = [norm for norm, _ in norms] or [torch.zeros((), device=device)]
        total = torch.stack([value.double() for value in values]).max()
        # max() does not carry NaN through every backend: send it as a count of its own.
        bad = everywhere(total.isnan().double(), dist.ReduceOp.SUM)
        total = everywhere(total.nan_to_num(nan=0.0, posinf=math.inf), dist.ReduceOp.MAX)
        return torch.where(bad > 0, torch.full_like(total, math.nan), total).float()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share in sorted({share for _, share in norms}):
        # In float64: the sum over hundreds of tensors keeps float32's accuracy, and is a handful of scalars.
        powers = torch.stack([norm for norm, s in norms if s == share]).double() ** norm_type
        total += powers.sum() * share
    return (everywhere(total, dist.ReduceOp.SUM) ** (1.0 / norm_type)).float()


def clip_(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place by ``max_norm / (total + 1e-6)`` where that is below one."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in gradients:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device, local.dtype))


@torch.no_grad()
def clip_gradients_(
    gradients: Sequence[torch.Tensor],
    max_norm: float,
    lanes: Sequence[Lane],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    owned: Sequence[tuple[torch.Tensor, int]] = (),
) -> torch.Tensor:
    """Clip by one joint p-norm. Collective over ``lanes``, whose groups together span the ranks.

    Args:
        gradients: as found in ``param.grad``: DTensors on any mesh within the ranks, or plain tensors that all ranks
            hold alike.
        owned: plain gradients, each with the number of ranks that hold it alike.

    Returns the norm before clipping; raises as :func:`clip_grad_norm_`.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(f"max_norm and norm_type must be positive, got {max_norm} and {norm_type}")
    norm_type = float(norm_type)
    norms = local_norms(gradients, norm_type, math.prod(lane.size for lane in lanes))
    for grad, copies in owned:
        norms += _norm(grad, norm_type, copies)
    total = combine_norms(norms, norm_type, lanes)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total gradient norm (order {norm_type}) is {total.item()}; nothing was clipped")
    clip_([*gradients, *(grad for grad, _ in owned)], total, max_norm)
    return total


@dataclass(frozen=True)
class GradientEntry:
    """One dedicated Muon gradient on its owner, as a strategy sees it.

    Attributes:
        fqn: name of the parameter.
        shape: its global shape; an owner of part of an expert stack sees that part's gradient.
        gradient: reduced, to be scaled in place.
    """

    fqn: str
    shape: tuple[int, ...]
    gradient: torch.Tensor


# (this rank's entries, max_norm, norm_type, lanes) -> the norm to report, the same on every rank.
Strategy = Callable[[list[GradientEntry], float, float, Sequence[Lane]], torch.Tensor]


_GLOBAL_NORM = "global_norm"
_STRATEGIES: dict[str, Strategy] = {}


def register_muon_grad_clip_strategy(name: str, strategy: Strategy) -> None:
    """Make ``strategy`` known to :func:`clip_grad_norm_` as ``name``.

    It is called on every rank, also one that owns nothing, so that it may communicate over ``lanes``.

    Raises:
        ValueError: the name is taken by another strategy.
    """
    if name == _GLOBAL_NORM or _STRATEGIES.setdefault(name, strategy) is not strategy:
        raise ValueError(f"a clip strategy called {name!r} is registered already")


@torch.no_grad()
def clip_grad_norm_(
    optimizer: Muon,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    strategy: str = _GLOBAL_NORM,
) -> torch.Tensor:
    """Clip the dedicated Muon gradients, and only them. Collective.

    Waits for reductions in flight; clips before momentum and Newton-Schulz. A backward after it adds to the clipped
    gradients.

    Args:
        strategy: how; by default by their global p-norm. Others are registered with
            :func:`register_muon_grad_clip_strategy`.

    Returns:
        The norm before clipping, a 0-D float32 tensor, the same on every rank (also when it is not finite).

    Raises:
        ValueError: an unknown strategy, or a bound that is not positive.
        RuntimeError: on every rank, with ``error_if_nonfinite`` (waits for the device); nothing is clipped then by the
            default strategy.
    """
    known = (_GLOBAL_NORM, *_STRATEGIES)
    if strategy not in known:
        raise ValueError(f"unknown clip strategy {strategy!r}{nearest(strategy, known)}; known: {', '.join(known)}")
    optimizer.runtime.wait_gradients()
    lanes = optimizer.runtime.lanes.grid
    pieces = [p for p in optimizer.runtime.owned if p.spec.route == "muon" and p.grad is not None]
    if strategy == _GLOBAL_NORM:
        owned = [(piece.grad, piece.copies) for piece in pieces]
        return clip_gradients_([], max_norm, lanes, norm_type, error_if_nonfinite, owned)
    entries = [GradientEntry(piece.fqn, piece.dp.shape, piece.grad) for piece in pieces]
    total = _STRATEGIES[strategy](entries, max_norm, float(norm_type), lanes)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradient norm of strategy {strategy!r} is {total.item()}")
    return total


@torch.no_grad()
def clip_total_grad_norm_(
    optimizer: Muon, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip all gradients of ``optimizer``, dedicated on any route and others, by one joint p-norm. Collective.
    Otherwise as :func:`clip_grad_norm_`."""
    optimizer.runtime.wait_gradients()
    owned = [(piece.grad, piece.copies) for piece in optimizer.runtime.owned if piece.grad is not None]
    others = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return clip_gradients_(others, max_norm, optimizer.runtime.lanes.grid, norm_type, error_if_nonfinite, owned)
