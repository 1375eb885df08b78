"""Model FLOPs: what the families' `flops_per_token` are made of.

A multiply-add is 2 FLOPs and the backward costs two forwards (PaLM, arXiv 2204.02311, appendix B). Attention is counted
without the causal halving, and recomputation is not counted. The optimizer's FLOPs are no model FLOPs.
"""

from torch import nn


def linear_flops(model: nn.Module) -> int:
    """FLOPs that one token's forward and backward take in the `nn.Linear` modules of `model`: 6 for each element of
    their weights, each weight once.

    An embedding table is read, not multiplied, so the table counts only when it is tied to the head. Sizes are those of
    the whole model also when parameters are DTensors, and the model may be on meta.
    """
    weights = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return 6 * sum(weight.numel() for weight in weights.values())


def attention_flops(*, n_layers: int, n_heads: int, qk_dim: int, v_dim: int, seq_len: int) -> int:
    """FLOPs that one token's forward and backward take in the two products of softmax attention.

    Args:
        n_layers: number of layers with such attention.
        n_heads: query heads per layer.
        qk_dim: width of one query or key head.
        v_dim: width of one value head.
        seq_len: tokens that a token attends to: the sequence's.
    """
    return 6 * n_layers * n_heads * (qk_dim + v_dim) * seq_len
