"""Memory of the fullest rank, by kind, at the moments of a step at which it may be largest.

Counted is what PyTorch allocates for tensors. A CUDA context, NCCL's buffers and fragments come on top.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.dmuon.optimizer.stack import BATCH_BYTES
from torchtitan_dmuon.dmuon.runtime.pack import Pack
from torchtitan_dmuon.dmuon.runtime.param import Piece
from torchtitan_dmuon.dmuon.runtime.schedule import MAX_REDUCTIONS_IN_FLIGHT
from torchtitan_dmuon.parallel.parallelize import DTYPES, reshards_matrices
from torchtitan_dmuon.plan.activations import Activations
from torchtitan_dmuon.plan.layout import Layout, local_elements

# The end of forward, with the logits; backward of the last block, then of the first; the optimizer's step.
MOMENTS = ("loss", "backward begins", "backward ends", "optimizer")

_FLOAT = 4  # bytes of FSDP2's masters, moments and gradients


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank at ``slot``, which has the most: of every kind, at each of ``MOMENTS``."""

    slot: int
    kinds: dict[str, tuple[int, int, int, int]]

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.kinds.values(), strict=True)))

    @property
    def peak(self) -> int:
        return max(self.totals)


def plan_memory(
    layout: Layout, config: JobConfig, activations: Activations, micro_batches: int, slot: int | None = None
) -> Memory:
    """``micro_batches`` of one step, on each rank. Of the rank at ``slot``, by default the fullest."""
    if slot is None:
        slot = fullest_slot(layout)
    packs = layout.packs(slot)
    fsdp = _Fsdp(layout, config)
    kinds = {
        **_dedicated_state(packs.values(), config),
        **_dedicated_flow(layout, packs, config, accumulates=micro_batches > 1),
        "FSDP2 weights": (fsdp.sharded,) * 4,
        "FSDP2 AdamW moments": (2 * fsdp.sharded,) * 4,
        "FSDP2 gradients": (fsdp.sharded if micro_batches > 1 else 0, fsdp.head_shard, fsdp.sharded, fsdp.sharded),
        "FSDP2 unsharded": (*fsdp.unsharded, fsdp.kept),
        "activations": (
            activations.saved,
            activations.saved + activations.recomputed,
            activations.one_block + activations.recomputed,
            0,
        ),
        "logits and loss": (activations.head, 0, 0, 0),
        "Newton-Schulz": (0, 0, 0, _workspace(packs.values(), config.dmuon.normuon)),
    }
    return Memory(slot, {name: moments for name, moments in kinds.items() if any(moments)})


def fullest_slot(layout: Layout) -> int:
    """The slot with the most bytes that stay: of masters, optimizer state, compute weights and gradients."""
    held: list[int] = [0] * layout.ranks
    source: dict[tuple[int, int], int] = defaultdict(int)  # (shard, column) -> bytes; every replica has them
    columns = layout.dims.tp
    for planned in layout.params:
        spec = planned.spec
        states = 0 if not spec.trainable else 1 if spec.route == "muon" else 2
        width = spec.master_dtype.itemsize + states * spec.optim_dtype.itemsize
        width += spec.grad_dtype.itemsize if spec.trainable else 0
        for index, (start, stop, slot) in enumerate(planned.runs):
            held[slot] += planned.elements(index) * width
            shard = layout.coordinate_of(slot)[1]
            for column in range(columns):
                part = local_elements((stop - start, *spec.shape[1:]), planned.tp_dim, columns, column)
                source[shard, column] += part * spec.param_dtype.itemsize
    return max(range(layout.ranks), key=lambda slot: held[slot] + source[layout.coordinate_of(slot)[1:]])


def _own_source(piece: Piece) -> bool:
    """Whether the master itself is what forward broadcasts (``Unit.allocate_masters``)."""
    return piece.spec.master_dtype == piece.spec.param_dtype and piece.dp.tp_dim is None


def _dedicated_state(packs: Iterable[Pack], config: JobConfig) -> dict[str, tuple[int, ...]]:
    """What the rank keeps from step to step."""
    masters = momentum = moments = source = 0
    for pack in packs:
        source += pack.own_bytes
        for piece in pack.owned:
            size = piece.numel * piece.spec.master_dtype.itemsize
            masters += size
            source -= size if _own_source(piece) else 0
            state = piece.numel * piece.spec.optim_dtype.itemsize if piece.spec.trainable else 0
            if piece.spec.route == "muon":
                neurons = piece.numel // piece.shape[-1 if not piece.spec.transposed else -2]
                momentum += state + (neurons * 4 if config.dmuon.normuon and state else 0)
            else:
                moments += 2 * state
    named = {"masters": masters, "momentum": momentum, "AdamW moments": moments, "compute weights": source}
    return {name: (size,) * 4 for name, size in named.items()}


