"""Models of transformers with our weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models import HFNameMap
from torchtitan_dmuon.initialization import parameter_seed


def hf_twin(model: nn.Module, names: HFNameMap) -> nn.Module:
    """The model of transformers with the same weights; ours has norms that are not one from then on."""
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(parameter_seed(7, fqn)))
    config = AutoConfig.for_model(**names.hf_config(model.args))
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    weights = {names.to_hf(fqn): parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == ([names.to_hf(names.head)] if model.args.tie_embeddings else [])
    return twin


def assert_equal_to_twin(model: nn.Module, names: HFNameMap, tokens: torch.Tensor) -> None:
    """Logits and all gradients of next-token prediction."""
    twin = hf_twin(model, names)
    ours, theirs = model(tokens), twin(tokens).logits
    assert ours.shape == (*tokens.shape, model.args.vocab_size)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    for logits in (ours, theirs):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = dict(twin.named_parameters())
    for fqn, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[names.to_hf(fqn)].grad, atol=1e-6, rtol=1e-4, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
        )
