"""The dedicated parameters of one hook boundary: their buffers, and the collectives that fill and empty them.

A unit knows how to bring its weights here, to show and hide them, to reduce its gradients to the owners and to publish
the owners' new weights. A unit does not know when: ``schedule.py`` decides that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import record_function

from ..transport.grid import Grid
from ..transport.lane import Lanes, Pending
from .pack import Cell, Pack, gather_gradients, gradient_view, publish_to_columns, typed
from .param import DedicatedParam, Piece

Accumulate = Callable[[torch.Tensor, torch.Tensor], None]


class Weights(enum.Enum):
    """Where the full weights of a unit are."""

    ABSENT = "absent"  # only their sources have them
    IN_FLIGHT = "in flight"  # broadcasts are launched
    HIDDEN = "hidden"  # here, while the parameters show placeholders (Z2 between passes)
    SHOWN = "shown"  # the parameters show them


class Stage(enum.Enum):
    """Which sum of a reduction is under way."""

    SHARD = "shard"  # over the shard group, onto the sources
    REPLICATE = "replicate"  # over the replicas, onto the owners' replica


@dataclass(eq=False)
class Reduction:
    """The gradients of one unit from one backward pass, on their way to the owners.

    Attributes:
        pending: the collective that is under way; it keeps the buffers alive that it reads.
        segments: this rank's sums after the shard stage, one for each range that this rank is the source of.
        goes_on: whether the replicate stage follows the shard stage, or is left to a later backward pass.
    """

    unit: Unit
    pending: Pending
    segments: list[torch.Tensor]
    goes_on: bool
    stage: Stage = Stage.SHARD


class Unit:
    """One hook boundary.

    Args:
        name: canonical name of the boundary module; empty for the root.
        module: the boundary.
        params: its dedicated parameters.
        grid, lanes: the ranks, and where the unit's collectives run.
        pinned: other boundaries lie inside this one, so its weights stay from its forward to the end of backward.
        casts: dtypes to which floating inputs and outputs of the boundary are cast; ``None`` leaves them.
        copy, add: write a gradient into a packed buffer of another dtype, or add the gradient to it.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        params: Sequence[DedicatedParam],
        grid: Grid,
        lanes: Lanes,
        pinned: bool,
        casts: tuple[torch.dtype | None, torch.dtype | None],
        copy: Accumulate,
        add: Accumulate,
    ) -> None:
        self.name = name
        self.module = module
        self.grid = grid
        self.lanes = lanes
        self.pinned = pinned
        self.input_dtype, self.output_dtype = casts
        self.pack = Pack(params, grid)
        self.params, self.trainable, self.owned = self.pack.params, self.pack.trainable, self.pack.owned
        self.weights = Weights.ABSENT
        self.active_calls = 0  # forward calls of the boundary that have begun and not ended
        self._copy, self._add = copy, add
        self._build_weights()
        self._build_gradients()

    def __str__(self) -> str:
        return self.name or "<root>"

    # ---------------------------------------------------------------- weights

    def _build_weights(self) -> None:
        pack, device = self.pack, self.grid.device
        self._unsharding, self._publishing = Pending(), Pending()
        self._always_here = self.grid.shape[1] == 1  # this rank is the source of everything: nothing is ever fetched
        self._own = torch.empty(pack.own_bytes, dtype=torch.uint8, device=device)
        self._packed = self._own
        if not self._always_here:
            self._packed = torch.empty(pack.weights.size, dtype=torch.uint8, device=device)
        self.views, self._placeholders = [], []
        for dp in self.params:
            start, dtype = pack.weights.start[dp.pieces[0]], dp.spec.param_dtype
            self.views.append(typed(self._packed, start, dtype, dp.local_shape))
            # NaN of the true shape, one element of memory.
            nan = torch.full((), torch.nan, dtype=dtype, device=device)
            self._placeholders.append(nan.expand(dp.local_shape))
        self._give_back()

    def _own_view(self, piece: Piece) -> torch.Tensor:
        """This column's part of the compute weight [local shape, param_dtype] of a piece that this rank is the source
        of."""
        shape = piece.local_shape(self.grid.coordinate[2])
        return typed(self._own, self.pack.own_start(piece), piece.spec.param_dtype, shape)

    def allocate_masters(self) -> None:
        """Give every owned piece its master, uninitialised. A master in ``param_dtype`` that tensor parallelism leaves
        whole is itself what forward broadcasts: nothing is stored twice."""
        for piece in self.owned:
            if piece.master is None:
                dtype = piece.spec.master_dtype
                if dtype == piece.spec.param_dtype and piece.dp.tp_dim is None:
                    piece.master = self._own_view(piece)
                else:
                    piece.master = torch.empty(piece.shape, dtype=dtype, device=self.grid.device)
                    piece.compute_weight = self._own_view(piece) if self.grid.shape[2] == 1 else None

    @torch.no_grad()
    def publish(self) -> None:
        """Collective with replicas or tensor parallelism. Bring the sources of all replicas and columns up to date with
        the owners' weights, asynchronously; the next unshard waits for it."""
        if not self.lanes.staged:
            return
        self._publishing.wait()
        with record_function(f"dmuon/publish {self}"), self.lanes.side_stream("publish"):
            if self.lanes.publish_tp is not None:
                publish_to_columns(self.pack, self.lanes.publish_tp, self._own_view)
            if self.lanes.publish_replicate is not None:
                segments = [(self._own[begin:end], replica) for (begin, end), replica in self.pack.publish_segments]
                self._publishing = self.lanes.publish_replicate.broadcast(segments)

    def wait_publish(self) -> None:
        """The current stream may read the compute weights that this rank is the source of."""
        self._publishing.wait()
        self.lanes.join("publish")

    def unshard(self) -> None:
        """Collective unless the weights are here already, which all ranks agree on. Every source broadcasts its ranges
        of the packed buffer, asynchronously."""
        if self.weights is not Weights.ABSENT:
            return
        with record_function(f"dmuon/unshard {self}"):
            self.wait_publish()
            if not self._always_here:
                self._packed.untyped_storage().resize_(self._packed.numel())
                segments = [(self._packed[begin:end], shard) for (begin, end), shard in self.pack.weight_segments]
                own = [self._own[start : start + end - begin] for begin, end, start in self.pack.own_weights]
                self._unsharding = self.lanes.unshard.broadcast(segments, own)
        self.weights = Weights.IN_FLIGHT

    def show(self) -> None:
        """Wait for the weights and let the parameters show them."""
        assert self.weights is not Weights.ABSENT, f"{self}: shown before it was unsharded"
        if self.weights is not Weights.SHOWN:
            self._unsharding.wait()
            for dp, view in zip(self.params, self.views, strict=True):
                dp.show(view)
            self.weights = Weights.SHOWN

    def hide(self) -> None:
        """Let the parameters show placeholders; the packed buffer stays."""
        if self.weights is Weights.ABSENT:
            return
        self._unsharding.wait()
        if self.weights is Weights.SHOWN:
            self.show_placeholders()
        self.weights = Weights.HIDDEN

    def show_placeholders(self) -> None:
        for dp, nan in zip(self.params, self._placeholders, strict=True):
            dp.show(nan)

    def reshard(self) -> None:
        """Hide the weights and give their memory back."""
        self.hide()
        if self.weights is Weights.HIDDEN:
            self._give_back()
            self.weights = Weights.ABSENT

    def _give_back(self) -> None:
        """Tensors that autograd has saved keep pointing at the same storage, which the next unshard fills again before
        backward reads them."""
        if not self._always_here:
            self._packed.untyped_storage().resize_(0)

    # ---------------------------------------------------------------- gradients

    def _build_gradients(self) -> None:
        self._grad_dtype = self.trainable[0].spec.grad_dtype if self.trainable else torch.float32
        counts = list(self.pack.gradients.count.values())
        self._counts = torch.tensor(counts, dtype=torch.int64, device=self.grid.device)
        self._gradients: torch.Tensor | None = None  # this rank's own, packed
        self._present: set[DedicatedParam] = set()  # parameters that have a gradient in there
        # This rank's segments after the shard stage, summed over the backward passes since they last went on.
        self.held: list[torch.Tensor] | None = None
        self.expect_gradients()

    def expect_gradients(self, each_once: bool = True) -> None:
        """A backward pass may begin: no parameter has its gradient yet.

        Args:
            each_once: autograd gives each parameter its gradient in one piece. False for a unit that ran several times
                and may have checkpoints inside, each with a backward pass of its own: only
                :meth:`expect_no_more_gradients` tells when such gradients are complete.
        """
        self._awaited = set(self.trainable)
        self._more_may_come = not each_once
        self.reduce_launched = False  # in the backward pass that is running

    def expect_no_more_gradients(self) -> None:
        """Zeros stand in for the gradients that have not come in this backward pass."""
        self._awaited, self._more_may_come = set(), False

    @property
    def gradients_complete(self) -> bool:
        return not self._awaited and not self._more_may_come

    def pack_gradient(self, dp: DedicatedParam) -> None:
        """Move the gradient that autograd has just put on ``dp.param`` into the packed buffer."""
        if self.reduce_launched:
            raise RuntimeError(
                f"{dp.fqn}: a gradient arrived after unit {str(self)!r} was reduced in the same backward "
                "pass: its weight was used where no forward call of the unit could be seen. Choose a boundary module "
                "that is always called (hook_boundary_predicate)"
            )
        grad, buffer = dp.take_gradient(), self._gradient_buffer()
        parts = [grad]
        if len(dp.pieces) > 1:
            parts = grad.split([piece.local_shape(self.grid.coordinate[2])[0] for piece in dp.pieces])
        write = self._add if dp in self._present else self._copy
        for piece, part in zip(dp.pieces, parts, strict=True):
            write(self._gradient_view(buffer, piece)[0], part)
        self._present.add(dp)
        self._awaited.discard(dp)

    def _gradient_buffer(self) -> torch.Tensor:
        if self._gradients is None:
            self._gradients = torch.empty(self.pack.gradients.size, dtype=self._grad_dtype, device=self.grid.device)
        return self._gradients

    def _gradient_view(self, buffer: torch.Tensor, piece: Piece, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient [local shape], its 0-D count) in a buffer that begins at place ``begin`` of the packed one."""
        return gradient_view(buffer, self.pack.gradients, piece, self.grid.coordinate[2], begin)

    def launch_reduce(self, goes_on: bool) -> Reduction:
        """Collective. Begin to sum the packed gradients onto their sources."""
        self.reduce_launched = True
        with record_function(f"dmuon/reduce {self}"):
            grads = self._gradient_buffer()
            grads.index_fill_(0, self._counts, 1.0)
            for dp in self.trainable:
                if dp not in self._present:
                    for piece in dp.pieces:
                        for part in self._gradient_view(grads, piece):
                            part.zero_()
            self._gradients, self._present = None, set()
            segments = [(grads[begin:end], shard) for (begin, end), shard in self.pack.gradient_segments]
            own = [segment for segment, shard in segments if shard == self.grid.coordinate[1]]
            if not self._always_here:  # the sums outlive the packed buffer
                own = [torch.empty_like(segment) for segment in own]
            return Reduction(self, self.lanes.reduce.reduce(segments, own), own, goes_on)

    def finish_shard_stage(self, reduction: Reduction, divide_factor: float) -> None:
        """Wait for the sums over the shard group, divide them, and add them to those of earlier backward passes."""
        reduction.pending.wait()
        if divide_factor != 1.0:
            for segment in reduction.segments:
                segment.div_(divide_factor)
        if self.held is not None:
            for total, segment in zip(self.held, reduction.segments, strict=True):
                total.add_(segment)
        else:
            self.held = reduction.segments
            if not self.lanes.staged:  # the owners' gradients are views of these sums, and later ones add to them
                for cell in self.pack.own_cells:
                    self._deliver(cell, self._held_part(cell))
        if not self.lanes.staged:
            self._note_arrival()

    def launch_replicate_stage(self) -> Pending:
        """Collective with replicas. Begin to sum the sources' gradients onto the owners' replica."""
        if self.lanes.reduce_replicate is None:
            return Pending()
        with record_function(f"dmuon/reduce to replica {self}"):
            spans = self.pack.replicate_segments
            return self.lanes.reduce_replicate.reduce((self._held_span(span), replica) for span, replica in spans)

    def finish_replicate_stage(self, pending: Pending) -> None:
        """Collective with tensor parallelism. Wait for the sums over the replicas; the owners receive the columns'
        parts and add the whole to their gradients."""
        pending.wait()
        if self.lanes.reduce_tp is not None:
            gather_gradients(self.pack, self.lanes.reduce_tp, self._held_part, self._grad_dtype)
        else:
            for cell in self.pack.cells_of(0):
                self._deliver(cell, self._held_part(cell).clone())  # or it would keep the other owners' part alive
        self.held = None
        self._note_arrival()

    def _held_part(self, cell: Cell) -> torch.Tensor:
        """The gradients of a cell that this rank is the source of, after the shard stage."""
        return self._held_span(self.pack.gradients.spans[cell])

    def _held_span(self, span: tuple[int, int]) -> torch.Tensor:
        own = [held for held, shard in self.pack.gradient_segments if shard == self.grid.coordinate[1]]
        for (begin, end), segment in zip(own, self.held, strict=True):
            if begin <= span[0] and span[1] <= end:
                return segment[span[0] - begin : span[1] - begin]
        raise AssertionError("this rank is not the source")

    def _deliver(self, cell: Cell, gradients: torch.Tensor) -> None:
        """Give the owner's pieces their gradients, which are views of the cell's."""
        for piece in cell.pieces:
            if piece.spec.trainable:
                piece.accumulate(*self._gradient_view(gradients, piece, self.pack.gradients.spans[cell][0]))

    def _note_arrival(self) -> None:
        """The current stream has written the gradients of the owned pieces, or added to them."""
        if self.grid.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
            for piece in self.owned:
                piece.arrived = arrived

    def drop_gradients(self) -> None:
        """Forget the gradients that are packed, held or delivered."""
        self._gradients, self._present, self.held = None, set(), None
        for piece in self.owned:
            piece.drop_gradient()
        self.expect_gradients()
