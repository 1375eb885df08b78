"""HuggingFace models as they are: the guide's recipe on small random ones equals one process.

The oracle orthogonalises every matrix by itself: each expert of a stack, and query, key, value, gate and up where they
are stored together. The guide's wrapping order is kept: dedicate, ``fully_shard`` on each layer, then on the root.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import dmuon
from tests.support.harness import GUIDE_TYPE_SPLIT, assert_same, full_weights, weights_of
from tests.support.meshes import mesh_of
from tests.support.oracle import orthogonalize
from tests.support.pool import distributed

pytest.importorskip("transformers", reason="these tests build models of transformers")

VOCAB, STEPS, SIZE, LENGTH = 61, 5, 3, 11
IGNORED = -100

# With eps at 1e-8 AdamW turns the rounding noise of a gradient that is mathematically zero (a key's bias) into a full
# step; hyperparameters are otherwise big enough to show.
HYPER = {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 1e-2, "adamw_weight_decay": 0.1, "adamw_eps": 1e-4}

SHARED = {"vocab_size": VOCAB, "initializer_range": 0.1, "use_cache": False}
ROTARY = {
    **SHARED,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
# name -> (configuration, model class, arguments, attention, path of the blocks)
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", ROTARY, "sdpa", "model.layers"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**ROTARY, "tie_word_embeddings": True}, "sdpa", "model.layers"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**ROTARY, "num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
        "eager",
        "model.layers",
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**SHARED, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "eager",
        "transformer.h",
    ),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**ROTARY, "hidden_size": 32, "pad_token_id": 0, "resid_pdrop": 0.0},
        "sdpa",
        "model.layers",
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**SHARED, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3}
        | {"max_position_embeddings": 32},
        "eager",
        "gpt_neox.layers",
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**ROTARY, "query_pre_attn_scalar": 8, "sliding_window": 4, "tie_word_embeddings": True},
        "eager",
        "model.layers",
    ),
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 12}
FAMILIES |= {
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {**ROTARY, "tie_word_embeddings": True}, "sdpa", "model.layers"),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**ROTARY, **LATENT, **EXPERTS, "num_key_value_heads": 4, "head_dim": 8}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        "eager",
        "model.layers",
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 36,
            "num_layers": 2,
            "num_heads": 3,
            "dropout_rate": 0.0,
        }
        | {"use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0},
        "eager",
        "encoder.block decoder.block",
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 8}
        | {"patch_size": 4, "num_labels": 5, "initializer_range": 0.1},
        "sdpa",
        "vit.layers",
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**SHARED, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 8}
        | {"n_groups": 1, "chunk_size": 8, "tie_word_embeddings": True},
        "eager",
        "backbone.layers",
    ),
}
# The models on which the guide's type split runs word for word; embedding and head are one parameter.
TIED = {
    name: (
        f"{name}Config",
        f"{name}ForCausalLM",
        {**ROTARY, "tie_word_embeddings": True, **more},
        "eager",
        "model.layers",
    )
    for name, more in {
        "Llama": {},
        "Qwen2": {},  # with biases
        "Qwen3": {},
        "Gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 4},
        "Mistral": {"sliding_window": None},
        "Phi3": {"hidden_size": 32, "pad_token_id": 0, "resid_pdrop": 0.0},  # fused projections
    }.items()
}


def make(family):
    """The same random model on every process."""
    import transformers

    config_class, model_class, arguments, attention, _ = {**FAMILIES, **TIED}[family]
    config = getattr(transformers, config_class)(**arguments, attn_implementation=attention)
    torch.manual_seed(7)
    # eager experts: the others need kernels or sizes that a CPU test does not have
    options = {"experts_implementation": "eager"} if family in ("qwen3_moe", "deepseek_v3") else {}
    model = getattr(transformers, model_class)._from_config(config, **options)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(0.1 * torch.randn(param.shape))
            elif not param.any():
                param.normal_(std=0.1)
    return model.train()


def selection(model):
    """The default classifier's, sizes aside."""
    return {name for name, decision in dmuon.classify(model, min_matrix_dim=8).items() if decision.muon}


