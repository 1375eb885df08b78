"""Sources of documents, the token cache shared by processes, and messages for corpora that are not there."""

import json
import multiprocessing
import os
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
    (folder / "a.md").write_bytes(b"a\xffy")
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
        ("c4", None, r"training\.dataset = 'c4' is unknown: choose one of stdlib, text, jsonl, bin"),
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
