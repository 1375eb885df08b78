"""The loader's stream: the same on any number of ranks, and after a restart at any point."""

from dataclasses import fields
from itertools import islice

import numpy as np
import pytest
import torch

from torchtitan_dmuon.config.job_config import DataLoader
from torchtitan_dmuon.data import DataError, LoaderConfig, PackedDataset, TokenLoader, sample_order
from torchtitan_dmuon.data.identity import describe

SEQ_LEN = 4


def make_dataset(samples=11):
    """Sample i holds the tokens 4i .. 4i + 4, so its first input tells its number."""
    return PackedDataset(np.arange(SEQ_LEN * samples + 1, dtype=np.uint16), SEQ_LEN)


def make_loader(samples=11, *, dp_rank=0, dp_size=1, **settings):
    workers = {name: settings.pop(name) for name in set(settings) & {field.name for field in fields(DataLoader)}}
    config = LoaderConfig(**{"local_batch_size": 2, "seed": 3, **settings}, dataloader=DataLoader(**workers))
    return TokenLoader(make_dataset(samples), config, dp_rank, dp_size)


def state(consumed, *, steps=0, seed=3, samples=11, skips=()):
    sources = {"data": describe(consumed, make_dataset(samples))}
    return {"consumed_samples": consumed, "steps": steps, "seed": seed, "sources": sources, "skips": [*skips]}


