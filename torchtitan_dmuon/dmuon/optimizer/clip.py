"""Norms and clipping of gradients that live in different places: a dedicated one on its owner, an FSDP2 one (a DTensor)
sharded or replicated over each mesh dimension. The norms of any number of buckets come out of one collective for each
mesh dimension, and the host does not wait for the device."""

from __future__ import annotations

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..ownership.policy import nearest
from ..runtime.param import Piece
from ..transport.lane import Lane
from .muon import Muon

logger = logging.getLogger(__name__)

# A gradient's local part, with the number of ranks that hold the same: it counts 1 / copies on each.
Part = tuple[torch.Tensor, int]
Buckets = Mapping[str, Sequence[Part]]
PLAIN = ("replicated", "sharded")  # what a plain tensor may be: the same on every rank, or a part of its own


def local_parts(gradients: Iterable[torch.Tensor | None], ranks: int, plain: str | None) -> list[Part]:
    """The local part of each gradient that there is. How many ranks hold a part of a DTensor follows from its mesh and
    placements; of a plain tensor ``plain`` says it. Raises ValueError where that is needed and missing."""
    if plain not in (None, *PLAIN):
        raise ValueError(f"plain must be one of {PLAIN}, got {plain!r}")
    parts = []
    for grad in (grad for grad in gradients if grad is not None):
        copies = 1 if plain == "sharded" else ranks
        if isinstance(grad, DTensor):
            copies = ranks // grad.device_mesh.size()  # ranks outside its mesh hold the same again
            for dim, placement in enumerate(grad.placements):
                if placement.is_partial():
                    raise ValueError("a partial gradient has no norm before it is reduced")
                copies *= grad.device_mesh.size(dim) if placement.is_replicate() else 1
            grad = grad.to_local()
        elif plain is None and ranks > 1:
            raise ValueError(
                f"a gradient of shape {list(grad.shape)} is a plain tensor: say whether every rank holds the same "
                "(plain='replicated') or a part of its own (plain='sharded')"
            )
        parts.append((grad, copies))
    return parts


