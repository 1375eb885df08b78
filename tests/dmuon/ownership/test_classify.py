"""The default predicate on our own models and on HuggingFace's, built on meta from small configurations."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuon import classify
from models import get_model_args, get_model_spec
from tests.support.harness import build_on_meta, muon_names
from tests.support.oracle import ToyModel
from torchtitan_dmuon.dmuon.ownership.classify import canonical_fqn, layer_of


def small_llama3(tie=False):
    spec = get_model_spec("llama3")
    args = dataclasses.replace(
        get_model_args("llama3", next(iter(spec.flavors))),
        dim=256, n_layers=12, n_heads=4, n_kv_heads=2, ffn_hidden_dim=384, vocab_size=512, tie_embeddings=tie,
    )  # fmt: skip
    return build_on_meta(lambda: spec.build(args))


# ------------------------------------------------------------------ our own


@pytest.mark.parametrize("tie", [False, True])
def test_llama3(tie):
    model = small_llama3(tie)
    leaves = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    leaves += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    assert set(muon_names(model)) == {f"layers.{i}.{leaf}.weight" for i in range(12) for leaf in leaves}
    decisions = classify(model)
    assert list(decisions) == [name for name, _ in model.named_parameters()]
    assert decisions["tok_embeddings.weight"].reason == "embedding or head"
    assert decisions["norm.weight"].reason == "1-D"
    assert tie == ("output.weight" not in decisions)
    if not tie:
        assert decisions["output.weight"].reason == "outside the repeated blocks"


class Zoo(nn.Module):
    """One layer of everything that must not be a matrix for Muon, beside four that are."""

    class TopKRouter(nn.Linear):
        pass

    class SwitchRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(128, 256, bias=False)

    def __init__(self):
        super().__init__()
        layer = nn.Module()
        layer.proj = nn.Linear(128, 256)
        layer.square = nn.Linear(128, 128, bias=False)
        layer.thin = nn.Linear(256, 127, bias=False)
        layer.conv = nn.Conv1d(256, 256, 4, groups=256)
        layer.dense_conv = nn.Conv2d(256, 256, 1)
        layer.norm = nn.LayerNorm(128)
        layer.positions = nn.Embedding(256, 128)
        layer.tied = nn.Linear(128, 256, bias=False)
        layer.tied.weight = layer.positions.weight
        layer.mlp = nn.Module()
        layer.mlp.gate = nn.Linear(128, 256)
        layer.mlp.experts = nn.Module()
        layer.shared = nn.Module()
        layer.shared.gate = nn.Linear(128, 256, bias=False)
        layer.shared.shared_expert = nn.Module()
        layer.glu = nn.Module()  # gated, without experts: nothing is routed
        layer.glu.gate = nn.Linear(128, 256, bias=False)
        layer.glu.up = nn.Linear(128, 256, bias=False)
        layer.moe = nn.Module()
        layer.moe.router = nn.Module()
        layer.moe.router.gate = nn.Linear(128, 256, bias=False)
        layer.moe.choose = self.TopKRouter(128, 256, bias=False)
        layer.moe.switch = self.SwitchRouter()
        layer.router = nn.Linear(128, 256, bias=False)
        layer.experts = nn.Module()
        layer.experts.w1 = nn.Parameter(torch.empty(4, 256, 128))
        layer.experts.w1_bias = nn.Parameter(torch.empty(256, 128))
        layer.A_log = nn.Parameter(torch.empty(1, 1, 256, 256))
        layer.scalar = nn.Parameter(torch.empty(()))
        self.layers = nn.ModuleList([layer])
        self.projector = nn.Linear(256, 256)


def test_zoo():
    decisions = classify(build_on_meta(Zoo))
    assert {name.removeprefix("layers.0."): decision.reason for name, decision in decisions.items()} == {
        "A_log": "not the weight of a linear layer (Module.A_log)",
        "scalar": "0-D",
        "proj.weight": "Linear in a block",
        "proj.bias": "1-D",
        "square.weight": "Linear in a block",
        "thin.weight": "thin: smaller side 127 < 128",
        "conv.weight": "not the weight of a linear layer (Conv1d.weight)",
        "conv.bias": "1-D",
        "dense_conv.weight": "not the weight of a linear layer (Conv2d.weight)",
        "dense_conv.bias": "1-D",
        "norm.weight": "1-D",
        "norm.bias": "1-D",
        "positions.weight": "embedding or head",
        "mlp.gate.weight": "router",
        "mlp.gate.bias": "1-D",
        "shared.gate.weight": "router",
        "glu.gate.weight": "Linear in a block",
        "glu.up.weight": "Linear in a block",
        "moe.router.gate.weight": "router",
        "moe.choose.weight": "router",
        "moe.switch.scores.weight": "router",
        "router.weight": "router",
        "experts.w1": "not the weight of a linear layer (Module.w1)",
        "experts.w1_bias": "not the weight of a linear layer (Module.w1_bias)",
        "projector.weight": "outside the repeated blocks",
        "projector.bias": "1-D",
    }
    assert [name for name, decision in decisions.items() if decision.muon] == [
        "layers.0.proj.weight",
        "layers.0.square.weight",
        "layers.0.glu.gate.weight",
        "layers.0.glu.up.weight",
    ]


def linear(out=256):
    return nn.Linear(128, out, bias=False)


def parts(**modules):
    module = nn.Module()
    for name, each in modules.items():
        module.register_module(name, each)
    return module


def experts():
    return nn.ModuleList([parts(gate_proj=linear(), up_proj=linear(), gate=linear()) for _ in range(2)])


class NoisyGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = linear()


ROUTERS = {
    "gate": linear,
    "wg": linear,
    "gating": linear,
    "switch": linear,
    "expert_gate": linear,
    "w_gate": linear,
    "gate_network": lambda: nn.Sequential(linear(), linear()),
    "scorer": NoisyGate,
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("beside", ["experts", "mlps", None])
def test_a_gate_beside_experts_is_a_router_however_many_they_are(name, beside):
    """256 outputs, so that none is refused for being thin. Tutel and Hunyuan: ``gate.wg`` beside ``experts``."""

    def build():
        others = {beside: experts()} if beside else {"up": linear()}
        return parts(layers=nn.ModuleList([parts(moe=parts(**{name: ROUTERS[name]()}, gate_proj=linear(), **others))]))

    decisions = classify(build_on_meta(build))
    gates = [each for key, each in decisions.items() if key.startswith(f"layers.0.moe.{name}.")]
    assert gates and all(each.muon == (beside is None) for each in gates)
    assert {each.reason for each in gates} == {"Linear in a block" if beside is None else "router"}
    assert all(each.muon for key, each in decisions.items() if not key.startswith(f"layers.0.moe.{name}."))


def test_what_is_inside_a_router_is_one_and_experts_are_none():
    class SwitchRouter(nn.Module):  # as transformers names a layer of experts, router and all
        def __init__(self):
            super().__init__()
            self.experts, self.gate = experts(), parts(router_mlp=parts(fc1=linear()), wg=linear())

    names = muon_names(build_on_meta(lambda: parts(layers=nn.ModuleList([parts(mlp=SwitchRouter())]))))
    leaves = ("gate_proj", "up_proj", "gate")
    assert names == [f"layers.0.mlp.experts.{i}.{leaf}.weight" for i in range(2) for leaf in leaves]


def test_fused_weights():
    """Three matrices of ``nn.MultiheadAttention``; of a fused weight the parts may be thin, not all of them."""

    def build():
        layer = parts(attention=nn.MultiheadAttention(128, 2), other=nn.MultiheadAttention(128, 2, kdim=160, vdim=160))
        layer.narrow = parts(qkv=linear(3 * 64), proj=nn.Linear(64, 128))
        layer.latent = parts(kv_a_proj_with_mqa=linear(160 + 64))
        vars(layer.latent).update(kv_lora_rank=160, qk_rope_head_dim=64)
        layer.unknown = parts(fused_qkv=linear(500))
        layer.mixer = parts(x_proj=linear(), dt_proj=linear(), in_proj=linear())
        layer.mixer.A_log = nn.Parameter(torch.empty(128, 16))
        return parts(layers=nn.ModuleList([layer]))

    decisions = classify(build_on_meta(build))
    leaf = {name.removeprefix("layers.0."): decision.reason for name, decision in decisions.items()}
    attention = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
    names = {name.removeprefix("layers.0.") for name in muon_names(build_on_meta(build))}
    assert {name for name in names if not name.endswith(".weight")} == {"attention.in_proj_weight"} | {
        f"other.{each}" for each in attention - {"in_proj_weight"}
    }
    assert leaf["narrow.qkv.weight"] == "thin: smaller side 64 < 128"
    assert leaf["latent.kv_a_proj_with_mqa.weight"] == "Linear in a block"
    told = "Linear in a block; looks fused, taken as one matrix: give it blocks"
    assert leaf["unknown.fused_qkv.weight"] == leaf["mixer.in_proj.weight"] == told
    assert leaf["mixer.x_proj.weight"] == leaf["mixer.dt_proj.weight"] == "state-space parameter"
    assert leaf["mixer.A_log"] == "not the weight of a linear layer (Module.A_log)"


@pytest.mark.parametrize(("outside", "warned"), [(256, False), (300, True)])
def test_a_warning_if_muon_gets_less_than_half(outside, warned, caplog):
    """Embedding and head do not count, not even a head that only its shape tells."""

    def build():
        return parts(
            embed=nn.Embedding(400, 128),
            layers=nn.ModuleList([parts(up=linear())]),
            projector=linear(outside),
            head=nn.Linear(128, 400, bias=False),
        )

    muon_names(build_on_meta(build))
    told = "Muon gets 46% of the elements outside embeddings of Module; the reasons are in the ownership table"
    assert [record.getMessage() for record in caplog.records] == [told] * warned


def test_smallest_side():
    model = ToyModel(layers=1)  # 20 and 36 wide
    assert muon_names(model) == []
    everything = ["layers.0.q_proj.weight", "layers.0.up_proj.weight", "layers.0.down_proj.weight"]
    assert muon_names(model, min_matrix_dim=20) == everything
    assert muon_names(model, min_matrix_dim=21) == []


# ------------------------------------------------------------------ HuggingFace


COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEARS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
GPT2 = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, attention_bias=True))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON))


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**COMMON))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=256, n_layer=2, n_head=4, n_positions=128))


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    # 160 experts, so that the router is not refused merely for being thin.
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON, num_experts=160, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1
        )
    )


HF_MODELS = [
    (llama, "model.layers", LINEARS, False),
    (qwen3, "model.layers", LINEARS, False),
    (gemma2, "model.layers", LINEARS, True),
    (gpt2, "transformer.h", GPT2, True),
    (qwen3_moe, "model.layers", LINEARS[:4] + EXPERTS, False),
]


@pytest.mark.parametrize(
    ("build", "layers", "leaves", "tied"), HF_MODELS, ids=lambda value: getattr(value, "__name__", "")
)
def test_huggingface(build, layers, leaves, tied):
    model = build_on_meta(build)
    if tied:
        model.tie_weights()  # building on meta may untie
    expected = {f"{layers}.{i}.{leaf}" + ("" if "experts" in leaf else ".weight") for i in range(2) for leaf in leaves}
    assert set(muon_names(model)) == expected
    decisions = classify(model)
    assert list(decisions) == [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" in decisions) != tied
    kinds = ("embed", "wte", "wpe", "lm_head", "norm", "ln_", "bias", "mlp.gate.", "router")
    for name, decision in decisions.items():
        if any(kind in name for kind in kinds):
            assert not decision.muon, name
    embedding = next(name for name, param in model.named_parameters() if param is model.get_input_embeddings().weight)
    assert decisions[embedding].reason == "embedding or head"
    if not tied:
        assert decisions["lm_head.weight"].reason == "embedding or head"


def test_an_output_head_inside_a_layer_is_known_by_the_models_own_word():
    """``get_output_embeddings`` is HuggingFace's interface; a headless model raises from it."""

    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Module()])
            self.layers[0].proj = nn.Linear(128, 128, bias=False)
            self.layers[0].head = nn.Linear(128, 256, bias=False)

        def get_input_embeddings(self):
            raise NotImplementedError

        def get_output_embeddings(self):
            return self.layers[0].head

    decisions = classify(build_on_meta(Headed))
    assert decisions["layers.0.proj.weight"].muon
    assert not decisions["layers.0.head.weight"].muon
    assert decisions["layers.0.head.weight"].reason == "embedding or head"


