"""Which weights of known models are stacks, fused or stored transposed, and how they are cut into matrices.

The name of a linear layer, the class of the module that holds the layer and the sizes that this module keeps tell the
layout (transformers 5, read from its code). An unknown weight is one matrix stored [out, in]. A rule of the user's
``param_policy`` goes before the table. Pure: reads modules and shapes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .blocks import MatrixLayout, split_equal, split_interleaved, split_sizes
from .classify import canonical_fqn, is_conv1d, is_expert_stack
from .spec import COLUMNS, ROWS, BlockSplit


def matrix_layouts(model: nn.Module) -> dict[str, MatrixLayout]:
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
    return {name: layout for name, layout in layouts.items() if layout != MatrixLayout()}


def _experts(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> MatrixLayout:
    marks = vars(module)  # by transformers 5 on every class of experts but Llama 4's
    transposed = marks.get("is_transposed", type(module).__name__ == "Llama4TextExperts")
    blocks = None
    if leaf == "gate_up_proj" and marks.get("has_gate", True):
        dim = COLUMNS if transposed else ROWS
        if marks.get("is_concatenated", True):
            blocks = split_equal(2, dim)(shape)
        else:  # gate and up alternate
            blocks = split_interleaved(shape[-2:][dim] // 2, (1, 1), dim)
    return MatrixLayout(True, transposed, blocks)


def _linear(parent: nn.Module, module: nn.Module, linear: str, shape: tuple[int, ...]) -> MatrixLayout:
    if is_conv1d(module):
        parts = shape[1] // shape[0] if linear == "c_attn" and shape[1] % shape[0] == 0 else 1  # 2: key and value
        return MatrixLayout(transposed=True, blocks=split_equal(parts, COLUMNS)(shape) if parts > 1 else None)
    rule = _LINEARS.get(linear, _Rule(lambda sizes, shape: None))
    known = type(parent).__name__.startswith(rule.classes) and (not rule.needs or rule.needs in vars(parent))
    return MatrixLayout(blocks=rule.cut(vars(parent), shape) if known else None)


@dataclass(frozen=True)
class _Rule:
    """How linear layers of one name are cut: ``cut(attributes of the module that holds the layer, shape of its
    weight)`` is the split, or ``None``. The rule is for holders whose class name begins as ``classes`` say and that
    have the attribute ``needs``."""

    cut: Callable[[dict[str, Any], tuple[int, ...]], BlockSplit | None]
    classes: tuple[str, ...] = ("",)
    needs: str = ""


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


def _delta_net(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
    """Every key head is [query, key, its values, their gates]."""
    heads, key = sizes["num_k_heads"], sizes["head_k_dim"]
    value = sizes["head_v_dim"] * sizes["num_v_heads"] // heads
    return split_interleaved(heads, (key, key, value, value))


def _heads_of(*parts: str) -> Callable[[dict[str, Any], tuple[int, ...]], BlockSplit]:
    """Every head is these parts; the holder keeps their sizes under these names."""

    def cut(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
        head = [sizes[part] for part in parts]
        return split_interleaved(shape[0] // sum(head), head)

    return cut


_LINEARS = {
    "gate_up_proj": _Rule(lambda sizes, shape: split_equal(2)(shape)),
    "qkv": _Rule(_thirds),
    "Wqkv": _Rule(_thirds),
    "qkv_proj": _Rule(_query_key_value_rows, classes=("Phi3", "Phi4")),
    "query_key_value": _Rule(_query_key_value_heads, classes=("GPTNeoX", "Bloom", "Persimmon", "Falcon")),
    "q_proj": _Rule(_heads_of("head_dim", "head_dim"), classes=("Qwen3Next", "Qwen3_5")),  # query, gate
    # Linear attention of Qwen3-Next.
    "in_proj_qkvz": _Rule(_delta_net, needs="num_k_heads"),
    "in_proj_qkv": _Rule(lambda at, _: split_sizes((at["key_dim"], at["key_dim"], at["value_dim"])), needs="key_dim"),
    # Latent attention of DeepSeek: [latent, shared rotary key], and for every head [key without rotation, value].
    "kv_a_proj_with_mqa": _Rule(
        lambda sizes, _: split_sizes((sizes["kv_lora_rank"], sizes["qk_rope_head_dim"])), needs="kv_lora_rank"
    ),
    "kv_b_proj": _Rule(_heads_of("qk_nope_head_dim", "v_head_dim"), needs="kv_lora_rank"),
}
