"""Which weights of known models are stacks, fused or stored transposed, and how they are cut into matrices.

The name of a linear layer, the class of the module that holds the layer and the sizes that this module keeps tell the
layout (transformers 5, read from its code). A layout is fields of a ``ParamSpec``, as a rule of ``param_policy`` sets
them: ``stack``, ``transposed``, ``blocks``. An unknown weight has none. Pure: reads modules and shapes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .blocks import split_equal, split_interleaved, split_sizes
from .classify import canonical_fqn, is_conv1d, is_expert_stack
from .spec import COLUMNS, ROWS, BlockSplit

# (attributes of the module that holds a linear layer, shape of the layer's weight) -> the split, if it is known.
_Cut = Callable[[dict[str, Any], tuple[int, ...]], BlockSplit | None]
_ANY = ("",)


def matrix_layouts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The layout of every weight of ``model`` that is not one matrix stored [out, in], by canonical name. The model is
    not sharded but for tensor parallelism; shapes are global."""
    layouts = {}
    for name, param in model.named_parameters():
        module_name, _, leaf = name.rpartition(".")
        module, shape = model.get_submodule(module_name), tuple(param.shape)
        parent_name, _, linear = canonical_fqn(module_name).rpartition(".")
        if is_expert_stack(module, param):
            layouts[canonical_fqn(name)] = _experts(module, leaf, shape)
        elif leaf == "weight" and param.ndim == 2 and parent_name:
            parts = module_name.split(".")
            while parts.pop() != linear:  # a wrapper of the layer
                pass
            layouts[canonical_fqn(name)] = _linear(model.get_submodule(".".join(parts)), module, linear, shape)
    return {name: layout for name, layout in layouts.items() if layout}


def _experts(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> dict[str, Any]:
    marks = vars(module)  # by transformers 5 on every class of experts but Llama 4's
    transposed = marks.get("is_transposed", type(module).__name__ == "Llama4TextExperts")
    if leaf != "gate_up_proj" or not marks.get("has_gate", True):
        return {"stack": True, "transposed": transposed}
    dim = COLUMNS if transposed else ROWS
    half = shape[-2:][dim] // 2
    groups = 1 if marks.get("is_concatenated", True) else half  # else gate and up alternate
    blocks = split_interleaved(groups, [half // groups] * 2, dim)
    return {"stack": True, "transposed": transposed, "blocks": blocks}


def _linear(parent: nn.Module, module: nn.Module, linear: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if is_conv1d(module):
        parts = shape[1] // shape[0] if linear == "c_attn" and shape[1] % shape[0] == 0 else 1  # 2: key and value
        return {"transposed": True, "blocks": split_equal(parts, COLUMNS)(shape) if parts > 1 else None}
    classes, cut = _LINEARS.get(linear, ((), None))
    blocks = cut(vars(parent), shape) if type(parent).__name__.startswith(classes) else None
    return {"blocks": blocks} if blocks else {}


def _thirds(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """[3, heads, head_dim], the vision encoders' and ModernBERT's; grouped heads are not known by the name."""
    return split_equal(3)(shape) if shape[0] == 3 * shape[1] else None


def _query_key_value_rows(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
    config, head_dim = sizes["config"], sizes["head_dim"]
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return split_sizes((query, key, key))


def _query_key_value_heads(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
    if "new_decoder_architecture" not in sizes:
        head_dim = sizes["head_dim"] if "head_dim" in sizes else sizes["head_size"]  # GPT-NeoX's name
        return split_interleaved(shape[0] // (3 * head_dim), [head_dim] * 3)
    heads, head_dim = sizes["num_heads"], sizes["head_dim"]  # Falcon, in three generations
    old = 1 if sizes["multi_query"] else heads
    groups = sizes["num_kv_heads"] if sizes["new_decoder_architecture"] else old
    return split_interleaved(groups, (heads // groups * head_dim, head_dim, head_dim))


def _delta_net(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """Every key head is [query, key, its values, their gates]."""
    if "num_k_heads" not in sizes:
        return None
    heads, key = sizes["num_k_heads"], sizes["head_k_dim"]
    value = sizes["head_v_dim"] * sizes["num_v_heads"] // heads
    return split_interleaved(heads, (key, key, value, value))


def _parts(*names: str) -> _Cut:
    """Every head, or the whole weight once, is these parts. The holder keeps their sizes under these names."""

    def cut(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
        parts = [sizes[name] for name in names if name in sizes]
        return split_interleaved(shape[0] // sum(parts), parts) if len(parts) == len(names) else None

    return cut


# Name of the linear layer -> (how the class of the module that holds the layer begins, the cut).
_LINEARS: dict[str, tuple[tuple[str, ...], _Cut]] = {
    "gate_up_proj": (_ANY, lambda sizes, shape: split_equal(2)(shape)),
    "qkv": (_ANY, _thirds),
    "Wqkv": (_ANY, _thirds),
    "qkv_proj": (("Phi3", "Phi4"), _query_key_value_rows),
    "query_key_value": (("GPTNeoX", "Bloom", "Persimmon", "Falcon"), _query_key_value_heads),
    "q_proj": (("Qwen3Next", "Qwen3_5"), _parts("head_dim", "head_dim")),  # query, gate
    # Linear attention of Qwen3-Next.
    "in_proj_qkvz": (_ANY, _delta_net),
    "in_proj_qkv": (_ANY, _parts("key_dim", "key_dim", "value_dim")),
    # Latent attention of DeepSeek: [latent, shared rotary key], and for every head [key without rotation, value].
    "kv_a_proj_with_mqa": (_ANY, _parts("kv_lora_rank", "qk_rope_head_dim")),
    "kv_b_proj": (_ANY, _parts("qk_nope_head_dim", "v_head_dim")),
}
