"""At which module the unit of each dedicated parameter is hooked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import nn

from .classify import block_of, canonical_fqn, is_bare_container


def hook_boundaries(
    model: nn.Module,
    selected: Mapping[str, nn.Parameter],
    accept: Callable[[str, nn.Module], bool] | None,
    strict: bool,
) -> dict[str, str]:
    """Boundary module name (as in ``named_modules``, the first of a module's) of each selected parameter.

    Args:
        accept, strict: ``hook_boundary_predicate`` and ``strict_hook_boundary`` of ``dedicate_params``.

    Raises:
        ValueError: with ``strict``, a parameter around which no module is accepted.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {module: name for name, module in model.named_modules()}
    by_id = {id(param): fqn for fqn, param in selected.items()}
    found: dict[str, set[str]] = defaultdict(set)
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in by_id:
            continue
        holder = name.rpartition(".")[0]
        if accept is None:
            boundary = block_of(model, holder) or ""
        else:
            boundary = _nearest_accepted(modules, holder, accept)
            if boundary is None and strict:
                raise ValueError(
                    f"{name}: hook_boundary_predicate accepts no module around it; widen the predicate or pass "
                    "strict_hook_boundary=False to hook such parameters at the root"
                )
            if boundary is not None:
                boundary = first_name[modules[boundary]]
        found[by_id[id(param)]].add(boundary or "")
    # A parameter shared by several boundaries is needed whenever one of them runs: it belongs to the root.
    return {fqn: names.pop() if len(names) == 1 else "" for fqn, names in ((f, found[f]) for f in selected)}


def _nearest_accepted(
    modules: Mapping[str, nn.Module], name: str, accept: Callable[[str, nn.Module], bool]
) -> str | None:
    while True:
        if accept(canonical_fqn(name), modules[name]) and not is_bare_container(modules[name]):
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]
