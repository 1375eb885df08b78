"""Llama 3 names in HuggingFace checkpoints (`LlamaForCausalLM`)."""

from typing import Any, ClassVar

from models.hf_names import ATTENTION, FEED_FORWARD, NORMS, DecoderHFNames
from models.llama3.model import Llama3Args


class Llama3HFNameMap(DecoderHFNames):
    """Llama 3's `models.HFNameMap`."""

    family = "Llama3"
    architecture = "LlamaForCausalLM"
    model_type = "llama"
    in_block: ClassVar = {**ATTENTION, **FEED_FORWARD, **NORMS}

    def hf_config(self, args: Llama3Args) -> dict[str, Any]:
        return {**super().hf_config(args), "mlp_bias": False}
