"""AdamW on the pieces this rank owns, with what depends on the data kept on the device.

The update itself is ``torch.optim.adamw.adamw`` (fused). Parameters that are not dedicated are left to
``torch.optim.AdamW``, see ``muon.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from ..runtime.param import Piece


def new_state(like: torch.Tensor, step_device: torch.device | str, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The state before the first step of a parameter like ``like``."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=step_device),
        "exp_avg": torch.zeros_like(like, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(like, dtype=dtype),
    }


def update(
    pieces: Sequence[Piece], states: Sequence[dict[str, Any]], group: dict[str, Any], found_inf: torch.Tensor | None
) -> None:
    """One AdamW step of what this rank owns of one parameter: a piece, or several runs of experts, which share one step
    count. Where no rank had a gradient, or ``found_inf`` (zero or one) is one, nothing moves: the fused kernel looks at
    the flag itself, so the host does not wait."""
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
