"""Semantic parameter groups: each of the user's groups becomes ``<name>/muon`` and ``<name>/adamw``.

Pure bookkeeping over parameters and their routes; the optimizer builds its state from the result. Keys of a group, all
optional but ``params``: ``group_name``; ``lr``, ``weight_decay`` for both halves, overridden by ``muon_lr``,
``adamw_lr``, ``muon_weight_decay``, ``adamw_weight_decay``; ``momentum``, ``nesterov`` for the Muon half;
``adamw_betas``, ``adamw_eps`` for the AdamW half; and ``dmuon_route`` (also ``dmuon_optimizer``,
``matrix_optimizer``), which sends every DMuon-managed parameter of the group down one route.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..ownership.policy import ROUTES, check_state_dtype, nearest
from ..ownership.spec import ParamSpec
from ..runtime.param import DedicatedParam

_ROUTE_KEYS = ("dmuon_route", "dmuon_optimizer", "matrix_optimizer")
_KEYS = (
    *("params", "group_name", "lr", "weight_decay", "muon_lr", "adamw_lr", "muon_weight_decay"),
    *("adamw_weight_decay", "momentum", "nesterov", "adamw_betas", "adamw_eps", *_ROUTE_KEYS),
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
        dedicated: the DMuon-managed parameters; their ``spec`` gets the route that the groups force.
        specs: what ``dedicate_params`` has given them, which counts where no route is forced.
        defaults: ``muon_lr``, ``adamw_lr``, ``muon_weight_decay``, ``adamw_weight_decay``, ``momentum``, ``nesterov``,
            ``adamw_betas``, ``adamw_eps``.

    Raises:
        ValueError: an unknown key, a value out of range, a group name given twice, a parameter that is missing, in two
            groups, or not the model's (as one taken before wrapping), or a route its storage cannot take.
    """
    by_param = {dp.param: dp for dp in dedicated}
    if groups is None:
        # Frozen dedicated parameters are listed too: they have an owner, if no state.
        frozen = [dp.param for dp in dedicated if not dp.spec.trainable]
        values = _checked("", dict(defaults))
        _set_specs(dedicated, specs, {})
        return _halves("", [*trainable.values(), *frozen], by_param, values)
    names = {param: name for name, param in trainable.items()}
    placed: dict[nn.Parameter, str] = {}
    forced: dict[nn.Parameter, ParamSpec] = {}
    checked = []
    for position, group in enumerate(groups):
        where = f"param_groups[{position}]"
        for key in group:
            if key not in _KEYS:
                raise ValueError(f"{where}: unknown key {key!r}{nearest(key, _KEYS)}; known: {', '.join(_KEYS)}")
        if "params" not in group:
            raise ValueError(f"{where}: 'params' is missing")
        params = _tensors(group["params"], where)
        name = group.get("group_name", f"group{position}")
        if name in placed.values():
            raise ValueError(f"{where}: group_name {name!r} is given twice")
        params = _placed(params, name, where, names, placed)
        forced |= _forced_route(group, params, specs, where)
        checked.append((f"{name}/", params, _hyperparameters(group, defaults, where)))
    missing = [name for name, param in trainable.items() if param not in placed]
    if missing:
        raise ValueError(
            f"param_groups leave out {len(missing)} trainable parameters, {missing[0]} among them; every trainable "
            "parameter needs a group"
        )
    _set_specs(dedicated, specs, forced)  # only now that nothing can go wrong any more
    return [half for prefix, params, values in checked for half in _halves(prefix, params, by_param, values)]


def _tensors(given: Any, where: str) -> list[torch.Tensor]:
    """One tensor, or several, each by itself or after its name, as PyTorch takes them."""
    entries = [given] if isinstance(given, torch.Tensor) else list(given)
    params = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in entries]
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ValueError(f"{where}: params must be tensors or pairs (name, tensor), got {param!r}")
    return params


def _set_specs(
    dedicated: Sequence[DedicatedParam],
    specs: Mapping[nn.Parameter, ParamSpec],
    forced: Mapping[nn.Parameter, ParamSpec],
) -> None:
    """All of them: what an earlier optimizer has forced ends with it."""
    for dp in dedicated:
        dp.spec = forced.get(dp.param, specs[dp.param])


