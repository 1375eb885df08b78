"""Llama 3 names in HuggingFace checkpoints (`LlamaForCausalLM`), and the `config.json` that goes with them.

Names only: our rotary embedding has HuggingFace's layout, so that no tensor is permuted.
`torchtitan_dmuon/checkpoint/huggingface.py` reads and writes the files.
"""

import re
from typing import Any

from models.llama3.model import Llama3Args

_TOP_LEVEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_TOP_LEVEL_FROM_HF = {name: fqn for fqn, name in _TOP_LEVEL.items()}
_IN_BLOCK_FROM_HF = {name: fqn for fqn, name in _IN_BLOCK.items()}


class Llama3HFNameMap:
    """Llama 3's `models.HFNameMap`.

    A tied head needs no case of its own: `named_parameters()` lists the shared tensor once, as `tok_embeddings.weight`,
    and a tied HuggingFace checkpoint stores the tensor once, as `model.embed_tokens.weight`. Some tied checkpoints hold
    `lm_head.weight` all the same; this name maps to `output.weight`, which a tied model's state dict has too.
    """

    embedding = "tok_embeddings.weight"
    head = "output.weight"

    def to_hf(self, fqn: str) -> str:
        """Our parameter FQN -> the HuggingFace name. Raises ValueError for a name Llama3 does not have."""
        if fqn in _TOP_LEVEL:
            return _TOP_LEVEL[fqn]
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", fqn)
        if match is None or match[2] not in _IN_BLOCK:
            raise ValueError(f"{fqn!r} is not a parameter of Llama3: it has no HuggingFace name")
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}"

    def from_hf(self, name: str) -> str | None:
        """The HuggingFace name -> our FQN; None for the rotary buffers of old checkpoints.

        Raises ValueError for any other name: without an unknown weight the loaded model would be a different one.
        """
        if name in _TOP_LEVEL_FROM_HF:
            return _TOP_LEVEL_FROM_HF[name]
        if name.endswith("rotary_emb.inv_freq"):
            return None
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None or match[2] not in _IN_BLOCK_FROM_HF:
            raise ValueError(f"{name!r} is not a weight of LlamaForCausalLM without biases: Llama3 cannot hold it")
        return f"layers.{match[1]}.{_IN_BLOCK_FROM_HF[match[2]]}"

    def hf_config(self, args: Llama3Args) -> dict[str, Any]:
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
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "intermediate_size": args.ffn_hidden_dim,
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": args.n_kv_heads,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
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
