"""The default predicate: which parameters of a model are matrices for Muon, and why the others are not.

Decided on the unsharded model by module identity (what class holds the parameter, and where it stands), not by
substrings of names. Pure: reads modules and shapes only.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

# What wrappers put into a name; the canonical name of a parameter has none of them.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# Newton-Schulz gains nothing on gates this thin (in_proj_ba, shared_expert_gate, LoRA factors, per-head gates).
MIN_MATRIX_DIM = 128

# A layer shaped like an embedding is a head wherever it stands, if the vocabulary is wider than this many times the
# model: with a smaller one, the hidden layer of a block may have that shape.
_WIDEST_BLOCK = 4


@dataclass(frozen=True)
class Decision:
    """Whether a parameter goes to Muon by default, and the reason in a few words."""

    muon: bool
    reason: str


def canonical_fqn(name: str) -> str:
    """``name`` without the parts that activation checkpointing, compile and FSDP wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def block_of(model: nn.Module, module_name: str) -> str | None:
    """Name of the module at which the unit of ``module_name`` is hooked: the first ancestor (or the module itself) that
    is an element of a ModuleList, ModuleDict or Sequential. ``None`` outside any. Whether such an element is a repeated
    block or a head does not matter for that."""
    module, prefix = model, []
    for part in module_name.split(".") if module_name else []:
        inside_container = isinstance(module, _CONTAINERS)
        module = module.get_submodule(part)
        prefix.append(part)
        if inside_container and not is_bare_container(module):
            return ".".join(prefix)
    return None


def is_bare_container(module: nn.Module) -> bool:
    """A list or dict of modules without a forward of its own: hooks on it would never fire."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def classify(model: nn.Module, min_matrix_dim: int = MIN_MATRIX_DIM) -> dict[str, Decision]:
    """A decision for every parameter of ``model``, by canonical name, in ``named_parameters`` order.

    Args:
        model: not yet sharded.
        min_matrix_dim: the smaller side a matrix needs.
    """
    embeddings = _embedding_ids(model)
    blocks = _repeated_blocks(model)
    embedding_shapes = {module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)}
    decisions: dict[str, Decision] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            name = f"{module_name}.{leaf}" if module_name else leaf
            if id(param) in embeddings or _is_shaped_like_a_head(param, embedding_shapes):
                decision = Decision(False, "embedding or head")
            else:
                decision = _decide(model, module_name, module, leaf, param, blocks, min_matrix_dim)
            decisions[canonical_fqn(name)] = decision
    return decisions


def _decide(
    model: nn.Module,
    module_name: str,
    module: nn.Module,
    leaf: str,
    param: nn.Parameter,
    blocks: set[str],
    min_matrix_dim: int,
) -> Decision:
    if param.ndim < 2:
        return Decision(False, f"{param.ndim}-D")
    is_linear = leaf == "weight" and (isinstance(module, nn.Linear) or is_conv1d(module))
    if not is_linear and not is_expert_stack(module, param):
        return Decision(False, f"not the weight of a linear layer ({type(module).__name__}.{leaf})")
    if not _is_inside(module_name, blocks):
        return Decision(False, "outside the repeated blocks")
    if _is_router(model, module_name, module):
        return Decision(False, "router")
    if min(param.shape[-2:]) < min_matrix_dim:
        return Decision(False, f"thin: smaller side {min(param.shape[-2:])} < {min_matrix_dim}")
    return Decision(True, f"{type(module).__name__} in a block")


def _repeated_blocks(model: nn.Module) -> set[str]:
    """Names of the modules that are layers of ``model``.

    A block is an element of a container and holds its parameters in modules of its own: a linear layer that is itself
    the element is a head or a projection as often as not (MusicGen's ``lm_heads`` are four in a ModuleList). Where all
    elements of a ModuleList, or of a ModuleDict with numbers for keys, are of that kind, all of them are blocks: hybrid
    models mix their classes. In other containers the parts of a model may stand beside each other (embedding, blocks,
    head), and only what occurs twice is a block. A model without any such has one layer, if a container has one
    candidate.
    """
    repeated, single = set(), set()
    for name, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        prefix = f"{name}." if name else ""
        # One module may stand in several places (shared layers).
        elements = {
            f"{prefix}{key}": _unwrapped(element)
            for key, element in container.named_modules(remove_duplicate=False)
            if key and "." not in key and _has_parameters(element)
        }
        candidates = {
            key: _kind(element)
            for key, element in elements.items()
            if not is_bare_container(element) and any(map(_has_parameters, element.children()))
        }
        is_list = isinstance(container, nn.ModuleList) or (
            isinstance(container, nn.ModuleDict) and all(key.isdecimal() for key in container)
        )
        if is_list and len(candidates) == len(elements):
            repeated |= candidates.keys()
        occurrences = Counter(candidates.values())
        repeated |= {key for key, kind in candidates.items() if occurrences[kind] > 1}
        if len(candidates) == 1:
            single |= candidates.keys()
    return repeated or single


def _kind(module: nn.Module) -> object:
    """What two blocks have in common: their class or, of a Sequential, which can be anything, all that is in it."""
    if type(module) is not nn.Sequential:
        return type(module)
    return tuple((type(each), *(param.shape for param in each.parameters(recurse=False))) for each in module.modules())


def _unwrapped(module: nn.Module) -> nn.Module:
    """What is inside the wrappers of activation checkpointing, compile and FSDP around ``module``."""
    while inner := [child for name, child in module.named_children() if name in _WRAPPER_PARTS]:
        (module,) = inner
    return module


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_inside(module_name: str, blocks: set[str]) -> bool:
    parts = module_name.split(".")
    return any(".".join(parts[:length]) in blocks for length in range(1, len(parts) + 1))


def _is_shaped_like_a_head(param: nn.Parameter, embedding_shapes: set[torch.Size]) -> bool:
    """Known so wherever it stands: Medusa's and DeepSeek's further heads are inside blocks."""
    return param.shape in embedding_shapes and param.shape[0] > _WIDEST_BLOCK * param.shape[1]


def is_conv1d(module: nn.Module) -> bool:
    """transformers' ``Conv1D`` (GPT-2), a linear layer stored [in, out]; by name, since transformers is optional."""
    return type(module).__name__ == "Conv1D"


def is_expert_stack(module: nn.Module, param: nn.Parameter) -> bool:
    """A [E, m, n] parameter of a module that holds the experts of a layer."""
    return type(module).__name__.endswith("Experts") and param.ndim == 3


def _is_router(model: nn.Module, module_name: str, module: nn.Module) -> bool:
    """A linear layer that scores experts: inside something called router, or a ``gate`` beside experts."""
    parts = module_name.split(".")
    while parts[-1] in _WRAPPER_PARTS:
        parts.pop()
    leaf = parts.pop()
    parent = model.get_submodule(".".join(parts))
    if "router" in module_name.split(".") or any(type(m).__name__.endswith("Router") for m in (module, parent)):
        return True
    return leaf == "gate" and any("expert" in name for name, _ in parent.named_children())


def _embedding_ids(model: nn.Module) -> set[int]:
    """Ids of the parameters of every embedding and, on HuggingFace models, of the output head."""
    holders = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if hasattr(model, "get_input_embeddings"):  # HuggingFace's interface for embedding and head
        for get in (model.get_input_embeddings, model.get_output_embeddings):
            with contextlib.suppress(NotImplementedError):  # a model without one of them
                holders += [found for found in [get()] if isinstance(found, nn.Module)]
    return {id(param) for holder in holders for param in holder.parameters(recurse=False)}
