"""Qwen3 names in HuggingFace checkpoints (`Qwen3ForCausalLM`)."""

from typing import Any, ClassVar

from models.hf_names import ATTENTION, FEED_FORWARD, NORMS, QK_NORMS, DecoderHFNames
from models.qwen3.model import Qwen3Args


class Qwen3HFNameMap(DecoderHFNames):
    """Qwen3's `models.HFNameMap`."""

    family = "Qwen3"
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    in_block: ClassVar = {**ATTENTION, **QK_NORMS, **FEED_FORWARD, **NORMS}

    def hf_config(self, args: Qwen3Args) -> dict[str, Any]:
        return {**super().hf_config(args), "use_sliding_window": False}
