"""Model FLOPs and device peaks: the two figures MFU is made of.

Here: the FLOPs of one token's forward and backward, and dense bf16 peaks by device name. Not here: timing and
reporting (`metrics.py`), and the optimizer's FLOPs, which are no model FLOPs and have their own figures.
"""

import re

from torch import nn

# Dense bf16 TFLOP/s from the vendors' data sheets (half of the figures quoted "with sparsity"). Patterns are
# whole words of the name that the driver reports: H20 begins H200, and the forms of H100 differ by 30%.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"\bA100\b", 312.0),
    (r"\bH100\b.*\bNVL\b", 835.0),
    (r"\bH100\b.*\bPCIe\b", 756.0),
    (r"\bH100\b.*\b(HBM3|SXM5?)\b", 989.0),  # the SXM form calls itself "NVIDIA H100 80GB HBM3"
    (r"\bH200\b(?!.*\bNVL\b)", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bB200\b", 2250.0),
    (r"\bMI300X\b", 1300.0),
)


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


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the device that `torch.cuda.get_device_name()` calls `device_name`.

    None for a device not in the table and for a MIG slice of one that is: no MFU is better than a wrong one.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    for pattern, tflops in _PEAK_TFLOPS:
        if re.search(pattern, device_name, flags=re.IGNORECASE):
            return tflops * 1e12
    return None
