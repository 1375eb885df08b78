"""At which module the unit of each dedicated parameter is hooked, and the dtypes to which the hooks cast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .classify import canonical_fqn, enclosing, is_bare_container, layer_of
from .spec import ParamSpec


def hook_boundaries(
    model: nn.Module,
    names: Mapping[str, Iterable[str]],
    accept: Callable[..., bool] | None,
    strict: bool,
) -> dict[str, str]:
    """The name of each parameter's boundary module, as ``named_modules`` gives it (the first of several), for the names
    of a ``Selection``. ``accept`` and ``strict`` are the arguments ``hook_boundary_predicate`` and
    ``hook_boundary_strict`` of ``dedicate_params``. Raises ValueError, with ``strict``, for a parameter around which
    ``accept`` takes no module."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {module: name for name, module in model.named_modules()}
    takes_name = accept is not None and _takes_name(accept)

    def boundary_of(name: str) -> str:
        holder = name.rpartition(".")[0]
        if accept is None:
            return layer_of(model, holder) or ""
        for outer in enclosing(holder):
            module = modules[outer]
            accepted = accept(canonical_fqn(outer), module) if takes_name else accept(module)
            if accepted and not is_bare_container(module):
                return first_name[module]
        if strict:
            remedy = "widen the predicate or pass hook_boundary_strict=False to hook such parameters at the root"
            raise ValueError(f"{name}: hook_boundary_predicate accepts no module around it; {remedy}")
        return ""

    found = {fqn: set(map(boundary_of, each)) for fqn, each in names.items()}
    # A parameter that several boundaries share is needed whenever one of them runs: it belongs to the root.
    return {fqn: boundaries.pop() if len(boundaries) == 1 else "" for fqn, boundaries in found.items()}


def _takes_name(accept: Callable[..., bool]) -> bool:
    """Whether a predicate is ``(name, module) -> bool``; one with a single required argument takes the module."""
    try:
        params = inspect.signature(accept).parameters.values()
    except ValueError as error:  # some built-in functions
        raise ValueError(f"hook_boundary_predicate: {error}; wrap it in lambda module: ...") from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(param.kind in positional and param.default is param.empty for param in params) != 1


def boundary_dtypes(name: str, specs: Iterable[ParamSpec]) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The (input, output) cast dtypes of one hook boundary; ``None`` means no cast. Raises ValueError if its parameters
    disagree where the boundary as a whole needs one value."""
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
