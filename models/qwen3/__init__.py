"""The dense Qwen3 family: its flavors and `ModelSpec`. `model.py` is the model, `hf.py` HuggingFace's names."""

from functools import partial

from models import ModelSpec
from models.decoder import decoder_flops, decoder_parts, divisible_heads
from models.layers import qk_heads
from models.qwen3.hf import Qwen3HFNameMap
from models.qwen3.model import Qwen3, Qwen3Args
from models.tensor_parallel import decoder_plan

__all__ = ["Qwen3", "Qwen3Args", "Qwen3HFNameMap", "flavors", "spec"]


def _released(dim: int, n_layers: int, n_heads: int, ffn_hidden_dim: int, tied: bool) -> Qwen3Args:
    shape = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": 8, "ffn_hidden_dim": ffn_hidden_dim}
    return Qwen3Args(**shape, vocab_size=151_936, tie_embeddings=tied)


# debugmodel takes the vocabulary of the run's tokenizer. Its heads are wider than dim / n_heads, as those of the
# smaller released models are.
flavors: dict[str, Qwen3Args] = {
    "debugmodel": Qwen3Args(
        dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=128, ffn_hidden_dim=768, max_seq_len=2048
    ),
    "0.6B": _released(1024, 28, 16, 3072, tied=True),
    "1.7B": _released(2048, 28, 16, 6144, tied=True),
    "4B": _released(2560, 36, 32, 9728, tied=True),
    "8B": _released(4096, 36, 32, 12_288, tied=False),
    "14B": _released(5120, 40, 40, 17_408, tied=False),
    "32B": _released(5120, 64, 64, 25_600, tied=False),
}

spec = ModelSpec(
    name="qwen3",
    flavors=flavors,
    build=Qwen3,
    parts=decoder_parts,
    flops_per_token=decoder_flops,
    hf=Qwen3HFNameMap(),
    tensor_parallel_plan=partial(decoder_plan, qk_norm=True),
    divisible=divisible_heads,
    qk_heads=qk_heads,
)
