"""Sources of documents, the token cache shared by processes, and messages for corpora that are not there."""

import gzip
import json
import multiprocessing
import os
import pickle
import struct
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from torchtitan_dmuon.data import ByteTokenizer, DataError, write_shard
from torchtitan_dmuon.data.corpus import build_tokens, find_documents, stdlib_documents, tokenize_once


def ids(*texts):
    return [token for text in texts for token in [*text.encode(), 256]]


def tokens_of(name, path, cache, text_key="text"):
    return build_tokens(name, None if path is None else str(path), text_key, ByteTokenizer(), cache)


def test_text_folder_file_and_glob(tmp_path):
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bee")
    (folder / "a.md").write_text("ay")
    (folder / "empty.txt").write_text("")
    (folder / "sub" / "c.txt").write_text("sea")
    (folder / ".hidden").write_text("no")
    cache = tmp_path / "cache"
    assert tokens_of("text", folder, cache)[:].tolist() == ids("ay", "bee", "sea")
    assert tokens_of("text", folder / "b.txt", cache)[:].tolist() == ids("bee")
    assert tokens_of("text", folder / "**/*.txt", cache)[:].tolist() == ids("bee", "sea")
    assert tokens_of("text", folder / "*.txt", cache)[:].dtype == np.uint16


def test_jsonl(tmp_path):
    lines = [json.dumps({"text": "one", "body": "1"}), "", json.dumps({"text": "two", "body": "2"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cache = tmp_path / "cache"
    assert tokens_of("jsonl", tmp_path, cache)[:].tolist() == ids("one", "two")
    assert tokens_of("jsonl", tmp_path / "a.jsonl", cache, text_key="body")[:].tolist() == ids("1", "2")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 has no text under the key 'content'"):
        tokens_of("jsonl", tmp_path, cache, text_key="content")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text"')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 is not valid JSON"):
        tokens_of("jsonl", tmp_path, cache)
    assert [file.name for file in cache.glob("*.tmp")] == []


def test_bin_shards_in_name_order(tmp_path):
    for name, tokens in [("s_1.bin", [3, 4]), ("s_0.bin", [1, 2])]:
        write_shard(tmp_path / name, np.array(tokens), vocab_size=257, fingerprint="bytes-1")
    assert tokens_of("bin", tmp_path, tmp_path)[:].tolist() == [1, 2, 3, 4]


def test_bin_shards_of_another_tokenizer(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([1]), vocab_size=300, fingerprint="hf-1")
    with pytest.raises(DataError, match=r"a\.bin was made for a vocabulary of 300 tokens but .* 257"):
        tokens_of("bin", tmp_path, tmp_path)
    write_shard(tmp_path / "a.bin", np.array([1]), vocab_size=200, fingerprint="hf-1")
    with pytest.raises(DataError, match=r"a\.bin was made with the tokenizer hf-1, not bytes-1"):
        tokens_of("bin", tmp_path, tmp_path)


def test_stdlib_is_sorted_and_without_site_packages():
    documents = stdlib_documents()
    assert list(documents.names) == sorted(documents.names)
    assert {"abc.py", "json/decoder.py"} <= set(documents.names)
    assert not [name for name in documents.names if "site-packages" in name or "__pycache__" in name]
    assert documents.files[documents.names.index("abc.py")] == Path(sysconfig.get_path("stdlib")) / "abc.py"


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        (
            "text",
            "nothing/*.txt",
            r"training\.dataset_path = 'nothing/\*\.txt': matches no file; give a file, a",
        ),
        ("jsonl", ".", r"training\.dataset_path = '\.': folder holds no '\*\.jsonl' file"),
        ("text", None, r"training\.dataset_path is not set: dataset 'text' needs"),
        (
            "bin",
            None,
            r"training\.dataset_path is not set: dataset 'bin' needs shards made by scripts/prepare",
        ),
        ("stdlib", "x", r"training\.dataset_path = 'x' is not used by dataset 'stdlib'"),
        ("c4", None, r"training\.dataset = 'c4' is unknown: choose one of stdlib, text, jsonl, parquet, arrow, bin"),
    ],
)
def test_messages(tmp_path, monkeypatch, name, path, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as info:
        tokens_of(name, path, tmp_path / "cache")
    assert "\n" not in str(info.value)


def test_section_is_named(tmp_path):
    with pytest.raises(DataError, match=r"^validation\.dataset_path is not set"):
        build_tokens("text", None, "text", ByteTokenizer(), tmp_path, section="validation")


def test_corpus_without_text(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"training\.dataset_path = .*a\.txt' holds no text"):
        tokens_of("text", tmp_path / "a.txt", tmp_path / "cache")


def test_cache_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    message = (
        rf"cannot write the token cache {tmp_path}/a.txt/text-\w+.bin: .*; make {tmp_path}/a.txt writable, or a sym"
    )
    with pytest.raises(DataError, match=message):
        tokens_of("text", tmp_path / "a.txt", tmp_path / "a.txt")


def test_a_folder_of_several_splits_names_them(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=rf"holds several splits; give one of {tmp_path}/test, {tmp_path}/train"):
        tokens_of("arrow", tmp_path, tmp_path / "cache")


def test_compressed_files_of_a_folder(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    (tmp_path / "c.txt").write_text("no")
    assert tokens_of("jsonl", tmp_path, tmp_path / "cache")[:].tolist() == ids("one", "two")


# ---- token files of others


def llm_c(tokens, dtype="<u2", magic=20240520):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(tokens)
    return header.tobytes() + np.array(tokens, dtype=dtype).tobytes()


def megatron(lengths, code):
    """The index of documents of one sequence each."""
    count = len(lengths)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, count + 1)
    parts = (np.array(lengths, "<i4"), np.zeros(count, "<i8"), np.arange(count + 1, dtype="<i8"))
    return head + b"".join(part.tobytes() for part in parts)


TOKENS = [5, 256, 7, 8, 200]
OTHERS = [
    ("bin", {"a.bin": llm_c(TOKENS)}),
    ("bin", {"a.bin": llm_c(TOKENS, "<u4", 20240801)}),
    ("bin", {"a.bin": np.array(TOKENS, "<i4").tobytes(), "a.idx": megatron([2, 3], 4)}),
    ("bin", {"a.bin": np.array(TOKENS, "<u2").tobytes(), "a.idx": megatron([2, 3], 8)}),
    ("bin_uint16", {"a.bin": np.array(TOKENS, "<u2").tobytes()}),
    ("bin_uint32", {"a.bin": np.array(TOKENS, "<u4").tobytes()}),
]


def write_files(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(("name", "files"), OTHERS)
def test_token_files_of_others(tmp_path, name, files):
    write_files(tmp_path / "in", files)
    stream = tokens_of(name, tmp_path / "in", tmp_path / "cache")
    assert stream[:].tolist() == TOKENS and len(stream.fingerprint) == 16
    assert pickle.loads(pickle.dumps(stream))[1:4].tolist() == TOKENS[1:4]


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("bin", {"a.bin": llm_c([3, 257])}, "holds the token 257, outside the vocabulary of 257: use the tokenizer"),
        (
            *("bin", {"a.bin": np.array([-1], "<i4").tobytes(), "a.idx": megatron([1], 4)}),
            "holds the token -1, outside the vocabulary",
        ),
        ("bin_uint16", {"a.bin": np.array([300], "<u2").tobytes()}, "holds the token 300, outside the vocabulary"),
        ("bin", {"a.bin": llm_c([3, 4])[:-1]}, "is 1027 bytes long but its header promises 1028"),
        (
            *("bin", {"a.bin": np.array([1, 2], "<i4").tobytes(), "a.idx": megatron([1, 2], 4)}),
            "is 8 bytes long but its header promises 12",
        ),
        ("bin", {"a.bin": b"", "a.idx": megatron([1], 4)[:-1]}, r"a\.idx is truncated: 61 bytes of 62"),
        ("bin", {"a.bin": b"1234", "a.idx": b"MMIDIDX"}, r"a\.idx is not a Megatron index"),
        ("bin", {"a.bin": b"1234", "a.idx": megatron([1], 7)}, "version 1 with tokens of type 7, not of integers"),
        ("bin", {"a.bin": b""}, r"a\.bin is empty: make shards with"),
        ("bin", {"a.bin": b"1234"}, r"a\.bin is not a token shard: make .* is dataset 'bin_uint16' or 'bin_uint32'"),
        ("bin_uint16", {"a.bin": b""}, "is 0 bytes long, no number of 2-byte tokens"),
        ("bin_uint32", {"a.bin": b"123456"}, "is 6 bytes long, no number of 4-byte tokens"),
        ("bin_uint16", {"a.bin": llm_c([1])}, "has a header: it is dataset 'bin', not tokens alone"),
    ],
)
def test_bad_token_files(tmp_path, name, files, message):
    write_files(tmp_path / "in", files)
    with pytest.raises(DataError, match=message) as info:
        tokens_of(name, tmp_path / "in", tmp_path / "cache")
    assert str(tmp_path / "in" / "a.") in str(info.value)


