"""Several sources in one order: shares, stages, and restarts that change nothing."""

from itertools import islice

import numpy as np
import pytest

from torchtitan_dmuon.config.job_config import DataLoader
from torchtitan_dmuon.data import LoaderConfig, Mixture, PackedDataset, Stage, TokenLoader, sample_order
from torchtitan_dmuon.data.mixture import Position

SEQ_LEN = 4
SIZES = {"web": 23, "code": 7, "math": 1000}
BEGIN = {name: 10_000 * number for number, name in enumerate(SIZES)}


def make_mixture(*stages):
    """Sample i of the n-th source begins with the token 10_000 n + 4 i."""
    sources = {
        name: PackedDataset(np.arange(BEGIN[name], BEGIN[name] + SEQ_LEN * size + 1, dtype=np.uint16), SEQ_LEN)
        for name, size in SIZES.items()
    }
    return Mixture(sources, [Stage(*stage) for stage in stages])


STAGES = ((1, {"web": 6, "code": 3, "math": 1}), (12, {"code": 0.5, "math": 0.25}))


def make_loaders(ranks, local_batch_size, *, num_workers=0, global_batch_size=8, seed=5, stages=STAGES):
    config = LoaderConfig(local_batch_size, global_batch_size, seed, dataloader=DataLoader(num_workers=num_workers))
    return [TokenLoader(make_mixture(*stages), config, rank, ranks) for rank in range(ranks)]


def sources_and_numbers(loaders, steps):
    """(source, number of the sample in it) of every global sample of the next steps."""
    iterators = [iter(loader) for loader in loaders]
    found = []
    for _ in range(steps * loaders[0].micro_batches_per_step):
        for iterator in iterators:
            for token in next(iterator)["input"][:, 0].tolist():
                name = list(SIZES)[token // 10_000]
                found.append((name, (token - BEGIN[name]) // SEQ_LEN))
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stopped_twice_and_resumed_on_other_ranks(num_workers):
    """Each sample of 20 steps, in its place: three sources, epochs of two of them ending, a stage in the middle."""
    whole = sources_and_numbers(make_loaders(1, 8), 20)
    seen, state = [], None
    for ranks, local_batch_size, steps in ((2, 2, 5), (4, 1, 9), (1, 4, 6)):
        loaders = make_loaders(ranks, local_batch_size, num_workers=num_workers if ranks == 1 else 0)
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        seen += sources_and_numbers(loaders, steps)
        states = [loader.state_dict() for loader in loaders]
        state = states[0]
        assert states == [state] * ranks
        stopped = {name: entry["samples"] % SIZES[name] for name, entry in state["sources"].items()}
        assert any(stopped.values())  # within an epoch
    assert seen == whole
    assert state["sources"]["web"]["samples"] > SIZES["web"] and state["sources"]["code"]["samples"] > SIZES["code"]


def test_each_source_is_read_in_its_own_order():
    whole = sources_and_numbers(make_loaders(1, 8), 20)
    for name, size in SIZES.items():
        nth = np.arange(sum(source == name for source, _ in whole))
        expected = sample_order(5, nth // size, nth % size, size).tolist()
        assert [number for source, number in whole if source == name] == expected


@pytest.mark.parametrize(
    "weights", [{"web": 6, "code": 3, "math": 1}, {"web": 1, "code": 1}, {"math": 1e-3, "web": 0, "code": 0.998}]
)
@pytest.mark.parametrize("seed", [0, -3, 1 << 70])
def test_every_stretch_has_its_shares(weights, seed):
    mixture = make_mixture((1, weights))
    total = sum(weights.values())
    for first in (0, 17, 10**15):
        position = Position(first, mixture.start().read)
        for count in (1, 10, 1000, 100_000):
            after = mixture.advance(seed, position, count, 1)
            assert after.samples == first + count and sum(after.read) == count
            for name, read in zip(SIZES, after.read, strict=True):
                assert abs(read - count * weights.get(name, 0) / total) < 4
                assert read == 0 or weights.get(name)


def test_every_rank_sees_every_source():
    """The order has no period that a number of ranks could share."""
    loaders = make_loaders(4, 1, stages=((1, {"web": 1, "code": 1}),))
    for loader in loaders:
        batches = [batch["input"][0, 0].item() // 10_000 for batch in islice(iter(loader), 200)]
        assert 90 <= sum(batches) <= 110


def test_a_stage_begins_at_its_step():
    loaders = make_loaders(2, 2)
    before, after = sources_and_numbers(loaders, 11), sources_and_numbers(loaders, 4)
    assert {name for name, _ in before} == set(SIZES) and {name for name, _ in after} == {"code", "math"}
    # A loader whose state was not taken up still reads what its step asks for.
    fresh = make_loaders(1, 8)
    fresh[0].steps = 11
    assert {name for name, _ in sources_and_numbers(fresh, 4)} == {"code", "math"}


def test_the_order_is_the_same_on_every_platform():
    mixture = make_mixture(STAGES[0])
    assert mixture.indices(5, mixture.start(), 12, 1, slice(12)).tolist() == [
        4,
        41,
        19,
        18,
        27,
        1,
        17,
        25,
        13,
        805,
        5,
        22,
    ]


def test_consumed_tokens_and_epochs():
    loaders = make_loaders(2, 4, stages=((1, {"web": 1, "code": 1}),))
    sources_and_numbers(loaders, 7)
    read = {name: entry["samples"] for name, entry in loaders[0].state_dict()["sources"].items()}
    assert read["math"] == 0 and sum(read.values()) == 56
    assert loaders[1].consumed() == {name: (4 * read[name], read[name] / size) for name, size in SIZES.items()}
