"""What PyTorch's own methods would do wrong to dedicated parameters: refused, or done right."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .runtime.handle import Runtime, refuse_copy
from .transport import torch_private


def guard(model: nn.Module, runtime: Runtime) -> None:
    """``.to()`` and its kin, ``state_dict`` and ``copy.deepcopy`` raise. ``model.zero_grad()``, for loops that do not
    call the optimizer's, also drops the owners' gradients."""
    torch_private.guard_apply(model)
    model.register_state_dict_pre_hook(_refuse_state_dict)
    for module in model.modules():
        if any(map(torch_private.is_dedicated, module.parameters())):
            vars(module)["__deepcopy__"] = functools.partial(refuse_copy, type(module).__name__)
    vars(model)["zero_grad"] = functools.partial(_zero_grad, model, runtime)


def _zero_grad(model: nn.Module, runtime: Runtime, set_to_none: bool = True) -> None:
    runtime.zero_grad()
    type(model).zero_grad(model, set_to_none)


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        "state_dict() of a model with dedicated parameters would hold placeholders (NaN): use "
        "dmuon.get_model_state_dict(model)"
    )