# ------------------------------------------------------------------ names


def test_wrappers_do_not_change_names_or_decisions():
    expected = classify(ToyModel(dim=128, hidden=130))
    assert sum(decision.muon for decision in expected.values()) == 9
    wrapped = ToyModel(dim=128, hidden=130)
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1] = torch.compile(wrapped.layers[1])
    wrapped.layers[2] = torch.compile(checkpoint_wrapper(wrapped.layers[2]))
    names = [name for name, _ in wrapped.named_parameters()]
    assert "layers.0._checkpoint_wrapped_module.q_proj.weight" in names  # so there is something to strip
    assert "layers.2._orig_mod._checkpoint_wrapped_module.q_proj.weight" in names
    assert classify(wrapped) == expected
    assert classify(torch.compile(wrapped)) == expected

    inside = ToyModel(dim=128, hidden=130)
    for layer in inside.layers:
        layer.q_proj = checkpoint_wrapper(layer.q_proj)
        composable_checkpoint(layer.up_proj)
    assert classify(inside) == expected


def test_canonical_names():
    assert canonical_fqn("_orig_mod.layers.0._checkpoint_wrapped_module.q_proj.weight") == "layers.0.q_proj.weight"
    assert canonical_fqn("a._fsdp_wrapped_module.b") == "a.b"
    assert canonical_fqn("layers.0.q_proj.weight") == "layers.0.q_proj.weight"
    assert canonical_fqn("my_orig_mod.w") == "my_orig_mod.w"  # only whole parts
    assert canonical_fqn("") == ""


