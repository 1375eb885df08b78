"""What users ask of a dedicated model: whose pieces, by rank and by place in the meshes."""

import pytest

import dmuon
from tests.support.harness import build
from tests.support.pool import distributed


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
@distributed(world=4)
def test_owned_parameters_by_rank_and_by_coordinate(rank, world, mesh):
    model, _ = build(world, mesh=mesh, optimizer=False)
    everything = [piece for dp in dmuon.get_dedicated_params(model) for piece in dp.pieces]
    _, shards, columns = mesh
    for other in range(world):  # the meshes count ranks replicate-major
        expected = [piece for piece in everything if piece.owner_rank == other]
        assert expected and dmuon.get_owned_params(model, other) == expected
        coordinate = (other // (shards * columns), other // columns % shards, other % columns)
        assert dmuon.get_owned_params(model, coordinate=coordinate) == expected
    assert dmuon.get_owned_params(model) == dmuon.get_owned_params(model, rank=rank)


@distributed(world=2)
def test_a_rank_that_is_none_of_the_models_is_told(rank, world):
    model, _ = build(world, optimizer=False)
    for wrong in ((0, 0), 2, -1, "0", 0.5):
        with pytest.raises(ValueError) as caught:
            dmuon.get_owned_params(model, rank=wrong)
        assert str(caught.value) == (
            f"rank must be a global rank, an int, among the 2 from 0 to 1 that share the model, got {wrong!r}; a place "
            "is coordinate=(replicate, shard, tp)"
        )
    for wrong in ((0, 0), (0, 2, 0), (0, -1, 0), 1, "010"):
        with pytest.raises(
            ValueError, match=r"coordinate must be \(replicate, shard, tp\) in meshes of sizes \(1, 2, 1\)"
        ):
            dmuon.get_owned_params(model, coordinate=wrong)
    with pytest.raises(ValueError, match=r"and go without rank, got \(0, 1, 0\) with rank=0"):
        dmuon.get_owned_params(model, 0, coordinate=(0, 1, 0))
