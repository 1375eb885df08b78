"""Data: tokenizers, corpora, samples and the resumable loader. Re-exports only."""

from torchtitan_dmuon.data.corpus import find_corpus
from torchtitan_dmuon.data.dataset import IGNORE_INDEX, PackedDataset, build_dataset, sample_order
from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.loader import LoaderConfig, TokenLoader
from torchtitan_dmuon.data.mixture import Mixture, Stage
from torchtitan_dmuon.data.shards import ShardWriter, TokenStream, read_shard, write_shard
from torchtitan_dmuon.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    encode_document,
)

__all__ = [
    "IGNORE_INDEX",
    "ByteTokenizer",
    "DataError",
    "HuggingFaceTokenizer",
    "LoaderConfig",
    "Mixture",
    "PackedDataset",
    "ShardWriter",
    "Stage",
    "TokenLoader",
    "TokenStream",
    "Tokenizer",
    "build_dataset",
    "build_tokenizer",
    "encode_document",
    "find_corpus",
    "read_shard",
    "sample_order",
    "write_shard",
]
