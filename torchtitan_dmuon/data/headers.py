"""Headers of token files: ours, llm.c's and Megatron's, and files of tokens alone, as nanoGPT's.

A shard of ours is a 96-byte little-endian header and then the tokens:

    offset  0   8 bytes   magic b"DMUONTOK"
            8   uint32    version, 2
           12   uint32    bytes per token, 2 (uint16) or 4 (uint32)
           16   uint64    number of tokens
           24   uint64    vocabulary size, above every id
           32   32 bytes  fingerprint of the tokenizer, UTF-8, zero padded
           64   32 bytes  SHA-256 of the tokens as they are stored
           96   tokens

Version 1 had no SHA-256; its tokens begin at offset 64.

llm.c's begin with 256 int32: 20240520 (uint16 tokens) or 20240801 (uint32 tokens), a version, the number of tokens.
Megatron's `.bin` has no header: the `.idx` file beside it tells the type and the lengths of its sequences.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan_dmuon.data.errors import DataError

MAGIC = b"DMUONTOK"
VERSION = 2
_HEADERS = {1: struct.Struct("<8sIIQQ32s"), 2: struct.Struct("<8sIIQQ32s32s")}
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}

_LLM_C = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
_LLM_C_BYTES = 1024
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class ShardHeader:
    """What is known of a token file before its tokens are read.

    Attributes:
        dtype: of the stored tokens.
        num_tokens: how many there are.
        offset: bytes before the tokens.
        vocab_size: above every id; None where the file does not tell.
        fingerprint: of the tokenizer; "" where the file does not tell.
        digest: SHA-256 of the stored tokens; None where the file does not tell.
    """

    dtype: np.dtype
    num_tokens: int
    offset: int = _HEADERS[VERSION].size
    vocab_size: int | None = None
    fingerprint: str = ""
    digest: bytes | None = None

    def pack(self) -> bytes:
        """The bytes at the head of a shard of ours, of today's version."""
        sizes = (self.dtype.itemsize, self.num_tokens, self.vocab_size)
        return _HEADERS[VERSION].pack(MAGIC, VERSION, *sizes, self.fingerprint.encode(), self.digest)


def is_shard(path: str | Path) -> bool:
    """Whether a file begins with the magic bytes of a shard of ours, complete or not."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: str | Path, raw_itemsize: int | None = None) -> ShardHeader:
    """Read and check the header of the token file at `path`.

    Args:
        raw_itemsize: 2 or 4 for a file of tokens alone; None for one that tells what it is.

    Raises:
        DataError: the file is missing, of no known kind or version, or not exactly as long as its header says.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(_LLM_C_BYTES)
        size = path.stat().st_size
        index = path.with_suffix(".idx")
        if raw_itemsize is not None:
            header = _raw(path, head, size, raw_itemsize)
        elif head[: len(MAGIC)] == MAGIC:
            header = _ours(path, head)
        elif len(head) == _LLM_C_BYTES and int.from_bytes(head[:4], "little") in _LLM_C:
            dtype = _LLM_C[int.from_bytes(head[:4], "little")]
            header = ShardHeader(dtype, int.from_bytes(head[8:12], "little"), _LLM_C_BYTES)
        elif index.is_file():
            header = _megatron(index)
        else:
            problem = "is empty" if not size else "is not a token shard"
            raise DataError(
                f"{path} {problem}: make shards with scripts/prepare_data.py; a file of tokens alone, as nanoGPT's, is "
                "dataset 'bin_uint16' or 'bin_uint32'"
            )
    except OSError as error:
        raise DataError(f"cannot read the token shard {path}: {error.strerror}") from error
    expected = header.offset + header.num_tokens * header.dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path} is {size} bytes long but its header promises {expected} ({header.num_tokens} tokens): "
            "copy it again or make it again"
        )
    return header


def _ours(path: Path, head: bytes) -> ShardHeader:
    version = int.from_bytes(head[8:12], "little")
    if len(head) >= 12 and version not in _HEADERS:
        raise DataError(f"{path} has version {version}; only versions 1 and {VERSION} are known")
    if len(head) < 12 or len(head) < _HEADERS[version].size:
        raise DataError(f"{path} is truncated inside its header: copy it again or make it again")
    form = _HEADERS[version]
    _, _, itemsize, num_tokens, vocab_size, name, *digest = form.unpack(head[: form.size])
    if itemsize not in _DTYPES:
        raise DataError(f"{path} has {itemsize}-byte tokens; only 2 and 4 bytes are known")
    fingerprint = name.rstrip(b"\0").decode("utf-8", errors="replace")
    digest = digest[0] if digest else None
    return ShardHeader(_DTYPES[itemsize], num_tokens, form.size, vocab_size, fingerprint, digest)


def _raw(path: Path, head: bytes, size: int, itemsize: int) -> ShardHeader:
    if not size or size % itemsize:
        raise DataError(f"{path} is {size} bytes long, no number of {itemsize}-byte tokens: copy it again")
    if head[: len(MAGIC)] == MAGIC or int.from_bytes(head[:4], "little") in _LLM_C:
        raise DataError(f"{path} has a header: it is dataset 'bin', not tokens alone")
    return ShardHeader(_DTYPES[itemsize], size // itemsize, 0)


def _megatron(index: Path) -> ShardHeader:
    with index.open("rb") as file:
        head = file.read(_MEGATRON.size)
        if len(head) < _MEGATRON.size or head[:9] != _MEGATRON_MAGIC:
            raise DataError(f"{index} is not a Megatron index, which the .bin file beside it needs")
        _, version, code, sequences, documents = _MEGATRON.unpack(head)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise DataError(f"{index} has version {version} with tokens of type {code}, not of integers of version 1")
        # Lengths (int32) and pointers (int64) of sequences, then the first sequence of each document (int64).
        expected = _MEGATRON.size + 12 * sequences + 8 * documents
        if index.stat().st_size < expected:
            raise DataError(f"{index} is truncated: {index.stat().st_size} bytes of {expected}; copy it again")
        lengths = np.fromfile(file, dtype="<i4", count=sequences)
    return ShardHeader(np.dtype(_MEGATRON_DTYPES[code]), int(lengths.sum(dtype=np.int64)), 0)
