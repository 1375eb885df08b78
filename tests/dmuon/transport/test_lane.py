"""What lanes carry between several owners at once, in every way a backend may have to do it."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.support.meshes import DEVICE
from tests.support.pool import distributed
from tests.support.private import adjacent, let_take_uneven_parts, takes_uneven_parts
from torchtitan_dmuon.dmuon.transport.lane import Lane, Pending

# (number of elements, rank) of each segment; ranks that are not there are left out, -1 is the last.
SEGMENTS = {
    "uneven": [(5, 0), (3, 1), (2, -1)],
    "even": [(4, 0), (4, 1), (4, 2)],
    "another order": [(4, 1), (4, 0), (4, 2)],
    "one owner": [(6, 1)],
    "a rank twice": [(5, 0), (0, 1), (4, 0), (3, 1)],
    "nothing": [(0, 0), (0, 1)],
}


def parts_of(case, world, seed):
    """(one buffer, its segments), random and different on every rank."""
    spans = [(size, rank % world) for size, rank in SEGMENTS[case] if rank < world]
    generator = torch.Generator("cpu").manual_seed(seed)
    buffer = torch.randn(sum(size for size, _ in spans), generator=generator, device="cpu").to(DEVICE)
    views = buffer.split([size for size, _ in spans])
    return buffer, [(view, rank) for view, (_, rank) in zip(views, spans, strict=True)]


@contextlib.contextmanager
def uneven_parts(lane):
    """Gives a backend that has none the uneven all-gather and reduce-scatter of NCCL, which copies parts of one shape
    to a tensor of its own."""
    if takes_uneven_parts(lane):
        yield
        return
    originals = dist.all_gather, dist.reduce_scatter

    def all_gather(parts, part, group, async_op):
        assert len({to.shape for to in parts}) > 1
        for rank, to in enumerate(parts):
            if rank == lane.rank:
                to.copy_(part.clone().view_as(to))
            dist.broadcast(to, group=group, group_src=rank)
        return Pending([])

    def reduce_scatter(part, parts, group, async_op):
        assert len({origin.shape for origin in parts}) > 1
        for rank, origin in enumerate(parts):
            dist.reduce(origin, group=group, group_dst=rank)
            if rank == lane.rank:
                part.copy_(origin.clone().view_as(part))
        return Pending([])

    let_take_uneven_parts(lane, True)
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter
    try:
        yield
    finally:
        dist.all_gather, dist.reduce_scatter = originals


def carries(rank, world, case, in_place):
    lane = Lane("test", dist.group.WORLD, torch.device(DEVICE))
    for uneven in (False, True):
        with uneven_parts(lane) if uneven else contextlib.nullcontext():
            everyone = [parts_of(case, world, seed)[1] for seed in range(world)]
            _, segments = parts_of(case, world, seed=rank)
            sent = [part.clone() for part, source in segments if source == rank]
            if not in_place:
                for part, _ in segments:
                    part.fill_(float("nan"))
            lane.broadcast(segments, None if in_place else sent).wait()
            for index, (part, source) in enumerate(segments):
                assert torch.equal(part, everyone[source][index][0])

            _, segments = parts_of(case, world, seed=rank)
            own = [part if in_place else torch.full_like(part, float("nan")) for part, to in segments if to == rank]
            lane.reduce(segments, None if in_place else own).wait()
            mine = [index for index, (_, to) in enumerate(segments) if to == rank]
            for part, index in zip(own, mine, strict=True):
                expected = torch.stack([parts[index][0].double() for parts in everyone]).sum(dim=0)
                torch.testing.assert_close(part.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("case", SEGMENTS)
@distributed(world=3)
def test_broadcast_and_reduce(rank, world, case, in_place):
    carries(rank, world, case, in_place)


@distributed(world=1)
def test_one_rank(rank, world):
    lane = Lane("test", dist.group.WORLD, torch.device(DEVICE))
    to, origin = torch.zeros(3), torch.arange(3.0)
    lane.broadcast([(to, 0)], [origin]).wait()
    assert torch.equal(to, origin)
    total = torch.zeros(3)
    lane.reduce([(origin, 0)], [total]).wait()
    assert torch.equal(total, origin)


def testadjacent_parts_are_one_view():
    buffer = torch.arange(12.0)
    whole = adjacent(buffer[2:].split(5))
    assert torch.equal(whole, buffer[2:]) and whole.data_ptr() == buffer[2:].data_ptr()
    assert adjacent(buffer.split([5, 7])) is None  # of two sizes
    assert adjacent([buffer[:4], buffer[5:9]]) is None  # a gap
    assert adjacent([buffer[4:8], buffer[:4]]) is None  # another order
    assert adjacent([buffer[:6], torch.zeros(6)]) is None  # two storages
