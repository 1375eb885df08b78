"""Model FLOPs: those of one token's forward and backward.

Device peaks are in `peak_flops.py`, timing and reporting in `metrics.py`. The optimizer's FLOPs are no model FLOPs and
have their own figures.
"""

from torch import nn


def num_matmul_parameters(model: nn.Module) -> int:
    """Elements of all weights that a token is multiplied with: the `nn.Linear` modules', each tensor once.

    An embedding table is read, not multiplied, so it counts only when it is tied to the head. Sizes are those
    of the whole model also when parameters are DTensors, and the model may be on `meta`.
    """
    weights = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(weight.numel() for weight in weights.values())


def num_flops_per_token(
    num_matmul_parameters: int, *, n_layers: int, n_heads: int, qk_dim: int, v_dim: int, seq_len: int
) -> int:
    """FLOPs of one token's forward and backward, the numerator of MFU (PaLM, arXiv 2204.02311, appendix B).

    `6 * num_matmul_parameters + 6 * n_layers * n_heads * (qk_dim + v_dim) * seq_len`: a multiply-add is 2
    FLOPs and the backward costs two forwards. Attention is counted without the causal halving and
    recomputation is not counted.

    Args:
        num_matmul_parameters: see the function of that name; routed experts count by `top_k / num_experts`.
        n_layers: number of full-attention layers.
        n_heads: query heads per layer.
        qk_dim: width of one query or key head.
        v_dim: width of one value head.
        seq_len: tokens in a training sequence.
    """
    return 6 * num_matmul_parameters + 6 * n_layers * n_heads * (qk_dim + v_dim) * seq_len
