"""Where units are hooked, and to which dtypes hooks cast (behaviour 19 of docs/design). No processes."""

import functools

import pytest
import torch
from torch import nn

from tests.support.oracle import ToyModel
from torchtitan_dmuon.dmuon.ownership.boundaries import boundary_dtypes, hook_boundaries
from torchtitan_dmuon.dmuon.ownership.spec import ParamSpec

BF16, FP32 = torch.bfloat16, torch.float32


class Accept:
    def by_module(self, module):
        return isinstance(module, nn.Linear)

    def __call__(self, name, module):
        return isinstance(module, nn.Linear)


def is_kind(module, kinds=(nn.Linear,)):
    return isinstance(module, kinds)


@pytest.mark.parametrize(
    "accept",
    [
        lambda module: isinstance(module, nn.Linear),
        lambda name, module: isinstance(module, nn.Linear) and name == "layers.1.q_proj",
        lambda *both: isinstance(both[1], nn.Linear),
        is_kind,
        functools.partial(lambda kind, module: isinstance(module, kind), nn.Linear),
        Accept(),
        Accept().by_module,
    ],
)
def test_a_predicate_takes_the_module_with_or_without_its_name(accept):
    names = {"layers.1.q_proj.weight": ["layers.1.q_proj.weight"]}
    assert hook_boundaries(ToyModel(), names, accept, strict=True) == {"layers.1.q_proj.weight": "layers.1.q_proj"}


def test_a_predicate_without_a_signature_is_told():
    with pytest.raises(
        ValueError, match=r"^hook_boundary_predicate: no signature found .*; wrap it in lambda module: "
    ):
        hook_boundaries(ToyModel(), {"embed.weight": ["embed.weight"]}, max, strict=True)


def spec(fqn, **values):
    """As ``resolve_specs`` makes them: a ``param_dtype`` among ``values`` was given by a rule."""
    common = {"shape": (2, 2), "route": "muon", "trainable": True, "param_dtype": FP32}
    return ParamSpec(fqn, **{**common, "declares_param_dtype": "param_dtype" in values, **values})


def test_boundary_casts():
    both = {"param_dtype": BF16, "output_dtype": FP32}
    assert boundary_dtypes("b", [spec("x", **both), spec("y", **both)]) == (BF16, FP32)
    assert boundary_dtypes("b", [spec("x", **both, cast_forward_inputs=True)]) == (BF16, FP32)
    assert boundary_dtypes("b", [spec("x", **both, cast_forward_inputs=False)]) == (None, FP32)
    assert boundary_dtypes("b", [spec("x", param_dtype=BF16)]) == (BF16, None)
    # Unless the user says it, inputs are cast only where one declared dtype fits the whole boundary.
    assert boundary_dtypes("b", [spec("x", param_dtype=BF16), spec("y", param_dtype=FP32)]) == (None, None)
    assert boundary_dtypes("b", [spec("x", param_dtype=FP32), spec("y", param_dtype=FP32)]) == (FP32, None)
    off = {"cast_forward_inputs": False}
    assert boundary_dtypes("b", [spec("x", param_dtype=BF16, **off), spec("y", **off)]) == (None, None)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_inputs_are_not_cast_to_a_dtype_that_no_rule_declared(dtype):
    own, said = {"param_dtype": dtype, "declares_param_dtype": False}, {"param_dtype": dtype}
    assert boundary_dtypes("b", [spec("x", **own), spec("y", **own)]) == (None, None)
    for specs in ([spec("x", **own), spec("y", **said)], [spec("x", **said), spec("y", **own)]):
        assert boundary_dtypes("b", specs) == (None, None)
    on = {"cast_forward_inputs": True}
    for x, y in ((own, own), (own, said), (said, own)):
        assert boundary_dtypes("b", [spec("x", **x, **on), spec("y", **y, **on)]) == (dtype, None)
    off = {"cast_forward_inputs": False}
    assert boundary_dtypes("b", [spec("x", **said, **off), spec("y", **said, **off)]) == (None, None)


def test_dtypes_each_parameter_may_have_of_its_own():
    specs = [spec("x", param_dtype=BF16, master_dtype=BF16, optim_dtype=BF16), spec("y", param_dtype=BF16)]
    assert boundary_dtypes("b", specs) == (BF16, None)


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [
        ("output_dtype", {"output_dtype": BF16}, {"output_dtype": FP32}),
        ("output_dtype", {"output_dtype": BF16}, {}),
        ("grad_dtype", {"grad_dtype": BF16}, {}),
        ("cast_forward_inputs", {"cast_forward_inputs": True}, {"cast_forward_inputs": False}),
        ("param_dtype", {"cast_forward_inputs": True, "param_dtype": BF16}, {"cast_forward_inputs": True}),
    ],
)
@pytest.mark.parametrize("name", ["layers.3", ""])
def test_conflicts_are_refused(name, field, first, second):
    for specs in (
        [spec("x.w", **first), spec("y.w", **second)],
        [spec("y.w", **second), spec("x.w", **first)],
    ):
        with pytest.raises(ValueError) as caught:
            boundary_dtypes(name, specs)
        message = str(caught.value)
        for part in (repr(name or "<root>"), f"conflicting {field}", "x.w", "y.w"):
            assert part in message


def test_the_gradient_of_a_frozen_parameter_conflicts_with_nothing():
    frozen = spec("y", param_dtype=BF16, trainable=False, grad_dtype=BF16)
    assert boundary_dtypes("b", [spec("x", param_dtype=BF16), frozen]) == (BF16, None)
    assert boundary_dtypes("b", [spec("x", param_dtype=BF16, trainable=False), frozen]) == (BF16, None)
