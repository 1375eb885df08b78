"""A run knows what it has read: the same content under other names, and what is told when it changed."""

import logging
import os

import numpy as np
import pytest

from torchtitan_dmuon.data import (
    ByteTokenizer,
    DataError,
    LoaderConfig,
    Mixture,
    PackedDataset,
    TokenLoader,
    build_dataset,
    write_shard,
)
from torchtitan_dmuon.data.corpus import build_tokens
from torchtitan_dmuon.data.identity import describe, resume_sources


def dataset(begin, samples=10, seq_len=4):
    return PackedDataset(np.arange(begin, begin + 4 * samples + 1), seq_len)


def text_dataset(folder, text, *, name="a.txt", seq_len=4):
    (folder / name).write_text(text)
    return build_dataset("text", str(folder / name), "text", ByteTokenizer(), seq_len, folder / "cache")


def test_the_fingerprint_is_of_content_alone(tmp_path):
    first = text_dataset(tmp_path, "hello world")
    (tmp_path / "other").mkdir()
    moved = text_dataset(tmp_path / "other", "hello world", name="b.txt", seq_len=3)
    assert moved.fingerprint == first.fingerprint and len(first.fingerprint) == 16
    os.utime(tmp_path / "a.txt", ns=(10**18, 10**18))
    assert text_dataset(tmp_path, "hello world").fingerprint == first.fingerprint
    assert text_dataset(tmp_path, "hello wOrld").fingerprint != first.fingerprint


def test_shards_of_either_version_have_the_same_fingerprint(tmp_path):
    def fingerprint():
        return build_tokens("bin", str(tmp_path / "a.bin"), "text", ByteTokenizer(), tmp_path / "cache").fingerprint

    write_shard(tmp_path / "a.bin", np.arange(200), vocab_size=257, fingerprint="bytes-1")
    today, content = fingerprint(), (tmp_path / "a.bin").read_bytes()
    assert not (tmp_path / "cache").exists()
    (tmp_path / "a.bin").write_bytes(content[:8] + b"\1" + content[9:64] + content[96:])
    assert fingerprint() == today
    [scan] = (tmp_path / "cache").glob("scan-*.json")
    before = scan.stat().st_mtime_ns
    assert fingerprint() == today and scan.stat().st_mtime_ns == before


def test_what_goes_on_where():
    """(sources of the checkpoint with samples read, sources now, samples read of each)"""
    a, b, c = dataset(0), dataset(100), dataset(200)
    longer, shorter = dataset(0, seq_len=8), dataset(0, seq_len=2)
    cases = [
        ({"a": (13, a)}, {"a": a}, [13]),
        ({"a": (13, a)}, {"a": a, "b": b}, [13, 0]),
        ({"a": (13, a), "b": (7, b)}, {"b": a, "a": b, "c": c}, [13, 7, 0]),  # renamed crosswise
        ({"a": (13, a), "b": (7, a)}, {"b": a, "a": a}, [7, 13]),  # the same data twice
        ({"a": (14, a)}, {"a": longer}, [7]),
        ({"a": (13, a)}, {"renamed": longer}, [5 + 2]),  # one epoch of 5, and 3 of 10
        ({"a": (13, a)}, {"a": shorter}, [26]),
    ]
    for before, now, expected in cases:
        saved = {name: describe(samples, data) for name, (samples, data) in before.items()}
        assert resume_sources(saved, now, False) == expected


def test_changes_are_told_and_accepted(caplog):
    saved = {"a": describe(13, dataset(0)), "b": describe(5, dataset(100)), "c": describe(1, dataset(200))}
    now = {"a": dataset(1, 20), "b": dataset(100)}
    with pytest.raises(DataError) as info:
        resume_sources(saved, now, False)
    assert str(info.value) == (
        "the source 'c' of the checkpoint is not in this run; the content of 'a' is not that of the checkpoint (then "
        f"41 tokens with fingerprint {dataset(0).fingerprint}, now 81 with {now['a'].fingerprint}): use the same data, "
        "tokenizer and keys of the data; or accept the change from here on with training.accept_changed_data = true; "
        'or begin the data anew with checkpoint.exclude_from_loading = ["dataloader"]. New files can be a source of '
        "their own"
    )
    with caplog.at_level(logging.WARNING):
        assert resume_sources(saved, now, True) == [26, 5]
    assert [record.message[:50] for record in caplog.records] == [
        "training.accept_changed_data: the source 'c' of th",
        "training.accept_changed_data: the content of 'a' i",
    ]


def test_a_loader_goes_on_beside_a_new_source():
    """What was read of the first source is not read again before its epoch ends."""
    config = LoaderConfig(2)
    before = TokenLoader(dataset(0), config)
    batches = iter(before)
    read = [next(batches)["input"][:, 0].tolist() for _ in range(3)]
    after = TokenLoader(Mixture({"old": dataset(0), "new": dataset(100)}), config)
    after.load_state_dict(before.state_dict())
    assert after.state_dict()["sources"]["old"]["samples"] == 6
    seen = [token for batch in read for token in batch]
    for batch in after:
        seen += [token for token in batch["input"][:, 0].tolist() if token < 100]
        if len(seen) >= 10:
            break
    assert sorted(seen[:10]) == list(range(0, 40, 4))


def test_changed_data_are_accepted_by_the_loader():
    state = TokenLoader(dataset(0), LoaderConfig(2)).state_dict()
    with pytest.raises(DataError, match="the content of 'data' is not that of the checkpoint"):
        TokenLoader(dataset(5), LoaderConfig(2)).load_state_dict(state)
    TokenLoader(dataset(5), LoaderConfig(2, accept_changed_data=True)).load_state_dict(state)
