"""QK-clip: keep attention logits bounded by shrinking the query and key weights of the heads that exceed.

After the optimizer's update a head whose largest logit of the step is S > tau has its logits scaled by
gamma = tau / S: the weights of its query and of its own key by sqrt(gamma) each; where the key is shared between heads
(grouped queries, the rotary part of latent attention) the query alone by gamma. The Kimi team, "Kimi K2", arXiv
2507.20534, algorithm 1; threshold tau = 100 there.

The largest logits come from the model's own attention, which notes them while it computes (as
``models.layers.Attention.track_max_logits``); nothing here runs attention again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..optimizer.matrices import neuron_dim
from ..ownership.blocks import index_of
from ..ownership.policy import nearest
from ..ownership.spec import Block
from ..runtime.handle import Runtime


@dataclass(frozen=True)
class HeadWeights:
    """The rows of the weight ``fqn`` that belong to the heads of a layer: group h of the block ``heads`` is head h's
    output neurons, which are scaled by gamma_h to the power ``exponent``. The weight must have an owner."""

    fqn: str
    heads: Block
    exponent: float


@dataclass(frozen=True)
class QKClipLayer:
    """One attention layer. ``max_logits``, float32 [heads], or [heads / T] on each of T tensor-parallel columns, is the
    largest logit of each head since the last step, at least zero: the model raises it in place, the step reads it and
    sets it to zero. ``weights`` are scaled."""

    max_logits: torch.Tensor
    weights: tuple[HeadWeights, ...]


def attention_heads(
    max_logits: torch.Tensor, query: str, key: str, n_heads: int, n_kv_heads: int, head_dim: int
) -> QKClipLayer:
    """Multi-head or grouped-query attention with separate ``query`` and ``key`` weights, by name."""
    rows = Block(0, head_dim, n_heads, head_dim)
    if n_heads == n_kv_heads:
        return QKClipLayer(max_logits, (HeadWeights(query, rows, 0.5), HeadWeights(key, rows, 0.5)))
    return QKClipLayer(max_logits, (HeadWeights(query, rows, 1.0),))


def latent_attention_heads(
    max_logits: torch.Tensor, query: str, key_value: str, n_heads: int, nope_dim: int, rope_dim: int, v_dim: int
) -> QKClipLayer:
    """DeepSeek's latent attention: heads of ``query`` are [nope | rope], of ``key_value`` [nope | value]; the rotary
    key is shared and stays."""
    per_query, per_key = nope_dim + rope_dim, nope_dim + v_dim
    return QKClipLayer(
        max_logits,
        (
            HeadWeights(query, Block(0, nope_dim, n_heads, per_query), 0.5),
            HeadWeights(query, Block(nope_dim, rope_dim, n_heads, per_query), 1.0),
            HeadWeights(key_value, Block(0, nope_dim, n_heads, per_key), 0.5),
        ),
    )


class QKClip:
    """Clips ``layers``, the same on every rank, in the same order. ``threshold`` is tau, the largest logit that is left
    alone. ``dmuon.Muon(qk_clip=...)`` applies it on the owners before they publish."""

    def __init__(self, layers: Sequence[QKClipLayer], threshold: float = 100.0) -> None:
        if not threshold > 0:
            raise ValueError(f"the QK-clip threshold must be positive, got {threshold}")
        if not layers:
            raise ValueError("QK-clip was given no layer")
        self.layers = tuple(layers)
        self.threshold = threshold

    def check(self, runtime: Runtime) -> None:
        """Raises ValueError for a weight without an owner, or heads that do not fit it."""
        known = {dp.fqn: dp for dp in runtime.params}
        for layer in self.layers:
            if not layer.weights:
                raise ValueError("QK-clip: a layer without weights scales nothing")
            for weights in layer.weights:
                fqn, groups = weights.fqn, weights.heads.groups
                if fqn not in known:
                    told = f"{fqn!r} is no dedicated parameter{nearest(fqn, known)}"
                    raise ValueError(f"QK-clip: {told}; it needs an owner, who scales it")
                dp, maxima = known[fqn], layer.max_logits.numel()
                if len(dp.pieces) != 1 or dp.spec.route == "sharded_adamw" or len(dp.shape) != 2:
                    raise ValueError(f"QK-clip: {fqn} must be one matrix with one owner, it is {dp}")
                if not dp.spec.trainable:
                    raise ValueError(f"QK-clip: {fqn} is frozen; leave its layer out")
                neurons = dp.shape[neuron_dim(dp.spec)]
                if max(weights.heads.indices()) >= neurons:
                    raise ValueError(f"QK-clip: {fqn} has {neurons} outputs, fewer than its heads {weights.heads}")
                if maxima not in (groups, groups // runtime.grid.shape[2]):
                    raise ValueError(f"QK-clip: {fqn} has {groups} heads, the layer notes {maxima} maxima")

    @torch.no_grad()
    def after_update(self, runtime: Runtime, found_inf: torch.Tensor | None = None) -> None:
        """Collective, one all-reduce a mesh dimension. Scale the masters this rank owns and start new maxima. Where
        ``found_inf`` is not zero, and for maxima that are not finite, nothing is scaled."""
        heads = [layer.weights[0].heads.groups for layer in self.layers]
        logits = torch.zeros(sum(heads), device=runtime.grid.device)
        for layer, part in zip(self.layers, logits.split(heads), strict=True):
            local = layer.max_logits.numel()
            start = runtime.grid.coordinate[2] * local if local < part.numel() else 0
            part[start : start + local] = layer.max_logits
            layer.max_logits.zero_()
        for lane in runtime.lanes.covering:
            lane.all_reduce(logits, dist.ReduceOp.MAX)
        exceeds = (logits > self.threshold) & logits.isfinite()
        if found_inf is not None:
            exceeds &= found_inf == 0
        gamma = torch.where(exceeds, self.threshold / logits, 1.0)
        owned = {piece.fqn: piece for piece in runtime.owned}
        for layer, factors in zip(self.layers, gamma.split(heads), strict=True):
            for weights in layer.weights:
                if (piece := owned.get(weights.fqn)) is not None:
                    _scale_heads(piece.master, neuron_dim(piece.spec), weights, factors)
                    piece.refresh_compute_weight()


def _scale_heads(master: torch.Tensor, dim: int, weights: HeadWeights, factors: torch.Tensor) -> None:
    neurons = torch.ones(master.shape[dim], device=master.device)
    neurons[index_of(weights.heads, master.device)] = (factors**weights.exponent).repeat_interleave(weights.heads.size)
    master.mul_(neurons[:, None] if dim == -2 else neurons)
