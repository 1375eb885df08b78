"""Seeds by name. That initial weights depend on nothing else is shown with the models."""

from torchtitan_dmuon.initialization import parameter_seed


def test_parameter_seed_is_fixed_for_ever():
    assert parameter_seed(0, "norm.weight") == 8332765274859384943
    assert parameter_seed(1, "norm.weight") != parameter_seed(0, "norm.weight")