def test_cache_is_reused_until_a_file_changes(tmp_path):
    class Counting(ByteTokenizer):
        calls = 0

        def encode(self, text):
            self.calls += 1
            return super().encode(text)

    source = tmp_path / "a.txt"
    source.write_text("one")
    tokenizer = Counting()
    documents = find_documents("text", str(source), "text")
    for _ in range(2):
        assert tokenize_once(documents, tokenizer, tmp_path / "cache")[:].tolist() == ids("one")
    assert tokenizer.calls == 1
    source.write_text("two")
    os.utime(source, ns=(10**18, 10**18))
    assert tokenize_once(documents, tokenizer, tmp_path / "cache")[:].tolist() == ids("two")
    assert tokenizer.calls == 2


def _race(barrier, results, source, cache):
    class Logging(ByteTokenizer):
        def encode(self, text):
            with (cache.parent / "encoded.log").open("a") as log:
                log.write("x")
            return super().encode(text)

    documents = find_documents("text", str(source), "text")
    barrier.wait(timeout=60)
    results.put(tokenize_once(documents, Logging(), cache)[:].tolist())


@pytest.mark.dist
def test_two_processes_race_for_the_cache(tmp_path):
    source = tmp_path / "docs"
    source.mkdir()
    for number in range(50):
        (source / f"{number:02}.txt").write_text(str(number))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (barrier, results, source, tmp_path / "cache")
    processes = [context.Process(target=_race, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert found == [ids(*map(str, range(50)))] * 2
    assert (tmp_path / "encoded.log").read_text() == "x" * 50
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
    assert list((tmp_path / "cache").glob("*.tmp")) == []
