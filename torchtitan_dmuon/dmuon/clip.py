"""Gradient norms and clipping over gradients that live in different places.

A dedicated gradient exists once, on its owner. An FSDP2 gradient is a DTensor: sharded over some mesh dimensions,
replicated over others. One number comes out of both, with one collective and without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .lanes import Lane
from .muon import Muon


def local_norms(
    gradients: Iterable[torch.Tensor], norm_type: float, plain_copies: int
) -> list[tuple[torch.Tensor, float]]:
    """(p-norm of the local part, share that counts) of each gradient. A part that r ranks hold alike counts 1/r on
    each of them; for plain tensors r is ``plain_copies``."""
    result = []
    for grad in gradients:
        copies = plain_copies
        if isinstance(grad, DTensor):
            copies = 1
            for dim, placement in enumerate(grad.placements):
                if placement.is_partial():
                    raise ValueError("a partial gradient has no norm before it is reduced")
                copies *= grad.device_mesh.size(dim) if placement.is_replicate() else 1
            grad = grad.to_local()
        if grad.numel():
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
            result.append((norm, 1.0 / copies))
    return result


def combine_norms(norms: list[tuple[torch.Tensor, float]], norm_type: float, lane: Lane) -> torch.Tensor:
    """Collective over ``lane``. The p-norm of everything, a 0-D float32 tensor, the same on every rank."""
    device = lane.device
    if norm_type == math.inf:
        values = [norm for norm, _ in norms] or [torch.zeros((), device=device)]
        total, op = torch.stack([value.double() for value in values]).max(), dist.ReduceOp.MAX
    else:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for share in sorted({share for _, share in norms}):
            # In float64: the sum over hundreds of tensors keeps float32's accuracy, and is a handful of scalars.
            powers = torch.stack([norm for norm, s in norms if s == share]).double() ** norm_type
            total += powers.sum() * share
        op = dist.ReduceOp.SUM
    if norm_type == math.inf:
        # max() does not carry NaN through every backend: send it as a count of its own.
        bad = lane.all_reduce(total.isnan().double())
        total = lane.all_reduce(total.nan_to_num(nan=0.0, posinf=math.inf), op)
        return torch.where(bad > 0, torch.full_like(total, math.nan), total).float()
    return (lane.all_reduce(total, op) ** (1.0 / norm_type)).float()


def clip_(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place by ``max_norm / (total + 1e-6)`` where that is below one."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in gradients:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device, local.dtype))


def _owned_gradients(optimizer: Muon) -> list[torch.Tensor]:
    optimizer.runtime.wait_gradients()
    return [dp.grad for dp in optimizer.runtime.owned if dp.grad is not None]


@torch.no_grad()
def clip_gradients_(
    gradients: Sequence[torch.Tensor],
    max_norm: float,
    lane: Lane,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    owned: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Clip by the joint p-norm of ``gradients`` (as found in ``param.grad``: DTensors on any mesh within ``lane``, or
    plain tensors that every rank of ``lane`` holds alike) and ``owned`` ones (plain tensors that only this rank holds).
    Collective over ``lane``. Returns the norm before clipping; raises as :func:`clip_grad_norm_`."""
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(f"max_norm and norm_type must be positive, got {max_norm} and {norm_type}")
    norm_type = float(norm_type)
    norms = local_norms(gradients, norm_type, lane.size) + local_norms(owned, norm_type, 1)
    total = combine_norms(norms, norm_type, lane)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total gradient norm (order {norm_type}) is {total.item()}; nothing was clipped")
    clip_([*gradients, *owned], total, max_norm)
    return total


@torch.no_grad()
def clip_grad_norm_(
    optimizer: Muon, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the dedicated gradients, and only them, by their global p-norm. Collective.

    Waits for reductions in flight; clips before momentum and Newton-Schulz. A backward after it adds to the clipped
    gradients.

    Returns:
        The norm before clipping, a 0-D float32 tensor, the same on every rank (also when it is not finite).

    Raises:
        RuntimeError: on every rank, with ``error_if_nonfinite`` (waits for the device).
    """
    lane, owned = optimizer.runtime.lanes.reduce, _owned_gradients(optimizer)
    return clip_gradients_([], max_norm, lane, norm_type, error_if_nonfinite, owned)


@torch.no_grad()
def clip_total_grad_norm_(
    optimizer: Muon, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip all gradients of ``optimizer``, dedicated and others, by one joint p-norm. Collective. Otherwise as
    :func:`clip_grad_norm_`."""
    lane, owned = optimizer.runtime.lanes.reduce, _owned_gradients(optimizer)
    others = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return clip_gradients_(others, max_norm, lane, norm_type, error_if_nonfinite, owned)
