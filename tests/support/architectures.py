"""What the default predicate has to make of small architectures of ``transformers``, written by hand from their code.

Of each architecture: keys of its configuration, its matrices and its other parameters of two dimensions or more. A name
is the part behind the last number (of a layer, of an expert), and is followed by
- ``[128,64]*4``, the rows of every block, here 4 times 128 and 64 in turn; no brackets: one matrix;
- ``'`` if matrices are stored [in, out]; their blocks are columns;
- ``?`` if it looks fused and the layout is not known;
- ``@`` if it is a router by its place. (A router whose class is no linear layer is left out for that.)
``{a,b}`` stands for both. Blocks are those after thin parts (of fewer than 128 rows) have joined the part before.
"""

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
# 160 experts, so that no router is refused for being thin.
EXPERTS = {
    "num_experts": 160, "num_local_experts": 160, "n_routed_experts": 160, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 128, "n_shared_experts": 1, "shared_expert_intermediate_size": 128,
    "first_k_dense_replace": 0,
}  # fmt: skip
LATENT = {
    **EXPERTS, "q_lora_rank": 160, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "num_key_value_heads": 4,
}  # fmt: skip
MAMBA = {"mamba_d_state": 64, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_expand": 2}
PICTURE = {"image_size": 32, "patch_size": 16}
SHORT = {"n_embd": 256, "n_layer": 1, "n_head": 4, "rotary_dim": 16}
T5 = {"d_model": 256, "d_kv": 64, "d_ff": 384, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
BART = {
    "d_model": 256, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 384, "decoder_ffn_dim": 384,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip


def two(*kinds: str) -> dict:
    return {"num_hidden_layers": 2, "layer_types": list(kinds)}


ATTENTION, MLP = "self_attn.{q,k,v,o}_proj ", "mlp.{gate,up,down}_proj "
LLAMA = (ATTENTION + MLP, "embed_tokens")
MOE = "mlp.experts.gate_up_proj[128,128] mlp.experts.down_proj "
WIDE_MOE = "mlp.experts.gate_up_proj[384,384] mlp.experts.down_proj "
SHARED = "mlp.shared_experts.{gate,up,down}_proj "
MLA = "self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,o_proj} self_attn.kv_b_proj[64,64]*4 "
NEOX = "{0}.query_key_value[64,64,64]*4 {0}.dense mlp.dense_h_to_4h mlp.dense_4h_to_h"
OUT = "self_attn.{q,k,v,out}_proj "
BERT = "attention.self.{query,key,value} attention.output.dense intermediate.dense output.dense"
BERT_WORDS = "embeddings.{word,position,token_type}_embeddings "
VIT = "attention.{q,k,v,o}_proj mlp.fc1 mlp.fc2"
VIT_REST = "embeddings.cls_token embeddings.position_embeddings embeddings.patch_embeddings.projection "

ARCHITECTURES: dict[str, tuple[dict, str, str]] = {
    # dense
    "llama": ({}, *LLAMA),
    "mistral": ({}, *LLAMA),
    "qwen2": ({}, *LLAMA),
    "qwen3": ({}, *LLAMA),
    "gemma2": ({}, *LLAMA),
    "gemma3_text": ({}, *LLAMA),
    "olmo2": ({}, *LLAMA),
    "cohere2": ({}, *LLAMA),
    "stablelm": ({}, *LLAMA),
    "exaone4": ({}, *LLAMA),
    "phi3": ({}, "self_attn.qkv_proj[256,128,128] self_attn.o_proj mlp.gate_up_proj[384,384] mlp.down_proj",
             "embed_tokens"),
    "glm4": ({}, ATTENTION + "mlp.gate_up_proj[384,384] mlp.down_proj", "embed_tokens"),
    "starcoder2": ({}, ATTENTION + "mlp.c_fc mlp.c_proj", "embed_tokens"),
    "nemotron": ({}, ATTENTION + "mlp.up_proj mlp.down_proj", "embed_tokens"),
    "gpt2": ({}, "attn.c_attn[256,256,256]' attn.c_proj' mlp.c_fc' mlp.c_proj'", "wte wpe"),
    "openai-gpt": ({"n_positions": 64, **SHORT}, "attn.c_attn[256,256,256]' attn.c_proj' mlp.c_fc' mlp.c_proj'",
                   "tokens_embed positions_embed"),
    # one head of keys and values: 64 rows each
    "gpt_bigcode": ({}, "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", "wte wpe"),
    "gptj": (SHORT, "attn.{q,k,v,out}_proj mlp.fc_in mlp.fc_out", "wte"),
    "codegen": (SHORT, "attn.qkv_proj[64,64,64]*4 attn.out_proj mlp.fc_in mlp.fc_out", "wte"),
    "mpt": ({"d_model": 256, "n_layers": 1, "n_heads": 4},
            "attn.Wqkv[256,256,256] attn.out_proj ffn.up_proj ffn.down_proj", "wte"),
    "opt": ({"ffn_dim": 384, "word_embed_proj_dim": 256}, OUT + "fc1 fc2", "decoder.embed_{tokens,positions}"),
    "gpt_neox": ({}, NEOX.format("attention"), "embed_in"),
    "gpt_neox_japanese": ({}, NEOX.format("attention"), "embed_in"),
    "persimmon": ({}, NEOX.format("self_attn"), "embed_tokens"),
    "bloom": (SHORT, NEOX.format("self_attention"), "word_embeddings"),
    "falcon": ({"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
               "self_attention.query_key_value[128,64,64]*2 self_attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h",
               "word_embeddings"),
    # experts
    "mixtral": (EXPERTS, ATTENTION + WIDE_MOE, "embed_tokens mlp.gate"),
    "olmoe": (EXPERTS, ATTENTION + WIDE_MOE, "embed_tokens mlp.gate"),
    "qwen3_moe": (EXPERTS, ATTENTION + MOE, "embed_tokens mlp.gate"),
    "qwen2_moe": (EXPERTS, ATTENTION + MOE + "mlp.shared_expert.{gate,up,down}_proj",
                  "embed_tokens mlp.gate mlp.shared_expert_gate@"),
    "deepseek_v3": (LATENT, MLA + MOE + SHARED, "embed_tokens mlp.gate"),
    "glm4_moe": (EXPERTS, ATTENTION + MOE + SHARED, "embed_tokens mlp.gate"),
    "phimoe": (EXPERTS, ATTENTION + WIDE_MOE, "embed_tokens mlp.router@"),
    "hunyuan_v1_moe": ({**EXPERTS, "moe_topk": 2}, ATTENTION + WIDE_MOE + "mlp.shared_mlp.{gate,up,down}_proj",
                       "embed_tokens mlp.gate.wg@"),
    "switch_transformers": (
        {**T5, "num_experts": 160, "encoder_sparse_step": 1, "decoder_sparse_step": 1},
        "SelfAttention.{q,k,v,o} EncDecAttention.{q,k,v,o} wi wo",
        "shared SelfAttention.relative_attention_bias mlp.router.classifier@"),
    "gpt_oss": (EXPERTS, ATTENTION + "mlp.experts.gate_up_proj[1,1]*384' mlp.experts.down_proj'",
                "embed_tokens mlp.router mlp.experts.gate_up_proj_bias mlp.experts.down_proj_bias"),
    "llama4_text": (
        {**EXPERTS, "intermediate_size_mlp": 384, "interleave_moe_layer_step": 1},
        ATTENTION + "feed_forward.experts.gate_up_proj[384,384]' feed_forward.experts.down_proj'"
        " feed_forward.shared_expert.{gate,up,down}_proj", "embed_tokens feed_forward.router@"),
    "dbrx": (
        {"d_model": 256, "n_heads": 4, "n_layers": 1, "max_seq_len": 64,
         "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
         "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2}},
        "norm_attn_norm.attn.Wqkv[256,128,128] norm_attn_norm.attn.out_proj"
        " ffn.experts.mlp.{w1,v1}[128,128,128,128] ffn.experts.mlp.w2[128,128,128,128]'", "wte ffn.router.layer@"),
    "jetmoe": (
        {**EXPERTS, "kv_channels": 64},
        "mlp.input_linear[384,384] mlp.output_linear self_attention.experts.{input,output}_linear"
        " self_attention.kv_proj[128,128]",
        "embed_tokens mlp.router.layer@ self_attention.experts.router.layer@"),
    "minimax": (
        {**EXPERTS, **two("linear_attention", "full_attention")},
        ATTENTION + "self_attn.qkv_proj[64,64,64]*4 self_attn.out_proj self_attn.output_gate " + WIDE_MOE,
        "embed_tokens mlp.gate"),
    # state spaces and other mixers
    "mamba": ({"state_size": 16, "time_step_rank": 160}, "mixer.in_proj[384,384] mixer.out_proj",
              "embeddings mixer.A_log mixer.conv1d mixer.x_proj mixer.dt_proj"),
    "falcon_mamba": ({"state_size": 16, "time_step_rank": 160}, "mixer.in_proj[384,384] mixer.out_proj",
                     "embeddings mixer.A_log mixer.conv1d mixer.x_proj mixer.dt_proj"),
    # 8 step sizes stay with C
    "mamba2": ({"state_size": 64, "num_heads": 8, "n_groups": 2, "expand": 2},
               "mixer.in_proj[512,512,128,136] mixer.out_proj", "embeddings mixer.conv1d"),
    "bamba": ({**MAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1]},
              ATTENTION + "feed_forward.{gate,up,down}_proj mamba.in_proj[512,512,128,136] mamba.out_proj",
              "embed_tokens mamba.conv1d"),
    "falcon_h1": ({**MAMBA, "mamba_d_ssm": 512},
                  ATTENTION + "feed_forward.{gate,up,down}_proj mamba.in_proj[512,512,128,136] mamba.out_proj",
                  "embed_tokens mamba.conv1d"),
    "granitemoehybrid": (
        {**EXPERTS, **MAMBA, **two("mamba", "attention"), "shared_intermediate_size": 128},
        ATTENTION + "block_sparse_moe.experts.gate_up_proj[384,384] block_sparse_moe.experts.down_proj"
        " shared_mlp.input_linear[128,128] shared_mlp.output_linear mamba.in_proj[512,512,128,136] mamba.out_proj",
        "embed_tokens block_sparse_moe.router mamba.conv1d"),
    "jamba": (
        {**EXPERTS, "mamba_dt_rank": 160, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
        ATTENTION + "mamba.in_proj[512,512] mamba.out_proj feed_forward.{gate,up,down}_proj"
        " feed_forward.experts.gate_up_proj[384,384] feed_forward.experts.down_proj",
        "embed_tokens mamba.A_log mamba.conv1d mamba.x_proj mamba.dt_proj feed_forward.router"),
    "qwen3_next": (
        {**EXPERTS, **two("linear_attention", "full_attention"), "linear_num_key_heads": 2, "linear_key_head_dim": 64,
         "linear_num_value_heads": 4, "linear_value_head_dim": 64},
        "self_attn.q_proj[64,64]*4 self_attn.{k,v,o}_proj linear_attn.in_proj_qkvz[64,64,128,128]*2"
        " linear_attn.out_proj mlp.shared_expert.{gate,up,down}_proj " + MOE,
        "embed_tokens mlp.gate mlp.shared_expert_gate@ linear_attn.conv1d linear_attn.in_proj_ba"),
    "lfm2": (two("conv", "full_attention"),
             "conv.in_proj[256,256,256] conv.out_proj feed_forward.{w1,w2,w3} " + OUT, "embed_tokens conv.conv"),
    "rwkv": ({"attention_hidden_size": 256},
             "attention.{key,value,receptance,output} feed_forward.{key,receptance,value}",
             "embeddings attention.time_mix_{key,value,receptance} feed_forward.time_mix_{key,receptance}"),
    # encoders
    "t5": (T5, "SelfAttention.{q,k,v,o} EncDecAttention.{q,k,v,o} DenseReluDense.wi DenseReluDense.wo",
           "shared SelfAttention.relative_attention_bias"),
    "bart": (BART, OUT + "encoder_attn.{q,k,v,out}_proj fc1 fc2", "shared {en,de}coder.embed_positions"),
    "bert": ({}, BERT, BERT_WORDS + "pooler.dense"),
    "deberta": ({}, "attention.self.in_proj[64,64,64]*4 attention.output.dense intermediate.dense output.dense",
                "embeddings.{word,position}_embeddings"),
    "modernbert": ({"layer_types": ["full_attention"]}, "attn.Wqkv[256,256,256] attn.Wo mlp.Wi[384,384] mlp.Wo",
                   "embeddings.tok_embeddings"),
    "albert": ({"embedding_size": 128}, "attention.{query,key,value,dense} ffn ffn_output",
               BERT_WORDS + "encoder.embedding_hidden_mapping_in pooler"),
    # pictures and sounds
    "vit": (PICTURE, VIT, VIT_REST + "pooler.dense"),
    "dinov2": (PICTURE, VIT, VIT_REST + "embeddings.mask_token"),
    "clip_vision_model": (PICTURE, OUT + "mlp.fc1 mlp.fc2", "embeddings.{patch,position}_embedding"),
    "siglip_vision_model": (
        PICTURE, OUT + "mlp.fc1 mlp.fc2",
        "embeddings.{patch,position}_embedding head.probe head.attention.in_proj_weight head.attention.out_proj"
        " head.mlp.{fc1,fc2}"),
    # the first layer of each stage but the first widens: its thirds are twice as tall as it is wide
    "sam2_hiera_det_model": (
        {"hidden_size": 128, "blocks_per_stage": [1, 1], "embed_dim_per_stage": [128, 256],
         "num_attention_heads_per_stage": [1, 2], "num_query_pool_stages": 1, "query_stride": [2, 2],
         "window_size_per_stage": [8, 4], "global_attention_blocks": []},
        "attn.qkv[128,128,128] attn.qkv[256,256,256] attn.proj mlp.proj_in mlp.proj_out proj",
        "pos_embed pos_embed_window patch_embed.projection"),
    "whisper": (BART, OUT + "encoder_attn.{q,k,v,out}_proj fc1 fc2",
                "encoder.conv1 encoder.conv2 {en,de}coder.embed_positions decoder.embed_tokens"),
}  # fmt: skip
