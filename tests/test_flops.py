"""MFU's two figures against numbers worked out by hand."""

import dataclasses

import pytest
import torch
from torch import nn

from models.llama3 import Llama3, Llama3Args, flavors
from torchtitan_dmuon.flops import num_flops_per_token, num_matmul_parameters


def _tiny(tie: bool) -> Llama3:
    args = Llama3Args(dim=8, n_layers=2, n_heads=2, n_kv_heads=1, ffn_hidden_dim=16, vocab_size=10, tie_embeddings=tie)
    with torch.device("meta"):
        return Llama3(args)


@pytest.mark.parametrize("tie", [False, True])
def test_matmul_parameters_by_hand(tie):
    # A block: wq 8*8, wk and wv 8*4 each, wo 8*8, three feed-forward matrices of 8*16. The head: 8*10.
    block = 64 + 32 + 32 + 64 + 3 * 128
    assert num_matmul_parameters(_tiny(tie)) == 2 * block + 80


def test_matmul_parameters_leave_out_norms_biases_and_tables():
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    assert num_matmul_parameters(model) == 12


def test_flops_by_hand():
    # 6 * 100 + 6 * 2 layers * 3 heads * (4 + 5) * 10 tokens
    assert num_flops_per_token(100, n_layers=2, n_heads=3, qk_dim=4, v_dim=5, seq_len=10) == 600 + 3240


def test_llama3_8b_at_8192():
    args = flavors["8B"]
    with torch.device("meta"):
        model = Llama3(args)
    n_matmul = num_matmul_parameters(model)
    # 8,030,261,248 parameters less the 128,256 x 4,096 table and 65 norms of 4,096.
    assert n_matmul == 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    flops = num_flops_per_token(
        n_matmul,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        qk_dim=args.head_dim,
        v_dim=args.head_dim,
        seq_len=8192,
    )
    assert flops == 6 * n_matmul + 12 * 32 * 32 * 128 * 8192
    assert flops == 57_912_852_480


def test_tied_table_counts_once():
    args = dataclasses.replace(flavors["1B"], n_layers=1)
    with torch.device("meta"):
        tied = num_matmul_parameters(Llama3(args))
        untied = num_matmul_parameters(Llama3(dataclasses.replace(args, tie_embeddings=False)))
    assert tied == untied
