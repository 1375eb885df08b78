"""Corpora: named sources of documents, turned into one flat token stream.

One process tokenizes a text-like corpus (`stdlib`, `text`, `jsonl`) once into a cache shard, which every process of the
host maps. `bin` corpora are tokenized already. The tokenizer's separator follows every document. `dataset.py` cuts the
stream into samples.
"""

import glob
import hashlib
import json
import logging
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.scan import fingerprint_of, make_once
from torchtitan_dmuon.data.shards import VERSION, ShardWriter, TokenStream, read_header
from torchtitan_dmuon.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CORPORA = ("stdlib", "text", "jsonl", "bin")
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Documents:
    """Files and how to read their documents.

    Attributes:
        kind: the corpus, and for `jsonl` the key of the text, as "jsonl:text".
        files: paths, in the order in which they are read.
        names: of the files, for the cache key.
        read: `read(file)` yields the text of each document of one file.
    """

    kind: str
    files: tuple[Path, ...]
    names: tuple[str, ...]
    read: Callable[[Path], Iterator[str]]


def find_files(pattern: str, suffix: str, *, key: str) -> tuple[Path, ...]:
    """The sorted files of a glob (`**` allowed), of a folder, or the one file itself.

    Args:
        pattern: a glob, a folder or a file.
        suffix: a folder stands for its files of this suffix at any depth, without hidden files and folders.
        key: the name of the setting, for the message.

    Raises:
        DataError: no file matches.
    """
    path = Path(pattern).expanduser()
    glob_pattern = f"{glob.escape(str(path))}/**/*{suffix}" if path.is_dir() else str(path)
    files = [Path(name) for name in glob.glob(glob_pattern, recursive=True)]
    files = sorted(file for file in files if file.is_file())
    if not files and path.is_file():  # a name with glob characters in it
        files = [path]
    if not files:
        problem = "matches no file"
        if path.is_dir():
            problem = f"folder holds no '*{suffix}' file"
        elif glob.escape(pattern) == pattern:
            problem = "does not exist"
        raise DataError(
            f"{key} = {pattern!r}: {problem}; give a file, a folder or a glob such as 'data/*{suffix or '.txt'}'"
        )
    return tuple(files)


def _open(file: Path) -> TextIO:
    try:
        return file.open(encoding="utf-8", errors="ignore")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; remove it from the corpus") from error


def read_text(file: Path) -> Iterator[str]:
    """The whole file as one document. Bytes that are not UTF-8 are left out. Raises DataError."""
    with _open(file) as content:
        yield content.read()


