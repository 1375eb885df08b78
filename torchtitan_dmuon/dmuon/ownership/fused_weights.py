"""Which weights of known models are stacks, fused or stored transposed, and how they are cut into matrices.

The name of a linear layer, the class of its *holder* (the module that has the layer as an attribute) and the sizes that
the holder keeps tell the layout (transformers 5 and known repositories, read from their code). A layout is fields of a
``ParamSpec``, as a rule of ``param_policy`` sets them: ``stack``, ``transposed``, ``blocks``. Pure: reads modules and
shapes only.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from .blocks import join_thin, split_equal, split_interleaved
from .spec import COLUMNS, ROWS, WRAPPER_PARTS, BlockSplit, canonical_fqn

# (names of the layer, start of the holder's class, sizes of the parts). Alternatives follow a "|"; the first one that
# fits is used. It fits if all sizes are known and fill the output side: once or, with "...", any number of times. A
# size is a product of names and quotients. Names are integer attributes of the holder and its config; H, K, D (heads,
# key heads, rows of a head); ``in`` and ``rows``, the sides of the weight; ``half`` and ``third`` of the rows, if
# another weight of the holder takes as many.
FUSED = (
    ("gate_up_proj|up_gate_proj|to_kv", "", "rows/2 rows/2"),
    ("Wi|w12|w13|ff_proj|linear_fc1|input_linear", "", "half half"),
    ("query_key_value|qkv_proj|in_proj", "GPTNeoX|Bloom|Persimmon|MiniMax|Disentangled", "D D D ..."),
    ("query_key_value|wqkv", "Falcon|InternLM2", "H/K*D D D ..."),
    ("linear_qkv", "", "H/K*D D D ..."),  # Megatron
    ("qkv_proj", "CodeGen", "rows/12 rows/12 rows/12 ..."),  # query, value, key in each of 4 parts
    ("c_attn", "GPTBigCode", "H*D D D | D D D ..."),
    ("qkv|Wqkv|wqkv|to_qkv|qkv_proj|att_proj|c_attn", "", "H*D K*D K*D | third third third | in in in"),
    ("c_attn", "", "in in"),  # key and value of cross-attention
    ("kv_proj", "JetMoe", "rows/2 rows/2"),
    ("q_proj", "Qwen3Next|Qwen3_5", "D D ..."),  # query, gate
    # Latent attention: [latent, shared rotary key], and for every head [key without rotation, value].
    ("kv_a_proj_with_mqa|wkv_a", "", "kv_lora_rank qk_rope_head_dim"),
    ("kv_b_proj|wkv_b", "", "qk_nope_head_dim v_head_dim ..."),
    # Linear attention: every key head is [query, key, its values, their gates].
    ("in_proj_qkvz", "", "head_k_dim head_k_dim" + 2 * " head_v_dim*num_v_heads/num_k_heads" + " ..."),
    ("in_proj_qkv", "", "key_dim key_dim value_dim"),
    # State-space layers: gate, input, B, C, one step size a head; in the first generation input and gate.
    ("in_proj", "", "intermediate_size intermediate_size" + 2 * " n_groups*ssm_state_size" + " num_heads"),
    ("in_proj", "", "d_inner d_inner ngroups*d_state ngroups*d_state nheads"),
    ("in_proj", "ZambaMamba", "1 1 ..."),
    ("in_proj", "Mamba|FalconMamba|Jamba", "intermediate_size intermediate_size | d_inner d_inner"),
    ("in_proj", "Lfm2", "in in in"),
)
_ALIASES = {
    "H": ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_attention_heads_per_partition"),
    "K": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_heads", "num_query_groups_per_partition"),
    "D": ("head_dim", "attention_head_size", "head_size", "dim_head", "hidden_size_per_attention_head"),
}
# Names of weights that sound as if they held several matrices.
LOOKS_FUSED = re.compile(
    r"(qkv|kqv|query_key|key_value|\b(gate_up|up_gate)(_proj)?|fused|\bw12|\bw13|\bin_proj|c_attn|[._]kv(_proj)?)(\.weight)?$"
)


def matrix_layouts(model: nn.Module, min_matrix_dim: int = 0) -> dict[str, dict[str, Any]]:
    """The layout of every weight of ``model`` that is not one matrix stored [out, in], by canonical name. The model is
    not sharded but for tensor parallelism; shapes are global. A part with fewer rows than ``min_matrix_dim`` stays with
    the part before it: it is no matrix of its own."""
    layouts = {}
    for name, param in model.named_parameters():
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        if param.ndim in (2, 3) and is_matrix(module, leaf, param):
            layouts[canonical_fqn(name)] = layout = _layout(model, module_name, leaf, param)
            if layout.get("blocks"):
                layout["blocks"] = join_thin(layout["blocks"], min_matrix_dim)
    return {name: layout for name, layout in layouts.items() if layout}


def is_matrix(module: nn.Module, leaf: str, param: nn.Parameter) -> bool:
    """Whether ``leaf`` of ``module`` is one or several matrices that a matrix product uses."""
    if isinstance(module, nn.MultiheadAttention):
        return leaf.endswith("proj_weight")
    is_linear = leaf == "weight" and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    return is_linear or is_expert_stack(module, param) or _flat_experts(module, param) > 0


def is_expert_stack(module: nn.Module, param: nn.Parameter) -> bool:
    """A parameter [E, m, n] of a module that holds the experts of a layer, as [64, 1408, 2048]."""
    return type(module).__name__.endswith("Experts") and param.ndim == 3


def _flat_experts(module: nn.Module, param: nn.Parameter) -> int:
    """The number E of experts in a parameter [E * m, n] of a module that holds the experts of a layer, else 0. A bias
    [E, n] is none."""
    sizes = vars(module)
    experts = next((sizes[name] for name in ("moe_num_experts", "num_experts") if name in sizes), 0)
    is_flat = "Expert" in type(module).__name__ and param.ndim == 2 and experts and param.shape[0] % experts == 0
    return experts if is_flat and param.shape[0] > experts else 0


def holder_of(model: nn.Module, module_name: str) -> tuple[nn.Module, str]:
    """The module that has ``module_name`` as an attribute, and the attribute's name; wrappers are passed over."""
    *parts, linear = module_name.split(".")
    while linear in WRAPPER_PARTS and parts:
        *parts, linear = parts
    return model.get_submodule(".".join(parts)), linear


