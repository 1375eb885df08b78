"""Every family describes every parameter, and the check tells one that does not."""

import dataclasses

import pytest
import torch

from models import get_model_args, get_model_spec, model_names
from models.check import undescribed

SPEC = get_model_spec("llama3")
ARGS = dataclasses.replace(get_model_args("llama3", "debugmodel"), vocab_size=64, n_layers=2)


def on_meta(spec, args):
    with torch.device("meta"):
        return spec.build(args)


@pytest.mark.parametrize("family", model_names())
def test_every_flavor_is_described(family):
    spec = get_model_spec(family)
    for args in spec.flavors.values():
        args = args if args.vocab_size else dataclasses.replace(args, vocab_size=64)
        assert not list(undescribed(spec, on_meta(spec, args), args))
        assert all(size > 0 for size in spec.divisible(args).values())


def found(change=lambda model: None, **replaced):
    model = on_meta(SPEC, ARGS)
    change(model)
    return list(undescribed(dataclasses.replace(SPEC, **replaced), model, ARGS))


def test_a_parameter_that_the_family_does_not_know():
    def add_bias(model):
        model.layers[1].attention.bias = torch.nn.Parameter(torch.empty(3, device="meta"))

    assert found(add_bias) == ["Llama3 has no parameter 'layers.1.attention.bias'; strip wrapper prefixes such as "
                               "'_orig_mod.' first"]  # fmt: skip


def test_a_module_without_a_place_in_the_plan():
    def without_wk(args, loss_parallel):
        outside, in_blocks = SPEC.tensor_parallel_plan(args, loss_parallel)
        return outside, [in_blocks[0], {name: how for name, how in in_blocks[1].items() if name != "attention.wk"}]

    expected = ["layers.1.attention.wk.weight has no place in the tensor-parallel plan of llama3"]
    assert found(tensor_parallel_plan=without_wk) == expected


def test_a_name_that_does_not_lead_back():
    class Swapped(type(SPEC.hf)):
        def from_hf(self, name):
            return {"model.norm.weight": "output.weight"}.get(name) or super().from_hf(name)

    assert found(hf=Swapped()) == ["the HuggingFace name of norm.weight leads back to output.weight"]
