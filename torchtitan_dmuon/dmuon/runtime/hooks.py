"""What fires the schedule: forward hooks on the boundaries, tensor hooks on their outputs, and a hook on every
trainable dedicated parameter. Public PyTorch API only.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..transport.torch_private import arrived
from .param import DedicatedParam
from .schedule import Phase, UnitSchedule
from .unit import Pack, Unit


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``fn`` on every tensor inside nested lists, tuples, dicts and dataclasses; a container in which nothing changes
    is passed through, and so is every other object."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    old = _items(value)
    new = {key: map_tensors(fn, item) for key, item in old.items()}
    if all(new[key] is old[key] for key in old):
        return value
    if dataclasses.is_dataclass(value):
        settable = {f.name for f in dataclasses.fields(value) if f.init}
        result = dataclasses.replace(value, **{key: item for key, item in new.items() if key in settable})
        for key in new.keys() - settable:
            object.__setattr__(result, key, new[key])
        return result
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update(new)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*new.values())
    return type(value)(new.values())  # lists, tuples, and what torch.max and its kin return


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    for item in _items(value).values():
        yield from tensors_in(item)


def _items(value: Any) -> dict[Any, Any]:
    """What a container holds, by key or position; empty for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}


def _caster(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if dtype is None:
        return lambda tensor: tensor
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def register_hooks(model: nn.Module, schedule: UnitSchedule) -> None:
    """Install every hook. They live as long as the model, which has to keep the schedule alive."""
    model.register_forward_pre_hook(_root_pre_forward(schedule))
    for unit in schedule.units:
        unit.module.register_forward_pre_hook(_pre_forward(schedule, unit), with_kwargs=True)
        unit.module.register_forward_hook(_post_forward(schedule, unit), always_call=True)
        for pack, dp in unit.trainable:
            dp.param.register_post_accumulate_grad_hook(_gradient_hook(schedule, unit, pack, dp))
    model.register_forward_hook(_root_post_forward(schedule))  # last, so the root's own unit has been left


def _root_pre_forward(schedule: UnitSchedule) -> Callable:
    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple) -> None:
        schedule.begin_forward()

    return hook


def _root_post_forward(schedule: UnitSchedule) -> Callable:
    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        if schedule.phase is Phase.BACKWARD:
            return
        if torch.is_grad_enabled():
            # The root's outputs get their gradient first, in the outermost backward pass. That is where the end of
            # backward must be asked for: asked inside a reentrant checkpoint it would come with the inner pass.
            forward = schedule.forward_pass
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: schedule.begin_backward(forward))
        schedule.end_forward(keep_last=torch.is_grad_enabled())

    return hook


def _pre_forward(schedule: UnitSchedule, unit: Unit) -> Callable:
    cast = _caster(unit.input_dtype)

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        return cast(arrived(tensor))

    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        schedule.enter_unit(unit)
        return map_tensors(receive, args), map_tensors(receive, kwargs)

    return hook


def _post_forward(schedule: UnitSchedule, unit: Unit) -> Callable:
    @torch.compiler.disable
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        schedule.leave_unit(unit)
        if output is None:  # the forward raised, or returns nothing
            return None
        if unit.output_dtype is not None:
            output = map_tensors(_caster(unit.output_dtype), output)
        if schedule.phase is not Phase.BACKWARD and torch.is_grad_enabled():
            forward = schedule.forward_pass
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: schedule.need_for_backward(unit, forward))
        return output

    return hook


def _gradient_hook(schedule: UnitSchedule, unit: Unit, pack: Pack, dp: DedicatedParam) -> Callable:
    # Weak: a parameter owns this hook where the garbage collector cannot see it, and what the hook calls owns the
    # parameter. Held strongly, model and process groups would never be freed.
    refs = [weakref.ref(held) for held in (schedule, unit, pack, dp)]

    @torch.compiler.disable
    def hook(param: torch.Tensor) -> None:
        schedule, unit, pack, dp = (ref() for ref in refs)
        schedule.take_gradient(unit, pack, dp)

    return hook