def _dedicated_flow(
    layout: Layout, packs: dict[str, Pack], config: JobConfig, accumulates: bool
) -> dict[str, tuple[int, ...]]:
    """What comes and goes within a step: gradients, and the buffers in which weights and gradients travel."""
    replicas, shards, columns = layout.grid_shape
    pinned = sum(pack.weights.size for name, pack in packs.items() if layout.pinned(name))
    cyclic = [pack for name, pack in packs.items() if not layout.pinned(name)]
    weights = [pack.weights.size for pack in cyclic]
    ahead = 1 + config.dmuon.prefetch
    unsharded = (sum(weights[-1:]), sum(weights[-ahead:]), sum(weights[:ahead]))
    if not reshards_matrices(config):
        unsharded = (sum(weights),) * 3
    if shards == 1:  # the sources themselves are what forward reads
        pinned, unsharded = 0, (0, 0, 0)
    held = {name: sum(size for size, mine in _segments(pack) if mine) for name, pack in packs.items()}
    own = sum(p.numel * p.spec.grad_dtype.itemsize for k in packs.values() for p in k.owned if p.spec.trainable)
    staged = replicas * columns > 1
    earlier = sum(held.values()) if accumulates else 0
    # A buffer that is being filled, those on their way to the sources and, with a second stage, the sums that go on.
    travelling = sorted((pack.gradients.size * pack.grad_itemsize for pack in cyclic), reverse=True)
    travelling = travelling[: 1 + MAX_REDUCTIONS_IN_FLIGHT]
    sums = sorted(held.values(), reverse=True)[: 1 + MAX_REDUCTIONS_IN_FLIGHT] if staged else []
    packed = sum(travelling) + sum(sums)
    if shards == 1 and not staged:  # the packed buffer becomes the gradients
        packed = sum(travelling[:1])
    ends = max(own, earlier)
    if shards == 1 and not staged:
        ends = max(0, ends - packed)
    return {
        "gradients": (earlier, earlier, ends, own),
        "packed weights": (*(pinned + each for each in unsharded), 0),
        "packed gradients": (0, packed, packed, 0),
    }


def _segments(pack: Pack) -> list[tuple[int, bool]]:
    """(bytes, whether this rank is the source) of the ranges of the packed gradients."""
    here = pack.grid.coordinate[1]
    return [((end - begin) * pack.grad_itemsize, shard == here) for (begin, end), shard in pack.gradient_segments]


def _workspace(packs: Iterable[Pack], adjusts: bool) -> int:
    """Most bytes of the matrices that go through Newton-Schulz together (``MatrixStack``), with Triton's passes."""
    counts: Counter[tuple[int, ...]] = Counter()
    for piece in (piece for pack in packs for piece in pack.owned):
        if piece.spec.route == "muon" and piece.spec.trainable:
            blocks, stacked = piece.spec.blocks, piece.numel // math.prod(piece.shape[-2:])
            shapes = [piece.shape[-2:]]
            if blocks is not None:
                shapes = [blocks.shape_of(block, piece.shape) for block in blocks.blocks]
            for shape in shapes:
                counts[shape] += stacked
    most = 0
    for shape, count in counts.items():
        matrix = (12 if adjusts else 4) * math.prod(shape) + 8 * min(shape) ** 2
        batches = math.ceil(count / max(1, BATCH_BYTES // matrix))
        most = max(most, math.ceil(count / batches) * matrix)
    return most


class _Fsdp:
    """Bytes of what FSDP2 shards: all of the model under AdamW, else what DMuon leaves out.

    Attributes:
        sharded: float32 weights of a rank; gradients have as many, moments twice as many.
        head_shard: of these, the head's.
        unsharded: weights in the compute dtype, their gradients and the buffers of reductions, at the first three of
            ``MOMENTS``.
        kept: unsharded weights that stay until the optimizer's step.
    """

    def __init__(self, layout: Layout, config: JobConfig) -> None:
        self._columns, self._shards = layout.dims.tp, layout.dims.dp_shard
        parts = layout.parts
        tied = parts.is_tied
        places = {} if tied else {id(p): "head" for part in (parts.norm, parts.head) for p in part.parameters()}
        for index, block in enumerate(parts.blocks):
            places |= {id(param): str(index) for param in block.parameters()}
        groups: dict[str, list[tuple[nn.Parameter, int | None]]] = defaultdict(list)
        for entry in layout.sharded.values():
            groups[places.get(id(entry[0]), "embedding")].append(entry)
        size = {name: sum(map(self._elements, params)) for name, params in groups.items()}
        shard = {name: sum(map(self._sharded, params)) for name, params in groups.items()}
        param = DTYPES[config.training.mixed_precision_param].itemsize
        reduce = DTYPES[config.training.mixed_precision_reduce].itemsize
        self.sharded = _FLOAT * sum(shard.values())
        self.head_shard = _FLOAT * shard.get("head", 0)
        blocks = [elements for name, elements in size.items() if name not in ("head", "embedding")]
        embedding, head = size.get("embedding", 0), size.get("head", 0)
        ahead = sum(blocks[:2])  # a block and the next one
        weights = (blocks[:1], head, embedding if tied else 0)
        loss, begins, ends = sum(weights[0]) + head + weights[2], ahead + weights[2], ahead + embedding
        self.kept = 0
        if config.parallelism.fsdp_reshard_after_forward == "never":
            loss = begins = ends = sum(size.values())
        # Gradients in the compute dtype, and the buffer in which they are reduced. A tied weight gets its gradient at
        # the loss and gives it away at the end.
        block = sum(blocks[:1])
        travelling = (param + reduce) * (1 if self._shards > 1 or param != reduce else 0)
        self.unsharded = (
            param * loss,
            param * begins + (param * embedding if tied else travelling * head) + travelling * block,
            param * ends + travelling * (embedding + block),
        )

    def _elements(self, entry: tuple[torch.Tensor, int | None]) -> int:
        param, tp_dim = entry
        return local_elements(tuple(param.shape), tp_dim, self._columns, 0)

    def _sharded(self, entry: tuple[torch.Tensor, int | None]) -> int:
        param, tp_dim = entry
        rows = -(-param.shape[0] // (self._columns if tp_dim == 0 else 1))
        return -(-rows // self._shards) * (self._elements(entry) // rows)
