"""Bytes that forward keeps for backward, found by running two blocks and the head on meta: nothing is allocated, and
whatever PyTorch would keep is counted."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.config.job_config import ActivationCheckpoint
from torchtitan_dmuon.families import Parts
from torchtitan_dmuon.loss import cross_entropy_sum
from torchtitan_dmuon.parallel.activation_checkpoint import Checkpointed, apply_activation_checkpointing
from torchtitan_dmuon.parallel.parallelize import DTYPES, uses_loss_parallel

_HALF_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
_FLOAT_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# A compiled block is taken to keep its input and the results of these; the rest is cheap to fuse into backward.
_KEPT_COMPILED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
_KEPT_COMPILED += [_HALF_ATTENTION.default, _FLOAT_ATTENTION.default]


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank.

    Attributes:
        saved: by all blocks, at the end of forward.
        one_block: by one block; all of them have as much, but for checkpointing every n-th one.
        recomputed: beside ``saved``, at most, while one block runs backward.
        head: at most, from the last block's output to its gradient: logits, their float32 copies and gradients.
    """

    saved: int
    one_block: int
    recomputed: int
    head: int


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside: ``now`` and at most (``peak``), in bytes, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(t.untyped_storage()) for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), given)
        return out

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        if storage in self._known or id(storage) in given:
            return
        self._known[storage] = None
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


class _FusedAttention(TorchFunctionMode):
    """On meta PyTorch would write out all attention scores; the fused kernels of real devices do not. In half precision
    those on CUDA also read grouped keys and values as they are (``models.layers.causal_attention``)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._half = dtype.itemsize == 2

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return (_HALF_ATTENTION if self._half else _FLOAT_ATTENTION)(*args, 0.0, True)[0]
        if func is torch.Tensor.repeat_interleave and self._half:
            return args[0]
        return func(*args, **(kwargs or {}))


class _BlockOnMeta(nn.Module):
    """A block whose forward, and its recomputation in backward, call fused attention."""

    def __init__(self, block: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._block = block
        self._dtype = dtype

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        with _FusedAttention(self._dtype):
            return self._block(*args)


def plan_activations(parts: Parts, config: JobConfig) -> Activations:
    """Those of one micro-batch of ``config`` on a rank. ``parts`` are those of a plain model on meta."""
    checkpointing, compiled = config.activation_checkpoint, config.compile
    columns = config.parallelism.tensor_parallel_degree
    fused = compiled.enable and "model" in compiled.components and checkpointing.mode == "none"
    layers, every = len(parts.blocks), 1
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op":
        every, checkpointing = int(checkpointing.selective_ac_option), dataclasses.replace(checkpointing, mode="full")
    saved, recomputed = _block(parts, config, checkpointing, fused)
    total = layers * saved
    if every > 1:
        plain = _block(parts, config, dataclasses.replace(checkpointing, mode="none"))
        checkpointed = math.ceil(layers / every)
        total = checkpointed * saved + (layers - checkpointed) * plain[0]
        recomputed = max(recomputed, plain[1])
    head = _head(parts, config)
    if uses_loss_parallel(config):
        head //= columns
    return Activations(total, total // layers, recomputed, head)


def _shape(parts: Parts, config: JobConfig) -> tuple[int, int, int]:
    return config.training.local_batch_size, config.training.seq_len, parts.head.in_features


def _block(
    parts: Parts, config: JobConfig, checkpointing: ActivationCheckpoint, fused: bool = False
) -> tuple[int, int]:
    """(saved by one block, most beside the saved bytes in its backward), on a tensor-parallel rank."""
    dtype = DTYPES[config.training.mixed_precision_param]
    shape, columns = _shape(parts, config), config.parallelism.tensor_parallel_degree
    full = math.prod(shape) * dtype.itemsize  # one activation of the model's width
    both = [_run_blocks(parts, count, shape, dtype, None if fused else checkpointing) for count in (1, 2)]
    saved = both[1][0] - both[0][0]
    recomputed = both[1][1] - both[1][0]
    if columns > 1:
        # Tensor parallelism cuts everything but the gathered inputs of two groups of linear layers, where they are
        # kept. (By operation, the outputs of the two that add up over the ranks are kept instead.)
        whole = 2 * full
        recomputed = (recomputed - min(whole, recomputed)) // columns + min(whole, recomputed)
        whole = 0 if checkpointing.mode == "full" else whole
        saved = (saved - whole) // columns + whole
    return saved, recomputed


def _run_blocks(
    parts: Parts,
    count: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    checkpointing: ActivationCheckpoint | None,
) -> tuple[int, int]:
    """(bytes saved by ``count`` blocks after forward, most bytes until the end of backward). Without ``checkpointing``
    they are compiled blocks."""
    blocks = nn.ModuleList(_BlockOnMeta(_copy_on_meta(parts.blocks[0], dtype), dtype) for _ in range(count))
    if checkpointing is None:
        contexts = functools.partial(create_selective_checkpoint_contexts, _KEPT_COMPILED)
        blocks = [Checkpointed(block, context_fn=contexts, preserve_rng_state=False) for block in blocks]
    else:  # there is no random state on meta
        apply_activation_checkpointing(blocks, dataclasses.replace(checkpointing, preserve_rng_state=False))
    others = [tensor.to(dtype) for tensor in parts.block_inputs(shape[1])]
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    with LiveBytes() as live:
        for block in blocks:
            x = block(x, *others)
        saved = live.now
        x.backward(torch.empty_like(x))
    return saved, live.peak


def _head(parts: Parts, config: JobConfig) -> int:
    """Most bytes from the last block's output on, before tensor parallelism."""
    dtype = DTYPES[config.training.mixed_precision_param]
    x = torch.empty(_shape(parts, config), dtype=dtype, device="meta", requires_grad=True)
    norm, output = _copy_on_meta(parts.norm, dtype), _copy_on_meta(parts.head, dtype)
    labels = torch.empty(x.shape[:2], dtype=torch.int64, device="meta")
    if config.compile.enable and "loss" in config.compile.components:
        # The compiled loss keeps the logits alone, and its backward writes their gradient.
        return 2 * math.prod(labels.shape) * output.out_features * dtype.itemsize
    with LiveBytes() as live:
        cross_entropy_sum(output(norm(x)), labels).backward()
    return live.peak


def _copy_on_meta(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with parameters of ``dtype`` whose gradients leave at once, as hooks take them."""
    twin = copy.deepcopy(module).to(dtype)
    for param in twin.parameters():
        param.requires_grad_(True)
        param.register_post_accumulate_grad_hook(_drop_gradient)
    return twin


def _drop_gradient(param: nn.Parameter) -> None:
    param.grad = None