def matrices_in(name, weight):
    """The matrices a 2-D weight holds, as views of it: the last dimension is a matrix's last, the others its rows."""
    if "c_attn" in name:  # [in, (query, key, value)]
        return weight.chunk(3, dim=1)
    if "gate_up_proj" in name:
        return weight.chunk(2, dim=0)
    if "qkv_proj" in name:  # 4 query heads of 8, 2 of keys, 2 of values
        return weight.split([32, 16, 16])
    if "query_key_value" in name:  # [heads, (query, key, value), head_dim]
        return weight.view(3, 3, 8, weight.shape[1]).unbind(1)
    if "kv_a_proj" in name:  # latent, rotary key
        return weight.split([12, 8])
    if "kv_b_proj" in name:  # [heads, (key, value), 8]
        return weight.view(4, 2, 8, weight.shape[1]).unbind(1)
    if "in_proj" in name:  # Mamba-2's gate, input, B, C and step sizes
        return weight.split([48, 48, 8, 8, 6])
    return [weight]


def inputs_of(family, step, rank):
    tokens = tokens_of(step, rank)
    if family == "vit":
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return {"pixel_values": torch.randn(SIZE, 3, 8, 8, generator=generator), "labels": tokens[:, 0] % 5}
    return {"input_ids": tokens, "labels": tokens.flip(1) if family == "t5" else tokens}


def tokens_of(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCAB, (SIZE, LENGTH), generator=generator)


def ragged_labels(step, rank):
    """Labels of which every rank and step has another number of valid ones; some rows have none."""
    labels = tokens_of(step, rank).clone()
    generator = torch.Generator().manual_seed(77 * step + rank)
    keep = torch.randint(1, LENGTH, (SIZE,), generator=generator) // (1 + rank)
    labels[torch.arange(LENGTH)[None] > keep[:, None]] = IGNORED
    return labels


def dedicate(family, world, **kwargs):
    model = make(family)
    names = selection(model)
    mesh = mesh_of(dp=world)
    dmuon.dedicate_params(model, mesh, predicate=lambda n, p: n in names, **kwargs)
    for path in FAMILIES[family][4].split():
        for layer in model.get_submodule(path):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(model, **HYPER)


class Oracle:
    """Muon on every matrix in what is selected, AdamW on the rest."""

    def __init__(self, model, names=None):
        self.model = model
        names = selection(model) if names is None else names
        named = dict(model.named_parameters())
        self.matrices = {name: named[name] for name in names}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.adamw = torch.optim.AdamW(
            [p for name, p in named.items() if name not in names],
            lr=HYPER["adamw_lr"],
            weight_decay=HYPER["adamw_weight_decay"],
            eps=HYPER["adamw_eps"],
        )

    @torch.no_grad()
    def step(self):
        for name, p in self.matrices.items():
            self.momentum[name].mul_(0.95).add_(p.grad)
            p.mul_(1 - HYPER["lr"] * HYPER["weight_decay"])
            stacks = [x if p.ndim == 3 else x[None] for x in (p, p.grad, self.momentum[name])]
            for whole in zip(*stacks, strict=True):
                for weight, grad, momentum in zip(*(matrices_in(name, each) for each in whole), strict=True):
                    update = orthogonalize((grad + 0.95 * momentum).flatten(0, -2))
                    scale = HYPER["lr"] * 0.2 * math.sqrt(max(update.shape))
                    weight.sub_((scale * update).float().view(weight.shape))
        self.adamw.step()
        self.model.zero_grad()


def check_selection(family, model):
    """What the classifier takes is what each architecture calls its matrices, and nothing else."""
    expected = {
        "llama": 2 * 7,
        "qwen3": 2 * 7,
        "qwen3_moe": 2 * (4 + 2),
        "gpt2": 2 * 4,
        "phi3": 2 * 4,
        "gpt_neox": 2 * 4,
        "gemma2": 2 * 7,
        "llama_tied": 2 * 7,
        "deepseek_v3": (5 + 3) + (5 + 2 + 3),
        "t5": 2 * (4 + 2) + 2 * (8 + 2),
        "vit": 2 * 6,
        "mamba2": 2 * 2,
    }[family]
    selected = [dp.fqn for dp in dmuon.get_dedicated_params(model)]
    assert len(selected) == expected, selected
    assert not [
        name
        for name in selected
        if any(word in name for word in ("embed", "lm_head", "wte", "wpe", "embed_in", "embed_out", "gate.w"))
    ]
    if family == "gpt2":
        shapes = {dp.fqn.split(".", 3)[3]: dp.shape for dp in dmuon.get_dedicated_params(model)}
        assert shapes["attn.c_attn.weight"] == (24, 72)  # [in, out]


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world=2, timeout=120)
def test_five_steps_by_the_guide_equal_one_process(rank, world, family):
    """The guide's loop: the model's own loss, averaged over ranks with equally many tokens."""
    model, optimizer = dedicate(family, world)
    check_selection(family, model)
    oracle = make(family)
    oracle_optimizer = Oracle(oracle)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs_of(family, step, rank)).loss
        loss.backward()
        optimizer.step()
        for other in range(world):
            expected = oracle(**inputs_of(family, step, other)).loss
            (expected / world).backward()
            if other == rank:
                torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        oracle_optimizer.step()
    actual, expected = full_weights(model), weights_of(oracle)
    assert_same(actual, expected)
    start = weights_of(make(family))
    for name, weight in expected.items():
        assert not torch.allclose(weight, start[name], atol=1e-4), f"{name} has not moved: the test shows nothing"


