"""What users and PyTorch's own methods would do wrong to dedicated parameters: refused, or done right."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from .runtime.handle import Runtime, refuse_copy
from .transport import torch_private


def guard(model: nn.Module, runtime: Runtime) -> None:
    """``.to()`` and its kin, ``state_dict``, ``load_state_dict``, ``copy.deepcopy`` and pickling raise, for the model
    and for every part of it. So does a forward after a dedicated parameter was replaced or written to.
    ``model.zero_grad()``, for loops that do not call the optimizer's, also drops the owners' gradients."""
    torch_private.guard_apply(model)
    for module in model.modules():
        if any(map(torch_private.is_dedicated, module.parameters())):
            module.register_state_dict_pre_hook(_refuse_state_dict)
            module.register_load_state_dict_pre_hook(_refuse_load_state_dict)
            vars(module)["__deepcopy__"] = functools.partial(refuse_copy, type(module).__name__)
    for dp in runtime.params:
        refuse = functools.partial(refuse_copy, dp.fqn)
        # Looked up on the object by copy, by pickle and by torch.distributed.checkpoint.
        vars(dp.param).update(__deepcopy__=refuse, __reduce_ex__=refuse, __create_write_items__=refuse)
    vars(model)["zero_grad"] = functools.partial(_zero_grad, model, runtime)
    watch = _Watch(model, runtime)
    runtime.verify = watch.verify
    model.register_forward_pre_hook(torch.compiler.disable(lambda *_: watch.verify_quickly()), prepend=True)


def _zero_grad(model: nn.Module, runtime: Runtime, set_to_none: bool = True) -> None:
    runtime.schedule.drop_gradients()
    type(model).zero_grad(model, set_to_none)


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    if any(map(torch_private.is_dedicated, module.parameters())):
        raise RuntimeError(
            "state_dict() of a model with dedicated parameters would hold placeholders (NaN): use "
            "dmuon.get_model_state_dict(model)"
        )


def _refuse_load_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    held = (f"{prefix}{name}" for name, param in module.named_parameters() if torch_private.is_dedicated(param))
    if (name := next((name for name in held if name in state), None)) is not None:
        raise RuntimeError(
            f"load_state_dict() cannot reach {name}, which is dedicated to an owner (with assign=True nothing would "
            "train or save the new weight): use dmuon.set_model_state_dict(model, state, full_state_dict=True)"
        )


class _Watch:
    """Notices that a dedicated parameter is no longer the model's, and that somebody has written into one. Both are
    found without a look at the device."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._model = model
        self._runtime = runtime
        self._names = {dp.param: dp.fqn for dp in runtime.params}
        self._versions = torch_private.versions_of(self._names)
        self._look()

    def _look(self) -> None:
        """Take down where the dedicated parameters are."""
        self._way = torch_private.way_to(self._model, self._names)
        self._places = torch_private.places_of(self._model, self._names)

    def verify_quickly(self) -> None:
        """Before every forward: 0.3 ms for 1,000 parameters of 1,000 layers."""
        if any(holder.get(key) is not held for holder, key, held in self._way):
            self.verify()
        self._verify_unwritten()

    def verify(self) -> None:
        """Raises RuntimeError, naming the parameter."""
        places = torch_private.places_of(self._model, self._names)
        if places != self._places:
            lost = set(self._places.values()) - set(places.values())
            changed = min(lost or {name for _, name in places.items() ^ self._places.items()})
            raise RuntimeError(
                f"{changed} was dedicated, and since then the model's parameter was replaced, or tied to another: "
                "nothing would train or save the weight that the model uses. Replace, tie and parametrize before "
                "dedicate_params; new values come in by dmuon.set_model_state_dict"
            )
        self._look()  # wrappers may have come in between
        self._verify_unwritten()

    def _verify_unwritten(self) -> None:
        versions = torch_private.versions_of(self._names)
        if versions == self._versions:
            return
        pairs = zip(self._names.items(), versions, self._versions, strict=True)
        written = {param: name for (param, name), now, before in pairs if now != before}
        self._versions = versions
        for local in (torch_private.local_tensor(param).data for param in written):
            if not any(local.stride()):  # a placeholder
                local.fill_(math.nan)
        name = next(iter(written.values()))
        raise RuntimeError(
            f"somebody has written into {name}, whose weight is at its owner: the write is lost. "
            "Write inside 'with dmuon.summon_full_params(model):', or use dmuon.set_model_state_dict"
        )
