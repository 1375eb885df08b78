"""Samples cut from a stream, and the order of an epoch as a pure function."""

import numpy as np
import pytest
import torch

from torchtitan_dmuon.data import ByteTokenizer, DataError, PackedDataset, build_dataset, sample_order


def test_samples_share_one_token():
    dataset = PackedDataset(np.arange(10, dtype=np.uint16), seq_len=3)
    assert len(dataset) == 3
    for index in range(3):
        sample = dataset[index]
        assert sample["input"].tolist() == [3 * index, 3 * index + 1, 3 * index + 2]
        assert sample["labels"].tolist() == [3 * index + 1, 3 * index + 2, 3 * index + 3]
        assert sample["input"].dtype == sample["labels"].dtype == torch.int64
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 3"):
            dataset[index]


def test_stream_that_just_holds_or_misses_a_sample():
    assert len(PackedDataset(np.arange(4), seq_len=3)) == 1
    assert len(PackedDataset(np.arange(6), seq_len=3)) == 1
    with pytest.raises(DataError, match=r"holds 3 tokens but one sample needs seq_len \+ 1 = 4: lower seq_len"):
        PackedDataset(np.arange(3), seq_len=3)
    with pytest.raises(DataError, match="seq_len = 0 must be at least 1"):
        PackedDataset(np.arange(3), seq_len=0)


def test_build_dataset(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    dataset = build_dataset("text", str(tmp_path / "a.txt"), "text", ByteTokenizer(), 2, tmp_path / "cache")
    assert [dataset[i]["labels"].tolist() for i in range(len(dataset))] == [[98, 99], [100, 256]]
    arguments = ("text", str(tmp_path / "a.txt"), "text", ByteTokenizer(), 9, tmp_path / "cache")
    with pytest.raises(DataError, match=r"^validation.seq_len: the corpus holds 5 tokens but one sample needs"):
        build_dataset(*arguments, section="validation")


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000, 4096, 4097])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (-5, 3), (1 << 70, 1 << 40)])
def test_order_is_a_bijection(n, seed, epoch):
    assert np.array_equal(np.sort(sample_order(seed, epoch, np.arange(n), n)), np.arange(n))


def test_order_differs_per_epoch_and_seed_and_from_the_natural_one():
    index = np.arange(1000)
    orders = [sample_order(seed, epoch, index, 1000) for seed in range(4) for epoch in range(4)]
    orders.append(index)
    for number, order in enumerate(orders):
        for other in orders[:number]:
            # Two random permutations agree in one place on average.
            assert (order == other).sum() < 10


def test_order_is_the_same_on_every_platform():
    assert sample_order(0, 0, np.arange(10), 10).tolist() == [0, 8, 4, 9, 1, 3, 6, 5, 2, 7]
    assert sample_order(0, 1, np.arange(10), 10).tolist() == [0, 5, 2, 3, 9, 8, 4, 1, 6, 7]
    assert sample_order(5, 0, 3, 10**12).item() == 949091594256


def test_order_broadcasts_and_takes_scalars():
    epochs, index = np.array([0, 0, 1]), np.array([8, 9, 0])
    together = sample_order(7, epochs, index, 10)
    alone = [sample_order(7, int(e), int(i), 10) for e, i in zip(epochs, index, strict=True)]
    assert alone[0].shape == () and alone[0].dtype == np.int64
    assert together.tolist() == [value.item() for value in alone]
    assert sample_order(7, np.array([[0], [1]]), np.arange(10), 10).shape == (2, 10)


def test_order_spreads_samples():
    # The mean place of the first tenth is that of a random permutation: 5000 +- 4 standard errors of 91.
    assert abs(sample_order(1, 0, np.arange(1000), 10000).mean() - 4999.5) < 4 * 91


@pytest.mark.parametrize(("index", "n"), [(-1, 5), (5, 5), (0, 0)])
def test_order_out_of_range(index, n):
    with pytest.raises(ValueError, match=r"an index lies outside|cannot order"):
        sample_order(0, 0, index, n)