def numbers(batch):
    """The sample numbers of a batch; None for a filler."""
    rows = zip(batch["input"].tolist(), batch["labels"].tolist(), strict=True)
    return [None if labels == [-100] * SEQ_LEN else tokens[0] // SEQ_LEN for tokens, labels in rows]


def take(iterator, count):
    return [number for batch in islice(iterator, count) for number in numbers(batch)]


def expected(start, stop, samples=11, seed=3):
    ids = np.arange(start, stop)
    return sample_order(seed, ids // samples, ids % samples, samples).tolist()


def merged(loaders, micro_batches):
    """The global order that the loaders of all ranks give together."""
    iterators = [iter(loader) for loader in loaders]
    return [number for _ in range(micro_batches) for it in iterators for number in numbers(next(it))]


def test_batches_have_the_documented_form():
    batch = next(iter(make_loader()))
    assert set(batch) == {"input", "labels"}
    for tensor in batch.values():
        assert tensor.shape == (2, SEQ_LEN) and tensor.dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input"] + 1)


@pytest.mark.parametrize(("dp_size", "local_batch_size"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_global_order_does_not_depend_on_ranks_or_micro_batches(dp_size, local_batch_size):
    loaders = [
        make_loader(local_batch_size=local_batch_size, global_batch_size=8, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    per_step = 8 // (dp_size * local_batch_size)
    assert loaders[0].micro_batches_per_step == per_step
    # Five steps of eight samples: more than three epochs of eleven.
    assert merged(loaders, 5 * per_step) == expected(0, 40)
    assert [loader.state_dict() for loader in loaders] == [state(40, steps=5)] * dp_size


def test_each_epoch_is_a_whole_permutation():
    stream = take(iter(make_loader(local_batch_size=11)), 3)
    epochs = [stream[:11], stream[11:22], stream[22:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(11))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_resume_on_other_ranks_and_batch_sizes(num_workers, steps):
    loader = make_loader(local_batch_size=2, global_batch_size=8, dp_size=2, num_workers=num_workers)
    take(iter(loader), steps * loader.micro_batches_per_step)
    saved = loader.state_dict()
    assert saved["consumed_samples"] == 8 * steps
    for dp_size, local, global_ in [(1, 4, 8), (2, 2, 8), (4, 2, 8), (3, 1, 6)]:
        resumed = [
            make_loader(
                local_batch_size=local,
                global_batch_size=global_,
                dp_rank=rank,
                dp_size=dp_size,
                num_workers=num_workers if rank == 0 else 0,
            )
            for rank in range(dp_size)
        ]
        for other in resumed:
            other.load_state_dict(saved)
            assert other.state_dict() == saved
        micro_batches, stride = 3, dp_size * local
        want = expected(8 * steps, 8 * steps + micro_batches * stride)
        assert merged(resumed, micro_batches) == want


def test_samples_are_skipped_once():
    """7 of them after 4, then 2 after 17. A run that is started again with the same number skips no more."""
    loader = make_loader()
    loader.load_state_dict(state(4, steps=2))
    assert loader.skip(7) and take(iter(loader), 3) == expected(11, 17)
    for samples, skips, first in ((7, False, 17), (2, True, 19), (2, False, 19)):
        saved = loader.state_dict()
        loader = make_loader()
        loader.load_state_dict(saved)
        assert loader.skip(samples) == skips
        saved = loader.state_dict()
        assert take(iter(loader), 1) == expected(first, first + 2)
        loader.load_state_dict(saved)
    assert saved == state(19, steps=5, skips=[7, 2])
    assert loader.read_samples == 10


def test_resume_twice():
    loader, stream = make_loader(), []
    for _ in range(3):
        stream += take(iter(loader), 3)
        saved = loader.state_dict()
        loader = make_loader()
        loader.load_state_dict(saved)
    assert stream == expected(0, 18)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_prefetched_batches_are_not_consumed(persistent_workers):
    loader = make_loader(num_workers=2, prefetch_factor=4, persistent_workers=persistent_workers)
    assert loader.state_dict()["consumed_samples"] == 0
    assert take(iter(loader), 3) == expected(0, 6)
    assert loader.state_dict()["consumed_samples"] == 6
    # A new iterator goes on there and loses nothing of what the workers had read ahead.
    assert take(iter(loader), 4) == expected(6, 14)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_ends_the_running_iterator(num_workers):
    loader = make_loader(num_workers=num_workers, persistent_workers=num_workers > 0)
    iterator = iter(loader)
    take(iterator, 3)
    loader.load_state_dict(state(2))
    with pytest.raises(RuntimeError, match="this iterator ended"):
        next(iterator)
    assert take(iter(loader), 2) == expected(2, 6)


def test_iterating_leaves_the_global_random_numbers_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    take(iter(make_loader(num_workers=1)), 2)
    take(iter(make_loader()), 2)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (state(1, seed=4), "data seed 4 but this run has 3"),
        (state(1, samples=12), r"the content of 'data' is not .* \(then 49 tokens with .*, now 45 with "),
        ({"seed": 3}, "lacks consumed_samples, steps, sources, skips"),
    ],
)
def test_foreign_state_is_refused(foreign, message):
    loader = make_loader()
    with pytest.raises(DataError, match=message):
        loader.load_state_dict(foreign)
    assert loader.state_dict()["consumed_samples"] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_gives_every_rank_the_same_number_of_batches(num_workers):
    # torchtitan 1634: seven batches on two ranks, all of them.
    loaders = [
        make_loader(7, local_batch_size=1, dp_rank=rank, dp_size=2, infinite=False, num_workers=num_workers)
        for rank in range(2)
    ]
    assert [len(loader) for loader in loaders] == [4, 4]
    for _ in range(2):
        found = [[number for batch in loader for number in numbers(batch)] for loader in loaders]
        assert found == [[0, 2, 4, 6], [1, 3, 5, None]]


def test_validation_on_more_ranks_than_samples():
    loaders = [make_loader(1, dp_rank=rank, dp_size=4, infinite=False) for rank in range(4)]
    found = [[numbers(batch) for batch in loader] for loader in loaders]
    assert found == [[[0, None]]] + [[[None, None]]] * 3


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_validation_starts_over_after_a_partial_pass(persistent_workers):
    loader = make_loader(7, infinite=False, num_workers=2, persistent_workers=persistent_workers)
    for _ in range(3):
        assert take(iter(loader), 2) == [0, 1, 2, 3]
    assert take(iter(loader), 9) == [0, 1, 2, 3, 4, 5, 6, None]


def test_finite_and_infinite_loaders_say_what_they_lack():
    with pytest.raises(TypeError, match="an infinite loader has no length"):
        len(make_loader())
    with pytest.raises(TypeError, match="a finite loader has no position"):
        make_loader(infinite=False).load_state_dict({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"global_batch_size": 18, "dp_size": 4},
            r"training\.global_batch_size = 18 is not a multiple of .* 2 x 4 = 8: use 16 or 24$",
        ),
        ({"global_batch_size": 3, "dp_size": 4}, r"global_batch_size = 3 .* 2 x 4 = 8: use 8$"),
        ({"global_batch_size": 0}, r"global_batch_size = 0 .* 2 x 1 = 2: use 2$"),
        ({"local_batch_size": 0}, r"training\.local_batch_size = 0 must be at least 1"),
        ({"dp_rank": 2, "dp_size": 2}, "data-parallel rank 2 of 2 ranks does not exist"),
        ({"prefetch_factor": 2}, "need num_workers of at least 1"),
        ({"persistent_workers": True}, "need num_workers of at least 1"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(DataError, match=message):
        make_loader(**settings)
