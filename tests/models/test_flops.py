"""MFU's numerator: by hand, and as PyTorch counts it."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import get_model_args, get_model_spec, model_names
from models.flops import attention_flops, linear_flops
from models.llama3 import Llama3, Llama3Args, flavors, spec

SEQ_LEN = 32


@pytest.mark.parametrize("tie", [False, True])
def test_linears_by_hand(tie):
    # A block: wq 8*8, wk and wv 8*4 each, wo 8*8, three feed-forward matrices of 8*16. The head: 8*10.
    args = Llama3Args(dim=8, n_layers=2, n_heads=2, n_kv_heads=1, ffn_hidden_dim=16, vocab_size=10, tie_embeddings=tie)
    with torch.device("meta"):
        model = Llama3(args)
    assert linear_flops(model) == 6 * (2 * (64 + 32 + 32 + 64 + 3 * 128) + 80)


def test_norms_biases_and_tables_do_not_count():
    assert linear_flops(nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3))) == 6 * 12


def test_attention_by_hand():
    # 6 * 2 layers * 3 heads * (4 + 5) * 10 tokens
    assert attention_flops(n_layers=2, n_heads=3, qk_dim=4, v_dim=5, seq_len=10) == 3240


def test_llama3_8b_at_8192():
    args = flavors["8B"]
    with torch.device("meta"):
        model = Llama3(args)
    # 8,030,261,248 parameters less the 128,256 x 4,096 table and 65 norms of 4,096.
    expected = 6 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096) + 12 * 32 * 32 * 128 * 8192
    assert spec.flops_per_token(model, args, 8192) == expected == 57_912_852_480


@pytest.mark.parametrize("family", model_names())
def test_every_familys_figure_is_what_pytorch_counts(family):
    made, tokens = get_model_spec(family), torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    args = dataclasses.replace(get_model_args(family, "debugmodel"), vocab_size=64)
    model = made.build(args)
    # The attention kernel that writes out its products; the counter does not know the CPU's fused one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * made.flops_per_token(model, args, SEQ_LEN)
