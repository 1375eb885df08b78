"""From one file to the texts of its documents: text, JSON lines, Parquet and Arrow; plain, gzip or Zstandard.

`corpus.py` finds the files, `scripts/prepare_data.py` reads them too.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from torchtitan_dmuon.data.errors import DataError

Reader = Callable[[Path], Iterator[str]]

# A folder stands for its files of these endings; "" is any.
SUFFIXES = {
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
_ROWS = 1024


def _pyarrow(reason: str) -> ModuleType:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{reason} needs the package pyarrow (extra parquet): pip install pyarrow") from error
    return pyarrow


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """The content of a file, unpacked if its name ends with .gz or .zst. Errors of the block become DataErrors."""
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as content:
                yield content
        elif file.suffix == ".zst":
            unpacked = _pyarrow(f"reading {file}").input_stream(str(file), compression="zstd")
            with io.BufferedReader(unpacked) as content:
                yield content
        else:
            with file.open("rb") as content:
                yield content
    except (OSError, EOFError, zlib.error) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"cannot read {file}: {problem}; copy it again or remove it from the corpus") from error


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} at offset {error.start}; convert the file with "
            "iconv -f ENCODING -t UTF-8, or drop such bytes with iconv -c -f UTF-8 -t UTF-8"
        ) from None


def read_text(file: Path) -> Iterator[str]:
    """The whole file as one document. Raises DataError, also for bytes that are not UTF-8."""
    with _open(file) as content:
        text = content.read()
    yield _decode(text, str(file))


def read_source_code(file: Path) -> Iterator[str]:
    """As `read_text`, but bytes that are not UTF-8 are left out."""
    with _open(file) as content:
        yield content.read().decode("utf-8", errors="ignore")


def read_jsonl(file: Path, text_key: str) -> Iterator[str]:
    """One document a line: the string under `text_key`. Empty lines are skipped.

    Raises:
        DataError: a line that is not UTF-8 or not a JSON object with a string under that key; or a file without lines.
    """
    found = False
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            found, where = True, f"{file}, line {number}"
            try:
                record = json.loads(_decode(line, where))
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is not valid JSON: {error}") from error
            text = record.get(text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{where} has no text under the key {text_key!r}: set text_key")
            yield text
    if not found:
        raise DataError(f"{file} is empty: copy it again or remove it from the corpus")


def read_parquet(file: Path, text_key: str) -> Iterator[str]:
    """One document a row: the string in column `text_key`; a null is no document. Raises DataError."""
    pyarrow = _pyarrow("reading Parquet")
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _check_column(file, table.schema_arrow.names, text_key)
            for batch in table.iter_batches(batch_size=_ROWS, columns=[text_key]):
                yield from _texts(file, batch.column(0), text_key)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} is not a Parquet file: {error}") from error


def read_arrow(file: Path, text_key: str) -> Iterator[str]:
    """As `read_parquet`, of a file that HuggingFace's `Dataset.save_to_disk` wrote (an Arrow stream)."""
    pyarrow = _pyarrow("reading Arrow files")
    try:
        with pyarrow.memory_map(str(file)) as content, pyarrow.ipc.open_stream(content) as table:
            _check_column(file, table.schema.names, text_key)
            for batch in table:
                yield from _texts(file, batch.column(text_key), text_key)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} is not an Arrow stream, as Dataset.save_to_disk writes: {error}") from error


def _check_column(file: Path, names: list[str], text_key: str) -> None:
    if text_key not in names:
        raise DataError(f"{file} has no column {text_key!r}, only {', '.join(names)}: set text_key")


def _texts(file: Path, column, text_key: str) -> Iterator[str]:
    """The texts of an Arrow array."""
    for text in column.to_pylist():
        if text is not None and not isinstance(text, str):
            raise DataError(f"{file}: column {text_key!r} does not hold text: set text_key")
        yield text or ""


def reader(kind: str, text_key: str) -> Reader:
    """How the files of the corpus `kind`, one of `SUFFIXES`, are read."""
    if kind == "text":
        return read_text
    return partial({"jsonl": read_jsonl, "parquet": read_parquet, "arrow": read_arrow}[kind], text_key=text_key)
