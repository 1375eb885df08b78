"""Tokenizers: text to token ids and back. A protocol and its two implementations.

`corpus.py` reads documents and places separators between them; `shards.py` stores tokens.
"""

import hashlib
import json
from pathlib import Path
from typing import Protocol

import numpy as np

from torchtitan_dmuon.data.errors import DataError

# Tried in this order when tokenizer_config.json does not name the end-of-text token.
_USUAL_SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|eot_id|>",
    "<|im_end|>",
)


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: one more than the largest id.
        separator_id: the id that follows every document.
        fingerprint: a short string that is stored with tokenized data. Tokenizers with equal fingerprints give equal
            ids for equal text.
    """

    vocab_size: int
    separator_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text` without separator: 1-D, dtype `token_dtype(vocab_size)`."""

    def decode(self, ids) -> str:
        """Text of a 1-D sequence of token ids, without separators."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest stored dtype (little-endian uint16 or uint32) that holds ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ByteTokenizer:
    """The 256 byte values of UTF-8 text, and the document separator 256. Needs no files."""

    vocab_size = 257
    separator_id = 256
    fingerprint = "bytes-1"

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the UTF-8 text: uint16 [n]. A lone surrogate, which UTF-8 cannot hold, becomes `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype("<u2")

    def decode(self, ids) -> str:
        """Text of the ids without separators. Incomplete UTF-8 becomes the replacement character."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` read with the `tokenizers` package.

    Args:
        path: the file, or a folder that holds `tokenizer.json`. A `tokenizer_config.json` beside the file names the
            separator (`eos_token`); else the usual names of an end-of-text token are tried.

    Raises:
        ImportError: `tokenizers` is not installed.
        DataError: the file is missing or unreadable, or its vocabulary has no end-of-text token.
    """

    def __init__(self, path: str | Path):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                f"reading the tokenizer {path} needs the package tokenizers (extra hf): pip install tokenizers"
            ) from error
        given = Path(path).expanduser()
        if not given.exists():
            raise DataError(f"{given} does not exist: give a tokenizer.json, or the folder that holds one")
        file = given / "tokenizer.json" if given.is_dir() else given
        if not file.is_file():
            raise DataError(f"no tokenizer at {file}: give a tokenizer.json, or the folder that holds one")
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(f"{file} is not a tokenizer.json that 'tokenizers' can read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document with the text "<|endoftext|>" must not get a separator there.
        self._tokenizer.encode_special_tokens = True
        # Ids may have gaps: the embedding table needs the largest id + 1 rows, not the number of entries.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.separator_id = self._find_separator(file)
        digest = hashlib.sha256(content + str(self.separator_id).encode()).hexdigest()
        self.fingerprint = f"hf-{digest[:16]}"

    def _find_separator(self, file: Path) -> int:
        config_file = file.with_name("tokenizer_config.json")
        names = _USUAL_SEPARATORS
        if config_file.is_file():
            try:
                config = json.loads(config_file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{config_file} is not valid JSON: {error}") from error
            eos = config.get("eos_token")
            if isinstance(eos, dict):
                eos = eos.get("content")
            if eos is not None:
                names = (eos,)
        for name in names:
            token_id = self._tokenizer.token_to_id(name)
            if token_id is not None:
                return token_id
        raise DataError(
            f"{file} has no document separator (tried {', '.join(names)}): "
            f"name one as eos_token in {config_file.name} beside it"
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text` without special tokens, uint16 or uint32 [n]."""
        # Lone surrogates (json "\ud800") cannot cross into the Rust library.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids) -> str:
        """Text of the ids without special tokens, of which the separator is one."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def build_tokenizer(path: str | None) -> Tokenizer:
    """The byte tokenizer for None, "" or "bytes", else the Hugging Face tokenizer at `path`.

    Raises:
        ImportError, DataError: as `HuggingFaceTokenizer`.
    """
    if path in (None, "", "bytes"):
        return ByteTokenizer()
    return HuggingFaceTokenizer(path)