def read_jsonl(file: Path, text_key: str) -> Iterator[str]:
    """One document a line: the string under `text_key`. Empty lines are skipped.

    Raises:
        DataError: a line that is not a JSON object with a string under that key.
    """
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number} is not valid JSON: {error}") from error
            text = record.get(text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{file}, line {number} has no text under the key {text_key!r}: set text_key")
            yield text


def stdlib_documents() -> Documents:
    """The `.py` files of the running interpreter's standard library, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    names = sorted(name for name in found if not _NOT_STDLIB.intersection(name.split("/")))
    return Documents("stdlib", tuple(found[name] for name in names), tuple(names), read_text)


def find_documents(name: str, path: str | None, text_key: str, *, section: str = "training") -> Documents:
    """The documents of a text-like corpus: "stdlib", "text" or "jsonl".

    Args:
        name, path, text_key: values of the keys `dataset`, `dataset_path` and the JSON key of the text.
        section: the TOML section that has these keys, for messages.

    Raises:
        DataError: the name is unknown; or the path is missing, not needed, or matches no file.
    """
    key = f"{section}.dataset_path"
    if name == "stdlib":
        if path:
            raise DataError(f"{key} = {path!r} is not used by dataset 'stdlib': remove it, or set dataset to 'text'")
        return stdlib_documents()
    if name not in ("text", "jsonl"):
        raise DataError(f"{section}.dataset = {name!r} is unknown: choose one of {', '.join(CORPORA)}")
    if not path:
        raise DataError(f"{key} is not set: dataset {name!r} needs a file, a folder or a glob")
    files = find_files(path, ".jsonl" if name == "jsonl" else "", key=key)
    names = tuple(str(file.resolve()) for file in files)
    if name == "text":
        return Documents("text", files, names, read_text)
    return Documents(f"jsonl:{text_key}", files, names, lambda file: read_jsonl(file, text_key))


def _cache_file(documents: Documents, tokenizer: Tokenizer, cache_folder: Path) -> Path:
    stats = [file.stat() for file in documents.files]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(documents.names, stats, strict=True)]
    key = json.dumps([VERSION, documents.kind, tokenizer.fingerprint, tokenizer.vocab_size, files])
    digest = hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()
    return cache_folder / f"{documents.kind.split(':')[0]}-{digest[:16]}.bin"


def _write_cache(documents: Documents, tokenizer: Tokenizer, file: Path) -> None:
    separator = np.array([tokenizer.separator_id])
    with ShardWriter(file, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint) as writer:
        for source in documents.files:
            for text in documents.read(source):
                if text:
                    writer.append(tokenizer.encode(text))
                    writer.append(separator)


def tokenize_once(documents: Documents, tokenizer: Tokenizer, cache_folder: str | Path) -> TokenStream:
    """The tokens of `documents`, from their cache shard in `cache_folder`. Without a shard, this call makes it.

    The key of the cache is the names, sizes and times of the files, and the tokenizer. Any number of processes may call
    this at once: one writes the shard under an exclusive lock, the others wait for the lock and map the shard.

    Raises:
        DataError: a document cannot be read, or the cache folder cannot be written or locked.
    """
    file = _cache_file(documents, tokenizer, Path(cache_folder).expanduser())

    def make() -> None:
        logger.info("tokenizing %d files into %s", len(documents.files), file)
        _write_cache(documents, tokenizer, file)

    make_once(file, make)
    return TokenStream([file], fingerprint_of([file], cache_folder))


def open_shards(
    path: str | None, tokenizer: Tokenizer, cache_folder: str | Path, *, section: str = "training"
) -> TokenStream:
    """The tokens of the `.bin` shards at `path` (file, folder or glob), in the order of their sorted names.

    Raises:
        DataError: there is no shard; or a shard is broken, or made with another tokenizer or a larger vocabulary.
    """
    key = f"{section}.dataset_path"
    if not path:
        raise DataError(f"{key} is not set: dataset 'bin' needs shards made by scripts/prepare_data.py")
    files = find_files(path, ".bin", key=key)
    for file in files:
        header = read_header(file)
        if header.vocab_size > tokenizer.vocab_size:
            raise DataError(
                f"{file} was made for a vocabulary of {header.vocab_size} tokens but the tokenizer has "
                f"{tokenizer.vocab_size}: use the tokenizer that made the shards ({header.fingerprint})"
            )
        if header.fingerprint not in ("", tokenizer.fingerprint):
            raise DataError(
                f"{file} was made with the tokenizer {header.fingerprint}, not {tokenizer.fingerprint}: "
                "use the same tokenizer or run scripts/prepare_data.py again"
            )
    return TokenStream(files, fingerprint_of(files, cache_folder))


def build_tokens(
    name: str,
    path: str | None,
    text_key: str,
    tokenizer: Tokenizer,
    cache_folder: str | Path,
    *,
    section: str = "training",
) -> TokenStream:
    """The flat token stream of the corpus `name`, one of `CORPORA`.

    Raises:
        DataError: as `find_documents`, `tokenize_once` and `open_shards`, and when the corpus holds no token.
    """
    if name == "bin":
        tokens = open_shards(path, tokenizer, cache_folder, section=section)
    else:
        documents = find_documents(name, path, text_key, section=section)
        tokens = tokenize_once(documents, tokenizer, cache_folder)
    if len(tokens) == 0:
        raise DataError(f"{section}.dataset_path = {path!r} holds no text: every file of dataset {name!r} is empty")
    return tokens
