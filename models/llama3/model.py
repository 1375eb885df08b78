"""The Llama 3 decoder. Flavors are in `__init__.py`, HuggingFace names in `hf.py`."""

from dataclasses import dataclass

from models.decoder import Decoder, DecoderArgs, TransformerBlock


@dataclass(frozen=True, kw_only=True)
class Llama3Args(DecoderArgs):
    """As `DecoderArgs`; each head is `dim / n_heads` wide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.n_heads:
            raise ValueError(f"dim ({self.dim}) must be a multiple of n_heads ({self.n_heads})")


class Llama3(Decoder):
    """`models.decoder.Decoder` with Llama 3's blocks."""

    def __init__(self, args: Llama3Args) -> None:
        super().__init__(args, (TransformerBlock(args) for _ in range(args.n_layers)))
