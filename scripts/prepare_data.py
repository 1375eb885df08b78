"""Makes token shards (`.bin`) for `training.dataset = "bin"` from text, JSON lines or Parquet files.

    python scripts/prepare_data.py --input 'docs/*.jsonl' --format jsonl --tokenizer assets/hf --output out

The shards of one run hold one flat stream: documents in the order of the sorted file names, each between
the tokenizer's BOS and EOS. They appear in the output folder only when all of them are complete.
"""

import argparse
import multiprocessing
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import environment  # noqa: F401
import numpy as np
from tqdm import tqdm

from torchtitan_dmuon.data import DataError, ShardWriter, Tokenizer, build_tokenizer, encode_document, find_corpus
from torchtitan_dmuon.data.headers import is_shard
from torchtitan_dmuon.data.readers import SUFFIXES, Reader, reader

STAGING = ".staging"
_CHUNK_CHARACTERS = 1 << 20


def read_chunks(files: tuple[Path, ...], read: Reader, progress: tqdm) -> Iterator[list[str]]:
    """The documents of all files in lists of about a million characters; `progress` advances by files."""
    chunk, characters = [], 0
    for file in files:
        for text in read(file):
            if text:
                chunk.append(text)
                characters += len(text)
            if characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        progress.update()
    if chunk:
        yield chunk


def encode_chunk(texts: list[str], tokenizer: Tokenizer) -> tuple[int, np.ndarray]:
    """The number of documents and their tokens."""
    return len(texts), np.concatenate([encode_document(tokenizer, text) for text in texts])


_worker_tokenizer: Tokenizer


def _start_worker(path: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = build_tokenizer(path)


def _encode_in_worker(texts: list[str]) -> tuple[int, np.ndarray]:
    return encode_chunk(texts, _worker_tokenizer)


def encode_all(
    chunks: Iterator[list[str]], tokenizer: Tokenizer, path: str, num_proc: int
) -> Iterator[tuple[int, np.ndarray]]:
    """`encode_chunk` of every chunk, in order, in `num_proc` processes."""
    if num_proc == 1:
        yield from (encode_chunk(chunk, tokenizer) for chunk in chunks)
        return
    # Not fork: the tokenizers library runs threads of its own.
    with multiprocessing.get_context("spawn").Pool(num_proc, _start_worker, (path,)) as pool:
        pending = deque()
        # A bounded window, for `imap` would read the whole corpus into memory ahead of the workers.
        for chunk in chunks:
            pending.append(pool.apply_async(_encode_in_worker, (chunk,)))
            if len(pending) >= 4 * num_proc:
                yield pending.popleft().get()
        while pending:
            yield pending.popleft().get()


class ShardSetWriter:
    """Cuts one stream into shards of `shard_tokens` tokens (the last may be shorter) in `folder`."""

    def __init__(self, folder: Path, shard_tokens: int, tokenizer: Tokenizer):
        self.folder = folder
        self.names: list[str] = []
        self.num_tokens = 0
        self._shard_tokens = shard_tokens
        self._settings = {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        self._writer: ShardWriter | None = None
        self._open = ExitStack()

    def append(self, tokens: np.ndarray) -> None:
        self.num_tokens += len(tokens)
        while len(tokens):
            if self._writer is None:
                self.names.append(f"shard_{len(self.names):05}.bin")
                self._writer = self._open.enter_context(ShardWriter(self.folder / self.names[-1], **self._settings))
            room = self._shard_tokens - self._writer.num_tokens
            self._writer.append(tokens[:room])
            tokens = tokens[room:]
            if self._writer.num_tokens == self._shard_tokens:
                self.finish()

    def finish(self) -> None:
        """Completes the open shard."""
        self._open.close()
        self._writer = None


def prepare(arguments: argparse.Namespace) -> str:
    """Does the work and returns the summary. Raises DataError, ImportError, OSError."""
    output = Path(arguments.output).expanduser()
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output} is a file: name a folder")
    old = sorted(output.glob("*.bin"))
    # Whoever gives the folder as training.dataset_path reads all of them; and --overwrite must not delete it.
    if foreign := [file for file in old if not is_shard(file)]:
        raise DataError(f"{output} holds {foreign[0].name}, which is no token shard: choose another --output")
    if old and not arguments.overwrite:
        raise DataError(f"{output} already holds {old[0].name}: choose another --output or add --overwrite")
    files = find_corpus(arguments.format, arguments.input, key="--input")
    read = reader(arguments.format, arguments.text_key)
    tokenizer = build_tokenizer(arguments.tokenizer)

    staging = output / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    staging.mkdir(parents=True)
    try:
        documents = 0
        shards = ShardSetWriter(staging, arguments.shard_tokens, tokenizer)
        with tqdm(total=len(files), unit="file", file=sys.stderr) as progress:
            chunks = read_chunks(files, read, progress)
            for count, tokens in encode_all(chunks, tokenizer, arguments.tokenizer, arguments.num_proc):
                documents += count
                shards.append(tokens)
                progress.set_postfix(tokens=f"{shards.num_tokens:,}")
        shards.finish()
        if not documents:
            raise DataError(f"--input {arguments.input!r} holds no text")
        for file in old:
            file.unlink()
        for name in shards.names:
            (staging / name).replace(output / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return (
        f"wrote {len(shards.names)} shards with {documents:,} documents and {shards.num_tokens:,} tokens "
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
    parser.add_argument("--num-proc", type=positive, default=1, metavar="N", help="processes that tokenize")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that are there")
    return parser.parse_args()


def main() -> int:
    try:
        summary = prepare(parse_arguments())
    except (DataError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
