"""Semantic parameter groups: each of the user's groups becomes ``<name>/muon`` and ``<name>/adamw``.

Keys of a group, all optional but ``params``: ``group_name``; ``lr``, ``weight_decay`` for both halves, overridden by
``muon_lr``, ``adamw_lr``, ``muon_weight_decay``, ``adamw_weight_decay``; ``momentum``, ``nesterov`` for the Muon half;
``adamw_betas``, ``adamw_eps`` for the AdamW half; and ``dmuon_route`` (also ``dmuon_optimizer``, ``matrix_optimizer``),
which sends every DMuon-managed parameter of the group down one route.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..ownership.policy import ROUTES, check_route, nearest
from ..ownership.spec import ParamSpec
from ..runtime.param import DedicatedParam

# Of each half: its hyperparameter -> the user's key.
_HALVES = {
    "muon": {"lr": "muon_lr", "momentum": "momentum", "nesterov": "nesterov", "weight_decay": "muon_weight_decay"},
    "adamw": {"lr": "adamw_lr", "betas": "adamw_betas", "weight_decay": "adamw_weight_decay", "eps": "adamw_eps"},
}
_ROUTE_KEYS = ("dmuon_route", "dmuon_optimizer", "matrix_optimizer")
_KEYS = (
    *("params", "group_name", "lr", "weight_decay", *_ROUTE_KEYS),
    *(key for half in _HALVES.values() for key in half.values()),
)


def lower_param_groups(
    groups: Sequence[Mapping[str, Any]] | None,
    trainable: Mapping[str, nn.Parameter],
    dedicated: Sequence[DedicatedParam],
    specs: Mapping[nn.Parameter, ParamSpec],
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """PyTorch parameter groups, Muon halves and AdamW halves, with the same content on every rank.

    Args:
        groups: the user's; ``None`` for one group of everything, whose halves are called ``muon`` and ``adamw``.
        trainable: every parameter that must be in one group, by name.
        dedicated: their ``spec`` gets the route that the groups force.
        specs: of ``dedicate_params``; they count where no route is forced.
        defaults: the hyperparameters of both halves by the user's keys (``muon_lr``, ...).

    Raises:
        ValueError: an unknown key, a value out of range, a group name given twice, a parameter that is missing, in two
            groups, or not the model's (as one taken before wrapping), or a route its storage cannot take.
    """
    names = {param: name for name, param in trainable.items()}
    placed: dict[nn.Parameter, str] = {}
    forced: dict[nn.Parameter, ParamSpec] = {}
    lowered = []
    for position, group in enumerate(groups or ()):
        where = f"param_groups[{position}]"
        for key in group:
            if key not in _KEYS:
                raise ValueError(f"{where}: unknown key {key!r}{nearest(key, _KEYS)}; known: {', '.join(_KEYS)}")
        if "params" not in group:
            raise ValueError(f"{where}: 'params' is missing")
        name = group.get("group_name", f"group{position}")
        if name in placed.values():
            raise ValueError(f"{where}: group_name {name!r} is given twice")
        params = _place(group["params"], name, where, names, placed)
        forced |= _forced_route(group, params, specs, where)
        lowered.append((f"{name}/", params, _hyperparameters(f"{where}: ", group, defaults)))
    if groups is None:  # frozen dedicated parameters are listed too: they have an owner, if no state
        frozen = [dp.param for dp in dedicated if not dp.spec.trainable]
        lowered.append(("", [*names, *frozen], _hyperparameters("", {}, defaults)))
    elif missing := [name for param, name in names.items() if param not in placed]:
        raise ValueError(
            f"param_groups leave out {len(missing)} trainable parameters, {missing[0]} among them; every trainable "
            "parameter needs a group"
        )
    for dp in dedicated:  # only now that nothing can go wrong any more; what an earlier optimizer has forced ends
        dp.spec = forced.get(dp.param, specs[dp.param])
    matrices = {dp.param for dp in dedicated if dp.spec.route == "muon"}
    halves = []
    for prefix, params, values in lowered:
        for half, keys in _HALVES.items():
            chosen = [param for param in params if (param in matrices) == (half == "muon")]
            if chosen:
                hyperparameters = {name: values[key] for name, key in keys.items()}
                halves.append({"params": chosen, "group_name": f"{prefix}{half}", **hyperparameters})
    return halves


def _place(given: Any, group: str, where: str, names: Mapping[nn.Parameter, str], placed: dict) -> list[nn.Parameter]:
    """The trainable ones among ``given``, noted in ``placed`` (parameter -> group): one tensor, or several, each by
    itself or after its name, as PyTorch takes them."""
    entries = [given] if isinstance(given, torch.Tensor) else list(given)
    params = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in entries]
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ValueError(f"{where}: params must be tensors or pairs (name, tensor), got {param!r}")
        if not param.requires_grad:
            continue
        if param not in names:
            raise ValueError(
                f"{where}: a parameter of shape {list(param.shape)} is not the model's; build groups from "
                "named_parameters() after dedicate_params and fully_shard, which replace parameters"
            )
        if param in placed:
            raise ValueError(f"{where}: {names[param]} is in group {placed[param]!r} already")
        placed[param] = group
    return [param for param in params if param.requires_grad]


def _forced_route(
    group: Mapping[str, Any], params: list[nn.Parameter], specs: Mapping[nn.Parameter, ParamSpec], where: str
) -> dict[nn.Parameter, ParamSpec]:
    """The specs of the group's dedicated parameters on the route it forces."""
    routes = {group[key] for key in _ROUTE_KEYS if group.get(key) is not None}
    if not routes:
        return {}
    if len(routes) > 1:
        raise ValueError(f"{where}: {' and '.join(_ROUTE_KEYS)} say different things: {sorted(routes)}")
    (route,) = routes
    if route not in ROUTES:
        raise ValueError(f"{where}: unknown route {route!r}{nearest(route, ROUTES)}; known: {', '.join(ROUTES)}")
    forced = {}
    for param, spec in ((param, specs[param]) for param in params if param in specs):
        if (route == "sharded_adamw") != (spec.route == "sharded_adamw"):
            raise ValueError(
                f"{where}: {spec.fqn} was dedicated on route {spec.route!r} and stored for it; choose {route!r} in "
                "dedicate_params(param_policy=...)"
            )
        forced[param] = replace(spec, route=route)
        check_route(forced[param], f"{where}: ")
    return forced


