"""Llama 3 against HuggingFace's implementation, and its initialisation against itself."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.layers import (
    RMSNorm,
    RopeScaling,
    apply_rotary,
    causal_attention,
    causal_attention_with_maxima,
    rope_table,
)
from models.llama3 import Llama3, Llama3Args, Llama3HFNameMap, flavors
from tests.support.twins import assert_equal_to_twin, hf_twin
from torchtitan_dmuon.initialization import seeded_init

HF = Llama3HFNameMap()

# init_std: with 0.02 attention is nearly uniform and its positions hardly show in the logits.
GQA = Llama3Args(
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_hidden_dim=96,
    vocab_size=128,
    max_seq_len=512,
    init_std=0.2,
)
TIED = dataclasses.replace(GQA, tie_embeddings=True)
MHA = dataclasses.replace(GQA, n_kv_heads=4)
# original_max_seq_len 64: a sequence of 400 reaches all three bands of the scaling.
SCALED = dataclasses.replace(GQA, rope_theta=10_000.0, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64))
ARGS = {"gqa": GQA, "tied": TIED, "mha": MHA, "scaled": SCALED}


def _tokens(args: Llama3Args, batch: int = 2, seq_len: int = 400) -> torch.Tensor:
    return torch.randint(args.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
def test_logits_and_gradients_equal_huggingface(args):
    assert_equal_to_twin(Llama3(args), HF, _tokens(args))


def test_rope_scaling_changes_the_logits_it_is_tested_on():
    model = Llama3(SCALED)
    unscaled = Llama3(dataclasses.replace(SCALED, rope_scaling=None))
    unscaled.load_state_dict(model.state_dict())
    tokens = _tokens(SCALED)
    assert (model(tokens) - unscaled(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("flavor", ["160M", "1B", "8B"])
def test_rope_table_equals_huggingface_for_the_released_figures(flavor):
    args = dataclasses.replace(flavors[flavor], vocab_size=8)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**HF.hf_config(args)))
    cos, sin = rotary(torch.zeros(1), torch.arange(20_000)[None])
    ours_cos, ours_sin = rope_table(20_000, args.head_dim, args.rope_theta, args.rope_scaling).chunk(2, -1)
    torch.testing.assert_close(torch.cat((ours_cos, ours_cos), -1), cos[0], atol=0, rtol=0)
    torch.testing.assert_close(torch.cat((ours_sin, ours_sin), -1), sin[0], atol=0, rtol=0)


def test_bf16_equals_huggingface_block_for_block():
    """The same roundings at the same places; only the attention kernels differ."""
    model = _materialise(SCALED)
    twin = hf_twin(model, HF).bfloat16()
    model.bfloat16()
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    block, hf_block = model.layers[0], twin.model.layers[0]
    assert torch.equal(block.attention_norm(x), hf_block.input_layernorm(x))
    assert torch.equal(block.feed_forward(x), hf_block.mlp(x))
    logits, hf_logits = model(_tokens(SCALED)), twin(_tokens(SCALED)).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert (logits - hf_logits).abs().mean() < 0.02 * hf_logits.abs().mean()


def test_rms_norm_keeps_the_input_dtype_with_an_fp32_weight():
    assert RMSNorm(8, 1e-5)(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    table = rope_table(64, 16, 10_000.0)
    q, k = torch.randn(16), torch.randn(16)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rotary(x.view(1, 1, 1, 16), table[position : position + 1]).flatten()

    torch.testing.assert_close(at(q, 50).norm(), q.norm())
    torch.testing.assert_close(at(q, 9) @ at(k, 4), at(q, 45) @ at(k, 40), atol=1e-5, rtol=1e-5)


def _materialise(args: Llama3Args, seed: int = 0) -> Llama3:
    """What the trainer does: build on meta, allocate, initialise each parameter; here in reverse order."""
    with torch.device("meta"):
        model = Llama3(args)
    assert all(p.is_meta for p in model.parameters()) and model.rope_table.is_meta
    model.to_empty(device="cpu")
    model.tie_weights()
    model.rope_table.fill_(float("nan"))
    model.init_buffers()
    for fqn, parameter in reversed(list(model.named_parameters())):
        parameter.data.fill_(float("nan"))
        seeded_init(model.init_parameter, seed)(fqn, parameter)
    return model


@pytest.mark.parametrize("args", [GQA, TIED, SCALED], ids=["gqa", "tied", "scaled"])
def test_meta_build_equals_eager_build_bitwise(args):
    eager, meta = Llama3(args), _materialise(args)
    for named_parameter in eager.named_parameters():
        seeded_init(eager.init_parameter, 0)(*named_parameter)
    assert eager.state_dict().keys() == meta.state_dict().keys()
    for name, value in eager.state_dict().items():
        assert torch.equal(value, meta.state_dict()[name]), name
    assert torch.equal(eager.rope_table, meta.rope_table)
    assert torch.equal(eager(_tokens(args)), meta(_tokens(args)))


def test_init_depends_on_seed_and_name_alone():
    first, other = (dict(_materialise(GQA, seed).named_parameters()) for seed in (0, 1))
    for fqn, parameter in first.items():
        if parameter.ndim == 2:
            assert not torch.equal(parameter, other[fqn]), fqn
    init = seeded_init(Llama3(GQA).init_parameter, 0)
    for fqn, parameter in first.items():  # one at a time, into a tensor that is not the model's
        torch.manual_seed(123)  # the global generator must not matter
        alone = torch.empty(parameter.shape)
        init(fqn, alone)
        assert torch.equal(alone, parameter), fqn
    assert not torch.equal(first["layers.0.attention.wk.weight"], first["layers.0.attention.wv.weight"])


def test_an_eager_model_is_ready_and_always_the_same():
    torch.manual_seed(123)  # the global generator must not matter
    first = dict(Llama3(GQA).named_parameters())
    torch.manual_seed(124)
    again = Llama3(GQA)
    for fqn, parameter in again.named_parameters():
        assert torch.equal(parameter, first[fqn]), fqn
    again.init_weights(seed=1)
    for fqn, parameter in again.named_parameters():
        assert torch.equal(parameter, first[fqn]) == (parameter.ndim == 1), fqn


@pytest.mark.parametrize("tie", [False, True])
def test_initial_distributions(tie):
    args = Llama3Args(
        dim=256, n_layers=3, n_heads=4, n_kv_heads=2, ffn_hidden_dim=512, vocab_size=512, tie_embeddings=tie
    )
    model = Llama3(args)
    cut = 0.9866  # standard deviation of a unit normal cut off at 3

    def check(name: str, std: float) -> None:
        weight = model.get_parameter(name)
        assert weight.std().item() == pytest.approx(std, rel=0.02), name
        assert weight.mean().abs().item() < 5 * std / weight.numel() ** 0.5, name

    check("tok_embeddings.weight", cut * 0.02 if tie else 1.0)
    check("output.weight", cut * 0.02)
    for layer in range(3):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            check(f"layers.{layer}.{name}.weight", cut * 0.02)
        for name in ("attention.wo", "feed_forward.w2"):
            check(f"layers.{layer}.{name}.weight", cut * 0.02 / (2 * (layer + 1)) ** 0.5)
        assert (model.get_parameter(f"layers.{layer}.ffn_norm.weight") == 1).all()
    # A fresh model predicts nearly the uniform distribution.
    tokens = _tokens(args, seq_len=64)
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(512.0).log().item(), abs=0.2)


def test_init_parameter_refuses_unknown_names():
    model = Llama3(GQA)
    for fqn in (
        "layers.0._orig_mod.attention.wq.weight",
        "layers.2.attention.wq.weight",
        "attention.wq.weight",
    ):
        with pytest.raises(ValueError, match="no parameter"):
            model.init_parameter(fqn, torch.empty(2, 2), torch.Generator())


def test_tied_head_is_one_parameter_under_two_names():
    model = Llama3(TIED)
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())
    state = model.state_dict()
    assert state["output.weight"].data_ptr() == state["tok_embeddings.weight"].data_ptr()
    assert "rope_table" not in state


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_released_sizes_equal_huggingface(flavor, parameters):
    args = flavors[flavor]
    with torch.device("meta"):
        model = Llama3(args)
        twin = LlamaForCausalLM(LlamaConfig(**HF.hf_config(args)))
    assert sum(p.numel() for p in model.parameters()) == parameters
    ours = {HF.to_hf(fqn): p.shape for fqn, p in model.named_parameters()}
    assert ours == {name: p.shape for name, p in twin.named_parameters()}


def test_160m_is_its_name():
    with torch.device("meta"):
        model = Llama3(dataclasses.replace(flavors["160M"], vocab_size=50_257))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(160e6, rel=0.01)


def test_hf_names_round_trip():
    model = Llama3(GQA)
    names = {fqn: HF.to_hf(fqn) for fqn in model.state_dict()}
    assert len(set(names.values())) == len(names)
    assert {HF.from_hf(name): name for name in names.values()} == names
    assert HF.from_hf("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    with pytest.raises(ValueError, match=r"q_proj\.bias"):
        HF.from_hf("model.layers.0.self_attn.q_proj.bias")
    with pytest.raises(ValueError, match="rope_table"):
        HF.to_hf("rope_table")


def test_forward_refuses_a_sequence_over_max_seq_len():
    model = Llama3(dataclasses.replace(GQA, max_seq_len=16))
    model(_tokens(GQA, seq_len=16))
    with pytest.raises(ValueError, match="17 tokens but max_seq_len is 16"):
        model(_tokens(GQA, seq_len=17))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 66}, "n_heads"),
        ({"dim": 12}, "even"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"n_layers": 0}, "n_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"max_seq_len": -1}, "max_seq_len"),
    ],
)
def test_bad_args_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GQA, **change)


def test_bad_rope_scaling_names_the_field():
    with pytest.raises(ValueError, match="low_freq_factor"):
        RopeScaling(low_freq_factor=4.0, high_freq_factor=4.0)
    with pytest.raises(ValueError, match=r"rope_scaling\.factor"):
        RopeScaling(factor=0.5)


def test_build_without_a_vocabulary_says_what_to_do():
    with pytest.raises(ValueError, match="vocab_size is None"):
        Llama3(flavors["debugmodel"])


def test_a_slice_of_the_heads_runs_the_same_attention():
    """Tensor parallelism by hand: the two halves of the heads add up to the whole."""
    model = Llama3(GQA)
    attention, x, rope = model.layers[0].attention, torch.randn(2, 32, 64), model.rope_table[:32]
    parts = []
    for half in (0, 1):
        part = Llama3(GQA).layers[0].attention
        for name in ("wq", "wk", "wv"):
            weight = attention.get_submodule(name).weight.detach().chunk(2, dim=0)[half]
            part.get_submodule(name).weight = torch.nn.Parameter(weight)
        part.wo.weight = torch.nn.Parameter(attention.wo.weight.detach().chunk(2, dim=1)[half])
        parts.append(part(x, rope))
    torch.testing.assert_close(parts[0] + parts[1], attention(x, rope), atol=1e-6, rtol=1e-5)


def test_compiled_blocks_have_no_graph_break_and_equal_eager():
    model, compiled = Llama3(GQA), Llama3(GQA)
    torch._dynamo.reset()
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    tokens = _tokens(GQA, seq_len=32)
    torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-6, rtol=1e-5)
    for logits in (compiled(tokens), model(tokens)):
        logits.logsumexp(-1).sum().backward()
    for (fqn, p), q in zip(model.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-5, rtol=1e-5, msg=fqn)


@pytest.fixture
def one_rank_mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_in_bf16_keeps_the_rope_table_fp32(one_rank_mesh):
    model, plain = Llama3(SCALED), Llama3(SCALED).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=one_rank_mesh, mp_policy=policy)
    fully_shard(model, mesh=one_rank_mesh, mp_policy=policy)
    tokens = _tokens(SCALED, seq_len=64)
    logits = model(tokens)
    plain.init_buffers()
    assert model.rope_table.dtype == torch.float32
    assert torch.equal(logits, plain(tokens))
    logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# ------------------------------------------------------------------ largest attention logits


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_notes_its_largest_logits(kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 19, heads, 8, generator=generator, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    )
    out, maxima = causal_attention_with_maxima(q, k, v)
    expected = causal_attention(q, k, v)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    got, want = (torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (out, expected))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for head in range(4):
        logits = torch.einsum("bid,bjd->bij", q[:, :, head], k[:, :, head * kv_heads // 4]) / 8**0.5
        allowed = torch.ones(19, 19).tril().bool()
        torch.testing.assert_close(maxima[head], logits[:, allowed].max(), atol=1e-6, rtol=1e-6)


def test_maxima_gather_over_forwards_that_train():
    model = Llama3(GQA)
    layer = model.layers[1].attention
    noted = layer.track_max_logits(torch.device("cpu"))
    tokens = _tokens(GQA, seq_len=16)
    reference = Llama3(GQA)(tokens)
    torch.testing.assert_close(model(tokens), reference, atol=1e-5, rtol=1e-5)
    first = noted.clone()
    assert first.shape == (4,) and (first > 0).all()
    model(tokens[:, :2])  # smaller maxima do not lower what is there
    assert torch.equal(noted, first)
    noted.zero_()
    with torch.no_grad():
        model(tokens)
    assert not noted.any()  # validation leaves no trace
    assert "layers.1.attention.max_logits" not in model.state_dict()
