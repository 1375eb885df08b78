"""Peak FLOP/s of a device by the name that its driver reports: the denominator of MFU."""

from __future__ import annotations

import re

import torch

from torchtitan_dmuon.logging import logger

# Dense bf16 TFLOP/s of one device as PyTorch counts devices, from the vendors' data sheets (half of what is quoted
# "with sparsity"). The first pattern that the name has counts. Patterns are whole words: H20 begins H200.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"\bA[18]00\b", 312.0),  # an A800 is an A100 with fewer links, an H800 likewise an H100
    (r"\bH[18]00\b.*\bNVL\b", 835.0),
    (r"\bH[18]00\b.*\bPCIe\b", 756.0),
    (r"\bH100\b.*\b(HBM3|SXM5?)\b", 989.0),  # the SXM form calls itself "NVIDIA H100 80GB HBM3"
    (r"\bH800\b", 989.0),  # the SXM form calls itself "NVIDIA H800"
    (r"\bH200\b.*\bNVL\b", 835.0),
    (r"\bG?H200\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bB[23]00\b", 2250.0),
    (r"\bGB[23]00\b", 2500.0),
    (r"\bL40S\b", 362.0),
    (r"\bMI250X\b", 191.5),  # PyTorch counts each of its two dies
    (r"\bMI3(00|25)X\b", 1300.0),
    (r"\bMI355X\b", 2500.0),
)


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


def peak_of(device: torch.device, tflops: float | None) -> float | None:
    """Peak FLOP/s of `device`: `tflops` of the user, else the table's. None, with a line in the log, where neither
    is known."""
    if tflops is not None:
        return tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    peak = peak_flops(name)
    if peak is None:
        logger.info("The peak FLOP/s of %s are not known: MFU is not shown (metrics.peak_tflops sets them)", name)
    return peak
