"""The default predicate: which parameters of a model are matrices for Muon, and why the others are not. The class and
the place of the module that holds a parameter decide, on the unsharded model; no substring of a name does. Pure. A
*layer* is a repeated module, such as ``model.layers[3]``; the reasons that users read call it a block."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .fused_weights import LOOKS_FUSED, holder_of, is_matrix, matrix_layouts
from .spec import WRAPPER_PARTS, canonical_fqn

logger = logging.getLogger(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# Newton-Schulz gains nothing on gates this thin (in_proj_ba, shared_expert_gate, LoRA factors, per-head gates).
MIN_MATRIX_DIM = 128

# A weight shaped like an embedding is a head (Medusa's and DeepSeek's further heads stand inside layers) if the
# vocabulary is more than so many times the model's width. Else it may be an MLP's hidden weight: [4 * 768, 768].
_WIDEST_HIDDEN = 4

# Words of a name (in small letters) or last words of a class that, beside experts, mean a router.
_GATES = frozenset({"gate", "gating", "switch", "wg", "Gate", "Gating", "Switch"})


@dataclass(frozen=True)
class Decision:
    """Whether a parameter goes to Muon by default, and the reason in a few words."""

    muon: bool
    reason: str


def enclosing(module_name: str) -> list[str]:
    """The names of a module and of those around it, up to the root's empty one: of ``a.b``, ``["a.b", "a", ""]``."""
    parts = module_name.split(".") if module_name else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def layer_of(model: nn.Module, module_name: str) -> str | None:
    """The outermost element of a ModuleList, ModuleDict or Sequential that is ``module_name`` or encloses it: where its
    unit is hooked. A head that is such an element counts here, too. ``None`` outside any container."""
    outer = model
    for name in enclosing(module_name)[-2::-1]:
        module = model.get_submodule(name)
        if isinstance(outer, _CONTAINERS) and not is_bare_container(module):
            return name
        outer = module
    return None


