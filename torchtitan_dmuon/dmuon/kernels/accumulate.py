"""Copies or adds a gradient into a packed buffer, whose dtype may differ."""

from __future__ import annotations

import torch

from .select import triton_passes


def copy(into: torch.Tensor, grad: torch.Tensor) -> None:
    passes = triton_passes(into.device)
    if passes is None or not passes.accumulate(into, grad, add=False):
        into.copy_(grad)


def add(into: torch.Tensor, grad: torch.Tensor) -> None:
    passes = triton_passes(into.device)
    if passes is None or not passes.accumulate(into, grad, add=True):
        into.add_(grad)
