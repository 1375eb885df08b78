"""The model registry: lookup, helpful errors, and that importing `models` pulls in nothing but torch."""

import dataclasses
import subprocess
import sys

import pytest

from models import get_model_args, get_model_spec, model_names


def test_every_family_is_complete():
    for name in model_names():
        spec = get_model_spec(name)
        assert spec.name == name
        assert "debugmodel" in spec.flavors
        for flavor, args in spec.flavors.items():
            assert get_model_args(name, flavor) is args
            assert dataclasses.is_dataclass(args)


def test_spec_and_args_are_frozen():
    spec = get_model_spec("llama3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.flavors["debugmodel"].dim = 1


def test_unknown_name_names_the_nearest_and_the_known():
    with pytest.raises(ValueError, match=r"unknown model 'lama3': did you mean 'llama3'\? Known: .*llama3"):
        get_model_spec("lama3")


def test_unknown_flavor_names_the_nearest_and_the_known():
    with pytest.raises(ValueError, match=r"'8b': did you mean '8B'\? Known: debugmodel, .*405B"):
        get_model_args("llama3", "8b")


def test_build_makes_the_model_of_the_args():
    spec = get_model_spec("llama3")
    args = dataclasses.replace(spec.flavors["debugmodel"], vocab_size=64, n_layers=1)
    model = spec.build(args)
    assert model.output.weight.shape == (64, args.dim)


def test_models_imports_neither_the_trainer_nor_transformers():
    code = (
        "import sys; import models; models.get_model_spec('llama3'); "
        "bad = {'torchtitan_dmuon', 'transformers'} & {m.split('.')[0] for m in sys.modules}; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
