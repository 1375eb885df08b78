"""Token shards: the `.bin` file format, its writer, and one flat stream over several of them.

A shard is a 96-byte little-endian header and then the tokens:

    offset  0   8 bytes   magic b"DMUONTOK"
            8   uint32    version, 2
           12   uint32    bytes per token, 2 (uint16) or 4 (uint32)
           16   uint64    number of tokens
           24   uint64    vocabulary size, above every id
           32   32 bytes  fingerprint of the tokenizer, UTF-8, zero padded
           64   32 bytes  SHA-256 of the tokens as they are stored
           96   tokens

Version 1 had no SHA-256; its tokens begin at offset 64.

`corpus.py` and `scripts/prepare_data.py` make the tokens.
"""

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.tokenizer import token_dtype

MAGIC = b"DMUONTOK"
VERSION = 2
_HEADERS = {1: struct.Struct("<8sIIQQ32s"), 2: struct.Struct("<8sIIQQ32s32s")}
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class ShardHeader:
    """The header of a shard.

    Attributes:
        dtype: of the stored tokens.
        num_tokens: how many there are.
        vocab_size: above every id.
        fingerprint: of the tokenizer.
        digest: SHA-256 of the stored tokens; None in a file that has none.
        offset: bytes before the tokens.
    """

    dtype: np.dtype
    num_tokens: int
    vocab_size: int
    fingerprint: str
    digest: bytes | None
    offset: int = _HEADERS[VERSION].size

    def pack(self) -> bytes:
        """The bytes at the head of a file of today's version."""
        sizes = (self.dtype.itemsize, self.num_tokens, self.vocab_size)
        return _HEADERS[VERSION].pack(MAGIC, VERSION, *sizes, self.fingerprint.encode(), self.digest)


def is_shard(path: str | Path) -> bool:
    """Whether a file begins with the magic bytes of a token shard, complete or not."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: str | Path) -> ShardHeader:
    """Read and check the header of the shard at `path`.

    Raises:
        DataError: the file is missing, no shard, of another version, or not exactly as long as its header says.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(_HEADERS[VERSION].size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read the token shard {path}: {error.strerror}") from error
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a token shard: make shards with scripts/prepare_data.py")
    version = int.from_bytes(raw[8:12], "little")
    if len(raw) >= 12 and version not in _HEADERS:
        raise DataError(f"{path} has version {version}; only versions 1 and {VERSION} are known")
    if len(raw) < 12 or len(raw) < _HEADERS[version].size:
        raise DataError(f"{path} is truncated inside its header: make the shard again with scripts/prepare_data.py")
    _, _, itemsize, num_tokens, vocab_size, name, *digest = _HEADERS[version].unpack(raw[: _HEADERS[version].size])
    if itemsize not in _DTYPES:
        raise DataError(f"{path} has {itemsize}-byte tokens; only 2 and 4 bytes are known")
    expected = _HEADERS[version].size + num_tokens * itemsize
    if size != expected:
        raise DataError(
            f"{path} is {size} bytes long but its header promises {expected} ({num_tokens} tokens): "
            "copy it again or make it again with scripts/prepare_data.py"
        )
    fingerprint = name.rstrip(b"\0").decode("utf-8", errors="replace")
    found = (_DTYPES[itemsize], num_tokens, vocab_size, fingerprint)
    return ShardHeader(*found, digest[0] if digest else None, _HEADERS[version].size)


def read_shard(path: str | Path) -> np.ndarray:
    """The tokens of one shard as a read-only memory map, uint16 or uint32 [num_tokens].

    Raises:
        DataError: see `read_header`.
    """
    header = read_header(path)
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
        found = (self._dtype, self.num_tokens, self._vocab_size, self._fingerprint)
        return ShardHeader(*found, self._hash.digest()).pack()

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

    Raises:
        DataError: see `read_header`.
    """

    def __init__(self, paths: Sequence[str | Path], fingerprint: str = ""):
        self.paths = [Path(path) for path in paths]
        self.fingerprint = fingerprint
        self._maps = [read_shard(path) for path in self.paths]
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
        return TokenStream, (self.paths, self.fingerprint)
