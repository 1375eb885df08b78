"""The HuggingFace names of a decoder, from tables, and the `config.json` that goes with them.

Names only: our rotary embedding has HuggingFace's layout, so that no tensor is permuted.
`torchtitan_dmuon/checkpoint/huggingface.py` reads and writes the files.
"""

import re
from typing import Any, ClassVar

from models.decoder import DecoderArgs

_TOP_LEVEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
}
QK_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
NORMS = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


class DecoderHFNames:
    """A `models.HFNameMap`; a family derives from it.

    A tied head needs no case of its own: `named_parameters()` lists the shared tensor once, as `tok_embeddings.weight`,
    and a tied HuggingFace checkpoint stores the tensor once, as `model.embed_tokens.weight`. Some tied checkpoints hold
    `lm_head.weight` all the same; this name maps to `output.weight`, which a tied model's state dict has too.

    Attributes:
        family: the name of our model in messages.
        architecture: the name of the class in transformers.
        model_type: the name of the family in transformers.
        in_block: our name of a parameter inside a block -> HuggingFace's.
    """

    family: ClassVar[str]
    architecture: ClassVar[str]
    model_type: ClassVar[str]
    in_block: ClassVar[dict[str, str]]
    embedding = "tok_embeddings.weight"
    head = "output.weight"

    def to_hf(self, fqn: str) -> str:
        """Our parameter FQN -> the HuggingFace name. Raises ValueError for a name the model does not have."""
        if fqn in _TOP_LEVEL:
            return _TOP_LEVEL[fqn]
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", fqn)
        if match is None or match[2] not in self.in_block:
            raise ValueError(f"{fqn!r} is not a parameter of {self.family}: it has no HuggingFace name")
        return f"model.layers.{match[1]}.{self.in_block[match[2]]}"

    def from_hf(self, name: str) -> str | None:
        """The HuggingFace name -> our FQN; None for the rotary buffers of old checkpoints.

        Raises ValueError for any other name: without an unknown weight the loaded model would be a different one.
        """
        top_level = {hf: ours for ours, hf in _TOP_LEVEL.items()}
        if name in top_level:
            return top_level[name]
        if name.endswith("rotary_emb.inv_freq"):
            return None
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        in_block = {hf: ours for ours, hf in self.in_block.items()}
        if match is None or match[2] not in in_block:
            raise ValueError(
                f"{name!r} is not a weight of {self.architecture} without biases: {self.family} cannot hold it"
            )
        return f"layers.{match[1]}.{in_block[match[2]]}"

    def hf_config(self, args: DecoderArgs) -> dict[str, Any]:
        """The content of `config.json`, in the keys that transformers 4 and 5 both read.

        Token ids are None: the tokenizer defines them, and the writer of the file fills them in.
        """
        rope_scaling = None
        if args.rope_scaling is not None:
            rope_scaling = {
                "rope_type": "llama3",
                "factor": args.rope_scaling.factor,
                "low_freq_factor": args.rope_scaling.low_freq_factor,
                "high_freq_factor": args.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": args.rope_scaling.original_max_seq_len,
            }
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "intermediate_size": args.ffn_hidden_dim,
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": args.n_kv_heads,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": args.norm_eps,
            "rope_theta": args.rope_theta,
            "rope_scaling": rope_scaling,
            "max_position_embeddings": args.max_seq_len,
            "tie_word_embeddings": args.tie_embeddings,
            "initializer_range": args.init_std,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
