"""Fused weights as blocks: the same as separate parameters, on any mesh."""

import pytest
import torch
from torch import nn

from dmuon import Block, BlockSplit, split_equal, split_heads, split_interleaved, split_sizes
from tests.support.harness import assert_same, build, full_weights, train, weights_of
from tests.support.oracle import OracleMuon, ToyModel, is_proj, train_one_process
from tests.support.pool import distributed
from torchtitan_dmuon.dmuon.ownership.blocks import put, take

SHAPE = (24, 7)


def rows_of(split, shape=SHAPE):
    return [block.indices() for block in split.blocks]


def test_the_kinds_of_split():
    assert rows_of(split_sizes((4, 2, 1))) == [[0, 1, 2, 3], [4, 5], [6]]
    assert rows_of(split_equal(3)(SHAPE)) == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert rows_of(split_heads(12)(SHAPE)) == [list(range(12)), list(range(12, 24))]
    assert rows_of(split_heads(1, dim=1)((3, 2))) == [[0], [1]]
    # two heads of (query 2, key 1)
    assert rows_of(split_interleaved(2, (2, 1))) == [[0, 1, 3, 4], [2, 5]]
    assert rows_of(split_interleaved(3, (1, 1))) == [[0, 2, 4], [1, 3, 5]]
    assert str(split_sizes((4, 2), dim=1)) == "2 blocks 4+2 columns"
    assert str(split_equal(3)(SHAPE)) == "3 blocks of 8 rows"


def test_what_does_not_cut_exactly_is_refused():
    for split, message in [
        (split_sizes((20, 3)), "hold 23 of the 24 rows"),
        (BlockSplit((Block(0, 12), Block(11, 12))), "hold 24 of the 24 rows"),
        (split_sizes((4, 4), dim=1), "hold 8 of the 7 columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            split.check(SHAPE)
    with pytest.raises(ValueError, match="24 rows do not split into 5"):
        split_equal(5)(SHAPE)
    with pytest.raises(ValueError, match="no multiple of head_dim 5"):
        split_heads(5)(SHAPE)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "split", [split_sizes((4, 5, 3)), split_interleaved(3, (1, 2, 1))], ids=["runs", "interleaved"]
)
def test_take_and_put(dim, split):
    stack = torch.randn(2, 12, 12)
    expected = stack.clone()
    for scale, block in enumerate(split.blocks, start=2):
        part = take(stack, block, dim)
        index = torch.tensor(block.indices())
        assert torch.equal(part, stack.index_select(1 + dim, index))
        part.mul_(scale)
        put(stack, block, dim, part)
        expected.index_copy_(1 + dim, index, expected.index_select(1 + dim, index) * scale)
    assert torch.equal(stack, expected)


# ------------------------------------------------------------------ equal to separate parameters

HYPER = {"lr": 0.05, "weight_decay": 0.1, "adamw_lr": 1e-3}
POLICY = {
    "overrides": [
        {"name": "q_proj", "set": {"blocks": split_heads(5)}},
        {"name": "up_proj", "set": {"blocks": split_interleaved(4, (2, 4, 3))}},
        {"name": "down_proj", "set": {"blocks": split_sizes((1, 30, 5), dim=1)}},
        {"name": "layers.1.down_proj", "set": {"blocks": split_interleaved(12, (1, 2), dim=1)}},
        {"name": "layers.2.up_proj", "set": {"blocks": None}},
    ]
}


def parts(name, shape):
    """The same cuts, written as indices."""
    everything = slice(None)
    if "q_proj" in name:
        return [(list(range(start, start + 5)), everything) for start in range(0, 20, 5)]
    if name == "layers.2.up_proj.weight":
        return [(everything, everything)]
    if "up_proj" in name:
        heads = range(0, 36, 9)
        runs = [(0, 2), (2, 6), (6, 9)]
        return [([h + i for h in heads for i in range(first, last)], everything) for first, last in runs]
    if name == "layers.1.down_proj.weight":
        columns = [[i for i in range(36) if i % 3 == 0], [i for i in range(36) if i % 3 != 0]]
    else:
        columns = [[0], list(range(1, 31)), list(range(31, 36))]
    return [(everything, index) for index in columns]


@pytest.mark.parametrize("mesh", [None, (2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=lambda m: "x".join(map(str, m or (4,))))
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@distributed(world=4)
def test_blocks_equal_separate_parameters(rank, world, mesh, scale):
    """Momentum, scale and Newton-Schulz of each block by itself (public faults: Megatron-LM 4731, 7117, 5961)."""
    model, optimizer = build(world, mesh=mesh, muon={**HYPER, "scale": scale}, param_policy=POLICY)
    columns = mesh[2] if mesh else 1
    train(model, optimizer, 3, rank // columns)
    oracle = ToyModel()
    expected = OracleMuon(oracle, is_proj, **HYPER, scale=scale, parts=parts)
    train_one_process(oracle, expected, 3, world // columns)
    # 1e-6 of a weight is far below what taking blocks for one matrix would make; sums over ranks round differently.
    assert_same(full_weights(model), weights_of(oracle), atol=2e-6, rtol=2e-6)


class Fused(ToyModel):
    """Query and up projections stored as one weight, so that nothing but storage differs from ``ToyModel``."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.fused_proj = nn.Linear(20, 56, bias=False)
            with torch.no_grad():
                layer.fused_proj.weight.copy_(torch.cat([layer.q_proj.weight, layer.up_proj.weight]))
            layer.q_proj, layer.up_proj = FirstRows(layer, 0, 20), FirstRows(layer, 20, 56)


class FirstRows(nn.Module):
    def __init__(self, layer, start, stop):
        super().__init__()
        self.held = [layer]  # in a list: no submodule
        self.range = slice(start, stop)

    def forward(self, x):
        return nn.functional.linear(x, self.held[0].fused_proj.weight[self.range])


@distributed(world=2)
def test_a_fused_model_trains_as_the_plain_one(rank, world):
    policy = {"overrides": [{"name": "fused_proj", "set": {"blocks": split_sizes((20, 36))}}]}
    fused, optimizer = build(world, Fused(), muon=HYPER, param_policy=policy)
    plain, other = build(world, ToyModel(), muon=HYPER)
    assert train(fused, optimizer, 3, rank) == pytest.approx(train(plain, other, 3, rank), rel=1e-6)
    fused, plain = full_weights(fused), full_weights(plain)
    for index in range(3):
        name = f"layers.{index}."
        both = torch.cat([plain[f"{name}q_proj.weight"], plain[f"{name}up_proj.weight"]])
        torch.testing.assert_close(fused[f"{name}fused_proj.weight"], both, atol=1e-6, rtol=1e-6)


@distributed(world=2)
def test_a_wrong_rule_names_the_parameter(rank, world):
    for rule, message in [
        (split_heads(7), r"layers\.0\.q_proj\.weight: 20 rows are no multiple of head_dim 7"),
        (split_sizes((3, 4)), r"layers\.0\.q_proj\.weight: its blocks hold 7 of the 20 rows"),
        ("heads", r"param_policy overrides\[0\]: blocks must be a split"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(world, optimizer=False, param_policy={"overrides": [{"name": "q_proj", "set": {"blocks": rule}}]})
    with pytest.raises(ValueError, match="transposed must be True or False"):
        build(world, optimizer=False, param_policy={"defaults": {"transposed": 1}})
