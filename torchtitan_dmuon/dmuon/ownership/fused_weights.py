"""Which weights of known models are fused or stored transposed, and how they are cut into matrices.

A weight is known by the name of its linear layer, the class that holds the layer and the sizes that this class keeps
(transformers 5, read from its code). An unknown weight is one matrix stored [out, in]. A rule of the user's
(``param_policy``'s ``blocks`` and ``transposed``) goes before the table. Pure: reads modules and shapes only.
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
    for module_name, module in model.named_modules():
        parent_name, _, linear = canonical_fqn(module_name).rpartition(".")
        for leaf, param in module.named_parameters(recurse=False):
            if is_expert_stack(module, param):
                layout = _experts(module, leaf, tuple(param.shape))
            elif leaf == "weight" and param.ndim == 2 and parent_name:
                layout = _linear(_parent(model, module_name), module, linear, tuple(param.shape))
            else:
                continue
            if layout != MatrixLayout():
                layouts[canonical_fqn(f"{module_name}.{leaf}")] = layout
    return layouts


def _parent(model: nn.Module, module_name: str) -> nn.Module:
    """The module whose attribute this one is, under the wrappers of either."""
    parts = module_name.split(".")
    linear = canonical_fqn(module_name).rpartition(".")[2]
    while parts.pop() != linear:
        pass
    return model.get_submodule(".".join(parts))


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
    """How linear layers of one name are cut.

    Attributes:
        cut: (attributes of the module that holds the layer, shape of its weight) -> the split, or ``None``.
        classes: the rule is for holders whose class name begins so.
        needs: and that have this attribute.
    """

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
    if sizes["new_decoder_architecture"]:
        groups = sizes["num_kv_heads"]
        return split_interleaved(groups, (heads // groups * head_dim, head_dim, head_dim))
    if sizes["multi_query"]:
        return split_sizes((heads * head_dim, head_dim, head_dim))
    return split_interleaved(heads, [head_dim] * 3)


def _gated_query(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
    """Every head is [query, gate]."""
    head_dim = sizes["head_dim"]
    return split_interleaved(shape[0] // (2 * head_dim), (head_dim, head_dim))


def _delta_net(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
    """Every key head is [query, key, its values, their gates]."""
    heads, key = sizes["num_k_heads"], sizes["head_k_dim"]
    value = sizes["head_v_dim"] * sizes["num_v_heads"] // heads
    return split_interleaved(heads, (key, key, value, value))


def _latent_up(sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit:
    """Every head is [key without rotation, value]."""
    head = (sizes["qk_nope_head_dim"], sizes["v_head_dim"])
    return split_interleaved(shape[0] // sum(head), head)


_LINEARS = {
    "gate_up_proj": _Rule(lambda sizes, shape: split_equal(2)(shape)),
    "qkv": _Rule(_thirds),
    "Wqkv": _Rule(_thirds),
    "qkv_proj": _Rule(_query_key_value_rows, classes=("Phi3", "Phi4")),
    "query_key_value": _Rule(_query_key_value_heads, classes=("GPTNeoX", "Bloom", "Persimmon", "Falcon")),
    "q_proj": _Rule(_gated_query, classes=("Qwen3Next", "Qwen3_5")),
    # Linear attention of Qwen3-Next.
    "in_proj_qkvz": _Rule(_delta_net, needs="num_k_heads"),
    "in_proj_qkv": _Rule(lambda at, _: split_sizes((at["key_dim"], at["key_dim"], at["value_dim"])), needs="key_dim"),
    # Latent attention of DeepSeek; the first is [latent, shared rotary key].
    "kv_a_proj_with_mqa": _Rule(
        lambda sizes, _: split_sizes((sizes["kv_lora_rank"], sizes["qk_rope_head_dim"])), needs="kv_lora_rank"
    ),
    "kv_b_proj": _Rule(_latent_up, needs="kv_lora_rank"),
}
