"""Tokenizers: text to token ids and back. A protocol and its two implementations.

`corpus.py` reads documents; `shards.py` stores tokens.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from torchtitan_dmuon.data.errors import DataError

# Tried in this order when tokenizer_config.json does not name the end-of-text token.
_USUAL_EOS = (
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
        bos_id, eos_id: the ids that begin and end every document; None is none.
        fingerprint: a short string that is stored with tokenized data. Tokenizers with equal fingerprints give equal
            ids for equal documents. It ends in "+bos" with a `bos_id`, and then in "-eos" without an `eos_id`.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text` without special tokens: 1-D, dtype `token_dtype(vocab_size)`."""

    def decode(self, ids) -> str:
        """Text of a 1-D sequence of token ids, without special tokens."""


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of a whole document: `bos_id`, the text, `eos_id`; 1-D, dtype `token_dtype(vocab_size)`."""
    ids = tokenizer.encode(text)
    begin, end = ([] if token is None else [token] for token in (tokenizer.bos_id, tokenizer.eos_id))
    return np.concatenate([np.array(begin, ids.dtype), ids, np.array(end, ids.dtype)])


def _framed(fingerprint: str, bos_id: int | None, eos_id: int | None) -> str:
    return f"{fingerprint}{'' if bos_id is None else '+bos'}{'-eos' if eos_id is None else ''}"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest stored dtype (little-endian uint16 or uint32) that holds ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ByteTokenizer:
    """The 256 byte values of UTF-8 text, and the end of a document, 256. Needs no files.

    Args:
        add_eos: whether documents end in it.
    """

    vocab_size = 257
    bos_id = None

    def __init__(self, add_eos: bool = True):
        self.eos_id = 256 if add_eos else None
        self.fingerprint = _framed("bytes-1", self.bos_id, self.eos_id)

    def encode(self, text: str) -> np.ndarray:
        """Bytes of the UTF-8 text: uint16 [n]. A lone surrogate, which UTF-8 cannot hold, becomes `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype("<u2")

    def decode(self, ids) -> str:
        """Text of the ids below 256. Incomplete UTF-8 becomes the replacement character."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` read with the `tokenizers` package.

    Args:
        path: the file, or a folder that holds `tokenizer.json`. A `tokenizer_config.json` beside the file names
            `bos_token` and `eos_token`; without an `eos_token` the usual names of an end-of-text token are tried.
        add_bos: begin documents with the `bos_token`, if there is one.
        add_eos: end documents with the `eos_token`.

    Raises:
        ImportError: `tokenizers` is not installed.
        DataError: a file is missing or unreadable, or the vocabulary lacks a token that it must have.
    """

    def __init__(self, path: str | Path, *, add_bos: bool = True, add_eos: bool = True):
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
        # A document with the text "<|endoftext|>" must not end there.
        self._tokenizer.encode_special_tokens = True
        # Ids may have gaps: the embedding table needs the largest id + 1 rows, not the number of entries.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        config_file = file.with_name("tokenizer_config.json")
        bos, eos = _named_tokens(config_file)
        self.bos_id = self._id_of([bos], config_file) if add_bos and bos is not None else None
        self.eos_id = self._id_of(_USUAL_EOS if eos is None else [eos], config_file) if add_eos else None
        # The id of eos is hashed by itself, and that of bos only where it is used: fingerprints stay those of shards
        # that were made before there was a choice.
        hashed = content + str(self.eos_id).encode() + (b"" if self.bos_id is None else b"+%d" % self.bos_id)
        self.fingerprint = _framed(f"hf-{hashlib.sha256(hashed).hexdigest()[:16]}", self.bos_id, self.eos_id)

    def _id_of(self, names: Sequence[str], config_file: Path) -> int:
        """The id of the first of these tokens that there is."""
        for name in names:
            token_id = self._tokenizer.token_to_id(name)
            if token_id is not None:
                return token_id
        raise DataError(
            f"{config_file.parent} has no token that begins or ends a document (tried {', '.join(names)}): name one in "
            f"{config_file.name} as bos_token or eos_token, or set training.add_bos or add_eos to false"
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text` without special tokens, uint16 or uint32 [n]."""
        # Lone surrogates (json "\ud800") cannot cross into the Rust library.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids) -> str:
        """Text of the ids without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _named_tokens(config_file: Path) -> tuple[str | None, str | None]:
    """`bos_token` and `eos_token` of a `tokenizer_config.json`, which need not be there."""
    if not config_file.is_file():
        return None, None
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{config_file} is not valid JSON: {error}") from error
    tokens = (config.get(name) for name in ("bos_token", "eos_token"))
    bos, eos = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return bos, eos


def build_tokenizer(path: str | None, *, add_bos: bool = True, add_eos: bool = True) -> Tokenizer:
    """The byte tokenizer, which has no BOS, for None, "" or "bytes"; else the Hugging Face tokenizer at `path`.

    Raises:
        ImportError, DataError: as `HuggingFaceTokenizer`.
    """
    if path in (None, "", "bytes"):
        return ByteTokenizer(add_eos)
    return HuggingFaceTokenizer(path, add_bos=add_bos, add_eos=add_eos)
