"""At which module the unit of each dedicated parameter is hooked, and the dtypes to which the hooks cast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .classify import canonical_fqn, enclosing, is_bare_container, layer_of
from .spec import ParamSpec


def hook_boundaries(
    model: nn.Module,
    selected: Mapping[str, nn.Parameter],
    accept: Callable[[str, nn.Module], bool] | None,
    strict: bool,
) -> dict[str, str]:
    """The name of the boundary module of each selected parameter, as ``named_modules`` gives it (the first of several).

    Args:
        accept, strict: ``hook_boundary_predicate`` and ``strict_hook_boundary`` of ``dedicate_params``.

    Raises:
        ValueError: with ``strict``, a parameter around which ``accept`` takes no module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {module: name for name, module in model.named_modules()}
    fqns = {id(param): fqn for fqn, param in selected.items()}
    found: dict[str, set[str]] = defaultdict(set)
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in fqns:
            continue
        holder = name.rpartition(".")[0]
        if accept is None:
            found[fqns[id(param)]].add(layer_of(model, holder) or "")
            continue
        around = ((outer, modules[outer]) for outer in enclosing(holder))
        taken = (m for outer, m in around if accept(canonical_fqn(outer), m) and not is_bare_container(m))
        boundary = next(taken, None)
        if boundary is None and strict:
            raise ValueError(
                f"{name}: hook_boundary_predicate accepts no module around it; widen the predicate or pass "
                "strict_hook_boundary=False to hook such parameters at the root"
            )
        found[fqns[id(param)]].add(first_name[model if boundary is None else boundary])
    # A parameter that several boundaries share is needed whenever one of them runs: it belongs to the root.
    return {fqn: found[fqn].pop() if len(found[fqn]) == 1 else "" for fqn in selected}


def boundary_dtypes(name: str, specs: Iterable[ParamSpec]) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The (input, output) cast dtypes of one hook boundary; ``None`` means no cast.

    Raises:
        ValueError: its parameters disagree where the boundary as a whole needs one value.
    """
    specs = list(specs)
    _one_value(name, "grad_dtype", [spec for spec in specs if spec.trainable])
    output_dtype = _one_value(name, "output_dtype", specs)
    cast = _one_value(name, "cast_forward_inputs", specs)
    if cast is None:
        dtypes = {spec.param_dtype if spec.declares_param_dtype else None for spec in specs}
        return (dtypes.pop() if len(dtypes) == 1 else None), output_dtype
    advice = "give the boundary one param_dtype or set cast_forward_inputs to False"
    input_dtype = _one_value(name, "param_dtype", specs, "cast_forward_inputs with ", advice) if cast else None
    return input_dtype, output_dtype


def _one_value(name: str, field: str, specs: list[ParamSpec], note: str = "", advice: str = "give it one value") -> Any:
    seen = {vars(spec)[field]: spec.fqn for spec in specs}
    if len(seen) > 1:
        told = ", ".join(f"{fqn}: {value}" for value, fqn in seen.items())
        raise ValueError(f"hook boundary {name or '<root>'!r}: {note}conflicting {field} ({told}); {advice}")
    return next(iter(seen), None)
