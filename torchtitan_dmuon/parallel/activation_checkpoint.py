"""Activation checkpointing of the repeated blocks: full, every n-th block, or selective by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_dmuon.config.job_config import ActivationCheckpoint
from torchtitan_dmuon.logging import logger

# Of these every second result is saved: memory for half of them buys most of the time.
_MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Results that are always saved, because they are expensive to compute or to communicate again.
_SAVED_OPS = frozenset(
    {
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in backward. The attribute that holds it is called as in PyTorch's own
    wrapper: tools that clean parameter names know it."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module
        self._options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **self._options, **kwargs)


def _selective_contexts() -> tuple[Any, Any]:
    """The contexts of one forward and its recomputation, both of which count the same products."""
    products = {False: 0, True: 0}  # so far, in the forward and in the recomputation

    def policy(ctx: Any, op: Callable, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in _SAVED_OPS
        if op in _MATRIX_PRODUCTS:
            products[ctx.is_recompute] += 1
            saved = products[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(blocks: nn.ModuleList, config: ActivationCheckpoint) -> None:
    """Replace blocks by checkpointed ones, in place."""
    if config.mode == "none":
        return
    options: dict[str, Any] = {
        "preserve_rng_state": config.preserve_rng_state,
        "early_stop": config.early_stop,
    }
    every = 1
    if config.mode == "selective" and config.selective_ac_option == "op":
        options["context_fn"] = _selective_contexts
    elif config.mode == "selective":
        every = int(config.selective_ac_option)
    for index, block in enumerate(blocks):
        if index % every == 0:
            blocks[index] = Checkpointed(block, **options)
    what = f"{config.mode} ({config.selective_ac_option})" if config.mode == "selective" else config.mode
    logger.info("Applied %s activation checkpointing", what)
