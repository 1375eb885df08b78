"""Arguments that other libraries have: refused, with what does their job."""

import pytest

import dmuon
from tests.support.harness import build, flat_mesh
from tests.support.oracle import ToyModel, is_proj
from tests.support.pool import distributed


@distributed(world=2)
def test_arguments_of_other_libraries(rank, world):
    mesh = flat_mesh(world)
    for argument, message in {
        "mode": "mode'.*reshard_after_forward",
        "compute_dtype": "param_policy",
        "tp_owner_strategy": "owners are chosen by the cost",
        "pack_small_params": "leave it out",
        "replicate_async": "pass it to Muon",
        "predicat": "did you mean 'predicate'",
        "foo": r"^dedicate_params\(\) takes no argument 'foo'$",
    }.items():
        model = ToyModel()
        with pytest.raises(TypeError, match=message):
            dmuon.dedicate_params(model, mesh, predicate=lambda n, p: is_proj(n, p), **{argument: None})
        assert not any(p.isnan().any() for p in model.parameters())
    model, _ = build(world, optimizer=False)
    for argument, message in {
        "forward_prefetch_depth": "pass prefetch to dedicate_params",
        "fused": "adamw_implementation='fused'",
        "record_step_profile": r"torch\.profiler",
        "momentun": "did you mean 'momentum'",
    }.items():
        with pytest.raises(TypeError, match=message):
            dmuon.Muon(model, **{argument: 1})
