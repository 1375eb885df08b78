"""Seeds that belong to names: initial weights and random states that depend on no order, rank or world size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

InitParameter = Callable[[str, torch.Tensor, torch.Generator], None]


def parameter_seed(seed: int, name: str) -> int:
    """A 64-bit seed for what is called ``name`` in a run of ``seed``, the same on every platform and version."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seeded_init(init_parameter: InitParameter, seed: int) -> Callable[[str, torch.Tensor], None]:
    """The function ``(fqn, tensor)`` that fills a whole parameter in place, for :func:`dmuon.materialize`.

    Every parameter gets a generator of its own, on the tensor's device and seeded by its name, so that whoever fills it
    draws the same values. ``init_parameter`` is the model's (``models.ModelSpec``).
    """

    def init(fqn: str, tensor: torch.Tensor) -> None:
        init_parameter(fqn, tensor, torch.Generator(tensor.device).manual_seed(parameter_seed(seed, fqn)))

    return init
