"""AdamW: on the pieces this rank owns, and by ``torch.optim.AdamW`` on parameters that are not dedicated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as adamw_update
from torch.profiler import record_function

from ..runtime.param import Piece

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
    adamw_update(
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


class PlainAdamW:
    """PyTorch's own AdamW over the parameters that are not dedicated: one for each parameter group that has some."""

    def __init__(self, implementation: str) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"adamw_implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
        self.implementation = implementation
        self.optimizers: list[tuple[dict[str, Any], torch.optim.AdamW]] = []

    def build(self, groups: Sequence[dict[str, Any]], dedicated: Collection[torch.Tensor], state: dict) -> None:
        """``state`` is that of the whole optimizer. The inner groups keep DTensors of different meshes apart: no fused
        kernel takes them together."""
        for group in groups:
            kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param not in dedicated:
                    kinds[param.device_mesh if isinstance(param, DTensor) else None].append(param)
            if kinds:
                options = {name: self.implementation == name for name in ("fused", "foreach")}
                adamw = torch.optim.AdamW([{"params": params} for params in kinds.values()], **options)
                adamw.state = state
                self.optimizers.append((group, adamw))

    def flag(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """``found_inf`` as :meth:`step` takes it. Raises ValueError where the kernels would not look at it."""
        if found_inf is None:
            return None
        if self.optimizers and self.implementation != "fused":
            raise ValueError(
                f"found_inf needs adamw_implementation='fused', this optimizer has {self.implementation!r}"
            )
        # A summed flag may be 2; PyTorch's fused AdamW skips at 1 only, and takes the flag off its step count.
        return (found_inf != 0).float()

    def step(self, found_inf: torch.Tensor | None) -> None:
        """One step by the hyperparameters of the groups. Nothing moves where ``found_inf`` is one."""
        for group, adamw in self.optimizers:
            for inner in adamw.param_groups:
                inner.update({key: group[key] for key in ("lr", "betas", "weight_decay", "eps")})
            with record_function(f"dmuon/adamw {group['group_name']}"):
                if found_inf is None:
                    adamw.step()
                else:
                    # The protocol of torch.amp.GradScaler, which the fused kernels implement.
                    adamw.found_inf, adamw.grad_scale = found_inf, None
                    adamw.step()
                    del adamw.found_inf, adamw.grad_scale
