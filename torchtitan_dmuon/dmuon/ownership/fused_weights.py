"""Which weights of known models are fused or stored transposed, and how they are cut into matrices.

By the name of the layer, the class that holds it and the sizes that class keeps (transformers 5, read from its code);
an unknown weight is one matrix stored [out, in]. A rule of the user's (``param_policy``'s ``blocks`` and
``transposed``) goes before the table. Pure: reads modules and shapes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .blocks import COLUMNS, ROWS, BlockSplit, split_equal, split_interleaved, split_sizes
from .classify import canonical_fqn, is_conv1d, is_expert_stack


@dataclass(frozen=True)
class MatrixLayout:
    """How a weight holds its matrices.

    Attributes:
        transposed: stored [in, out], as ``Conv1D``'s; else [out, in], as ``nn.Linear``'s.
        blocks: the matrices of a fused weight; ``None`` for one.
    """

    transposed: bool = False
    blocks: BlockSplit | None = None


def matrix_layouts(model: nn.Module) -> dict[str, MatrixLayout]:
    """The layout of every weight of ``model`` that is not one matrix stored [out, in], by canonical name. The model is
    not sharded but for tensor parallelism; shapes are global."""
    layouts = {}
    for module_name, module in model.named_modules():
        parent_name, _, layer = canonical_fqn(module_name).rpartition(".")
        for leaf, param in module.named_parameters(recurse=False):
            if is_expert_stack(module, param):
                layout = _experts(module, leaf, param)
            elif leaf == "weight" and param.ndim == 2 and parent_name:
                layout = _linear(_parent(model, module_name), module, layer, tuple(param.shape))
            else:
                continue
            if layout != MatrixLayout():
                layouts[canonical_fqn(f"{module_name}.{leaf}")] = layout
    return layouts


def _parent(model: nn.Module, module_name: str) -> nn.Module:
    """The module whose attribute this one is, under whatever wrappers either has."""
    parts = module_name.split(".")
    layer = canonical_fqn(module_name).rpartition(".")[2]
    while parts.pop() != layer:
        pass
    return model.get_submodule(".".join(parts))


# transformers 5 marks its classes of experts; this one it does not.
_TRANSPOSED_EXPERTS = ("Llama4TextExperts",)


def _experts(module: nn.Module, leaf: str, param: nn.Parameter) -> MatrixLayout:
    marks = vars(module)
    transposed = marks.get("is_transposed", type(module).__name__ in _TRANSPOSED_EXPERTS)
    blocks = None
    if leaf == "gate_up_proj" and marks.get("has_gate", True):
        dim = COLUMNS if transposed else ROWS
        if marks.get("is_concatenated", True):
            blocks = split_equal(2, dim)(tuple(param.shape))
        else:  # gate and up alternate
            blocks = split_interleaved(param.shape[-2:][dim] // 2, (1, 1), dim)
    return MatrixLayout(transposed, blocks)


def _linear(parent: nn.Module, module: nn.Module, layer: str, shape: tuple[int, ...]) -> MatrixLayout:
    if is_conv1d(module):
        parts = shape[1] // shape[0] if layer == "c_attn" and shape[1] % shape[0] == 0 else 1  # 2: key and value
        return MatrixLayout(True, split_equal(parts, COLUMNS)(shape) if parts > 1 else None)
    rule = _LINEARS.get(layer)
    blocks = rule(type(parent).__name__, vars(parent), shape) if rule is not None else None
    return MatrixLayout(False, blocks)


Rule = Callable[[str, dict[str, Any], tuple[int, ...]], BlockSplit | None]


def _gate_up(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    return split_equal(2)(shape)


def _thirds(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """[3, heads, head_dim], the vision encoders' and ModernBERT's; grouped heads are not known by the name."""
    return split_equal(3)(shape) if shape[0] == 3 * shape[1] else None


def _qkv_proj(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    if not owner.startswith(("Phi3", "Phi4")):
        return None
    config, head_dim = sizes["config"], sizes["head_dim"]
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return split_sizes((query, key, key))


def _query_key_value(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    if owner.startswith(("GPTNeoX", "Bloom", "Persimmon")):
        heads = sizes["num_heads"] if "num_heads" in sizes else sizes["config"].num_attention_heads
        return split_interleaved(heads, [shape[0] // heads // 3] * 3)
    if owner.startswith("Falcon"):
        heads, head_dim = sizes["num_heads"], sizes["head_dim"]
        if sizes["new_decoder_architecture"]:
            groups = sizes["num_kv_heads"]
            return split_interleaved(groups, (heads // groups * head_dim, head_dim, head_dim))
        if sizes["multi_query"]:
            return split_sizes((heads * head_dim, head_dim, head_dim))
        return split_interleaved(heads, [head_dim] * 3)
    return None


def _gated_query(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """Qwen3-Next: every head is [query, gate]."""
    if not owner.startswith(("Qwen3Next", "Qwen3_5")):
        return None
    head_dim = sizes["head_dim"]
    return split_interleaved(shape[0] // (2 * head_dim), (head_dim, head_dim))


def _delta_net(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """Qwen3-Next's linear attention: every key head is [query, key, its values, their gates]."""
    if "num_k_heads" not in sizes:
        return None
    heads, key = sizes["num_k_heads"], sizes["head_k_dim"]
    value = sizes["head_v_dim"] * sizes["num_v_heads"] // heads
    return split_interleaved(heads, (key, key, value, value))


def _delta_net_qkv(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    if "key_dim" not in sizes:
        return None
    return split_sizes((sizes["key_dim"], sizes["key_dim"], sizes["value_dim"]))


def _mla_down(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """DeepSeek's latent attention: [latent | shared rotary key]."""
    if "kv_lora_rank" not in sizes:
        return None
    return split_sizes((sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]))


def _mla_up(owner: str, sizes: dict[str, Any], shape: tuple[int, ...]) -> BlockSplit | None:
    """Every head is [key without rotation, value]."""
    if "kv_lora_rank" not in sizes:
        return None
    head = (sizes["qk_nope_head_dim"], sizes["v_head_dim"])
    return split_interleaved(shape[0] // sum(head), head)


_LINEARS: dict[str, Rule] = {
    "gate_up_proj": _gate_up,
    "qkv": _thirds,
    "Wqkv": _thirds,
    "qkv_proj": _qkv_proj,
    "query_key_value": _query_key_value,
    "q_proj": _gated_query,
    "in_proj_qkvz": _delta_net,
    "in_proj_qkv": _delta_net_qkv,
    "kv_a_proj_with_mqa": _mla_down,
    "kv_b_proj": _mla_up,
}