def _hyperparameters(where: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``group``, else the defaults, by the user's keys for each half."""
    values = dict(defaults)
    for both in ("lr", "weight_decay"):
        if both in group:
            values |= {f"muon_{both}": group[both], f"adamw_{both}": group[both]}
    values |= {key: group[key] for key in values if key in group}
    for key, value in values.items():
        _check_value(where, key, value)
    return values | {"adamw_betas": tuple(values["adamw_betas"])}


def _check_value(where: str, key: str, value: Any) -> None:
    """Raises ValueError for a wrong type, length or range."""
    if key == "nesterov":
        if not isinstance(value, bool):
            raise ValueError(f"{where}nesterov must be True or False, got {value!r}")
        return
    numbers_of = {key: value}
    if key == "adamw_betas":
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
            raise ValueError(f"{where}adamw_betas must be two numbers, got {value!r}")
        numbers_of = {f"adamw_betas[{index}]": beta for index, beta in enumerate(value)}
    for name, number in numbers_of.items():
        # A learning rate may be a tensor, as in PyTorch.
        if isinstance(number, bool) or not isinstance(number, numbers.Real | torch.Tensor):
            raise ValueError(f"{where}{name} must be a number, got {number!r}")
        if not 0.0 <= number < (1.0 if key in ("momentum", "adamw_betas") else math.inf):
            raise ValueError(f"{where}{name} is out of range: {number}")


def saved_hyperparameters(
    groups: Sequence[dict[str, Any]],
    names: Mapping[torch.Tensor, str],
    saved: Sequence[Mapping[str, Any]],
    frozen: Set[str],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each of an optimizer's groups with its hyperparameters in a state dict.

    Raises:
        ValueError: a group or a hyperparameter is missing, has other parameters (but for ``frozen`` ones), or could
            not be set.
    """
    by_name = {group["group_name"]: group for group in saved}
    updates = []
    for group in groups:
        name = group["group_name"]
        if name not in by_name:
            raise ValueError(f"the state dict has no group {name!r}, only {', '.join(map(repr, by_name))}")
        here, there = {names[p] for p in group["params"]}, set(by_name[name]["params"])
        if differing := (here ^ there) - frozen:
            raise ValueError(f"group {name!r} has other parameters in the state dict: {min(differing)} differs")
        values = {key: value for key, value in by_name[name].items() if key != "params"}
        missing = sorted(group.keys() - values.keys() - {"params", "initial_lr"})
        if missing:
            raise ValueError(f"group {name!r} of the state dict has no {missing[0]}")
        for key, users_key in _HALVES[name.rpartition("/")[2]].items():
            _check_value(f"group {name!r} of the state dict: ", users_key, values[key])
        updates.append((group, values))
    return updates
