"""Qwen3 against HuggingFace's implementation."""

import dataclasses

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.qwen3 import Qwen3, Qwen3Args, Qwen3HFNameMap, flavors, spec
from tests.support.twins import assert_equal_to_twin
from torchtitan_dmuon.config import ConfigError, load_config
from torchtitan_dmuon.initialization import seeded_init
from torchtitan_dmuon.optimizer import clipped_heads

HF = Qwen3HFNameMap()
# Heads of 24: 4 of them are wider than the residual stream.
ARGS = Qwen3Args(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=24, ffn_hidden_dim=96, vocab_size=128, max_seq_len=512,
    init_std=0.2,
)  # fmt: skip
TOKENS = torch.randint(128, (2, 200), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": True}, {"n_kv_heads": 4}], ids=str)
def test_logits_and_gradients_equal_huggingface(change):
    assert_equal_to_twin(Qwen3(dataclasses.replace(ARGS, **change)), HF, TOKENS)


def test_meta_build_equals_eager_build_bitwise():
    eager = Qwen3(ARGS)
    with torch.device("meta"):
        meta = Qwen3(ARGS)
    meta.to_empty(device="cpu")
    meta.init_buffers()
    for model in (eager, meta):
        for fqn, parameter in model.named_parameters():
            parameter.data.fill_(float("nan"))
            seeded_init(model.init_parameter, 0)(fqn, parameter)
    assert (eager.layers[1].attention.q_norm.weight == 1).all()
    assert torch.equal(eager(TOKENS), meta(TOKENS))


@pytest.mark.parametrize(
    ("flavor", "parameters"),
    [
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
        ("32B", 32_762_123_264),
    ],
)
def test_released_sizes_equal_huggingface(flavor, parameters):
    args = flavors[flavor]
    with torch.device("meta"):
        model = Qwen3(args)
        twin = Qwen3ForCausalLM(Qwen3Config(**HF.hf_config(args)))
    assert sum(p.numel() for p in model.parameters()) == parameters
    ours = {HF.to_hf(fqn): p.shape for fqn, p in model.named_parameters()}
    assert ours == {name: p.shape for name, p in twin.named_parameters()}


def test_bad_args_name_the_field():
    with pytest.raises(ValueError, match="width of a head must be even"):
        dataclasses.replace(ARGS, head_dim=7)
    with pytest.raises(ValueError, match="head_dim must be positive"):
        dataclasses.replace(ARGS, head_dim=0)


def test_qk_clip_is_refused():
    """A norm follows the projections: smaller weights give the same logits. Splitting them into heads is no problem."""
    model = Qwen3(ARGS)
    config = load_config(["--model.name", "qwen3", "--dmuon.qk_clip_threshold", "30"])
    with pytest.raises(ConfigError, match=r"dmuon.qk_clip_threshold: QK-clip changes no logit of qwen3"):
        clipped_heads(model, config)
    heads = spec.qk_heads(model)
    assert [each.attention for each in heads] == [layer.attention for layer in model.layers]
    assert heads[0].split == {"wq.weight": 24, "wk.weight": 24, "wv.weight": 24}
