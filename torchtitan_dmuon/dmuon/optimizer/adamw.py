"""AdamW: on the pieces this rank owns, and by ``torch.optim.AdamW`` on parameters that are not dedicated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw

from ..runtime.param import Piece
from ..transport.grid import Grid
from ..transport.torch_private import is_dedicated

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def update_pieces(
    pieces: Sequence[Piece],
    states: Sequence[Mapping[str, torch.Tensor]],
    group: Mapping[str, Any],
    found_inf: torch.Tensor | None,
) -> None:
    """One step of the pieces of one parameter that this rank owns; they share one step count. Where no rank had a
    gradient, or ``found_inf`` (zero or one) is one, nothing moves: the fused kernel reads the flag itself, so the host
    does not wait. Masters and compute weights are written."""
    for piece in pieces:
        piece.wait_gradient()
    skip = pieces[0].grad_count.eq(0).float()
    if found_inf is not None:
        skip = torch.maximum(skip, found_inf)
    step = states[0]["step"]
    adamw(
        [piece.master for piece in pieces],
        [piece.grad.to(piece.master.dtype) for piece in pieces],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [step, *(step.clone() for _ in pieces[1:])],  # the kernel counts once a tensor
        fused=True,
        found_inf=skip,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for piece in pieces:
        piece.refresh_compute_weight()


def check_reduced(model: nn.Module, names: Mapping[torch.Tensor, str], grid: Grid) -> None:
    """Raises ValueError, on every rank, where nobody averages the gradients of a parameter over the data-parallel
    ranks: one that neither has an owner, nor is sharded by FSDP2, nor lies in a DDP module."""
    if grid.shape[0] * grid.shape[1] == 1:
        return
    averaged = {p for m in model.modules() if isinstance(m, DistributedDataParallel) for p in m.parameters()}
    replicate, shard, _ = grid.coordinate
    columns = {grid.ranks[grid.slot_at(replicate, shard, tp)] for tp in range(grid.shape[2])}
    alone = []
    for param, name in names.items():
        sharded = isinstance(param, DTensor) and not columns.issuperset(param.device_mesh.mesh.flatten().tolist())
        if not (sharded or param in averaged or is_dedicated(param)):
            alone.append(name)
    if alone:
        raise ValueError(
            f"{len(alone)} trainable parameters, {alone[0]} among them, have no owner and no shards: their gradients "
            "would differ from rank to rank. Call fully_shard on the modules that hold them, dedicate them, or, where "
            "somebody else averages their gradients, pass Muon(..., gradients_reduced_elsewhere=True)"
        )


def build_plain(
    groups: Sequence[dict[str, Any]], dedicated: Collection[torch.Tensor], implementation: str, state: dict
) -> torch.optim.AdamW | None:
    """PyTorch's own AdamW over the parameters that are not dedicated, if there are any, on the ``state`` of the whole
    optimizer. Its groups know the one they are of, ``outer``, and keep DTensors of different meshes apart: no fused
    kernel takes them together."""
    inner = []
    for group in groups:
        kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for param in group["params"]:
            if param not in dedicated:
                kinds[param.device_mesh if isinstance(param, DTensor) else None].append(param)
        inner += [{"params": params, "outer": group} for params in kinds.values()]
    if not inner:
        return None
    plain = torch.optim.AdamW(inner, fused=implementation == "fused", foreach=implementation == "foreach")
    plain.state = state
    return plain


def step_plain(
    plain: torch.optim.AdamW, found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None = None
) -> None:
    """One step by the hyperparameters of the outer groups, on gradients divided by ``grad_scale``. Nothing moves where
    ``found_inf`` is one."""
    for inner in plain.param_groups:
        inner.update({key: inner["outer"][key] for key in ("lr", "betas", "weight_decay", "eps")})
    plain.found_inf, plain.grad_scale = found_inf, grad_scale  # as torch.amp.GradScaler tells fused kernels
    plain.step()
