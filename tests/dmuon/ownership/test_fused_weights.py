"""The table of fused and transposed weights, against what the models' own code does with them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtitan_dmuon.dmuon.ownership import fused_weights

transformers = pytest.importorskip("transformers", reason="these tests build models of transformers")

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**BASE, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}


def matrix_layouts(model):
    """The found fields, and the defaults of the others."""
    return {
        fqn: SimpleNamespace(**{"stack": False, "transposed": False, "blocks": None, **layout})
        for fqn, layout in fused_weights.matrix_layouts(model).items()
    }


def layouts_of(name, config):
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    found = matrix_layouts(model)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    for fqn, layout in found.items():
        if layout.blocks is not None:
            layout.blocks.check(shapes[fqn])
    return {fqn.split(".", 3)[-1].removesuffix(".weight"): layout for fqn, layout in found.items()}


def starts(*runs):
    """Rows (or columns) of runs [start, stop)."""
    return [index for start, stop in runs for index in range(start, stop)]


HALVES = [starts((0, 48)), starts((48, 96))]
HEADS = [starts(*((h * 24 + i * 8, h * 24 + i * 8 + 8) for h in range(4))) for i in range(3)]
GROUPS = [
    starts((0, 16), (32, 48)),  # two groups of (two queries, key, value)
    starts((16, 24), (48, 56)),
    starts((24, 32), (56, 64)),
]
MLA = {
    **BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
}
MLA_HEAD = ((0, 6), (6, 11))  # key without rotation, value
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}

# model, config -> {weight: (dimension of the cut, indices of every block)}; the rest is plain
CASES = {
    "phi3": (
        ("Phi3", GROUPED),
        {
            "self_attn.qkv_proj": (0, [starts((0, 32)), starts((32, 48)), starts((48, 64))]),
            "mlp.gate_up_proj": (0, HALVES),
        },
    ),
    "glm4": (("Glm4", GROUPED), {"mlp.gate_up_proj": (0, HALVES)}),
    "gpt_neox": (("GPTNeoX", BASE), {"attention.query_key_value": (0, HEADS)}),
    "gpt_neox japanese": (("GPTNeoXJapanese", BASE), {"attention.query_key_value": (0, HEADS)}),
    "persimmon": (("Persimmon", BASE), {"self_attn.query_key_value": (0, HEADS)}),
    "bloom": (("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
              {"self_attention.query_key_value": (0, HEADS)}),
    "falcon old": (
        ("Falcon", {**BASE, "multi_query": False, "alibi": False}),
        {"self_attention.query_key_value": (0, HEADS)},
    ),
    "falcon multi-query": (
        ("Falcon", {**BASE, "multi_query": True}),
        {"self_attention.query_key_value": (0, [starts((0, 32)), starts((32, 40)), starts((40, 48))])},
    ),
    "falcon grouped": (
        ("Falcon", {**BASE, "new_decoder_architecture": True, "num_kv_heads": 2}),
        {"self_attention.query_key_value": (0, GROUPS)},
    ),
    "deepseek": (
        ("DeepseekV3", MLA),
        {
            "self_attn.kv_a_proj_with_mqa": (0, [starts((0, 12)), starts((12, 16))]),
            "self_attn.kv_b_proj": (0, [starts(*((h * 11 + a, h * 11 + b) for h in range(4))) for a, b in MLA_HEAD]),
        },
    ),
    "mixtral": (("Mixtral", EXPERTS), {"mlp.experts.gate_up_proj": (0, HALVES)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_cuts(case):
    (name, config), expected = CASES[case]
    found = layouts_of(name, config)
    cuts = {
        fqn: (layout.blocks.dim, [block.indices() for block in layout.blocks.blocks])
        for fqn, layout in found.items()
        if layout.blocks is not None
    }
    assert cuts == expected
    assert not any(layout.transposed for layout in found.values())


def test_gpt2_is_transposed_and_cut_along_columns():
    with torch.device("meta"):
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, add_cross_attention=True)
        found = matrix_layouts(transformers.GPT2LMHeadModel(config))
    found = {fqn.removeprefix("transformer.h.0.").removesuffix(".weight"): layout for fqn, layout in found.items()}
    assert all(layout.transposed for layout in found.values())
    cuts = {fqn: layout.blocks and [block.indices() for block in layout.blocks.blocks] for fqn, layout in found.items()}
    thirds = [starts((0, 32)), starts((32, 64)), starts((64, 96))]
    assert cuts == {
        "attn.c_attn": thirds,
        "attn.c_proj": None,
        "crossattention.c_attn": thirds[:2],
        "crossattention.q_attn": None,
        "crossattention.c_proj": None,
        "mlp.c_fc": None,
        "mlp.c_proj": None,
    }
    assert found["attn.c_attn"].blocks.dim == 1


def test_gpt_oss_alternates_gate_and_up_in_transposed_experts():
    found = layouts_of("GptOss", EXPERTS)
    gate_up = found["mlp.experts.gate_up_proj"]
    assert gate_up.transposed and gate_up.blocks.dim == 1
    assert [block.indices() for block in gate_up.blocks.blocks] == [list(range(0, 96, 2)), list(range(1, 96, 2))]
    assert found["mlp.experts.down_proj"].transposed and found["mlp.experts.down_proj"].blocks is None


def test_llama4_experts_are_transposed():
    config = transformers.Llama4TextConfig(**EXPERTS, intermediate_size_mlp=48, interleave_moe_layer_step=1)
    with torch.device("meta"):
        found = matrix_layouts(transformers.Llama4ForCausalLM(config))
    (gate_up,) = (layout for fqn, layout in found.items() if fqn.endswith("experts.gate_up_proj"))
    assert gate_up.transposed and gate_up.blocks.dim == 1
    assert [block.indices() for block in gate_up.blocks.blocks] == HALVES


def test_qwen3_next():
    config = {
        **GROUPED,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 3,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    found = layouts_of("Qwen3Next", config)
    # two key heads, each: query 3, key 3, two values of 5, two gates of 5
    bounds = [(0, 3), (3, 6), (6, 16), (16, 26)]
    expected = [starts(*((h * 26 + a, h * 26 + b) for h in range(2))) for a, b in bounds]
    assert [block.indices() for block in found["linear_attn.in_proj_qkvz"].blocks.blocks] == expected
    # four heads, each: query 8, gate 8
    gated = [starts(*((h * 16 + a, h * 16 + a + 8) for h in range(4))) for a in (0, 8)]
    assert [block.indices() for block in found["self_attn.q_proj"].blocks.blocks] == gated


class Attention(nn.Module):
    """Linear layers of these shapes, name -> (out, in), and what the module keeps of sizes."""

    def __init__(self, linears, **sizes):
        super().__init__()
        for name, (out, inputs) in linears.items():
            self.register_module(name, nn.Linear(inputs, out, bias=False))
        vars(self).update(sizes)


class InternLM2Attention(Attention):
    pass


class Mamba2(Attention):
    pass


class MixedExperts(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        self.num_experts = 4
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


THIRDS = [starts((0, 8)), starts((8, 16)), starts((16, 24))]
GROUPED_ROWS = [starts((0, 8)), starts((8, 12)), starts((12, 16))]  # 4 heads of 2 queries, 2 of keys and of values
TWO = [starts((0, 12)), starts((12, 24))]
BY_GROUP = [starts((0, 4), (8, 12)), starts((4, 6), (12, 14)), starts((6, 8), (14, 16))]
# what a layer holds -> {weight: indices of every block}
OWN = {
    "nanoGPT": (Attention({"c_attn": (24, 8), "c_proj": (8, 8)}, n_head=2, n_embd=8), {"c_attn": THIRDS}),
    "nanoGPT without sizes": (Attention({"c_attn": (24, 8), "c_proj": (8, 8)}), {"c_attn": THIRDS}),
    "x-transformers": (
        Attention({"to_q": (16, 8), "to_kv": (24, 8), "to_out": (8, 16)}, heads=4),
        {"to_kv": TWO},
    ),
    "lucidrains' attention, wider than the model": (
        Attention({"to_qkv": (24, 6), "to_out": (6, 8)}, heads=4),
        {"to_qkv": THIRDS},
    ),
    "gpt-fast": (
        Attention({"wqkv": (16, 8), "wo": (8, 8)}, n_head=4, head_dim=2, n_local_heads=2, dim=8),
        {"wqkv": GROUPED_ROWS},
    ),
    "InternLM2": (
        InternLM2Attention({"wqkv": (16, 8), "wo": (8, 8)}, num_heads=4, head_dim=2, num_key_value_heads=2),
        {"wqkv": BY_GROUP},
    ),
    "Megatron": (
        Attention(
            {"linear_qkv": (16, 8), "linear_proj": (8, 8)},
            num_attention_heads_per_partition=4,
            num_query_groups_per_partition=2,
            hidden_size_per_attention_head=2,
        ),
        {"linear_qkv": BY_GROUP},
    ),
    "Megatron's gated MLP": (Attention({"linear_fc1": (24, 8), "linear_fc2": (8, 12)}), {"linear_fc1": TWO}),
    "Megatron's MLP": (Attention({"linear_fc1": (24, 8), "linear_fc2": (8, 24)}), {}),
    "OLMo": (
        Attention(
            {"att_proj": (16, 8), "attn_out": (8, 8), "ff_proj": (24, 8), "ff_out": (8, 12)},
            config=SimpleNamespace(n_heads=4, n_kv_heads=2),
        ),
        {"att_proj": GROUPED_ROWS, "ff_proj": TWO},
    ),
    "w12": (Attention({"w12": (24, 8), "w3": (8, 12)}), {"w12": TWO}),
    "mamba_ssm": (
        Mamba2({"in_proj": (22, 8), "out_proj": (8, 6)}, d_inner=6, ngroups=2, d_state=2, nheads=2),
        {"in_proj": [starts((0, 6)), starts((6, 12)), starts((12, 16)), starts((16, 20)), starts((20, 22))]},
    ),
    "torch": (nn.MultiheadAttention(8, 2), {"in_proj_weight": THIRDS}),
    "torch, other keys": (nn.MultiheadAttention(8, 2, kdim=6), {}),
    "flat experts": (
        MixedExperts(w1=(24, 8), bias=(4, 8), router=(6, 8)),
        {"w1": [starts((i, i + 6)) for i in range(0, 24, 6)]},
    ),
    "grouped heads of unknown sizes": (Attention({"qkv": (16, 8), "proj": (8, 8)}, heads_of_keys=2), {}),
    "unknown classes": (Attention({"query_key_value": (24, 8), "q_proj": (16, 8), "in_proj": (24, 8)}), {}),
}


@pytest.mark.parametrize("case", OWN)
def test_cuts_of_own_code(case):
    layer, expected = OWN[case]
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    found = {
        fqn.removeprefix("layers.0.").removesuffix(".weight"): [block.indices() for block in layout.blocks.blocks]
        for fqn, layout in matrix_layouts(model).items()
    }
    assert found == expected
    assert all(block for blocks in found.values() for block in blocks)


def test_a_thin_part_stays_with_the_part_before_it():
    """Latent 12, rotary key 4; key 24 and value 20 over the four heads: with a least side of 8, 21 and 25."""
    config = transformers.DeepseekV3Config(**MLA)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    attention = "model.layers.0.self_attn"
    for least, latent, heads in ((0, 2, 2), (8, 0, 2), (21, 0, 0)):
        found = fused_weights.matrix_layouts(model, least)
        for name, blocks in ((f"{attention}.kv_a_proj_with_mqa", latent), (f"{attention}.kv_b_proj", heads)):
            split = found[f"{name}.weight"]["blocks"]
            split.check(model.get_parameter(f"{name}.weight").shape)
            assert len(split.blocks) == (blocks or 1), (name, least)
