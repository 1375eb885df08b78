"""``Muon.state_dict`` and ``load_state_dict``: state by parameter name, the same keys on every rank.

A state dict is ``{"state": {fqn: {name: tensor}}, "param_groups": [...], "muon": {...}}``. Tensors are live, as DCP
saves and loads them in place; where another rank holds one, this rank has a ``Chunks`` without parts under its name.
``muon`` records what the momentum is and what turned it into updates. One made from other optimizers may also have
``fresh``, the names of parameters whose state starts anew: those optimizers make none before a first gradient.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..optimizer.adamw import new_state
from ..optimizer.groups import check_half
from ..runtime.param import Piece
from .pieces import Chunks, logical_tensors, parts_of

if TYPE_CHECKING:
    from ..optimizer.muon import Muon

logger = logging.getLogger(__name__)

HEAVY_BALL, EMA = "heavy_ball", "ema"


def muon_recipe(optimizer: Muon) -> dict[str, Any]:
    """What a state dict records of how the state was made; plain data."""
    newton_schulz, rule = optimizer.newton_schulz, optimizer.rule
    return {
        "momentum_form": HEAVY_BALL,
        "coefficients": [list(abc) for abc in newton_schulz.coefficients],
        "scale": rule.scale,
        "normuon_beta2": rule.normuon_beta2,
        "cautious_weight_decay": rule.cautious_weight_decay,
    }


def check_muon_recipe(saved: Mapping[str, Any], optimizer: Muon, source: str = "the state dict") -> None:
    """Say what differs between a saved recipe and this optimizer's.

    Raises:
        ValueError: the momentum has another form. What only changes the next updates is logged as a warning.
    """
    form = saved.get("momentum_form", HEAVY_BALL)
    if form != HEAVY_BALL:
        raise ValueError(
            f"{source} holds {form!r} momentum, this optimizer keeps {HEAVY_BALL!r} (M = mu M + G): convert it with "
            "dmuon.convert_ema_momentum"
        )
    for key, here in muon_recipe(optimizer).items():
        if key in saved and saved[key] != here:
            logger.warning("%s was made with %s %s, this optimizer has %s", source, key, saved[key], here)


def optimizer_state_dict(optimizer: Muon) -> dict[str, Any]:
    """As :meth:`Muon.state_dict`. Not collective."""
    names = optimizer.names
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
    state = {fqn: values for fqn, values in live_state(optimizer).items() if values}
    return {"state": state, "param_groups": groups, "muon": muon_recipe(optimizer)}


def live_state(optimizer: Muon) -> dict[str, dict[str, torch.Tensor]]:
    """Name of the parameter -> name of the state -> the live tensor, created where no step has been taken yet; the same
    names on every rank."""
    held: dict[str, dict[Piece, torch.Tensor]] = defaultdict(dict)
    for piece in optimizer.runtime.owned:
        if piece.spec.trainable:
            for key, value in optimizer.state_of(piece).items():
                held[key][piece] = value
    owned = {key: logical_tensors(values) for key, values in held.items()}
    dedicated = {dp.param: dp for dp in optimizer.runtime.params}
    plain_groups = [group for _, plain in optimizer.plain_adamw for group in plain.param_groups]
    fused = {id(param): group["fused"] for group in plain_groups for param in group["params"]}
    state: dict[str, dict[str, torch.Tensor]] = {}
    for param, fqn in optimizer.names.items():
        if param in dedicated:
            expected = optimizer.state_layout(dedicated[param]) if dedicated[param].spec.trainable else {}
            absent = {key: Chunks.absent(shape, dtype) for key, (shape, dtype) in expected.items()}
            state[fqn] = absent | {key: tensors[fqn] for key, tensors in owned.items() if fqn in tensors}
        elif id(param) in fused:
            if param not in optimizer.state:
                optimizer.state[param] = new_state(param, param.device if fused[id(param)] else "cpu")
            state[fqn] = dict(optimizer.state[param])
    return state


@torch.no_grad()
def load_optimizer_state_dict(optimizer: Muon, saved: Mapping[str, Any]) -> None:
    """As :meth:`Muon.load_state_dict`. Everything is checked before anything changes. Not collective."""
    if "state" not in saved:
        raise ValueError(f"this is no state dict of Muon: it has no 'state', only {sorted(saved)}")
    check_muon_recipe(saved.get("muon", {}), optimizer)
    updates = _group_updates(optimizer, saved["param_groups"]) if "param_groups" in saved else []
    copies = []
    fresh = set(saved.get("fresh", ()))
    for fqn, values in live_state(optimizer).items():
        for key, live in values.items():
            if fqn in fresh:
                copies.append((live, [torch.zeros_like(part) for part, _ in parts_of(live)[1]]))
                continue
            if key not in saved["state"].get(fqn, {}):
                told = sorted(saved["state"].get(fqn, {})) or "nothing"
                raise ValueError(f"{fqn}: the state dict has {told} of it, {key} is missing")
            copies.append((live, _matching(f"{fqn}.{key}", live, saved["state"][fqn][key])))
    unknown = sorted(saved["state"].keys() - set(optimizer.names.values()))
    if unknown:
        raise ValueError(f"the state dict has {unknown[0]}, which this optimizer has not")
    for live, parts in copies:
        for (part, _), values in zip(parts_of(live)[1], parts, strict=True):
            part.copy_(values)
    for group, values in updates:
        group.update(values)


def _group_updates(optimizer: Muon, saved: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    by_name = {group["group_name"]: group for group in saved}
    updates = []
    for group in optimizer.param_groups:
        name = group["group_name"]
        if name not in by_name:
            raise ValueError(f"the state dict has no group {name!r}, only {', '.join(map(repr, by_name))}")
        here, there = {optimizer.names[p] for p in group["params"]}, set(by_name[name]["params"])
        if here != there:
            raise ValueError(f"group {name!r} has other parameters in the state dict: {min(here ^ there)} differs")
        values = {key: value for key, value in by_name[name].items() if key != "params"}
        missing = sorted(group.keys() - values.keys() - {"params", "initial_lr"})
        if missing:
            raise ValueError(f"group {name!r} of the state dict has no {missing[0]}")
        check_half(f"group {name!r} of the state dict: ", values)
        updates.append((group, values))
    return updates


def _matching(name: str, live: torch.Tensor, saved: torch.Tensor) -> list[torch.Tensor]:
    """The values of ``saved`` for each part of ``live`` that this rank holds.

    Raises:
        ValueError: another shape, or a rank's part that is not the one held here.
    """
    whole, parts = parts_of(live)
    if not isinstance(saved, torch.Tensor):
        raise ValueError(f"{name} is a {type(saved).__name__} in the state dict, expected a tensor")
    if type(saved) in (torch.Tensor, torch.nn.Parameter):
        if tuple(saved.shape) != tuple(whole):
            raise ValueError(f"{name} has shape {list(saved.shape)} in the state dict, here {list(whole)}")
        return [saved[tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))] for part, at in parts]
    other_whole, held = parts_of(saved)
    found = {at: part for part, at in held}
    if tuple(other_whole) != tuple(whole) or any(
        at not in found or found[at].shape != part.shape for part, at in parts
    ):
        raise ValueError(f"{name}: the state dict has another part of it than this rank; load it through DCP")
    return [found[at] for _, at in parts]


# -------------------------------------------------------------------- state of other optimizers


def convert_ema_momentum(state: Mapping[str, Any], momentum: float) -> dict[str, Any]:
    """A state dict whose momentum buffers are averages, ``M = mu M + (1 - mu) G`` (Keller Jordan's, PyTorch's and many
    others), as the sums that :class:`Muon` keeps: both give the same direction. Buffers are copied.

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
    """The states of a one-process run with ``torch.optim.Muon`` and ``torch.optim.AdamW`` as one for
    :meth:`Muon.load_state_dict`. Hyperparameters are not taken over. Parameters that never had a gradient start anew.

    Args:
        muon, adamw: ``state_dict()`` of each.
        muon_names, adamw_names: names of their parameters, in the order in which they were given; not needed where the
            optimizers were built from ``named_parameters()``.

    Raises:
        ValueError: names that are missing, or not as many as parameters.
    """
    state: dict[str, dict[str, torch.Tensor]] = {}
    fresh: list[str] = []
    for what, saved, names in (("muon", muon, muon_names), ("adamw", adamw, adamw_names)):
        for group, fqns in _named_groups(what, saved, names):
            part = {fqn: dict(saved["state"][index]) for index, fqn in fqns.items() if index in saved["state"]}
            if what == "muon":
                part = convert_ema_momentum({"state": part}, group["momentum"])["state"]
            state |= part
            fresh += [fqn for index, fqn in fqns.items() if index not in saved["state"]]
    return {"state": state, "muon": {"momentum_form": HEAVY_BALL}, "fresh": fresh}


def _named_groups(
    what: str, saved: Mapping[str, Any], names: Iterable[str] | None
) -> list[tuple[Mapping[str, Any], dict[int, str]]]:
    """Each group with the names of its parameters by their index."""
    groups = saved["param_groups"]
    if names is None:
        if any("param_names" not in group for group in groups):
            raise ValueError(
                f"the {what} state has no parameter names: pass {what}_names, or build the optimizer from "
                "named_parameters()"
            )
        return [(group, dict(zip(group["params"], group["param_names"], strict=True))) for group in groups]
    names = list(names)
    indices = [index for group in groups for index in group["params"]]
    if len(names) != len(indices):
        raise ValueError(f"{len(names)} {what}_names for {len(indices)} parameters")
    named = dict(zip(indices, names, strict=True))
    return [(group, {index: named[index] for index in group["params"]}) for group in groups]
