"""Documents of one file, by kind and compression, and what is told of bad ones."""

import gzip
import sys

import pytest

from torchtitan_dmuon.data import DataError
from torchtitan_dmuon.data.readers import read_source_code, reader

LINES = b'{"body": "one"}\n\n{"body": "tw\xc3\xb6"}\n'
COLUMN = {"body": ["one", None, "tw\u00f6"], "number": [1, 2, 3]}


def zstandard(content):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def parquet():
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(COLUMN), sink)
    return sink.getvalue().to_pybytes()


def arrow():
    """As `datasets.Dataset.save_to_disk` writes it."""
    pyarrow = pytest.importorskip("pyarrow")
    sink, table = pyarrow.BufferOutputStream(), pyarrow.table(COLUMN)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("kind", "name", "content", "texts"),
    [
        ("text", "a.txt", lambda: b"h\xc3\xa9\r\nllo", ["h\u00e9\r\nllo"]),
        ("text", "a.txt.gz", lambda: gzip.compress(b"hello"), ["hello"]),
        ("text", "a.txt.zst", lambda: zstandard(b"hello"), ["hello"]),
        ("text", "empty.txt", lambda: b"", [""]),
        ("jsonl", "a.jsonl", lambda: LINES, ["one", "tw\u00f6"]),
        ("jsonl", "a.jsonl.gz", lambda: gzip.compress(LINES), ["one", "tw\u00f6"]),
        ("jsonl", "a.jsonl.zst", lambda: zstandard(LINES), ["one", "tw\u00f6"]),
        ("parquet", "a.parquet", parquet, ["one", "", "tw\u00f6"]),
        ("arrow", "a.arrow", arrow, ["one", "", "tw\u00f6"]),
    ],
)
def test_documents(tmp_path, kind, name, content, texts):
    (tmp_path / name).write_bytes(content())
    assert list(reader(kind, "body")(tmp_path / name)) == texts


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        (
            "text",
            "a.txt",
            lambda: b"ab\xff",
            r"a\.txt is not UTF-8: byte 0xff at offset 2; convert the file with iconv",
        ),
        ("text", "a.txt.gz", lambda: b"text", r"cannot read .*a\.txt\.gz: Not a gzipped file"),
        ("text", "a.txt.gz", lambda: gzip.compress(b"hello")[:-9], r"cannot read .*a\.txt\.gz: Compressed file ended"),
        ("text", "a.txt.zst", lambda: zstandard(b"hello")[:-3], r"cannot read .*a\.txt\.zst: Truncated"),
        (
            "jsonl",
            "a.jsonl",
            lambda: LINES + b'{"body": "\xff"}',
            r"a\.jsonl, line 4 is not UTF-8: byte 0xff at offset 10",
        ),
        ("jsonl", "a.jsonl", lambda: LINES + b"[", r"a\.jsonl, line 4 is not valid JSON"),
        ("jsonl", "a.jsonl", lambda: LINES + b"[]", r"a\.jsonl, line 4 has no text under the key 'body': set text_key"),
        ("jsonl", "a.jsonl", lambda: b"\n", r"a\.jsonl is empty"),
        ("jsonl", "a.jsonl.gz", lambda: b"", r"a\.jsonl\.gz is empty"),
        ("parquet", "a.parquet", lambda: parquet()[:-9], r"a\.parquet is not a Parquet file"),
        ("parquet", "a.parquet", lambda: b"", r"a\.parquet is not a Parquet file"),
        ("arrow", "a.arrow", lambda: arrow()[:40], r"a\.arrow is not an Arrow stream"),
        ("arrow", "a.arrow", lambda: b"", r"a\.arrow is not an Arrow stream"),
    ],
)
def test_bad_files(tmp_path, kind, name, content, message):
    (tmp_path / name).write_bytes(content())
    with pytest.raises(DataError, match=message) as info:
        list(reader(kind, "body")(tmp_path / name))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(("kind", "content"), [("parquet", parquet), ("arrow", arrow)])
def test_columns(tmp_path, kind, content):
    (tmp_path / "a").write_bytes(content())
    with pytest.raises(DataError, match="has no column 'text', only body, number: set text_key"):
        list(reader(kind, "text")(tmp_path / "a"))
    with pytest.raises(DataError, match="column 'number' does not hold text: set text_key"):
        list(reader(kind, "number")(tmp_path / "a"))


@pytest.mark.parametrize(("kind", "name"), [("parquet", "a"), ("arrow", "a"), ("text", "a.zst")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, kind, name):
    (tmp_path / name).write_bytes(b"x")
    for module in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=r"needs the package pyarrow \(extra parquet\): pip install pyarrow"):
        list(reader(kind, "body")(tmp_path / name))


def test_source_code_leaves_out_other_bytes(tmp_path):
    (tmp_path / "a.py").write_bytes(b"a\xffy")
    assert list(read_source_code(tmp_path / "a.py")) == ["ay"]
