"""The Llama 3 family: its flavors and `ModelSpec`. `model.py` is the model, `hf.py` HuggingFace's names."""

from functools import partial

from models import ModelSpec
from models.decoder import decoder_flops, decoder_parts, divisible_heads
from models.layers import RopeScaling, qk_heads
from models.llama3.hf import Llama3HFNameMap
from models.llama3.model import Llama3, Llama3Args
from models.tensor_parallel import decoder_plan

__all__ = ["Llama3", "Llama3Args", "Llama3HFNameMap", "flavors", "spec"]

_VOCAB_SIZE = 128_256
_MAX_SEQ_LEN = 131_072

# Those up to 400M take the vocabulary of the run's tokenizer. 160M and 400M have so many parameters with a vocabulary
# of about 50,000. tiny64 to tiny160, named by their width, are for scaling runs on a CPU. The figures of 1B and 3B are
# Llama 3.2's; those of 8B, 70B and 405B are Llama 3.1's.
flavors: dict[str, Llama3Args] = {
    "debugmodel": Llama3Args(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_hidden_dim=768, max_seq_len=2048),
    "tiny64": Llama3Args(dim=64, n_layers=2, n_heads=2, n_kv_heads=1, ffn_hidden_dim=192, max_seq_len=2048),
    "tiny96": Llama3Args(dim=96, n_layers=3, n_heads=3, n_kv_heads=1, ffn_hidden_dim=288, max_seq_len=2048),
    "tiny128": Llama3Args(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden_dim=384, max_seq_len=2048),
    "tiny160": Llama3Args(dim=160, n_layers=5, n_heads=5, n_kv_heads=1, ffn_hidden_dim=480, max_seq_len=2048),
    "160M": Llama3Args(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_hidden_dim=2304),
    "400M": Llama3Args(dim=1024, n_layers=24, n_heads=16, n_kv_heads=4, ffn_hidden_dim=3072),
    "1B": Llama3Args(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_hidden_dim=8192,
        vocab_size=_VOCAB_SIZE,
        rope_scaling=RopeScaling(factor=32.0),
        max_seq_len=_MAX_SEQ_LEN,
        tie_embeddings=True,
    ),
    "3B": Llama3Args(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_hidden_dim=8192,
        vocab_size=_VOCAB_SIZE,
        rope_scaling=RopeScaling(factor=32.0),
        max_seq_len=_MAX_SEQ_LEN,
        tie_embeddings=True,
    ),
    "8B": Llama3Args(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_hidden_dim=14_336,
        vocab_size=_VOCAB_SIZE,
        rope_scaling=RopeScaling(factor=8.0),
        max_seq_len=_MAX_SEQ_LEN,
    ),
    "70B": Llama3Args(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_hidden_dim=28_672,
        vocab_size=_VOCAB_SIZE,
        rope_scaling=RopeScaling(factor=8.0),
        max_seq_len=_MAX_SEQ_LEN,
    ),
    "405B": Llama3Args(
        dim=16_384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_hidden_dim=53_248,
        vocab_size=_VOCAB_SIZE,
        rope_scaling=RopeScaling(factor=8.0),
        max_seq_len=_MAX_SEQ_LEN,
    ),
}

spec = ModelSpec(
    name="llama3",
    flavors=flavors,
    build=Llama3,
    parts=decoder_parts,
    flops_per_token=decoder_flops,
    hf=Llama3HFNameMap(),
    tensor_parallel_plan=partial(decoder_plan, qk_norm=False),
    divisible=divisible_heads,
    qk_heads=qk_heads,
)
