"""The random state of one process as tensors: Python, NumPy, PyTorch on the CPU and on its CUDA device."""

from __future__ import annotations

import random

import numpy as np
import torch

from torchtitan_dmuon.initialization import parameter_seed


def get_random_state() -> dict[str, torch.Tensor]:
    """By generator: ``python`` and ``numpy`` float64 [627] (their words, whether there is a spare Gaussian, and it),
    ``torch`` and, with a GPU, ``cuda`` uint8. Every integer in them is below 2^32, so float64 holds it exactly."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Continue where :func:`get_random_state` was called. A missing ``cuda`` leaves the GPU's generator alone."""
    *words, has_gauss, gauss = state["python"].tolist()
    random.setstate((3, tuple(int(word) for word in words), gauss if has_gauss else None))
    *keys, position, has_gauss, cached = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_random_state(seed: int, step: int, rank: int) -> None:
    """A random state that depends on the arguments alone, for a rank that the checkpoint has none of."""
    value = parameter_seed(seed, f"rng/{step}/{rank}")
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value % 2**63)
