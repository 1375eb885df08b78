"""The hooks that call the schedule: forward hooks on the boundaries, tensor hooks on the boundaries' outputs, and a
hook on every trainable dedicated parameter. Public PyTorch API only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..nested import map_tensors, tensors_in
from ..transport.torch_private import arrived, is_last_hook
from .param import DedicatedParam
from .schedule import Phase, UnitSchedule
from .unit import Unit


def _caster(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if dtype is None:
        return lambda tensor: tensor
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def register_hooks(model: nn.Module, schedule: UnitSchedule) -> None:
    """Install every hook. They live as long as the model, which has to keep the schedule alive."""
    model.register_forward_pre_hook(torch.compiler.disable(lambda *_: schedule.root_pre_forward()))
    for unit in schedule.units:
        unit.module.register_forward_pre_hook(_pre_forward(schedule, unit), with_kwargs=True)
        unit.module.register_forward_hook(_post_forward(schedule, unit), always_call=True)
        for dp in unit.trainable:
            dp.param.register_post_accumulate_grad_hook(_post_accumulate_grad(schedule, unit, dp))
    model.register_forward_hook(_root_post_forward(schedule))  # last: the root's own unit has been left by then


def _root_post_forward(schedule: UnitSchedule) -> Callable:
    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        if schedule.phase is Phase.BACKWARD:
            return
        if torch.is_grad_enabled():
            # The root's outputs get their gradient first, in the outermost backward pass. The end of backward must be
            # asked for there: asked for inside a reentrant checkpoint, it would come with the inner pass.
            forward = schedule.forward_pass
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: schedule.root_pre_backward(forward))
        schedule.root_post_forward(backward_follows=torch.is_grad_enabled())

    return hook


def _pre_forward(schedule: UnitSchedule, unit: Unit) -> Callable:
    cast = _caster(unit.input_dtype)

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        return cast(arrived(tensor))

    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        schedule.pre_forward(unit)
        return map_tensors(receive, args), map_tensors(receive, kwargs)

    return hook


def _post_forward(schedule: UnitSchedule, unit: Unit) -> Callable:
    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        schedule.post_forward(unit)
        if output is None:  # the forward raised, or returns nothing
            return None
        if unit.output_dtype is not None:
            output = map_tensors(_caster(unit.output_dtype), output)
        if schedule.phase is not Phase.BACKWARD and torch.is_grad_enabled():
            forward = schedule.forward_pass
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: schedule.pre_backward(unit, forward))
        return output

    return hook


def _post_accumulate_grad(schedule: UnitSchedule, unit: Unit, dp: DedicatedParam) -> Callable:
    # Weak references: a parameter owns this hook where the garbage collector cannot see it, and what the hook calls
    # owns the parameter. Strong ones would keep model and process groups for ever.
    refs = [weakref.ref(held) for held in (schedule, unit, dp)]

    @torch.compiler.disable
    def hook(param: torch.Tensor) -> None:
        schedule, unit, dp = (ref() for ref in refs)
        if not is_last_hook(param, hook):
            raise RuntimeError(
                f"{dp.fqn}: a post-accumulate-grad hook that was registered after dedicate_params would find no "
                "gradient: register the hook before, and it finds this rank's own"
            )
        schedule.post_accumulate_grad(unit, dp)

    return hook
