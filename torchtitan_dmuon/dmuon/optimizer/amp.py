"""``torch.amp.GradScaler`` with dedicated gradients, which lie on their owners and not in ``param.grad``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..transport.torch_private import local_tensor


class ScaledGradients(torch.optim.Optimizer):
    """The half of ``Muon`` that a ``torch.amp.GradScaler`` talks to.

    ``scaler.step(optimizer)`` reads ``_step_supports_amp_scaling``, looks for infinities in every ``param.grad``, sets
    ``optimizer.found_inf`` and ``optimizer.grad_scale`` and calls ``step``, which has to obey both. ``scaler.update()``
    makes the scale smaller where the scaler has seen an infinity.
    """

    runtime: Any  # the model's Runtime; this file would come too deep if it imported the class
    _unscaled = False  # by :func:`unscale_`, since gradients were last dropped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Collective while there are gradients. The scaler reads this property right before it looks at ``param.grad``:
        the last moment to tell the scaler of infinities in dedicated gradients."""
        if self.runtime.schedule.has_gradients and not self._unscaled:
            smallest = min((dp.param for dp in self.runtime.params if dp.spec.trainable), key=torch.Tensor.numel)
            self._show_scaler(self._find_inf(), smallest)
        return True

    def _scaler_orders(self, found_inf: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(``found_inf``, ``grad_scale``) of a step: the scaler's, or the caller's flag.

        Raises:
            RuntimeError: only ``param.grad`` has been unscaled.
        """
        if "found_inf" not in vars(self):
            return found_inf, None
        told = torch.as_tensor(vars(self)["found_inf"], device=self.runtime.grid.device)
        scale = vars(self)["grad_scale"]
        if scale is None and not self._unscaled:
            raise RuntimeError(
                "scaler.unscale_(optimizer) does not reach gradients on their owners, and nothing was changed: call "
                "dmuon.unscale_(scaler, optimizer) in its place, on every rank"
            )
        return told, scale

    def _find_inf(self) -> torch.Tensor:
        """Collective. 0-D float32, the same on every rank: one where a dedicated gradient is not finite, else zero."""
        found = torch.zeros((), device=self.runtime.grid.device)
        if grads := [piece.grad for piece in self.runtime.arrived()]:
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(grads, math.inf)])
            found = (~largest.isfinite()).any().float()
        for lane in self.runtime.lanes.covering:
            lane.all_reduce(found, dist.ReduceOp.MAX)
        return found

    def _show_scaler(self, found: torch.Tensor, stand_in: torch.nn.Parameter) -> None:
        """Add an infinity to one ``param.grad`` where ``found`` is one. Where no parameter has any, ``stand_in`` gets
        one, until ``zero_grad``."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not params:
            stand_in.grad = torch.zeros_like(stand_in)
        local_tensor((params or [stand_in])[0].grad).add_(torch.where(found > 0, math.inf, 0.0))

    def _scale_owned(self, factor: float | torch.Tensor) -> None:
        if grads := [piece.grad for piece in self.runtime.arrived()]:
            torch._foreach_mul_(grads, factor)


@torch.no_grad()
def scale_gradients_(optimizer: ScaledGradients, factor: float | torch.Tensor) -> None:
    """Multiply every gradient of ``optimizer``, a :class:`Muon`, by ``factor``: dedicated ones on any route and those
    in ``param.grad``. In place of ``p.grad.mul_(factor)``, which misses dedicated gradients. Call it on every rank
    after the last backward of a step and before clipping. Waits for reductions in flight.

    Args:
        factor: a number, or a 0-D tensor on the device, for which the host does not wait; the same on every rank, or
            different on the owners of different parameters.

    Raises:
        RuntimeError: the last backward ran under ``no_sync``, whose gradients would be missed.
    """
    optimizer._scale_owned(factor)
    others = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    for grad in map(local_tensor, others):
        grad.mul_(factor)


def unscale_(scaler: torch.amp.GradScaler, optimizer: ScaledGradients) -> None:
    """``scaler.unscale_(optimizer)``, which clipping needs first, for dedicated gradients, too. Collective; waits for
    the device. Raises RuntimeError where it has been called since the last step."""
    if not scaler.is_enabled():
        return
    if optimizer._unscaled:
        raise RuntimeError("dmuon.unscale_ has been called since the last step; once is enough")
    optimizer._scale_owned(1.0 / scaler.get_scale())
    flag = torch.nn.Parameter(torch.zeros((), device=optimizer.runtime.grid.device))
    optimizer._show_scaler(optimizer._find_inf(), flag)
    optimizer.param_groups.append({"params": [flag]})  # where the scaler looks
    try:
        scaler.unscale_(optimizer)
    finally:
        optimizer.param_groups.pop()
    optimizer._unscaled = True
