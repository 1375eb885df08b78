"""The table of fused and transposed weights, against what the models' own code does with them."""

from types import SimpleNamespace

import pytest
import torch

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


def test_unknown_classes_are_left_alone():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].query_key_value = torch.nn.Linear(8, 24, bias=False)
    model.layers[0].q_proj = torch.nn.Linear(8, 16, bias=False)
    model.layers[0].in_proj = torch.nn.Linear(8, 24, bias=False)
    assert matrix_layouts(model) == {}