def is_bare_container(module: nn.Module) -> bool:
    """A list or dict of modules without a forward of its own: hooks on it would never fire."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def classify(model: nn.Module, min_matrix_dim: int = MIN_MATRIX_DIM) -> dict[str, Decision]:
    """A decision for every parameter of ``model``, which is not sharded yet, by canonical name, in ``named_parameters``
    order. Matrices whose smaller side is below ``min_matrix_dim`` are left out."""
    embeddings, layers, layouts = _embeddings_and_heads(model), _repeated_layers(model), matrix_layouts(model)
    shapes = {module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)}
    decisions, outside, taken = {}, 0, 0
    for name, param in model.named_parameters():
        if param in embeddings or (param.shape in shapes and param.shape[0] > _WIDEST_HIDDEN * param.shape[1]):
            decision = Decision(False, "embedding or head")
        else:
            decision = _decide(model, name, param, layers, layouts.get(canonical_fqn(name), {}), min_matrix_dim)
            outside += param.numel() * (param.shape not in shapes)
            taken += param.numel() * decision.muon
        decisions[canonical_fqn(name)] = decision
    if 2 * taken < outside:
        told = "Muon gets %.0f%% of the elements outside embeddings of %s; the reasons are in the ownership table"
        logger.warning(told, 100 * taken / outside, type(model).__name__)
    return decisions


def _decide(
    model: nn.Module, name: str, param: nn.Parameter, layers: set[str], layout: Mapping[str, Any], min_matrix_dim: int
) -> Decision:
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    if param.ndim < 2:
        return Decision(False, f"{param.ndim}-D")
    if not is_matrix(module, leaf, param):
        return Decision(False, f"not the weight of a linear layer ({type(module).__name__}.{leaf})")
    if layers.isdisjoint(enclosing(module_name)):
        return Decision(False, "outside the repeated blocks")
    if _is_router(model, module_name):
        return Decision(False, "router")
    holder, linear = holder_of(model, module_name)
    if linear in ("x_proj", "dt_proj") and "A_log" in dict(holder.named_parameters(recurse=False)):  # Mamba
        return Decision(False, "state-space parameter")
    split = layout.get("blocks")
    shapes = [split.shape_of(block, param.shape) for block in split.blocks] if split else [param.shape[-2:]]
    if (side := max(map(min, shapes))) < min_matrix_dim:
        return Decision(False, f"thin: smaller side {side} < {min_matrix_dim}")
    unknown = "" if split or not LOOKS_FUSED.search(name) else "; looks fused, taken as one matrix: give it blocks"
    return Decision(True, f"{type(module).__name__} in a block{unknown}")


def _repeated_layers(model: nn.Module) -> set[str]:
    """Names of the layers of ``model``.

    A candidate is an element of a container that holds its parameters in modules of its own: a bare ``nn.Linear`` is a
    head as often as a projection (MusicGen's ``lm_heads`` are four in a ModuleList). If all elements of a ModuleList,
    or of a ModuleDict with numbers for keys, are candidates, all are layers, of whatever class: hybrid models mix
    classes. In other containers the parts of a model may stand side by side (embedding, layers, head), and a candidate
    is a layer only if another one is of its kind. Where that finds none, the only candidate of a container is a layer.
    """
    repeated, single = set(), set()
    for name, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        # One module may stand in several places (shared layers).
        elements = {
            f"{name}.{key}".lstrip("."): _unwrapped(element)
            for key, element in container.named_modules(remove_duplicate=False)
            if key and "." not in key and any(True for _ in element.parameters())
        }
        candidates = {
            key: _kind(element)
            for key, element in elements.items()
            if not is_bare_container(element) and any(True for each in element.children() for _ in each.parameters())
        }
        is_list = not isinstance(container, nn.Sequential) and all(k.isdecimal() for k, _ in container.named_children())
        if is_list and len(candidates) == len(elements):
            repeated |= candidates.keys()
        occurrences = Counter(candidates.values())
        repeated |= {key for key, kind in candidates.items() if occurrences[kind] > 1}
        if len(candidates) == 1:
            single |= candidates.keys()
    return repeated or single


def _kind(module: nn.Module) -> object:
    """Equal for two modules of one kind: their class or, of a Sequential, which can be anything, all its content."""
    if type(module) is not nn.Sequential:
        return type(module)
    return tuple((type(each), *(param.shape for param in each.parameters(recurse=False))) for each in module.modules())


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of activation checkpointing, compile and FSDP around ``module``."""
    while inner := [child for name, child in module.named_children() if name in WRAPPER_PARTS]:
        (module,) = inner
    return module


def _is_router(model: nn.Module, module_name: str) -> bool:
    """A linear layer that scores experts: it or a module around it is called a router, or a gate and stands beside
    experts. A module around the experts themselves is none, nor is the ``gate_proj`` of an MLP."""
    names = [name for name in enclosing(module_name) if name.rpartition(".")[2] not in WRAPPER_PARTS]
    for name, outer in itertools.pairwise(names):
        module, part = model.get_submodule(name), name.rpartition(".")[2]
        words = {*part.lower().split("_"), *re.findall("[A-Z][a-z]+$", type(module).__name__)}
        if any("expert" in inner.lower() for inner, _ in module.named_modules()):
            continue
        if not words.isdisjoint({"router", "Router"}):
            return True
        beside = {sibling.lower() for sibling, _ in model.get_submodule(outer).named_children() if sibling != part}
        experts_beside = "mlps" in beside or any("expert" in sibling for sibling in beside)
        if experts_beside and not words.isdisjoint(_GATES) and words.isdisjoint({"proj", "up"}):
            return True
    return False


def _embeddings_and_heads(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of every embedding and, on HuggingFace models, of the output head."""
    holders = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_input_embeddings"):  # HuggingFace's interface for embedding and head
        for get in (model.get_input_embeddings, model.get_output_embeddings):
            with contextlib.suppress(NotImplementedError):  # a model without one of them
                holders += [found for found in [get()] if isinstance(found, nn.Module)]
    return {param for holder in holders for param in holder.parameters(recurse=False)}
