"""Which route, dtypes and blocks each dedicated parameter gets, by names, shapes and the user's rules: ``param_policy``
(defaults, then overrides in their order) and ``route_hint_fn`` (routes only). Pure."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .spec import BlockSplit, ParamSpec, Selection, canonical_fqn

logger = logging.getLogger(__name__)

# muon: an owner runs Muon. adamw: an owner runs AdamW. sharded_adamw: every rank runs AdamW on its rows.
ROUTES = ("muon", "adamw", "sharded_adamw")

_DTYPE_KEYS = ("param_dtype", "grad_dtype", "master_dtype", "optim_dtype", "output_dtype")
_NONE = {"grad_dtype": torch.float32, "output_dtype": None}  # the keys whose value may be None, and what None means
_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_DTYPES = _SHORT | {str(dtype).removeprefix("torch."): dtype for dtype in _SHORT.values()}
SETTABLE = ("route", *_DTYPE_KEYS, "cast_forward_inputs", "stack", "transposed", "blocks")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: `` (did you mean 'x'?)``, or nothing if no known word is like ``word``."""
    match = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def matches(pattern: str, fqn: str) -> bool:
    """Whether a rule's pattern matches a name: ``re:...`` is a regular expression to search for, a pattern with one of
    ``*?[`` a glob over the whole name, any other a substring."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], fqn) is not None
    return fnmatch.fnmatchcase(fqn, pattern) if set(pattern) & set("*?[") else pattern in fqn


def resolve_specs(
    selection: Selection,
    param_policy: Mapping[str, Any] | None,
    route_hint_fn: Callable[[str, nn.Parameter], str | None] | None,
    layouts: Mapping[str, Mapping[str, Any]],
) -> dict[str, ParamSpec]:
    """Apply the rules to the selected parameters; a rule may use any name of a tied one.

    Precedence, field by field: ``layouts`` (of ``fused_weights.py``) and built-in defaults <
    ``param_policy["defaults"]`` < ``route_hint_fn`` < overrides in their order (the last match wins). A vector or a
    scalar that ends on ``muon`` goes to ``adamw``, with a reason that says so, unless an override has named it exactly:
    then it is an error.

    Raises ValueError for an unknown key, route or dtype; blocks that do not fit; an override that matches none of the
    selected parameters; a shape or a dtype that the route cannot take; a dtype that no gradient can have.
    """
    defaults, overrides = _parse(param_policy)
    specs: dict[str, ParamSpec] = {}
    names = {fqn: set(map(canonical_fqn, each)) for fqn, each in selection.names.items()}
    exact: dict[str, bool] = {}  # whether the override that chose the route names the parameter in full
    for fqn, param in selection.params.items():
        spec = ParamSpec(
            fqn, tuple(param.shape), "muon", param.requires_grad, param.dtype,
            reason=selection.reasons[fqn], **layouts.get(fqn, {}),
        )  # fmt: skip
        specs[fqn] = spec = replace(spec, **defaults)
        if route_hint_fn is not None and (hint := route_hint_fn(fqn, param)) is not None:
            specs[fqn] = replace(spec, route=_check("route", hint, f"route_hint_fn({fqn!r})"))
    for where, patterns, values in overrides:
        found: set[str] = set()
        for fqn, spec in specs.items():
            hits = {pattern for pattern in patterns if any(matches(pattern, name) for name in names[fqn])}
            if hits:
                found |= hits
                specs[fqn] = replace(spec, **values)
                if "route" in values:
                    exact[fqn] = not hits.isdisjoint(names[fqn])
        if not found:
            alike = next(filter(None, (nearest(pattern, specs) for pattern in patterns)), "")
            told = " or ".join(map(repr, patterns))
            raise ValueError(f"{where}: {told} matches none of the {len(specs)} selected parameters{alike}")
        if unused := [pattern for pattern in patterns if pattern not in found]:
            logger.info("%s: no selected parameter matches %s", where, ", ".join(map(repr, unused)))
    for fqn, spec in specs.items():
        if spec.route == "muon" and len(spec.shape) < 2 and not exact.get(fqn):
            reason = f"{len(spec.shape)}-D: adamw, not muon"
            spec = replace(spec, route="adamw", optim_dtype=spec.master_dtype, reason=reason)
        specs[fqn] = spec = _resolve_blocks(spec)
        check_route(spec)
        if spec.grad_dtype not in (torch.float32, torch.bfloat16, torch.float64):
            advice = "use torch.float32 or torch.bfloat16"
            raise ValueError(f"{fqn}: grad_dtype {spec.grad_dtype} overflows in a sum over ranks; {advice}")
    return specs


def _resolve_blocks(spec: ParamSpec) -> ParamSpec:
    """Turn a rule's function into a split, which must cut the matrix exactly. Off the muon route blocks that do not fit
    are dropped; blocks that fit are kept, since a parameter group may still force the parameter onto that route."""
    if spec.blocks is None or len(spec.shape) not in (2, 3):
        return replace(spec, blocks=None)
    try:
        blocks = spec.blocks(spec.shape) if callable(spec.blocks) else spec.blocks
        blocks.check(spec.shape)
    except ValueError as error:
        if spec.route == "muon":
            raise ValueError(f"{spec.fqn}: {error}") from None
        return replace(spec, blocks=None)
    return replace(spec, blocks=blocks if len(blocks.blocks) > 1 else None)


def _parse(policy: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[tuple[str, list[str], dict[str, Any]]]]:
    """The checked defaults, and (where it stands, patterns, values) of every override."""
    policy = policy or {}
    for key in policy:
        if key not in ("defaults", "overrides"):
            raise ValueError(f"param_policy: unknown key {key!r}{nearest(key, ('defaults', 'overrides'))}")
    defaults = _fields(policy.get("defaults", {}), "param_policy defaults")
    overrides = []
    for position, rule in enumerate(policy.get("overrides", ())):
        where = f"param_policy overrides[{position}]"
        if set(rule) != {"name", "set"}:
            raise ValueError(f"{where}: needs exactly the keys 'name' and 'set', got {sorted(rule)}")
        patterns = [rule["name"]] if isinstance(rule["name"], str) else list(rule["name"])
        if not patterns:
            raise ValueError(f"{where}: 'name' is empty, so the rule matches nothing")
        overrides.append((where, patterns, _fields(rule["set"], where)))
    return defaults, overrides


def _fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    checked = {key: _check(key, value, where) for key, value in values.items()}
    return checked | ({"declares_param_dtype": True} if "param_dtype" in checked else {})


def _check(key: str, value: Any, where: str) -> Any:
    """The value as :class:`ParamSpec` has it."""
    if key not in SETTABLE:
        raise ValueError(f"{where}: unknown key {key!r}{nearest(key, SETTABLE)}; known: {', '.join(SETTABLE)}")
    if key == "route" and value not in ROUTES:
        raise ValueError(f"{where}: unknown route {value!r}{nearest(value, ROUTES)}; known: {', '.join(ROUTES)}")
    if value is None and key in _NONE:
        return _NONE[key]
    if key in _DTYPE_KEYS:
        dtype = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            known = ", ".join(map(repr, _DTYPES))
            raise ValueError(f"{where}: {key} must be a floating torch.dtype or its name ({known}), got {value!r}")
        return dtype
    if key in ("cast_forward_inputs", "stack", "transposed") and not isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be True or False, got {value!r}")
    if key == "blocks" and not (value is None or callable(value) or isinstance(value, BlockSplit)):
        splits = "dmuon.split_sizes, split_equal, split_heads, split_interleaved"
        raise ValueError(f"{where}: blocks must be a split ({splits}), a function of the shape, or None, got {value!r}")
    return value


def check_route(spec: ParamSpec, where: str = "") -> None:
    """Raises ValueError, its message after ``where``, for a parameter whose shape or dtypes the route cannot take."""
    name, shape = f"{where}{spec.fqn}", list(spec.shape)
    if spec.route == "muon" and len(shape) != 2 and not (spec.stack and len(shape) == 3):
        remedies = ["give the parameter route 'adamw'", "leave it out of the predicate"]
        if len(shape) > 2:
            remedies.append(f"store it flat ({[shape[0], math.prod(shape[1:])]})")
        if len(shape) == 3:
            rule = f"{{'name': {spec.fqn!r}, 'set': {{'stack': True}}}}"
            remedies.insert(0, f"declare it a stack of {shape[0]} matrices by the param_policy override {rule}")
        problem = f"the muon route needs a matrix or a stack of matrices, this parameter has shape {shape}"
        raise ValueError(f"{name}: {problem}; {', or '.join(remedies)}")
    if spec.route == "sharded_adamw" and not shape:
        raise ValueError(f"{name}: the sharded_adamw route needs rows to share, this parameter is a scalar")
    if spec.route != "muon" and spec.trainable and spec.optim_dtype != spec.master_dtype:  # no fused AdamW takes it
        dtypes = f"optim_dtype ({spec.optim_dtype}) must be master_dtype ({spec.master_dtype})"
        raise ValueError(f"{name}: on route {spec.route!r} {dtypes}")
