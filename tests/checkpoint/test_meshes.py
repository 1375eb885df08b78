"""A checkpoint of any mesh goes on on any other: state bitwise, the next step to 1e-6, and on its own mesh bitwise
(behaviours 15 to 17 of docs/design)."""

import pytest
import torch

from tests.support.harness import assert_same, full_weights
from tests.support.pool import distributed
from tests.support.toy import build_toy, checkpointer, everything, read_checkpoint, state_at, step

MESHES = {
    4: {"shard 4": (1, 4, 1), "2x2": (2, 2, 1), "dp2 tp2": (1, 2, 2)},
    2: {"shard 2": (1, 2, 1)},
    1: {"one": (1, 1, 1)},
}
SOURCES = [
    *((mesh, "fsdp2") for meshes in MESHES.values() for mesh in meshes),
    ("shard 4", "dedicated"),
    ("dp2 tp2", "dedicated"),
    ("shard 4", "exclude"),
]
TARGET_ROUTES = ("fsdp2", "z2", "dedicated", "exclude")
# What trained a weight: the state of one kind is of no use to the other.
IS_EXCLUDED = {"exclude": "up_proj"}


def of(world, pairs):
    return [(mesh, MESHES[world][mesh], routes) for mesh, routes in pairs if mesh in MESHES[world]]


def save_sources(rank, world, folder):
    """Two steps, a checkpoint right behind the second, and what the third step gives."""
    for mesh, shape, routes in of(world, SOURCES):
        model, optimizer = build_toy(world, shape, routes)
        losses = [step(model, optimizer, number, rank, shape) for number in range(2)]
        saver = checkpointer(f"{folder}/{mesh}/{routes}", model, optimizer)
        saver.save(state_at(2))
        held = everything(model, optimizer)
        losses.append(step(model, optimizer, 2, rank, shape))
        after = full_weights(model)
        if rank == 0:
            torch.save({"held": held, "after": after, "losses": losses}, f"{folder}/{mesh}-{routes}.pt")


@distributed(world=4)
def save_on_4(rank, world, folder):
    save_sources(rank, world, folder)


@distributed(world=2)
def save_on_2(rank, world, folder):
    save_sources(rank, world, folder)


