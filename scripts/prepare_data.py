"""Makes token shards (`.bin`) for `training.dataset = "bin"` from text, JSON lines, Parquet or Arrow files.

    python scripts/prepare_data.py --input 'docs/*.jsonl' --format jsonl --tokenizer assets/hf --output out

The shards of one run hold one flat stream: documents in the order of the sorted file names, each between the
tokenizer's BOS and EOS. They appear in the output folder only when all of them are complete. A run that was killed goes
on after its last complete shard when the same command is given again.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path

import environment  # noqa: F401
import numpy as np
from tqdm import tqdm

from torchtitan_dmuon.data import DataError, ShardWriter, Tokenizer, build_tokenizer, encode_document, find_corpus
from torchtitan_dmuon.data.headers import is_shard, read_header
from torchtitan_dmuon.data.readers import SUFFIXES, Reader, reader

STAGING = ".staging"
_PROGRESS = "progress.json"
_CHUNK_CHARACTERS = 1 << 20


def read_chunks(files: tuple[Path, ...], read: Reader, progress: tqdm) -> Iterator[list[str]]:
    """The documents of all files in lists of about a million characters. `progress` advances by bytes of files, within
    a file by characters read of it."""
    chunk, characters = [], 0
    for file in files:
        left = file.stat().st_size
        for text in read(file):
            if text:
                chunk.append(text)
                characters += len(text)
                progress.update(min(left, len(text)))
                left -= min(left, len(text))
            if characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        progress.update(left)
    if chunk:
        yield chunk


def encode_chunk(texts: list[str], tokenizer: Tokenizer) -> tuple[int, np.ndarray]:
    """The number of documents and their tokens."""
    return len(texts), np.concatenate([encode_document(tokenizer, text) for text in texts])


_worker_tokenizer: Tokenizer


def _start_worker(arguments: argparse.Namespace) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer_of(arguments)


def _encode_in_worker(texts: list[str]) -> tuple[int, np.ndarray]:
    return encode_chunk(texts, _worker_tokenizer)


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    """Raises as `build_tokenizer`."""
    return build_tokenizer(arguments.tokenizer, add_bos=arguments.add_bos, add_eos=arguments.add_eos)


def encode_all(
    chunks: Iterator[list[str]], tokenizer: Tokenizer, arguments: argparse.Namespace
) -> Iterator[tuple[int, np.ndarray]]:
    """`encode_chunk` of every chunk, in order, in `--num-proc` processes if there is more than one chunk."""
    first = list(islice(chunks, 2))
    chunks = chain(first, chunks)
    if arguments.num_proc == 1 or len(first) < 2:
        yield from (encode_chunk(chunk, tokenizer) for chunk in chunks)
        return
    # Not fork: the tokenizers library runs threads of its own.
    with multiprocessing.get_context("spawn").Pool(arguments.num_proc, _start_worker, (arguments,)) as pool:
        pending = deque()
        # A bounded window, for `imap` would read the whole corpus into memory ahead of the workers.
        for chunk in chunks:
            pending.append(pool.apply_async(_encode_in_worker, (chunk,)))
            if len(pending) >= 4 * arguments.num_proc:
                yield pending.popleft().get()
        while pending:
            yield pending.popleft().get()


class ShardSetWriter:
    """Cuts one stream into shards of `shard_tokens` tokens (the last may be shorter) in `folder`. Their numbers begin
    at `first`; `complete` of them are there already."""

    def __init__(self, folder: Path, shard_tokens: int, tokenizer: Tokenizer, first: int, complete: int):
        self.folder = folder
        self.complete = complete
        self.num_tokens = complete * shard_tokens
        self._first = first
        self._shard_tokens = shard_tokens
        self._settings = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        self._writer: ShardWriter | None = None
        self._open = ExitStack()

    def append(self, tokens: np.ndarray) -> int | None:
        """Adds `tokens`. Returns how many of them are in complete shards; None if no shard was completed."""
        self.num_tokens += len(tokens)
        done = None
        begin = 0
        while begin < len(tokens):
            if self._writer is None:
                path = self.folder / f"shard_{self._first + self.complete:05}.bin"
                self._writer = self._open.enter_context(ShardWriter(path, **self._settings))
            part = tokens[begin : begin + self._shard_tokens - self._writer.num_tokens]
            self._writer.append(part)
            begin += len(part)
            if self._writer.num_tokens == self._shard_tokens:
                self.finish()
                done = begin
        return done

    def finish(self) -> None:
        """Completes the open shard, if there is one."""
        if self._writer is not None:
            self._open.close()
            self._writer = None
            self.complete += 1


@dataclass
class Progress:
    """What is in the complete shards of the staging folder: all of the first `chunks` chunks, which have `documents`
    documents, and `tokens` tokens of the next one. `settings` made them."""

    settings: dict
    shards: int = 0
    chunks: int = 0
    documents: int = 0
    tokens: int = 0

    def save(self, staging: Path) -> None:
        temporary = staging / f"{_PROGRESS}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(staging / _PROGRESS)

    @classmethod
    def of(cls, staging: Path, settings: dict) -> "Progress":
        """That of a run of the same settings that was killed, else none; the folder is cleared of all the rest."""
        file, begin = staging / _PROGRESS, cls(settings)
        if file.is_file():
            saved = cls(**json.loads(file.read_text()))
            if saved.settings == settings:
                print(f"going on after {saved.shards} complete shards of a run that ended early", file=sys.stderr)
                return saved
            print("starting over: a run that ended early had other files or settings", file=sys.stderr)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return begin


def old_shards(arguments: argparse.Namespace, output: Path, tokenizer: Tokenizer) -> list[Path]:
    """The shards that are in the output folder. Raises DataError if they may not be there."""
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output} is a file: name a folder")
    old = sorted(output.glob("*.bin"))
    # Whoever gives the folder as training.dataset_path reads all of them; and --overwrite must not delete it.
    if foreign := [file for file in old if not is_shard(file)]:
        raise DataError(f"{output} holds {foreign[0].name}, which is no token shard: choose another --output")
    if old and not (arguments.overwrite or arguments.append):
        raise DataError(f"{output} already holds {old[0].name}: choose another --output or add --append or --overwrite")
    for file in old if arguments.append else ():
        if (made := read_header(file).fingerprint) != tokenizer.fingerprint:
            raise DataError(
                f"{file} was made with the tokenizer {made}, not {tokenizer.fingerprint}: one folder holds shards of "
                "one tokenizer; choose another --output"
            )
    return old


def write_shards(
    arguments: argparse.Namespace, files: tuple[Path, ...], tokenizer: Tokenizer, staging: Path, first: int
) -> tuple[ShardSetWriter, int]:
    """All shards, in the staging folder, and the number of documents."""
    read = reader(arguments.format, arguments.text_key)
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    keys = (arguments.format, arguments.text_key, tokenizer.fingerprint, arguments.shard_tokens, first)
    settings = json.loads(json.dumps({"files": stats, "keys": keys}))  # as it is read back
    progress = Progress.of(staging, settings)
    shards = ShardSetWriter(staging, arguments.shard_tokens, tokenizer, first, progress.shards)
    documents, begin, skipped = progress.documents, progress.chunks, progress.tokens
    started, tokens_before = time.monotonic(), shards.num_tokens
    with tqdm(
        total=sum(size for _, size, _ in stats), unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr
    ) as bar:
        chunks = islice(read_chunks(files, read, bar), begin, None)
        for number, (count, tokens) in enumerate(encode_all(chunks, tokenizer, arguments), start=begin):
            if (done := shards.append(tokens[skipped:])) is not None:
                Progress(settings, shards.complete, number, documents, skipped + done).save(staging)
            skipped = 0
            documents += count
            rate = (shards.num_tokens - tokens_before) / (time.monotonic() - started)
            bar.set_postfix_str(f"{shards.num_tokens:,} tokens, {rate:,.0f} tokens/s")
    shards.finish()
    return shards, documents


def prepare(arguments: argparse.Namespace) -> str:
    """Does the work and returns the summary. Raises DataError, ImportError, OSError."""
    output = Path(arguments.output).expanduser()
    tokenizer = tokenizer_of(arguments)
    old = old_shards(arguments, output, tokenizer)
    files = find_corpus(arguments.format, arguments.input, key="--input")
    numbers = [int(match[1]) for file in old if (match := re.fullmatch(r"shard_(\d+)\.bin", file.name))]
    first = 1 + max(numbers, default=-1) if arguments.append else 0
    staging = output / STAGING
    try:
        shards, documents = write_shards(arguments, files, tokenizer, staging, first)
        if not documents:
            raise DataError(f"--input {arguments.input!r} holds no text")
        for file in old if arguments.overwrite else ():
            file.unlink()
        for file in sorted(staging.glob("*.bin")):
            file.replace(output / file.name)
        (staging / _PROGRESS).unlink(missing_ok=True)
    finally:
        if not (staging / _PROGRESS).exists():  # nothing to go on from
            shutil.rmtree(staging, ignore_errors=True)
    return (
        f"wrote {shards.complete} shards with {documents:,} documents and {shards.num_tokens:,} tokens "
        f"to {output} (vocabulary {tokenizer.vocab_size}, tokenizer {tokenizer.fingerprint})\n"
        f"train on them with --training.dataset bin --training.dataset_path {output}"
    )


def positive(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", required=True, metavar="GLOB", help="files, a folder or a glob (quote it)")
    parser.add_argument("--format", required=True, choices=tuple(SUFFIXES))
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key or column of the text")
    parser.add_argument("--tokenizer", default="bytes", metavar="PATH", help="tokenizer folder, or 'bytes'")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder of the shards")
    parser.add_argument("--shard-tokens", type=positive, default=100_000_000, metavar="N")
    parser.add_argument(
        "--num-proc", type=positive, default=os.cpu_count(), metavar="N", help="processes that tokenize; all cores"
    )
    parser.add_argument("--no-add-bos", dest="add_bos", action="store_false", help="as training.add_bos = false")
    parser.add_argument("--no-add-eos", dest="add_eos", action="store_false", help="as training.add_eos = false")
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--overwrite", action="store_true", help="replace the shards that are there")
    there.add_argument("--append", action="store_true", help="add to the shards that are there, of the same tokenizer")
    return parser.parse_args()


def main() -> int:
    try:
        summary = prepare(parse_arguments())
    except (DataError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on after the last complete shard", file=sys.stderr)
        return 130
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
