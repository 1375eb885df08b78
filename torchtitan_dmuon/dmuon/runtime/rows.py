"""Packs of large parameters whose rows every rank of the shard group owns a run of (route ``sharded_adamw``).

Weights are all-gathered for forward and gradients reduce-scattered; both directions use the whole group's bandwidth,
which is what an embedding or a head needs. Replicas each keep and update their copy of the rows, from one all-reduced
gradient, so they stay equal to the last bit. Under tensor parallelism the rows are those of this column's shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from ..transport.grid import Grid, Lanes
from ..transport.lane import Pending, Transfer
from ..transport.tensor_parallel import chunk_bounds, local_shape
from .param import ALIGN_BYTES, DedicatedParam, Piece, accumulate, placeholder


class RowPack:
    """One parameter, its rows cut into equal runs (the last ones shorter or empty).

    Args:
        dp: the parameter; gets its piece here.
        grid: the grid.
        divide_factor: called at reduction time; the summed gradient is divided by it.
    """

    def __init__(self, dp: DedicatedParam, grid: Grid, divide_factor: Callable[[], float]) -> None:
        self.grid = grid
        self.device = grid.device
        self._divide_factor = divide_factor
        self.params = [dp]
        self.trainable = [dp] if dp.spec.trainable else []
        ranks, shape = grid.shape[1], dp.local_shape
        self._row_size = math.prod(shape[1:])
        self._max_rows = -(-shape[0] // ranks)
        dp.pieces = [self._piece_of(slot) for slot in range(grid.num_slots)]
        self.owned = self.pieces = [dp.pieces[grid.slot]]
        dtype = dp.spec.param_dtype
        self._source = torch.zeros(self._max_rows * self._row_size, dtype=dtype, device=self.device)
        self._packed = torch.empty(ranks * self._max_rows * self._row_size, dtype=dtype, device=self.device)
        self.views = [self._packed[: math.prod(shape)].view(shape)]
        self._placeholder = placeholder(shape, dtype, self.device)
        # One more (aligned) element per rank counts the ranks that had a gradient.
        self._block = self._max_rows * self._row_size + ALIGN_BYTES // dp.spec.grad_dtype.itemsize
        self._grads: torch.Tensor | None = None  # [ranks, block], unreduced
        self._present = False
        self._travelling: torch.Tensor | None = None  # [block], after the shard stage
        self.free()

    def transfers(self, lanes: Lanes) -> Iterator[Transfer]:
        """As ``OwnedPack.transfers``."""
        if lanes.unshard.size > 1:
            yield lanes.unshard.plan(self.weight_bytes)
        if self.trainable:
            if lanes.reduce.size > 1:
                yield lanes.reduce.plan(self.grad_bytes)
            if lanes.reduce_replicate is not None:
                yield lanes.reduce_replicate.plan(self.grad_bytes // self.grid.shape[1], passes=2)

    def _piece_of(self, slot: int) -> Piece:
        """The rows that ``slot`` holds: some of its tensor-parallel column's, the same in every replica."""
        dp, (replicas, ranks, columns) = self.params[0], self.grid.shape
        _, shard, column = self.grid.coordinate_of(slot)
        shape = local_shape(dp.shape, dp.tp_dim, column, columns)
        start, rows = chunk_bounds(shape[0], ranks)[shard]
        piece = Piece(dp, start, start + rows, slot, self.grid.ranks[slot], slot == self.grid.slot)
        piece.shape = (rows, *shape[1:])
        piece.copies = replicas * (columns if dp.tp_dim is None else 1)
        return piece

    # ---------------------------------------------------------------- weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed compute buffer."""
        return self._packed.numel() * self._packed.element_size()

    def allocate_masters(self) -> None:
        """As ``OwnedPack.allocate_masters``."""
        (piece,) = self.pieces
        if piece.master is None:
            same = piece.spec.master_dtype == piece.spec.param_dtype
            own = self._source[: piece.numel].view(piece.shape)
            piece.master = own if same else torch.empty(piece.shape, dtype=piece.spec.master_dtype, device=self.device)
            piece.compute_weight = None if same else own

    @torch.no_grad()
    def publish(self, lanes: Lanes, refresh: bool) -> None:
        """As ``OwnedPack.publish``; not collective."""
        if refresh:
            self.pieces[0].refresh_compute_weight()

    def wait_publish(self, lanes: Lanes) -> None:
        """Nothing is ever in flight."""

    def launch_unshard(self, lanes: Lanes) -> Pending:
        """Collective. All-gather the rows."""
        self._packed.untyped_storage().resize_(self.weight_bytes)
        if lanes.unshard.size == 1:
            self._packed.copy_(self._source)
            return Pending([])
        return lanes.unshard.all_gather(self._packed, self._source)

    def install(self) -> None:
        self.params[0].show(self.views[0])

    def conceal(self) -> None:
        self.params[0].show(self._placeholder)

    def free(self) -> None:
        self._packed.untyped_storage().resize_(0)

    # ---------------------------------------------------------------- gradients

    @property
    def grad_bytes(self) -> int:
        """Bytes of the packed gradient buffer."""
        size = self.grid.shape[1] * self._block
        return size * self.params[0].spec.grad_dtype.itemsize if self.trainable else 0

    def add_gradient(self, dp: DedicatedParam) -> None:
        """As ``OwnedPack.add_gradient``."""
        grad = dp.take_gradient().reshape(dp.local_shape[0], self._row_size)
        buffer = self._packed_gradients()
        for block, rows in zip(buffer, grad.split(self._max_rows), strict=False):  # no block for ranks without rows
            accumulate(block[: rows.numel()].view(rows.shape), rows, add=self._present)
        self._present = True

    def _packed_gradients(self) -> torch.Tensor:
        if self._grads is None:
            shape, dtype = (self.grid.shape[1], self._block), self.params[0].spec.grad_dtype
            self._grads = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._grads

    def launch_reduce(self, lanes: Lanes) -> tuple[Pending, torch.Tensor]:
        """Collective. Reduce-scatter the rows; a rank without a gradient sends zeros."""
        grads = self._packed_gradients()
        grads[:, -1] = 1.0 if self._present else 0.0
        self._grads, self._present = None, False
        if lanes.reduce.size == 1:
            return Pending([], [grads]), grads[0]
        output = torch.empty_like(grads[0])
        return lanes.reduce.reduce_scatter(output, grads.view(-1)), output

    def finish_shard_stage(self, lanes: Lanes, pending: Pending, own: torch.Tensor) -> None:
        """As ``OwnedPack.finish_shard_stage``."""
        pending.wait()
        if (factor := self._divide_factor()) != 1.0:
            own.div_(factor)
        if self._travelling is None:
            self._travelling = own
            if not lanes.staged:
                self._deliver(own)
        else:
            self._travelling.add_(own)

    def _deliver(self, own: torch.Tensor) -> None:
        (piece,) = self.pieces
        piece.accumulate(own[: piece.numel].view(piece.shape), own[-1])

    def launch_replicate_stage(self, lanes: Lanes) -> Pending:
        """Collective. Sum over replicas, on all of them."""
        if lanes.reduce_replicate is None or self._travelling is None:
            return Pending([])
        return lanes.reduce_replicate.launch_all_reduce(self._travelling)

    def finish_stages(self, lanes: Lanes, pending: Pending) -> None:
        """Wait for the replicate stage and add the result to the gradient."""
        pending.wait()
        if self._travelling is not None:
            self._deliver(self._travelling)
        self._travelling = None

    def drop_gradients(self) -> None:
        """As ``OwnedPack.drop_gradients``."""
        self._grads, self._present, self._travelling = None, False, None
        for piece in self.pieces:
            piece.drop_gradient()