def test_renaming_shows_in_the_decisions():
    """torchtitan 3356: by a pattern of names, a renamed matrix went to AdamW without a word."""

    def layer(attribute):
        module = nn.Module()
        module.register_module(attribute, nn.Linear(128, 128, bias=False))
        return module

    def model(attribute):
        root = nn.Module()
        root.layers = nn.ModuleList([layer(attribute)])
        return root

    assert muon_names(model("q_proj")) == ["layers.0.q_proj.weight"]
    assert muon_names(model("wq")) == ["layers.0.wq.weight"]  # another name, still a matrix

    renamed = model("q_proj")
    linear = renamed.layers[0].q_proj
    linear.register_parameter("kernel", linear.weight)
    del linear.weight
    decision = classify(renamed)["layers.0.q_proj.kernel"]
    assert not decision.muon
    assert decision.reason == "not the weight of a linear layer (Linear.kernel)"


def test_a_shared_matrix_is_listed_once():
    model = ToyModel(layers=2, dim=128, hidden=130)
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    decisions = classify(model)
    assert list(decisions) == [name for name, _ in model.named_parameters()]
    assert "layers.1.q_proj.weight" not in decisions and decisions["layers.0.q_proj.weight"].muon


# ------------------------------------------------------------------ layers


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        attn = nn.Module()
        attn.heads = nn.ModuleList([nn.Linear(2, 2)])
        layer = nn.Module()
        layer.attn = attn
        layer.mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
        self.layers = nn.ModuleList([layer, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
        self.stages = nn.ModuleDict({"0": nn.Linear(2, 2), "last": nn.Sequential(nn.Linear(2, 2))})
        self.stack = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("", None),
        ("head", None),
        ("layers", None),
        ("inner", None),
        ("layers.0", "layers.0"),
        ("layers.0.attn", "layers.0"),
        ("layers.0.attn.heads.0", "layers.0"),  # the outermost
        ("layers.0.mlp.2", "layers.0"),
        ("layers.1.0", "layers.1"),
        ("stages.0", "stages.0"),
        ("stages.last.0", "stages.last"),
        ("stack.0", "stack.0"),
        ("inner.layers.0", "inner.layers.0"),
    ],
)
def test_layer_of(module, layer):
    assert layer_of(Nested(), module) == layer