def _local_power(parts: Sequence[Part], norm_type: float, device: torch.device) -> torch.Tensor:
    """0-D float64: this rank's share of the sum of ``|g| ** norm_type``, or its largest ``|g|`` for the infinity norm
    (NaN if there is one)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    alike: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for grad, copies in parts:
        if grad.numel():
            alike[(copies, torch.promote_types(grad.dtype, torch.float32))].append(grad)
    for (copies, dtype), grads in sorted(alike.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        # In float64: the sum over hundreds of tensors keeps float32's accuracy, and is a handful of scalars.
        norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(grads, norm_type, dtype)]).double()
        if norm_type == math.inf:
            total = torch.maximum(total, norms.max())
        else:
            total = total + (norms**norm_type).sum() / copies
    return total


def combine_norms(
    buckets: Iterable[Sequence[Part]], norm_type: float, lanes: Sequence[Lane], device: torch.device
) -> torch.Tensor:
    """Collective over ``lanes``, one after the other. The p-norm of each bucket over all ranks: float32 [buckets], the
    same on every rank."""
    powers = torch.stack([_local_power(parts, norm_type, device) for parts in buckets])
    if norm_type == math.inf:
        # Not every backend's maximum carries NaN: it is sent as a flag beside the number.
        bad = powers.isnan()
        sent = torch.cat([powers.nan_to_num(nan=0.0, posinf=math.inf), bad.double()])
        for lane in lanes:
            sent = lane.all_reduce(sent, dist.ReduceOp.MAX)
        largest, bad = sent.chunk(2)
        return torch.where(bad > 0, math.nan, largest).float()
    for lane in lanes:
        powers = lane.all_reduce(powers)
    return (powers ** (1.0 / norm_type)).float()


def _clip(
    buckets: Buckets,
    max_norms: Mapping[str, float | None],
    lanes: Sequence[Lane],
    norm_type: float,
    error_if_nonfinite: bool,
) -> dict[str, torch.Tensor]:
    """Scale every bucket in place by ``max_norm / (norm + 1e-6)`` where that is below one, and return the norms.
    ``None`` in place of a bound only measures. Collective. Nothing is changed if an error is raised."""
    for value in (*max_norms.values(), norm_type):
        if value is not None and not value > 0:
            raise ValueError(f"max_norm and norm_type must be positive, got {dict(max_norms)} and {norm_type}")
    totals = combine_norms(buckets.values(), float(norm_type), lanes, lanes[0].device)
    norms = dict(zip(buckets, totals.unbind(), strict=True))
    if error_if_nonfinite and not totals.isfinite().all():
        values = {name: norm.item() for name, norm in norms.items()}
        told = next(iter(values.values())) if len(values) == 1 else values
        raise RuntimeError(f"the total gradient norm (order {norm_type}) is {told}; nothing was clipped")
    for name, parts in buckets.items():
        if max_norms[name] is None:
            continue
        factor = (max_norms[name] / (norms[name] + 1e-6)).clamp(max=1.0)
        for device in {grad.device for grad, _ in parts}:
            torch._foreach_mul_([grad for grad, _ in parts if grad.device == device], factor.to(device))
    return norms


def _parts(pieces: Iterable[Piece]) -> list[Part]:
    return [(piece.grad, 1) for piece in pieces]


@torch.no_grad()
def clip_gradients_(
    gradients: Iterable[torch.Tensor | None],
    max_norm: float | None,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    plain: str | None = None,
) -> torch.Tensor:
    """Clip by one joint p-norm, and return the norm before clipping. Collective over ``groups``, one after the other,
    which together span the ranks (one for each mesh dimension). Raises as :func:`clip_grad_norm_`.

    Args:
        gradients: DTensors on any mesh within the ranks, or plain tensors.
        device: on which the groups communicate.
        plain: what plain tensors are: ``replicated``, alike on all ranks, or ``sharded``, a part of its own on each.
    """
    lanes = [Lane("clip", group, device) for group in groups]
    parts = local_parts(gradients, math.prod(lane.size for lane in lanes), plain)
    return _clip({"": parts}, {"": max_norm}, lanes, norm_type, error_if_nonfinite)[""]


@dataclass(frozen=True)
class GradientEntry:
    """One dedicated Muon gradient on its owner, as a strategy sees it: reduced, to be scaled in place. ``fqn`` and
    ``shape`` are the parameter's; an owner of part of an expert stack sees that part's gradient."""

    fqn: str
    shape: tuple[int, ...]
    gradient: torch.Tensor


# (this rank's entries, max_norm, norm_type, lanes) -> the norm to report, the same on every rank.
Strategy = Callable[[list[GradientEntry], float, float, Sequence[Lane]], torch.Tensor]

_GLOBAL_NORM = "global_norm"
_TOLD: weakref.WeakSet[Muon] = weakref.WeakSet()  # whose users know of the AdamW routes
_STRATEGIES: dict[str, Strategy] = {}


def register_muon_grad_clip_strategy(name: str, strategy: Strategy) -> None:
    """Make ``strategy`` known to :func:`clip_grad_norm_` as ``name``. It is called on every rank, also one that owns
    nothing, so that it may communicate over ``lanes``. Raises ValueError where another strategy has the name."""
    if name == _GLOBAL_NORM or _STRATEGIES.setdefault(name, strategy) is not strategy:
        raise ValueError(f"a clip strategy called {name!r} is registered already")


@torch.no_grad()
def clip_grad_norm_(
    optimizer: Muon,
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    strategy: str = _GLOBAL_NORM,
) -> torch.Tensor:
    """Clip the dedicated Muon gradients, and only them, before momentum and Newton-Schulz. Collective; waits for
    reductions in flight. A backward after it adds to the clipped gradients. Says once if dedicated parameters on an
    AdamW route stay unclipped.

    Args:
        max_norm: the bound; ``None`` only measures (a strategy gets it as infinity).
        strategy: how; by default by their global p-norm. Others are registered with
            :func:`register_muon_grad_clip_strategy`.

    Returns:
        The norm before clipping, a 0-D float32 tensor, the same on every rank (also when it is not finite).

    Raises:
        ValueError: an unknown strategy, or a bound that is not positive.
        RuntimeError: on every rank, with ``error_if_nonfinite`` (waits for the device). By the default strategy
            nothing is clipped then.
    """
    known = (_GLOBAL_NORM, *_STRATEGIES)
    if strategy not in known:
        raise ValueError(f"unknown clip strategy {strategy!r}{nearest(strategy, known)}; known: {', '.join(known)}")
    lanes = optimizer.runtime.lanes.covering
    others = [dp.fqn for dp in optimizer.runtime.params if dp.spec.route != "muon" and dp.spec.trainable]
    if others and optimizer not in _TOLD:
        _TOLD.add(optimizer)
        message = "clip_grad_norm_ leaves %d dedicated parameters on an AdamW route unclipped, %s among them: call %s"
        logger.warning(message, len(others), others[0], "clip_total_grad_norm_ to clip all by one norm")
    pieces = [piece for piece in optimizer.runtime.arrived() if piece.spec.route == "muon"]
    if strategy == _GLOBAL_NORM:
        return _clip({"": _parts(pieces)}, {"": max_norm}, lanes, norm_type, error_if_nonfinite)[""]
    entries = [GradientEntry(piece.fqn, piece.dp.shape, piece.grad) for piece in pieces]
    bound = math.inf if max_norm is None else max_norm
    total = _STRATEGIES[strategy](entries, bound, float(norm_type), lanes)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradient norm of strategy {strategy!r} is {total.item()}")
    return total


@torch.no_grad()
def clip_total_grad_norm_(
    optimizer: Muon, max_norm: float | None, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """As :func:`clip_grad_norm_`, of all gradients of ``optimizer``, dedicated on any route and others."""
    owned, lanes = _parts(optimizer.runtime.arrived()), optimizer.runtime.lanes.covering
    others = [param.grad for group in optimizer.param_groups for param in group["params"]]
    # A plain parameter is alike on all ranks: Muon takes no other.
    parts = owned + local_parts(others, math.prod(lane.size for lane in lanes), "replicated")
    return _clip({"": parts}, {"": max_norm}, lanes, norm_type, error_if_nonfinite)[""]


@torch.no_grad()
def try_clip_optimizer_grad_norm_buckets_(
    optimizer: Muon,
    regular_grads: Iterable[torch.Tensor | None] = (),
    adamw_grads: Iterable[torch.Tensor | None] = (),
    max_norm: float | Mapping[str, float | None] | None = 1.0,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    plain: str | None = None,
) -> dict[str, torch.Tensor]:
    """Clip the gradients of a run as three buckets, each by its own norm: ``regular`` (``regular_grads``), ``muon``
    (dedicated matrices) and ``adamw`` (``adamw_grads`` and dedicated parameters on an AdamW route). Collective, one
    all-reduce for each mesh dimension. One implementation serves all devices, so it always succeeds. Returns the norm
    of each before clipping; waiting, errors and norms are those of :func:`clip_grad_norm_`.

    Args:
        regular_grads, adamw_grads: DTensors, or plain tensors; ``None`` is left out.
        max_norm: the bound of all buckets, or of each by name; ``None`` only measures.
        plain: what plain tensors are, as for :func:`clip_gradients_`.
    """
    pieces, lanes = optimizer.runtime.arrived(), optimizer.runtime.lanes.covering
    ranks = math.prod(lane.size for lane in lanes)
    adamw = _parts(piece for piece in pieces if piece.spec.route != "muon")
    buckets = {
        "regular": local_parts(regular_grads, ranks, plain),
        "muon": _parts(piece for piece in pieces if piece.spec.route == "muon"),
        "adamw": local_parts(adamw_grads, ranks, plain) + adamw,
    }
    max_norms = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(buckets, max_norm)
    if max_norms.keys() != buckets.keys():
        raise ValueError(f"max_norm is given for {sorted(max_norms)}, the buckets are {list(buckets)}")
    return _clip(buckets, max_norms, lanes, norm_type, error_if_nonfinite)
