"""Corpora: named sources of documents, turned into one flat token stream.

One process tokenizes a text-like corpus (`stdlib`, `text`, `jsonl`, `parquet`, `arrow`) once into a cache shard, which
every process of the host maps. `bin` corpora are tokenized already. The tokenizer's BOS and EOS begin and end every
document. `dataset.py` cuts the stream into samples.
"""

import glob
import hashlib
import json
import logging
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.headers import VERSION, read_header
from torchtitan_dmuon.data.readers import SUFFIXES, Reader, read_source_code, reader
from torchtitan_dmuon.data.scan import fingerprint_of, make_once, scan_once
from torchtitan_dmuon.data.shards import ShardWriter, TokenStream
from torchtitan_dmuon.data.tokenizer import Tokenizer, encode_document

logger = logging.getLogger(__name__)

_RAW_ITEMSIZES = {"bin": None, "bin_uint16": 2, "bin_uint32": 4}
CORPORA = ("stdlib", *SUFFIXES, *_RAW_ITEMSIZES)
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Documents:
    """Files and how to read their documents.

    Attributes:
        kind: the corpus, and the key of the text where there is one, as "jsonl:text".
        files: paths, in the order in which they are read.
        names: of the files, for the cache key.
        read: `read(file)` yields the text of each document of one file.
    """

    kind: str
    files: tuple[Path, ...]
    names: tuple[str, ...]
    read: Reader


def find_files(pattern: str, suffixes: Sequence[str], *, key: str) -> tuple[Path, ...]:
    """The sorted files of a glob (`**` allowed), of a folder, or the one file itself.

    Args:
        pattern: a glob, a folder or a file.
        suffixes: a folder stands for its files of these suffixes at any depth, without hidden files and folders.
        key: the name of the setting, for the message.

    Raises:
        DataError: no file matches; or the folder holds the splits of a HuggingFace dataset.
    """
    path = Path(pattern).expanduser()
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(str(folder) for folder in path.iterdir() if folder.is_dir()))
        raise DataError(f"{key} = {pattern!r}: the folder holds several splits; give one of {splits}")
    if path.is_dir():
        folder = f"{glob.escape(str(path))}/**/*"
        found = {name for suffix in suffixes for name in glob.glob(f"{folder}{suffix}", recursive=True)}
    else:
        found = set(glob.glob(str(path), recursive=True))
    files = sorted(file for file in map(Path, found) if file.is_file())
    if not files and path.is_file():  # a name with glob characters in it
        files = [path]
    if not files:
        problem = "matches no file"
        if path.is_dir():
            problem = f"folder holds no '*{suffixes[0]}' file"
        elif glob.escape(pattern) == pattern:
            problem = "does not exist"
        raise DataError(
            f"{key} = {pattern!r}: {problem}; give a file, a folder or a glob such as 'data/*{suffixes[0] or '.txt'}'"
        )
    return tuple(files)


def find_corpus(name: str, path: str, *, key: str) -> tuple[Path, ...]:
    """The files of a corpus other than "stdlib". Raises as `find_files`."""
    return find_files(path, SUFFIXES.get(name, (".bin",)), key=key)


def stdlib_documents() -> Documents:
    """The `.py` files of the running interpreter's standard library, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    names = sorted(name for name in found if not _NOT_STDLIB.intersection(name.split("/")))
    return Documents("stdlib", tuple(found[name] for name in names), tuple(names), read_source_code)


def find_documents(name: str, path: str | None, text_key: str, *, section: str = "training") -> Documents:
    """The documents of a text-like corpus: "stdlib", or one of `SUFFIXES`.

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
    if name not in SUFFIXES:
        raise DataError(f"{section}.dataset = {name!r} is unknown: choose one of {', '.join(CORPORA)}")
    if not path:
        raise DataError(f"{key} is not set: dataset {name!r} needs a file, a folder or a glob")
    files = find_corpus(name, path, key=key)
    names = tuple(str(file.resolve()) for file in files)
    return Documents(name if name == "text" else f"{name}:{text_key}", files, names, reader(name, text_key))


def _cache_file(documents: Documents, tokenizer: Tokenizer, cache_folder: Path) -> Path:
    stats = [file.stat() for file in documents.files]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(documents.names, stats, strict=True)]
    key = json.dumps([VERSION, documents.kind, tokenizer.fingerprint, tokenizer.vocab_size, files])
    digest = hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()
    return cache_folder / f"{documents.kind.split(':')[0]}-{digest[:16]}.bin"


def _write_cache(documents: Documents, tokenizer: Tokenizer, file: Path) -> None:
    with ShardWriter(file, vocab_size=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint) as writer:
        for source in documents.files:
            for text in documents.read(source):
                if text:
                    writer.append(encode_document(tokenizer, text))


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
    name: str, path: str | None, tokenizer: Tokenizer, cache_folder: str | Path, *, section: str = "training"
) -> TokenStream:
    """The tokens of the `.bin` files at `path` (file, folder or glob), in the order of their sorted names.

    Args:
        name: "bin" for files that tell what they are (`headers.py`), "bin_uint16" and "bin_uint32" for tokens alone.

    Raises:
        DataError: there is no file; or one is broken, made with another tokenizer, or holds a token that the tokenizer
            does not have.
    """
    key = f"{section}.dataset_path"
    if not path:
        raise DataError(f"{key} is not set: dataset {name!r} needs shards made by scripts/prepare_data.py")
    files = find_corpus(name, path, key=key)
    raw_itemsize = _RAW_ITEMSIZES[name]
    for file in files:
        header = read_header(file, raw_itemsize)
        if header.vocab_size is None:
            scan = scan_once(file, cache_folder, raw_itemsize)
            if scan.smallest < 0 or scan.largest >= tokenizer.vocab_size:
                token = scan.smallest if scan.smallest < 0 else scan.largest
                raise DataError(
                    f"{file} holds the token {token}, outside the vocabulary of {tokenizer.vocab_size}: use the "
                    "tokenizer that made the file, and the dataset that names its type"
                )
        elif header.vocab_size > tokenizer.vocab_size:
            raise DataError(
                f"{file} was made for a vocabulary of {header.vocab_size} tokens but the tokenizer has "
                f"{tokenizer.vocab_size}: use the tokenizer that made the shards ({header.fingerprint})"
            )
        if header.fingerprint not in ("", tokenizer.fingerprint):
            raise DataError(
                f"{file} was made with the tokenizer {header.fingerprint}, not {tokenizer.fingerprint}: "
                "use the same tokenizer, training.add_bos (+bos) and training.add_eos (-eos), or run "
                "scripts/prepare_data.py again"
            )
    return TokenStream(files, fingerprint_of(files, cache_folder, raw_itemsize), raw_itemsize)


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
    if name in _RAW_ITEMSIZES:
        tokens = open_shards(name, path, tokenizer, cache_folder, section=section)
    else:
        documents = find_documents(name, path, text_key, section=section)
        tokens = tokenize_once(documents, tokenizer, cache_folder)
    if len(tokens) == 0:
        raise DataError(f"{section}.dataset_path = {path!r} holds no text: every file of dataset {name!r} is empty")
    return tokens