@distributed(world=1)
def save_on_1(rank, world, folder):
    save_sources(rank, world, folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sources"))
    for save in (save_on_4, save_on_2, save_on_1):
        save(folder=folder)
    return folder


def goes_to(mesh, routes, source, source_routes):
    """Every mesh from every other, and every route from every other, but not all from all."""
    if source == mesh or routes == source_routes == "fsdp2":
        return True
    return source == "shard 4" and mesh != "2x2" and routes != "z2"  # the state in Z2 is that in Z3


def load_on(rank, world, sources, mesh, routes):
    shape = MESHES[world][mesh]
    for source, source_routes in SOURCES:
        if not goes_to(mesh, routes, source, source_routes):
            continue
        told = f"{source}/{source_routes} on {mesh}/{routes}"
        expected = torch.load(f"{sources}/{source}-{source_routes}.pt")
        model, optimizer = build_toy(world, shape, routes, seed=5)
        untouched = {name for name, p in model.named_parameters() if not p.requires_grad}
        folder = f"{sources}/{source}/{source_routes}"
        saver = checkpointer(folder, model, optimizer, load_only=True)
        state = saver.load()
        assert (state.step, state.loader) == (2, {"consumed_samples": 2}), told
        changed = {IS_EXCLUDED.get(routes), IS_EXCLUDED.get(source_routes)} - {None}
        changed = changed if routes == "exclude" or source_routes == "exclude" else set()
        changed = set() if routes == source_routes else changed
        held = everything(model, optimizer)
        wanted = dict(expected["held"])
        for name in list(held.keys() | wanted.keys()):
            if name.startswith("optimizer.") and any(part in name for part in changed):
                assert name not in held or not held[name].any(), (told, name)  # starts at zero
                wanted.pop(name, None)
                held.pop(name, None)
        assert_same(held, wanted, atol=0, rtol=0)
        assert not any(f"optimizer.{name}" in key for name in untouched for key in held), told
        if changed:
            continue
        loss = step(model, optimizer, 2, rank, shape)
        same = (mesh, routes.replace("z2", "fsdp2")) == (source, source_routes)
        tolerance = 0 if same else 1e-6
        assert_same(full_weights(model), expected["after"], atol=tolerance, rtol=tolerance)
        if same and rank == 0 and world != 4:
            assert loss == expected["losses"][2], told


@pytest.mark.parametrize("routes", TARGET_ROUTES)
@pytest.mark.parametrize("mesh", MESHES[4])
@distributed(world=4)
def test_loaded_on_4(rank, world, sources, mesh, routes):
    load_on(rank, world, sources, mesh, routes)


@pytest.mark.parametrize("routes", TARGET_ROUTES)
@distributed(world=2)
def test_loaded_on_2(rank, world, sources, routes):
    load_on(rank, world, sources, "shard 2", routes)


@pytest.mark.parametrize("routes", TARGET_ROUTES)
@distributed(world=1)
def test_loaded_on_1(rank, world, sources, routes):
    load_on(rank, world, sources, "one", routes)


def test_plain_dcp_reads_the_logical_tensors(sources):
    for mesh, routes in SOURCES:
        found = read_checkpoint(f"{sources}/{mesh}/{routes}/step-2")
        expected = torch.load(f"{sources}/{mesh}-{routes}.pt")["held"]
        assert_same({name: t for name, t in found.items() if not name.startswith("rng.")}, expected, atol=0, rtol=0)
        assert {t.dtype for name, t in found.items() if name.startswith("model.")} == {torch.float32}
        world = next(world for world, meshes in MESHES.items() if mesh in meshes)
        ranks = {name.split(".")[1] for name in found if name.startswith("rng.")}
        assert ranks == {str(rank) for rank in range(world)}


@distributed(world=4)
def test_saved_again_it_is_the_same(rank, world, sources, tmp_path):
    """Save, resume, save: every tensor, the random state included; on the same mesh and over another one."""
    before = read_checkpoint(f"{sources}/shard 4/fsdp2/step-2") if rank == 0 else None
    folder = f"{sources}/shard 4/fsdp2"
    for number, (mesh, routes) in enumerate([("shard 4", "fsdp2"), ("dp2 tp2", "dedicated"), ("2x2", "z2")]):
        model, optimizer = build_toy(world, MESHES[4][mesh], routes, seed=number + 6)
        saver = checkpointer(folder, model, optimizer)
        saver.load()
        again = checkpointer(f"{tmp_path}/{number}", model, optimizer)
        again.save(state_at(2))
        folder = f"{tmp_path}/{number}"
        if rank == 0:
            assert_same(read_checkpoint(f"{folder}/step-2"), before, atol=0, rtol=0)


@pytest.mark.parametrize("routes", ["fsdp2", "dedicated"])
@distributed(world=4)
def test_tied_weights_and_buffers(rank, world, routes, tmp_path):
    model, optimizer = build_toy(world, (1, 4, 1), routes, tie=True)
    step(model, optimizer, 0, rank, (1, 4, 1))
    checkpointer(tmp_path, model, optimizer).save(state_at(1))
    held = everything(model, optimizer)
    other, its_optimizer = build_toy(world, (2, 2, 1), routes, seed=9, tie=True)
    checkpointer(tmp_path, other, its_optimizer).load()
    assert other.lm_head.weight is other.embed.weight
    assert_same(everything(other, its_optimizer), held, atol=0, rtol=0)
    step(model, optimizer, 1, rank, (1, 4, 1))
    step(other, its_optimizer, 1, rank, (2, 2, 1))
    assert_same(full_weights(other), full_weights(model), atol=1e-6, rtol=1e-6)
