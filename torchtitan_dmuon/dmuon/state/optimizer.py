"""The state of an optimizer as plain data: ``{fqn: {state name: tensor}}``, the same keys on every rank.

The tensors are live, as DCP saves and loads them in place. Where other ranks hold one, this rank has a
``PartialTensor`` without parts under its name.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch

logger = logging.getLogger(__name__)

State = dict[str, dict[str, torch.Tensor]]

HEAVY_BALL = "heavy_ball"  # the form of Muon's momentum, M = mu M + G


def adamw_state(adamw: torch.optim.AdamW, names: Mapping[torch.Tensor, str]) -> State:
    """The state of the parameters of ``adamw`` that ``names`` names. Where AdamW has taken no step yet, its state is
    created, so that DCP can load into it."""
    state: State = {}
    for group in adamw.param_groups:
        for param in (param for param in group["params"] if param in names):
            if param not in adamw.state:
                step = torch.zeros((), dtype=torch.float32, device=param.device if group["fused"] else "cpu")
                moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                adamw.state[param] = {"step": step, **moments}
            state[names[param]] = dict(adamw.state[param])
    return state


def flat_view(state: State) -> dict[str, torch.Tensor]:
    """The same tensors as ``<fqn>.<state name>``."""
    return {f"{fqn}.{name}": tensor for fqn, values in state.items() for name, tensor in values.items()}


class ByName(dict):
    """The ``state`` of an optimizer's state dict. ``torch.distributed.checkpoint.state_dict`` takes entries out by
    number to put them back by name; of these, named already, it would lose those of other owners."""

    def pop(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict does not know of owners: use dmuon.get_optimizer_state_dict("
            "model, optimizer) in place of get_optimizer_state_dict, or hand optimizer.state_dict() to dcp.save"
        )

    def __reduce__(self) -> tuple:
        return OrderedDict, (), None, None, iter(self.items())  # torch.load takes it without knowing this class


def tell_frozen(named: Iterable[str], frozen: Collection[str]) -> None:
    """Say once that a state dict has the state of parameters that are frozen now, and that nobody takes it."""
    if left_out := sorted({*named}.intersection(frozen)):
        message = "the state dict has the state of %d parameters that are frozen now: it is left out (%s%s)"
        logger.warning(message, len(left_out), left_out[0], ", ..." if len(left_out) > 1 else "")


def convert_ema_momentum(state: Mapping[str, Any], momentum: float) -> dict[str, Any]:
    """Turn momentum buffers that are averages, ``M = mu M + (1 - mu) G`` (Keller Jordan's, PyTorch's and many others),
    into the sums that :class:`Muon` keeps: both give the same direction. Buffers are copied.

    Args:
        state: ``{"state": {fqn: {"momentum_buffer": tensor, ...}}, ...}``.
        momentum: mu.
    """
    converted = {
        fqn: {key: value / (1.0 - momentum) if key == "momentum_buffer" else value for key, value in values.items()}
        for fqn, values in state["state"].items()
    }
    return {**state, "state": converted, "muon": {**state.get("muon", {}), "momentum_form": HEAVY_BALL}}


def state_dict_from_torch(
    muon: Mapping[str, Any],
    adamw: Mapping[str, Any],
    muon_names: Iterable[str] | None = None,
    adamw_names: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Turn the states of a one-process run with ``torch.optim.Muon`` and ``torch.optim.AdamW`` into one state dict for
    :meth:`Muon.load_state_dict`. Hyperparameters are not taken over. Parameters that never had a gradient start anew.

    Args:
        muon, adamw: ``state_dict()`` of each.
        muon_names, adamw_names: names of their parameters, in the order in which they were given; not needed where the
            optimizers were built from ``named_parameters()``. Too few or none: ValueError.
    """
    state: State = {}
    fresh: list[str] = []
    for optimizer, saved, names in (("muon", muon, muon_names), ("adamw", adamw, adamw_names)):
        groups = saved["param_groups"]
        if names is None:
            names = [name for group in groups for name in group.get("param_names", ())]
        indices, names = [index for group in groups for index in group["params"]], list(names)
        if not names and indices:
            raise ValueError(
                f"the {optimizer} state has no parameter names: pass {optimizer}_names, or build the optimizer from "
                "named_parameters()"
            )
        if len(names) != len(indices):
            raise ValueError(f"{len(names)} {optimizer}_names for {len(indices)} parameters")
        name_of = dict(zip(indices, names, strict=True))
        for group in groups:
            held = {name_of[i]: dict(saved["state"][i]) for i in group["params"] if i in saved["state"]}
            if optimizer == "muon":
                held = convert_ema_momentum({"state": held}, group["momentum"])["state"]
            state |= held
            fresh += [name_of[i] for i in group["params"] if i not in saved["state"]]
    return {"state": state, "muon": {"momentum_form": HEAVY_BALL}, "fresh": fresh}
