"""At which module the unit of each dedicated parameter is hooked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import nn

from .classify import canonical_fqn, enclosing, is_bare_container, layer_of


def hook_boundaries(
    model: nn.Module,
    selected: Mapping[str, nn.Parameter],
    accept: Callable[[str, nn.Module], bool] | None,
    strict: bool,
) -> dict[str, str]:
    """The name of the boundary module of each selected parameter, as ``named_modules`` gives it (the first of several).

    Args:
        accept, strict: ``hook_boundary_predicate`` and ``hook_boundary_strict`` of ``dedicate_params``.

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
                "hook_boundary_strict=False to hook such parameters at the root"
            )
        found[fqns[id(param)]].add(first_name[model if boundary is None else boundary])
    # A parameter that several boundaries share is needed whenever one of them runs: it belongs to the root.
    return {fqn: found[fqn].pop() if len(found[fqn]) == 1 else "" for fqn in selected}