def _layout(model: nn.Module, module_name: str, leaf: str, param: nn.Parameter) -> dict[str, Any]:
    module, shape, layout = model.get_submodule(module_name), tuple(param.shape), {}
    if isinstance(module, nn.MultiheadAttention):
        return {"blocks": split_equal(3)(shape)} if leaf == "in_proj_weight" else {}
    kind, marks = type(module).__name__, vars(module)
    if experts := _flat_experts(module, param):
        return {"blocks": split_equal(experts)(shape), "transposed": (kind, leaf) == ("DbrxExpertGLU", "w2")}
    if is_expert_stack(module, param):  # transformers 5 marks every class of experts but Llama 4's
        layout = {"stack": True, "transposed": marks.get("is_transposed", kind == "Llama4TextExperts")}
    elif kind == "Conv1D":  # GPT-2's linear layer; by name, since transformers is optional
        layout = {"transposed": True}
    dim = COLUMNS if layout.get("transposed") else ROWS
    holder, linear = holder_of(model, module_name) if leaf == "weight" else (module, leaf)
    if linear == "gate_up_proj" and not marks.get("is_concatenated", True):  # gate and up alternate
        blocks = split_interleaved(shape[-2:][dim] // 2, (1, 1), dim)
    else:
        blocks = _cut(holder, linear, param, dim) if marks.get("has_gate", True) else None
    return {**layout, "blocks": blocks} if blocks else layout


def _cut(holder: nn.Module, linear: str, param: nn.Parameter, dim: int) -> BlockSplit | None:
    """The split by the first alternative of ``FUSED`` that fits."""
    kind = type(holder).__name__
    fitting = [sizes for names, kinds, sizes in FUSED if linear in names.split("|") and re.match(kinds, kind)]
    known = _known_sizes(holder, param, dim) if fitting else {}
    for told in " | ".join(fitting).split(" | ") if fitting else ():
        parts = [_product(term, known) for term in told.removesuffix(" ...").split()]
        groups, rest = divmod(known["rows"], sum(parts)) if all(parts) else (0, 0)
        if groups and not rest and (groups == 1 or told.endswith("...")):
            return split_interleaved(groups, parts, dim)
    return None


def _known_sizes(holder: nn.Module, param: nn.Parameter, dim: int) -> dict[str, int]:
    """The value of every name that a term may have; 0 where it is not known."""
    rows, inputs = param.shape[-2:][dim], param.shape[-2:][1 - dim]
    config = vars(holder).get("config") or {}
    told = (vars(holder), config if isinstance(config, dict) else vars(config))
    sources = [{name: size for name, size in each.items() if isinstance(size, int)} for each in told]
    known = {**sources[1], **sources[0], "rows": rows, "in": inputs}
    for short, names in _ALIASES.items():
        known[short] = next((each[name] for each in sources for name in names if name in each), 0)
    known["K"] = known["K"] or known["H"]
    known["D"] = known["D"] or inputs // max(known["H"], 1)
    taken = {other.shape[-2:][1 - dim] for other in holder.parameters() if other.ndim > 1 and other is not param}
    for word, count in (("half", 2), ("third", 3)):
        known[word] = rows // count if rows not in taken and rows / count in taken else 0
    return known


def _product(term: str, known: dict[str, int]) -> int:
    """The value of one term; 0 if a name in it is not known."""
    value = 1
    for sign, name in re.findall(r"([*/]?)(\w+)", term):
        size = int(name) if name.isdecimal() else known.get(name, 0)
        value = value * size if sign != "/" else value // size if size else 0
    return value
