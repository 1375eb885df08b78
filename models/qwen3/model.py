"""The dense Qwen3 decoder (arXiv 2505.09388). Flavors are in `__init__.py`, HuggingFace names in `hf.py`."""

from dataclasses import dataclass

from models.decoder import Decoder, DecoderArgs, TransformerBlock


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(DecoderArgs):
    """As `DecoderArgs`, with Qwen3's values.

    Attributes:
        head_dim: width of one head, whatever `dim` and `n_heads` are.
    """

    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    max_seq_len: int = 40_960


class Qwen3(Decoder):
    """`models.decoder.Decoder` whose attention has a norm over each head of the queries and of the keys."""

    def __init__(self, args: Qwen3Args) -> None:
        super().__init__(args, (TransformerBlock(args, qk_norm=True) for _ in range(args.n_layers)))