def test_layer_of_names_the_wrapper():
    """The hook boundary is what the parent calls: the wrapper, by the name ``named_modules`` has for it."""
    model = Nested()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    assert layer_of(model, "layers.0._checkpoint_wrapped_module.attn") == "layers.0"
    assert layer_of(torch.compile(model), "_orig_mod.layers.0._checkpoint_wrapped_module") == "_orig_mod.layers.0"


def nano_gpt(container):
    """karpathy's layout: the layers' ModuleList is itself an element of a ModuleDict."""
    model = nn.Module()
    layer = nn.Module()
    layer.c_fc = nn.Linear(128, 256)
    parts = {"wte": nn.Embedding(16, 128), "h": nn.ModuleList([layer]), "ln_f": nn.LayerNorm(128)}
    model.transformer = nn.ModuleDict(parts) if container is nn.ModuleDict else nn.ModuleList(parts.values())
    model.lm_head = nn.Linear(128, 256)
    return model


@pytest.mark.parametrize(("container", "stack"), [(nn.ModuleDict, "transformer.h"), (nn.ModuleList, "transformer.1")])
def test_a_bare_container_is_no_layer(container, stack):
    """ModuleList and ModuleDict have no forward, so a unit hooked there would never be entered."""
    model = nano_gpt(container)
    assert layer_of(model, f"{stack}.0.c_fc") == f"{stack}.0"
    assert layer_of(model, f"{stack}.0") == f"{stack}.0"
    assert muon_names(model) == [f"{stack}.0.c_fc.weight"]
