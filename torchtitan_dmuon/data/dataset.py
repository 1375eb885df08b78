"""Samples of a token stream and their pseudo-random order.

Sample i of a dataset is a fixed span of the stream. A formula, not a list, gives the order of the samples in an epoch.
`loader.py` decides which rank gets which sample.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan_dmuon.data.corpus import build_tokens
from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.shards import TokenStream
from torchtitan_dmuon.data.tokenizer import Tokenizer

IGNORE_INDEX = -100

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 6


class PackedDataset(Dataset):
    """Samples of `seq_len` tokens cut from a flat stream, one right after the other.

    Sample i is `tokens[i * seq_len : i * seq_len + seq_len + 1]`. Its labels are its inputs moved by one, so that
    neighbouring samples share one token: with `seq_len` 4, sample 0 is tokens 0 to 4 and sample 1 is tokens 4 to 8. A
    sample may span several documents; BOS and EOS between two documents are tokens like any other.

    Args:
        tokens: a `TokenStream` or 1-D integer array.
        seq_len: tokens of one sample.

    Attributes:
        fingerprint: of the content of `tokens`, whatever `seq_len` is.

    Raises:
        DataError: `seq_len` is not positive, or the stream is shorter than one sample.
    """

    def __init__(self, tokens: TokenStream | np.ndarray, seq_len: int):
        if seq_len < 1:
            raise DataError(f"seq_len = {seq_len} must be at least 1")
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"the corpus holds {len(tokens)} tokens but one sample needs seq_len + 1 = {seq_len + 1}: "
                "lower seq_len or use a larger corpus"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        if isinstance(tokens, TokenStream):
            self.fingerprint = tokens.fingerprint
        else:
            self.fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`, {"input": int64 [seq_len], "labels": int64 [seq_len]}. May raise IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        start = index * self.seq_len
        span = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return {"input": span[:-1], "labels": span[1:]}


def _mix(word: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 on uint64 arrays. Multiplication wraps at 64 bits on every platform."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def sample_order(
    seed: int, epoch: int | Sequence[int] | np.ndarray, index: int | Sequence[int] | np.ndarray, n: int
) -> np.ndarray:
    """The sample at position `index` of an epoch: a permutation of `range(n)` for each (seed, epoch).

    A Feistel network permutes the integers below the next power of four. A result outside `range(n)` is permuted again
    until it falls inside (cycle walking); the whole stays a bijection. Memory does not depend on n.

    Args:
        seed: any Python integer, taken modulo 2**64.
        epoch, index: integers or integer arrays that broadcast; epoch >= 0 and 0 <= index < n.
        n: number of samples, at least 1.

    Returns:
        int64 array of the broadcast shape (0-d for two integers).

    Raises:
        ValueError: n < 1, or an index is out of range.
    """
    epochs, indices = np.broadcast_arrays(np.asarray(epoch, dtype=np.int64), np.asarray(index, dtype=np.int64))
    if n < 1:
        raise ValueError(f"cannot order {n} samples")
    if indices.size and not (indices.min() >= 0 and indices.max() < n):
        raise ValueError(f"an index lies outside range({n})")
    # NumPy warns of overflow on scalars but not on arrays, so that all values below are at least 1-D.
    base = _mix(np.array([(seed + _GOLDEN) & _WORD], dtype=np.uint64))
    # The seed is mixed once more than the epoch; otherwise seed 1 in epoch 2 would have the order of seed 2 in epoch 1.
    keys = _mix(base ^ epochs.ravel().astype(np.uint64))
    # The network permutes at least 64 integers, so that the order of a few samples is mixed as well.
    half = max(3, ((n - 1).bit_length() + 1) // 2)
    result = indices.ravel().astype(np.uint64)
    outside = np.arange(result.size)
    while outside.size:
        result[outside] = _feistel(result[outside], keys[outside], half)
        outside = outside[result[outside] >= n]
    return result.astype(np.int64).reshape(indices.shape)


def _feistel(value: np.ndarray, key: np.ndarray, half: int) -> np.ndarray:
    """A keyed bijection of the integers below 4**half; uint64 arrays of one shape."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> bits, value & mask
    for number in range(_ROUNDS):
        round_key = key + np.uint64(((number + 1) * _GOLDEN) & _WORD)
        left, right = right, left ^ (_mix(right + round_key) & mask)
    return (left << bits) | right


def build_dataset(
    name: str,
    path: str | None,
    text_key: str,
    tokenizer: Tokenizer,
    seq_len: int,
    cache_folder: str | Path,
    *,
    section: str = "training",
) -> PackedDataset:
    """The samples of a named corpus, one of `corpus.CORPORA`.

    Args:
        name, path: the keys `dataset` and `dataset_path` of the TOML section `section`, which messages name.
        text_key: the key of the text in a JSON line, or the column of the text in a table.
        cache_folder: folder of the cache shards of text-like corpora.

    Raises:
        DataError: see `corpus.build_tokens` and `PackedDataset`.
    """
    tokens = build_tokens(name, path, text_key, tokenizer, cache_folder, section=section)
    try:
        return PackedDataset(tokens, seq_len)
    except DataError as error:
        raise DataError(f"{section}.seq_len: {error}") from None
