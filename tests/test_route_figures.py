"""RMS of weights and updates and norms of gradients, by route, against the whole tensors."""

import pytest
import torch

import dmuon
from tests.support.harness import EVERY_ROUTE, build, data_rank, full_gradients, full_weights
from tests.support.meshes import DEVICE, mesh_of
from tests.support.oracle import ToyModel, batch, loss_of
from tests.support.pool import distributed
from torchtitan_dmuon.route_figures import RouteFigures

CASES = {
    "fsdp2": ((1, 4, 1), {}),
    "replicas and tensor parallel": ((2, 1, 2), {}),
    "every route": ((2, 2, 1), EVERY_ROUTE),
}


def expected_figures(model, before, after, gradients):
    routes = {row.name: "fsdp2" if "FSDP2" in row.route else row.route for row in dmuon.ownership_table(model)}
    figures = {}
    for route in set(routes.values()):
        names = [name for name in after if routes[name] == route]
        weights, moved, grads = (
            torch.cat([each[name].double().flatten() for name in names]) for each in (after, before, gradients)
        )
        moved = weights - moved
        figures[f"optimizer/weight_rms/{route}"] = weights.square().mean().sqrt().item()
        figures[f"optimizer/update_rms/{route}"] = moved.square().mean().sqrt().item()
        figures[f"optimizer/grad_norm/{route}"] = grads.norm().item()
    return figures


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
@distributed(world=4)
def test_figures_are_those_of_the_whole_tensors(rank, world, case):
    """Weights are smaller than a sample; each part counts once, however many ranks hold it."""
    mesh, options = CASES[case]
    model, optimizer = build(world, ToyModel(dim=20, hidden=37), mesh=mesh, **options)
    replicate, shard, tp = mesh
    grid = mesh_of(replicate=replicate, shard=shard, tp=tp)
    groups = [grid[name].get_group() for name in ("replicate", "shard", "tp")]
    figures = RouteFigures(model, optimizer, groups, torch.device(DEVICE))
    for step in range(2):
        tokens, labels = batch(step, data_rank(rank, mesh))
        loss_of(model(tokens), labels).backward()
        dmuon.clip_total_grad_norm_(optimizer, 0.1)
        before, gradients = full_weights(model), full_gradients(model)
        with figures.around_step():
            optimizer.step()
        expected = expected_figures(model, before, full_weights(model), gradients)
        assert figures.take() == pytest.approx(expected, rel=1e-4)
