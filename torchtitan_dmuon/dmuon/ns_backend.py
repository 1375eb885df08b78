"""Which kernels Newton-Schulz runs on here, told in words and as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class BackendStatus:
    """One kernel family: whether it can be used on this machine, and why or why not."""

    name: str
    available: bool
    reason: str


def get_backend_status() -> dict[str, dict]:
    """Every kernel family by name, as plain data."""
    cuda = torch.cuda.is_available()
    statuses = [
        BackendStatus("cublas", cuda, "torch.matmul in float16" if cuda else "no CUDA device"),
        BackendStatus("cpu", True, "torch.matmul in float32"),
    ]
    return {status.name: asdict(status) for status in statuses}


def get_ns_backend() -> str:
    """What Newton-Schulz uses by default on this machine, in one line."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"Gram NS · kernel=cublas (SM{major}{minor}, float16)"
    return "Gram NS · kernel=cpu (float32)"