def _placed(
    params: Iterable[nn.Parameter],
    group: str,
    where: str,
    names: Mapping[nn.Parameter, str],
    placed: dict[nn.Parameter, str],
) -> list[nn.Parameter]:
    """The trainable ones among ``params``, noted in ``placed``."""
    kept = []
    for param in params:
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
        kept.append(param)
    return kept


def _forced_route(
    group: Mapping[str, Any], params: list[nn.Parameter], specs: Mapping[nn.Parameter, ParamSpec], where: str
) -> dict[nn.Parameter, ParamSpec]:
    """The specs of the group's dedicated parameters on the route it forces."""
    routes = {group[key] for key in _ROUTE_KEYS if group.get(key) is not None}
    if not routes:
        return {}
    forced = {}
    if len(routes) > 1:
        raise ValueError(f"{where}: {' and '.join(_ROUTE_KEYS)} say different things: {sorted(routes)}")
    (route,) = routes
    if route not in ROUTES:
        raise ValueError(f"{where}: unknown route {route!r}{nearest(route, ROUTES)}; known: {', '.join(ROUTES)}")
    for param, spec in ((param, specs[param]) for param in params if param in specs):
        if (route == "sharded_adamw") != (spec.route == "sharded_adamw"):
            raise ValueError(
                f"{where}: {spec.fqn} was dedicated on route {spec.route!r} and stored for it; choose {route!r} in "
                "dedicate_params(param_policy=...)"
            )
        if route == "muon" and len(spec.shape) not in (2, 3):
            raise ValueError(f"{where}: {spec.fqn} has shape {list(spec.shape)}; the muon route needs matrices")
        forced[param] = replace(spec, route=route)
        check_state_dtype(forced[param])
    return forced


def _hyperparameters(group: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = dict(defaults)
    for both in ("lr", "weight_decay"):
        if both in group:
            values |= {f"muon_{both}": group[both], f"adamw_{both}": group[both]}
    values |= {key: group[key] for key in values if key in group}
    return _checked(f"{where}: ", values)


def _checked(where: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values with betas as a tuple. Raises ValueError for a wrong type, length or range."""
    betas = values["adamw_betas"]
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{where}adamw_betas must be two numbers, got {betas!r}")
    values["adamw_betas"] = tuple(betas)
    if not isinstance(values["nesterov"], bool):
        raise ValueError(f"{where}nesterov must be True or False, got {values['nesterov']!r}")
    ranges = {key: values[key] for key in values if key not in ("nesterov", "adamw_betas")}
    ranges |= {f"adamw_betas[{index}]": beta for index, beta in enumerate(values["adamw_betas"])}
    for key, value in ranges.items():
        # A learning rate may be a tensor, as in PyTorch.
        if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.Tensor):
            raise ValueError(f"{where}{key} must be a number, got {value!r}")
        below_one = key == "momentum" or key.startswith("adamw_betas")
        if not 0.0 <= value < (1.0 if below_one else math.inf):
            raise ValueError(f"{where}{key} is out of range: {value}")
    return values


def check_half(where: str, half: Mapping[str, Any]) -> None:
    """Raises ValueError for hyperparameters of a lowered group (``lr``, ``betas``, ...) that no group could have."""
    neutral = {"adamw_betas": (0.0, 0.0), "nesterov": True}
    names = {"betas": "adamw_betas", "eps": "adamw_eps", "nesterov": "nesterov"}
    known = ("lr", "weight_decay", "momentum", "betas", "eps", "nesterov")
    _checked(where, neutral | {names.get(key, key): half[key] for key in known if key in half})


def _halves(
    prefix: str,
    params: list[nn.Parameter],
    by_param: Mapping[nn.Parameter, DedicatedParam],
    values: Mapping[str, Any],
) -> list[dict[str, Any]]:
    muon = [param for param in params if param in by_param and by_param[param].spec.route == "muon"]
    chosen = set(muon)
    halves = [
        {
            "params": muon,
            "group_name": f"{prefix}muon",
            "lr": values["muon_lr"],
            "momentum": values["momentum"],
            "nesterov": values["nesterov"],
            "weight_decay": values["muon_weight_decay"],
        },
        {
            "params": [param for param in params if param not in chosen],
            "group_name": f"{prefix}adamw",
            "lr": values["adamw_lr"],
            "betas": values["adamw_betas"],
            "weight_decay": values["adamw_weight_decay"],
            "eps": values["adamw_eps"],
        },
    ]
    return [half for half in halves if half["params"]]
