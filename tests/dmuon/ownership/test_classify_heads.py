"""Heads among layers: the default predicate finds the repeated layers wherever a model keeps its head."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuon import classify
from tests.support.harness import build_on_meta, muon_names


class MLP(nn.Module):
    """A layer whose linear modules are a Sequential, as many write it."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))


class Mixer(MLP):
    """The other kind of a hybrid model."""


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.out = nn.Linear(128, 500)


class Extra(nn.Module):
    """A further head as a layer, like Medusa's: a residual linear, then as many rows as there are tokens."""

    def __init__(self):
        super().__init__()
        self.residual = nn.Linear(128, 128)
        self.out = nn.Linear(128, 1000)


def parts(**modules):
    root = nn.Module()
    for name, module in modules.items():
        root.register_module(name, module)
    return root


def head():
    return nn.Linear(128, 500)  # no wider than a layer's hidden side may be


def tokens(vocabulary=500):
    return nn.Embedding(vocabulary, 128)


def sequential_head():
    return nn.Sequential(nn.LayerNorm(128), head())


def stack():
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128))


LAYOUTS = {
    # allenai/OLMo
    "parts in a dict": (
        lambda: parts(
            transformer=nn.ModuleDict({"wte": tokens(), "blocks": nn.ModuleList([MLP(), MLP()]), "ff_out": head()})
        ),
        ["transformer.blocks.0", "transformer.blocks.1"],
    ),
    "parts in a dict, one layer, the head a module": (
        lambda: parts(transformer=nn.ModuleDict({"wte": tokens(), "blocks": nn.ModuleList([MLP()]), "out": Head()})),
        ["transformer.blocks.0"],
    ),
    "parts in a dict, layers a Sequential of one": (
        lambda: nn.ModuleDict({"wte": tokens(), "blocks": nn.Sequential(MLP()), "head": head()}),
        ["blocks.0"],
    ),
    "a Sequential": (lambda: nn.Sequential(tokens(), MLP(), MLP(), head()), ["1", "2"]),
    "a Sequential, one layer": (lambda: nn.Sequential(tokens(), MLP(), head()), ["1"]),
    "a Sequential, the head a module": (lambda: nn.Sequential(tokens(), MLP(), MLP(), Head()), ["1", "2"]),
    "a Sequential of Sequentials": (
        lambda: nn.Sequential(tokens(), stack(), stack(), sequential_head()),
        ["1.1", "2.1"],
    ),
    "a pipeline": (lambda: nn.Sequential(parts(wte=tokens()), MLP(), MLP(), Head()), ["1", "2"]),
    "a shared layer": (lambda: nn.Sequential(tokens(), *[MLP()] * 3, parts(out=head())), ["1"]),
    "a Sequential as head": (
        lambda: parts(wte=tokens(), layers=nn.ModuleList([MLP()]), lm_head=sequential_head()),
        ["layers.0"],
    ),
    "a module in a Sequential as head": (
        lambda: parts(wte=tokens(), layers=nn.ModuleList([MLP()]), lm_head=nn.Sequential(nn.Dropout(), Head())),
        ["layers.0"],
    ),
    # MusicGen
    "a list of heads": (
        lambda: parts(layers=nn.ModuleList([MLP()]), lm_heads=nn.ModuleList([head(), head()])),
        ["layers.0"],
    ),
    # torchtitan
    "a dict of layers": (
        lambda: parts(wte=tokens(), layers=nn.ModuleDict({"0": MLP(), "1": MLP()})),
        ["layers.0", "layers.1"],
    ),
    "a dict of one layer": (lambda: parts(layers=nn.ModuleDict({"0": MLP()}), output=head()), ["layers.0"]),
    "hybrid": (lambda: parts(layers=nn.ModuleList([MLP(), Mixer(), Mixer()])), ["layers.0", "layers.1", "layers.2"]),
    "hybrid in a dict": (lambda: parts(layers=nn.ModuleDict({"0": MLP(), "1": Mixer()})), ["layers.0", "layers.1"]),
    "hybrid as parts": (lambda: nn.ModuleList([tokens(), MLP(), MLP(), Head()]), ["1", "2"]),
    "stages": (
        lambda: parts(stages=nn.ModuleList([nn.ModuleList([MLP()]), nn.ModuleList([Mixer()])])),
        ["stages.0.0", "stages.1.0"],
    ),
    "experts in a layer": (
        lambda: parts(layers=nn.ModuleList([parts(experts=nn.ModuleList([MLP(), MLP()]))])),
        ["layers.0.experts.0", "layers.0.experts.1"],
    ),
    "wrapped": (
        lambda: nn.Sequential(tokens(), checkpoint_wrapper(MLP()), torch.compile(MLP()), checkpoint_wrapper(head())),
        ["1", "2"],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_is_no_layer_wherever_it_stands(layout):
    build, layers = LAYOUTS[layout]
    leaves = [""] if layout == "a Sequential of Sequentials" else [".mlp.0", ".mlp.2"]
    assert muon_names(build_on_meta(build)) == [f"{layer}{leaf}.weight" for layer in layers for leaf in leaves]


def test_a_weight_shaped_like_the_embedding_is_a_head_in_a_layer_too():
    def build(vocabulary):
        further = nn.ModuleList([Extra(), Extra()])
        return parts(wte=tokens(vocabulary), layers=nn.ModuleList([MLP()]), further=further)

    decisions = classify(build_on_meta(lambda: build(1000)))
    assert decisions["further.1.residual.weight"].muon and decisions["layers.0.mlp.0.weight"].muon
    assert not decisions["further.1.out.weight"].muon
    assert decisions["further.1.out.weight"].reason == "embedding or head"
    # As wide, but from another dimension (DeepSeek's kv_b_proj with 32768 tokens).
    lifting = parts(wte=tokens(1000), layers=nn.ModuleList([parts(down=nn.Linear(128, 160), up=nn.Linear(160, 1000))]))
    assert muon_names(lifting) == ["layers.0.down.weight", "layers.0.up.weight"]
    # A vocabulary as small as the hidden side of a layer says nothing about it.
    assert "layers.0.mlp.0.weight" in muon_names(build_on_meta(lambda: build(256)))
