"""The default predicate and the built-in layouts on the architectures of ``transformers``, on the meta device."""

import re

import pytest

from dmuon import classify
from tests.support.architectures import ARCHITECTURES, SIZES
from tests.support.harness import build_on_meta
from torchtitan_dmuon.dmuon.ownership.classify import MIN_MATRIX_DIM
from torchtitan_dmuon.dmuon.ownership.fused_weights import matrix_layouts

transformers = pytest.importorskip("transformers", reason="these tests build models of transformers")


def expand(text):
    """``a.{b,c}d`` as ``a.bd`` and ``a.cd``."""
    found = re.fullmatch(r"(.*?)\{(.*?)\}(.*)", text)
    if found is None:
        return {text}
    before, choices, after = found.groups()
    return {whole for choice in choices.split(",") for whole in expand(before + choice + after)}


def kind(name):
    """The name of a parameter behind its last number."""
    return re.sub(r"^.*[._]\d+\.", "", name.removesuffix(".weight"))


def told(layout):
    """The layout as the table writes it."""
    blocks = layout["blocks"].blocks if layout.get("blocks") else ()
    groups = f"*{blocks[0].groups}" if blocks and blocks[0].groups > 1 else ""
    sizes = f"[{','.join(str(block.size) for block in blocks)}]{groups}" if len(blocks) > 1 else ""
    return sizes + "'" * layout.get("transposed", False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_split(name):
    config, matrices, others = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(name, **{k: v for k, v in {**SIZES, **config}.items() if v is not None})
    model = build_on_meta(lambda: transformers.AutoModel.from_config(config))
    decisions, layouts = classify(model), matrix_layouts(model, MIN_MATRIX_DIM)
    taken, left = set(), set()
    for fqn, param in model.named_parameters():
        decision, layout = decisions[fqn], layouts.get(fqn, {})
        if layout.get("blocks"):
            layout["blocks"].check(param.shape)
        if decision.muon:
            taken.add(kind(fqn) + told(layout) + "?" * ("looks fused" in decision.reason))
        elif param.ndim > 1:
            left.add(kind(fqn) + "@" * (decision.reason == "router"))
    assert taken == {each for text in matrices.split() for each in expand(text)}
    assert left == {each for text in others.split() for each in expand(text)}


def test_there_are_many():
    assert len(ARCHITECTURES) >= 40