@pytest.mark.parametrize("reshard", [False, True])
@distributed(world=2, timeout=120)
def test_ragged_labels_with_a_global_count(rank, world, reshard):
    """Sum of losses over the global number of valid tokens, gradient division off everywhere: how many of them a rank
    has does not matter."""
    model, optimizer = dedicate("llama", world, reshard_after_forward=reshard)
    dmuon.set_gradient_divide_factor(model, 1.0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def sum_of_losses(model, tokens, labels):
        logits = model(input_ids=tokens).logits[:, :-1]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    oracle = make("llama")
    oracle_optimizer = Oracle(oracle)
    for step in range(STEPS):
        labels = [ragged_labels(step, r) for r in range(world)]
        counts = [(each[:, 1:] != IGNORED).sum() for each in labels]
        assert counts[0] != counts[1]
        (sum_of_losses(model, tokens_of(step, rank), labels[rank]) / sum(counts)).backward()
        optimizer.step()
        tokens = torch.cat([tokens_of(step, r) for r in range(world)])
        (sum_of_losses(oracle, tokens, torch.cat(labels)) / sum(counts)).backward()
        oracle_optimizer.step()
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2, timeout=120)
def test_gradient_checkpointing_and_evaluation_of_a_model_with_experts(rank, world):
    """transformers' own checkpointing of the layers, and generation-like forwards between steps, change nothing."""
    results = []
    for extra in (False, True):
        model, optimizer = dedicate("qwen3_moe", world)
        if extra:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for step in range(2):
            tokens = tokens_of(step, rank)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            if extra:
                model.eval()
                with torch.no_grad():
                    assert model(input_ids=tokens_of(50, rank)).logits.isfinite().all()
                model.train()
        results.append(full_weights(model))
    assert_same(results[1], results[0], atol=0, rtol=0)


def in_bfloat16(master):
    """What computes where ``param_dtype`` is bfloat16: buffers, as the rotary frequencies, stay."""
    model = copy.deepcopy(master)
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model


@pytest.mark.parametrize("family", TIED)
@distributed(world=2, timeout=120)
def test_the_guides_type_split_word_for_word(rank, world, family):
    """``lm_head`` is the embedding's other name, a bias of a projection goes to AdamW, and not each pattern of a rule
    has to match: Phi-3 has no ``q_proj``. A step equals one process that computes in bfloat16, too; after it, a weight
    between two bfloat16 numbers may round to either."""
    model, oracle, mesh = make(family), make(family), mesh_of(dp=world)
    dmuon.dedicate_params(model, mesh, **GUIDE_TYPE_SPLIT)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    rows = {row.name: row for row in dmuon.ownership_table(model)}
    assert rows.keys() == {name for name, _ in oracle.named_parameters()}
    matrices = {name for name, row in rows.items() if "proj" in name and len(row.shape) == 2}
    biases = {name for name in rows if name.endswith("proj.bias")}
    routes = {name: "adamw" for name in rows} | dict.fromkeys(matrices, "muon")
    assert {n: r.route for n, r in rows.items()} == {**routes, "model.embed_tokens.weight": "sharded_adamw"}
    assert (len(matrices), len(biases)) == (2 * (4 if family == "Phi3" else 7), 2 * 3 * (family == "Qwen2"))
    assert {rows[name].reason for name in biases} <= {"1-D: adamw, not muon"}

    optimizer, expected = dmuon.Muon(model, **HYPER), Oracle(oracle, matrices)
    tokens = tokens_of(0, rank)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for param in oracle.parameters():
        param.grad = torch.zeros_like(param)
    for other in range(world):
        computing, tokens = in_bfloat16(oracle), tokens_of(0, other)
        computing(input_ids=tokens, labels=tokens).loss.backward()
        for param, computed in zip(oracle.parameters(), computing.parameters(), strict=True):
            param.grad.add_(computed.grad.float() / world)
    expected.step()
    assert_same(full_weights(model), weights_of(oracle))
