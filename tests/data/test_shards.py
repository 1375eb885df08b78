"""The .bin format byte for byte, broken files, and the stream over several shards."""

import hashlib
import pickle
import struct

import numpy as np
import pytest

from torchtitan_dmuon.data import DataError, ShardWriter, TokenStream, read_shard, write_shard
from torchtitan_dmuon.data.headers import read_header


def shard(path, tokens, vocab_size=257):
    write_shard(path, np.array(tokens), vocab_size=vocab_size, fingerprint="bytes-1")
    return path


def test_file_is_exactly_as_documented(tmp_path):
    path = shard(tmp_path / "a.bin", [1, 256])
    header = b"DMUONTOK" + struct.pack("<IIQQ", 2, 2, 2, 257) + b"bytes-1".ljust(32, b"\0")
    tokens = b"\x01\x00\x00\x01"
    assert path.read_bytes() == header + hashlib.sha256(tokens).digest() + tokens
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_version_1_is_read(tmp_path):
    header = b"DMUONTOK" + struct.pack("<IIQQ", 1, 2, 2, 257) + b"bytes-1".ljust(32, b"\0")
    (tmp_path / "a.bin").write_bytes(header + b"\x01\x00\x00\x01")
    assert read_shard(tmp_path / "a.bin").tolist() == [1, 256]
    assert read_header(tmp_path / "a.bin").digest is None


def test_large_vocabulary_is_stored_in_32_bits(tmp_path):
    tokens = read_shard(shard(tmp_path / "a.bin", [0, 65536], vocab_size=65537))
    assert tokens.dtype == np.dtype("<u4") and tokens.tolist() == [0, 65536]
    assert read_shard(shard(tmp_path / "b.bin", [65535], vocab_size=65536)).dtype == np.dtype("<u2")
    assert read_shard(shard(tmp_path / "empty.bin", [])).tolist() == []


@pytest.mark.parametrize("bad", [257, -1])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, bad):
    with pytest.raises(DataError, match=rf"token id {bad} .* outside the vocabulary of 257"):
        shard(tmp_path / "a.bin", [3, bad])
    assert list(tmp_path.iterdir()) == []


def test_failed_writer_keeps_the_old_file(tmp_path):
    path = shard(tmp_path / "a.bin", [1, 2, 3])
    with (
        pytest.raises(RuntimeError, match="stop"),
        ShardWriter(path, vocab_size=257, fingerprint="bytes-1") as writer,
    ):
        writer.append(np.array([9]))
        raise RuntimeError("stop")
    assert read_shard(path).tolist() == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"a\.bin is 101 bytes long but its header promises 102 \(3 tokens\)"),
        (lambda content: content + b"x", r"a\.bin is 103 bytes long but its header promises 102"),
        (lambda content: content[:40], r"a\.bin is truncated inside its header"),
        (lambda content: content[:10], r"a\.bin is truncated inside its header"),
        (lambda content: b"", r"a\.bin is empty"),
        (lambda content: b"PK" + content[2:], r"a\.bin is not a token shard"),
        (lambda content: content[:8] + b"\3" + content[9:], r"a\.bin has version 3; only versions 1 and 2"),
        (lambda content: content[:12] + b"\3" + content[13:], r"a\.bin has 3-byte tokens"),
    ],
)
def test_broken_files_are_named(tmp_path, damage, message):
    path = shard(tmp_path / "a.bin", [1, 2, 3])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        read_shard(path)


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the token shard .*a\.bin: No such file"):
        read_shard(tmp_path / "a.bin")


def test_stream_over_shards_equals_the_concatenation(tmp_path):
    parts = [[0, 1, 2], [], [3], [4, 5, 6, 7]]
    stream = TokenStream([shard(tmp_path / f"{i}.bin", part) for i, part in enumerate(parts)])
    assert len(stream) == 8
    for start in range(9):
        for stop in range(9):
            assert stream[start:stop].tolist() == list(range(8))[start:stop]
    assert stream[2:6].dtype == np.uint16


def test_pickling_a_stream_carries_paths_only(tmp_path):
    stream = TokenStream([shard(tmp_path / "a.bin", np.arange(200))])
    content = pickle.dumps(stream)
    assert len(content) < 400
    assert pickle.loads(content)[:].tolist() == list(range(200))
