"""Token shards: their writer, and one flat stream over several of them. `headers.py` has the file formats.

`corpus.py` and `scripts/prepare_data.py` make the tokens.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.headers import ShardHeader, read_header
from torchtitan_dmuon.data.tokenizer import token_dtype


def read_shard(path: str | Path, raw_itemsize: int | None = None) -> np.ndarray:
    """The tokens of one token file as a read-only memory map, integers [num_tokens]; uint16 or uint32 in ours.

    Raises:
        DataError: see `read_header`, which has the arguments.
    """
    header = read_header(path, raw_itemsize)
    if header.num_tokens == 0:  # memory mapping refuses an empty region
        return np.empty(0, dtype=header.dtype)
    return np.memmap(path, dtype=header.dtype, mode="r", offset=header.offset, shape=(header.num_tokens,))


class ShardWriter:
    """Writes one shard: tokens go to `<path>.tmp`, which becomes `path` when the block ends without error.

    Use as a context manager and call `append` any number of times. An existing `path` is replaced.

    Args:
        path: the file to make; its folder must exist.
        vocab_size: above every id; the stored dtype is the smallest that holds ids below `vocab_size`.
        fingerprint: of the tokenizer, at most 32 bytes.
    """

    def __init__(self, path: str | Path, *, vocab_size: int, fingerprint: str):
        if len(fingerprint.encode()) > 32:
            raise ValueError(f"the fingerprint {fingerprint!r} is longer than 32 bytes")
        self.path = Path(path)
        self.num_tokens = 0
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._dtype = token_dtype(vocab_size)
        self._hash = hashlib.sha256()

    def _header(self) -> bytes:
        return ShardHeader(
            self._dtype,
            self.num_tokens,
            vocab_size=self._vocab_size,
            fingerprint=self._fingerprint,
            digest=self._hash.digest(),
        ).pack()

    def __enter__(self) -> "ShardWriter":
        self._file = self._temporary.open("wb")
        self._file.write(self._header())
        return self

    def append(self, tokens: np.ndarray) -> None:
        """Add the ids of `tokens`, any integer dtype, 1-D.

        Raises:
            DataError: an id is negative or not below the vocabulary size.
        """
        tokens = np.asarray(tokens)
        if tokens.size == 0:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise DataError(f"token id {bad} for {self.path} is outside the vocabulary of {self._vocab_size}")
        content = tokens.astype(self._dtype, copy=False).tobytes()
        self._hash.update(content)
        self._file.write(content)
        self.num_tokens += tokens.size

    def __exit__(self, exception_type, exception, traceback) -> None:
        try:
            if exception_type is None:
                self._file.seek(0)
                self._file.write(self._header())
                self._file.flush()
                os.fsync(self._file.fileno())  # or a power cut could leave the renamed file with empty blocks
                self._temporary.replace(self.path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)


def write_shard(path: str | Path, tokens: np.ndarray, *, vocab_size: int, fingerprint: str) -> None:
    """Write `tokens` (integers, 1-D) as the shard `path`, atomically. Raises as `ShardWriter`."""
    with ShardWriter(path, vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        writer.append(tokens)


class TokenStream:
    """Several shards read as one flat sequence of tokens.

    `len(stream)` is the number of tokens and `stream[a:b]` a 1-D array. A pickled stream is its paths only: a worker
    process of the loader maps the files itself.

    Args:
        paths: the shards.
        fingerprint: of the content of all of them; "" where nobody asks.
        raw_itemsize: as for `read_header`.

    Raises:
        DataError: see `read_header`.
    """

    def __init__(self, paths: Sequence[str | Path], fingerprint: str = "", raw_itemsize: int | None = None):
        self.paths = [Path(path) for path in paths]
        self.fingerprint = fingerprint
        self._raw_itemsize = raw_itemsize
        self._maps = [read_shard(path, raw_itemsize) for path in self.paths]
        self._ends = np.cumsum([len(tokens) for tokens in self._maps], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        if step != 1:
            raise ValueError("a token stream is read in runs: the step must be 1")
        parts = []
        shard = bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[shard])
            begin = self._ends[shard - 1] if shard else 0
            if end > start:
                parts.append(self._maps[shard][start - begin : end - begin])
            start = max(start, end)
            shard += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def __reduce__(self):
        return TokenStream, (self.paths, self.fingerprint, self._raw_itemsize)
