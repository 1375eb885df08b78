"""Tokenizers: ids, BOS and EOS, fingerprints and what is said when files are missing."""

import builtins
import json

import numpy as np
import pytest

from torchtitan_dmuon.data import ByteTokenizer, DataError, HuggingFaceTokenizer, build_tokenizer, encode_document


def save_tokenizer(folder, eos="<|endoftext|>", config=None):
    """A word-level tokenizer of three words and one special token, as tokenizer.json in `folder`."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(eos, special=True)])
    tokenizer.enable_truncation(max_length=2)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("h\u00e9\n")
    assert ids.dtype == np.uint16
    assert ids.tolist() == [104, 195, 169, 10]
    assert tokenizer.decode([104, 195, 169, 256, 10]) == "h\u00e9\n"
    assert tokenizer.decode([195]) == "\ufffd"
    assert tokenizer.encode("\ud800").tolist() == [63]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.fingerprint) == (257, 256, "bytes-1")


def test_hugging_face_ids_without_truncation_or_forged_eos(tmp_path):
    folder = save_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 3)
    assert tokenizer.encode("a b a b").tolist() == [1, 2, 1, 2]
    assert tokenizer.encode("a b a b").dtype == np.uint16
    assert 3 not in tokenizer.encode("a <|endoftext|> b").tolist()
    assert tokenizer.decode([1, 2, 3]) == "a b"
    assert HuggingFaceTokenizer(folder / "tokenizer.json").fingerprint == tokenizer.fingerprint
    assert tokenizer.fingerprint.startswith("hf-") and len(tokenizer.fingerprint) == 19


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>"}])
def test_eos_from_tokenizer_config(tmp_path, eos):
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, eos="<end>", config={"eos_token": eos}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 3)


@pytest.mark.parametrize(
    ("config", "keys", "ids", "ending"),
    [
        ({"eos_token": "<end>"}, {}, [1, 3], ""),
        ({"eos_token": "<end>", "bos_token": "[UNK]"}, {}, [0, 1, 3], "+bos"),
        ({"eos_token": "<end>", "bos_token": "[UNK]"}, {"add_bos": False}, [1, 3], ""),
        ({"eos_token": "<end>", "bos_token": {"content": "<end>"}}, {}, [3, 1, 3], "+bos"),
        ({"eos_token": "<end>", "bos_token": "[UNK]"}, {"add_eos": False}, [0, 1], "+bos-eos"),
        ({"bos_token": "missing"}, {"add_bos": False, "add_eos": False}, [1], "-eos"),
    ],
)
def test_documents_begin_and_end(tmp_path, config, keys, ids, ending):
    tokenizer = build_tokenizer(str(save_tokenizer(tmp_path, eos="<end>", config=config)), **keys)
    document = encode_document(tokenizer, "a")
    assert document.tolist() == ids and document.dtype == np.uint16
    last = tokenizer.fingerprint[len("hf-") + 16 :]
    assert last == ending and len(tokenizer.fingerprint) <= 32
    assert tokenizer.encode("a").tolist() == [1] and tokenizer.decode([1]) == "a"


def test_documents_of_bytes():
    assert encode_document(build_tokenizer(None), "a").tolist() == [97, 256]
    without = build_tokenizer(None, add_eos=False)
    assert encode_document(without, "a").tolist() == [97]
    assert (without.fingerprint, without.vocab_size) == ("bytes-1-eos", 257)


def test_a_bos_that_is_not_there(tmp_path):
    folder = save_tokenizer(tmp_path, eos="<end>", config={"bos_token": "<s>", "eos_token": "<end>"})
    with pytest.raises(
        DataError, match=r"tried <s>\): name one in tokenizer_config.json as bos_token or eos_token, or"
    ):
        HuggingFaceTokenizer(folder)


def test_no_eos(tmp_path):
    folder = save_tokenizer(tmp_path, eos="<end>")
    with pytest.raises(DataError, match=r"has no token that begins or ends a document .* name one in tokenizer_conf"):
        HuggingFaceTokenizer(folder)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist: give a tokenizer.json"):
        build_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer.json that 'tokenizers' can read"):
        build_tokenizer(str(tmp_path))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(ImportError, match=r"pip install tokenizers"):
        build_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", [None, "", "bytes"])
def test_bytes_by_default(path):
    assert isinstance(build_tokenizer(path), ByteTokenizer)
