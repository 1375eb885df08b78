"""Packs of parameters with one owner per piece.

``OwnedPack`` holds the owned parameters of one unit: the packed compute buffer the forward reads, this rank's source
weights, the owner's masters, and gradients on their way to the owner. It launches collectives when it is told to;
when that happens is the unit's and the schedule's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..transport.grid import Grid, Lanes
from ..transport.lane import Pending, Transfer
from ..transport.tensor_parallel import local_part, local_shape
from .param import ALIGN_BYTES, DedicatedParam, Piece, accumulate, placeholder, round_up


@dataclass
class _Cell:
    """Consecutive pieces of the packed buffers with one owner; ``place`` is its (replicate, shard, tp) coordinate."""

    place: tuple[int, int, int]
    pieces: list[Piece]
    weights: tuple[int, int] = (0, 0)  # bytes of the packed weights
    grads: tuple[int, int] = (0, 0)  # elements of the packed gradients


class OwnedPack:
    """The owned parameters of one unit, packed owner after owner.

    Args:
        params: in model order; those of several pieces come last, each contiguous.
        grid: the grid.
        divide_factor: called at reduction time; the summed gradient is divided by it.
    """

    def __init__(self, params: Sequence[DedicatedParam], grid: Grid, divide_factor: Callable[[], float]) -> None:
        self.grid = grid
        self.device = grid.device
        self._divide_factor = divide_factor
        single = sorted((dp for dp in params if len(dp.pieces) == 1), key=lambda dp: self._cell_order(dp.pieces[0]))
        several = [dp for dp in params if len(dp.pieces) > 1]
        self.params = [*single, *several]
        self.pieces = [piece for dp in self.params for piece in dp.pieces]
        self.trainable = [dp for dp in self.params if dp.spec.trainable]
        self.always_unsharded = grid.shape[1] == 1
        self._cells: list[_Cell] = []
        for dp in self.params:
            for piece in dp.pieces:
                place = grid.coordinate_of(piece.owner)
                joins = len(dp.pieces) == 1 and self._cells and self._cells[-1].place == place
                if joins:
                    self._cells[-1].pieces.append(piece)
                else:
                    self._cells.append(_Cell(place, [piece]))
        self._own_cells = [cell for cell in self._cells if cell.place[1] == grid.coordinate[1]]
        self._publishing = Pending([])
        self._layout_weights()
        self._layout_gradients()

    def _cell_order(self, piece: Piece) -> tuple[int, int, int]:
        replicate, shard, tp = self.grid.coordinate_of(piece.owner)
        return shard, replicate, tp

    def _local_shape(self, piece: Piece, column: int) -> tuple[int, ...]:
        return local_shape(piece.shape, piece.dp.tp_dim, column, self.grid.shape[2])

    def _cells_of(self, column: int) -> list[_Cell]:
        """The cells whose source is this rank's shard and whose owner is in this replica and in ``column``."""
        owner = (*self.grid.coordinate[:2], column)
        return [cell for cell in self._own_cells if cell.place == owner]

    def transfers(self, lanes: Lanes) -> Iterator[Transfer]:
        """What this rank launches to unshard once, to reduce once through all stages, and to publish once."""
        itemsize = self._grad_dtype.itemsize
        for lane, segments, width in (
            (lanes.unshard, self._weight_segments, 1),
            (lanes.publish_replicate, self._publish_segments(), 1),
            (lanes.reduce, self._grad_segments, itemsize),
            (lanes.reduce_replicate, self._replicate_segments(), itemsize),
        ):
            if lane is not None and lane.size > 1:
                yield from (lane.plan((end - begin) * width) for (begin, end), _ in segments if end > begin)
        columns, column = range(self.grid.shape[2]), self.grid.coordinate[2]
        if lanes.publish_tp is not None:
            mine = self._cells_of(column)
            yield lanes.publish_tp.plan_exchange([self._column_layout(mine, target)[1] for target in columns])
        if lanes.reduce_tp is not None and self.trainable:
            sizes = [sum(cell.grads[1] - cell.grads[0] for cell in self._cells_of(target)) for target in columns]
            yield lanes.reduce_tp.plan_exchange([size * itemsize for size in sizes])

    # ---------------------------------------------------------------- weights

    def _layout_weights(self) -> None:
        self._weight_offset: dict[Piece, int] = {}
        column, end = self.grid.coordinate[2], 0
        for cell in self._cells:
            end = self._place_weights(cell.pieces, column, end, self._weight_offset)
            cell.weights = (self._weight_offset[cell.pieces[0]], end)
        self._weight_end = round_up(end, ALIGN_BYTES)
        self._weight_segments = _merge((cell.weights, cell.place[1]) for cell in self._cells)
        # Source weights: this rank's segments, one after the other.
        self._own_ranges, size = [], 0
        for (begin, end), shard in self._weight_segments:
            if shard == self.grid.coordinate[1]:
                self._own_ranges.append((begin, end, size))
                size = round_up(size + end - begin, ALIGN_BYTES)
        self._source = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._packed = self._source
        if not self.always_unsharded:
            self._packed = torch.empty(self._weight_end, dtype=torch.uint8, device=self.device)
        self.views = [
            _typed(self._packed, self._weight_offset[dp.pieces[0]], dp.spec.param_dtype, dp.local_shape)
            for dp in self.params
        ]
        self._placeholders = [placeholder(dp.local_shape, dp.spec.param_dtype, self.device) for dp in self.params]
        self.free()

    def _place_weights(self, pieces: Iterable[Piece], column: int, begin: int, offsets: dict[Piece, int]) -> int:
        """Lay out the local weights of ``column``; returns the end. Pieces of one parameter follow each other without a
        gap, so that the parameter is one view of the buffer."""
        end = begin
        for piece in pieces:
            if piece is piece.dp.pieces[0]:
                end = round_up(end, ALIGN_BYTES)
            offsets[piece] = end
            end += math.prod(self._local_shape(piece, column)) * piece.spec.param_dtype.itemsize
        return end

    def _source_offset(self, packed_offset: int) -> int:
        for begin, end, source in self._own_ranges:
            if begin <= packed_offset <= end:
                return packed_offset - begin + source
        raise AssertionError("not a source of this rank")

    def _source_view(self, piece: Piece) -> torch.Tensor:
        """This column's part of the source weight of ``piece``, [local shape, param_dtype]."""
        offset = self._source_offset(self._weight_offset[piece])
        return _typed(self._source, offset, piece.spec.param_dtype, self._local_shape(piece, piece.dp.tp_column))

    @property
    def weight_bytes(self) -> int:
        """Bytes broadcast to fill the packed compute buffer."""
        return sum(end - begin for (begin, end), _ in self._weight_segments)

    @property
    def owned(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.is_owned]

    def allocate_masters(self) -> None:
        """Give every owned piece its (uninitialised) master. A master in the compute dtype that no tensor parallelism
        splits is the source weight itself, so nothing is stored twice."""
        for piece in self.owned:
            if piece.master is None:
                dtype = piece.spec.master_dtype
                if dtype == piece.spec.param_dtype and piece.dp.tp_dim is None:
                    piece.master = self._source_view(piece)
                else:
                    piece.master = torch.empty(piece.shape, dtype=dtype, device=self.device)
                    piece.compute_weight = self._source_view(piece) if self.grid.shape[2] == 1 else None

    @torch.no_grad()
    def publish(self, lanes: Lanes, refresh: bool) -> None:
        """Collective with more than one stage. Bring the source weights of every replica and column up to date with
        the owners' masters, asynchronously; ``launch_unshard`` waits for it.

        Args:
            refresh: the owners' own source weights are not up to date yet.
        """
        self._publishing.wait()
        with lanes.side_stream("publish"):
            if lanes.publish_tp is None:
                for piece in self.owned if refresh else ():
                    piece.refresh_compute_weight()
            else:
                self._publish_columns(lanes)
            if lanes.publish_replicate is not None:
                self._publishing = lanes.publish_replicate.broadcast(
                    (self._source[begin:end], source) for (begin, end), source in self._publish_segments()
                )

    def _publish_segments(self) -> list[tuple[tuple[int, int], int]]:
        """Ranges of the source weights, each with the replica it comes from."""
        return _merge((self._source_range(cell), cell.place[0]) for cell in self._own_cells)

    def _source_range(self, cell: _Cell) -> tuple[int, int]:
        begin = self._source_offset(cell.weights[0])
        return begin, begin + cell.weights[1] - cell.weights[0]

    def _column_layout(self, cells: list[_Cell], column: int) -> tuple[dict[Piece, int], int]:
        """Offsets and size of what the owner of ``cells`` sends to ``column``."""
        offsets: dict[Piece, int] = {}
        end = 0
        for cell in cells:
            end = self._place_weights(cell.pieces, column, round_up(end, ALIGN_BYTES), offsets)
        return offsets, round_up(end, ALIGN_BYTES)

    def _publish_columns(self, lanes: Lanes) -> None:
        """Owner -> its weight's shards on every tensor-parallel column of its replica."""
        column, columns = self.grid.coordinate[2], self.grid.shape[2]
        parts, sent_sizes = [], []
        for target in range(columns):
            offsets, size = self._column_layout(self._cells_of(column), target)
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            for piece, offset in offsets.items():
                shard = local_part(piece.master, piece.dp.tp_dim, target, columns)
                _typed(buffer, offset, piece.spec.param_dtype, shard.shape).copy_(shard)
            parts.append(buffer)
            sent_sizes.append(size)
        layouts, output_sizes = zip(
            *(self._column_layout(self._cells_of(owner), column) for owner in range(columns)), strict=True
        )
        output = torch.empty(sum(output_sizes), dtype=torch.uint8, device=self.device)
        lanes.publish_tp.exchange(output, list(output_sizes), torch.cat(parts), sent_sizes).wait()
        for part, offsets in zip(output.split(output_sizes), layouts, strict=True):
            for piece, offset in offsets.items():
                view = self._source_view(piece)
                view.copy_(_typed(part, offset, piece.spec.param_dtype, view.shape))

    def wait_publish(self, lanes: Lanes) -> None:
        """The source weights may be read on the current stream."""
        self._publishing.wait()
        lanes.join("publish")

    def launch_unshard(self, lanes: Lanes) -> Pending:
        """Collective. Fill the packed buffer: every source broadcasts its segments."""
        self.wait_publish(lanes)
        if self.always_unsharded:
            return Pending([])
        self._packed.untyped_storage().resize_(self._packed.numel())
        return lanes.unshard.broadcast(
            ((self._packed[begin:end], shard) for (begin, end), shard in self._weight_segments),
            [self._source[source : source + end - begin] for begin, end, source in self._own_ranges],
        )

    def install(self) -> None:
        """Let the parameters show their weights."""
        for dp, view in zip(self.params, self.views, strict=True):
            dp.show(view)

    def conceal(self) -> None:
        """Let the parameters show placeholders; the packed buffer stays as it is."""
        for dp, nan in zip(self.params, self._placeholders, strict=True):
            dp.show(nan)

    def free(self) -> None:
        """Give the packed buffer's memory back. Tensors saved for backward keep pointing at the same storage, which
        ``launch_unshard`` fills again before they are read."""
        if not self.always_unsharded:
            self._packed.untyped_storage().resize_(0)

    # ---------------------------------------------------------------- gradients

    def _layout_gradients(self) -> None:
        """Per cell: its trainable gradients, then one element per piece that counts the ranks which had one. Summed
        together with the gradients, the counts tell the owner what was skipped everywhere."""
        self._grad_dtype = self.trainable[0].spec.grad_dtype if self.trainable else torch.float32
        self._align = ALIGN_BYTES // self._grad_dtype.itemsize
        self._grad_offset: dict[Piece, tuple[int, int]] = {}  # of the gradient and of its count
        column, end = self.grid.coordinate[2], 0
        for cell in self._cells:
            begin = end
            end = self._place_gradients(cell.pieces, column, begin, self._grad_offset)
            cell.grads = (begin, end)
        self._grad_segments = _merge((cell.grads, cell.place[1]) for cell in self._cells)
        counts = [count for _, count in self._grad_offset.values()]
        self._counts = torch.tensor(counts, dtype=torch.int64, device=self.device)
        self._grads: torch.Tensor | None = None  # packed, unreduced
        self._present: set[DedicatedParam] = set()
        # This rank's segments after the shard stage, accumulated until they travel on.
        self._source_grads: list[torch.Tensor] | None = None

    def _place_gradients(
        self, pieces: Iterable[Piece], column: int, begin: int, offsets: dict[Piece, tuple[int, int]]
    ) -> int:
        trainable = [piece for piece in pieces if piece.spec.trainable]
        starts, end = [], begin
        for piece in trainable:
            starts.append(end)
            end = round_up(end + math.prod(self._local_shape(piece, column)), self._align)
        for index, (piece, start) in enumerate(zip(trainable, starts, strict=True)):
            offsets[piece] = (start, end + index)
        return round_up(end + len(trainable), self._align)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the packed gradient buffer."""
        return (self._cells[-1].grads[1] if self._cells else 0) * self._grad_dtype.itemsize

    def add_gradient(self, dp: DedicatedParam) -> None:
        """Accumulate the gradient autograd has put on ``dp.param`` into the packed buffer."""
        grad = dp.take_gradient()
        buffer = self._packed_gradients()
        for piece in dp.pieces:
            slot = self._local_gradient(buffer, piece, *self._grad_offset[piece], dp.tp_column)[0]
            part = grad if piece.is_whole else grad[piece.start : piece.stop]
            accumulate(slot, part, add=dp in self._present)
        self._present.add(dp)

    def _packed_gradients(self) -> torch.Tensor:
        if self._grads is None:
            size = self._cells[-1].grads[1]
            self._grads = torch.empty(size, dtype=self._grad_dtype, device=self.device)
        return self._grads

    def _local_gradient(
        self, buffer: torch.Tensor, piece: Piece, start: int, count: int, column: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient [local shape of ``column``], its 0-D count) in a buffer."""
        shape = self._local_shape(piece, column)
        return buffer[start : start + math.prod(shape)].view(shape), buffer[count]

    def launch_reduce(self, lanes: Lanes) -> tuple[Pending, list[torch.Tensor]]:
        """Collective. Sum the packed gradients onto their sources; a parameter without a local gradient sends zeros.
        Returns what ``finish_shard_stage`` needs: this rank's segments, which the packed buffer does not outlive."""
        grads = self._packed_gradients()
        grads.index_fill_(0, self._counts, 1.0)
        for dp in self.trainable:
            if dp not in self._present:
                for piece in dp.pieces:
                    for part in self._local_gradient(grads, piece, *self._grad_offset[piece], dp.tp_column):
                        part.zero_()
        self._grads, self._present = None, set()
        segments = [(grads[begin:end], shard) for (begin, end), shard in self._grad_segments]
        own = [segment for segment, shard in segments if shard == self.grid.coordinate[1]]
        if not self.always_unsharded:
            own = [torch.empty_like(segment) for segment in own]
        return lanes.reduce.reduce(segments, own), own

    def finish_shard_stage(self, lanes: Lanes, pending: Pending, own: list[torch.Tensor]) -> None:
        """Wait for the reduction along the shard dimension and add this rank's segments to what has come before."""
        pending.wait()
        factor = self._divide_factor()
        for segment in own:
            if factor != 1.0:
                segment.div_(factor)
        if self._source_grads is None:
            self._source_grads = own
            if not lanes.staged:
                for cell in self._own_cells:
                    self._deliver(cell, self._in_source(cell.grads))
        else:
            for total, segment in zip(self._source_grads, own, strict=True):
                total.add_(segment)

    def _in_source(self, grads: tuple[int, int]) -> torch.Tensor:
        """The part of the source gradients that has the packed range ``grads``."""
        own = [span for span, shard in self._grad_segments if shard == self.grid.coordinate[1]]
        for (begin, end), segment in zip(own, self._source_grads, strict=True):
            if begin <= grads[0] and grads[1] <= end:
                return segment[grads[0] - begin : grads[1] - begin]
        raise AssertionError("not a source of this rank")

    def _deliver(self, cell: _Cell, segment: torch.Tensor) -> None:
        """Give the owner's pieces their gradients: views of ``segment``, which covers the cell."""
        for piece in cell.pieces:
            if piece.spec.trainable:
                start, count = (offset - cell.grads[0] for offset in self._grad_offset[piece])
                piece.accumulate(*self._local_gradient(segment, piece, start, count, piece.dp.tp_column))

    def launch_replicate_stage(self, lanes: Lanes) -> Pending:
        """Collective. Sum the sources' gradients over replicas onto the owner's replica."""
        if lanes.reduce_replicate is None or self._source_grads is None:
            return Pending([])
        return lanes.reduce_replicate.reduce(
            (self._in_source(span), replica) for span, replica in self._replicate_segments()
        )

    def _replicate_segments(self) -> list[tuple[tuple[int, int], int]]:
        """Ranges of the packed gradients that this rank is the source of, each with the replica it goes to."""
        return _merge((cell.grads, cell.place[0]) for cell in self._own_cells)

    def finish_stages(self, lanes: Lanes, pending: Pending) -> None:
        """Collective with tensor parallelism. Wait for the replicate stage, gather the columns' shards on the owner
        and add the result to its gradient."""
        pending.wait()
        if lanes.reduce_tp is not None:
            self._gather_columns(lanes)
        else:
            for cell in self._cells_of(0):
                self._deliver(cell, self._in_source(cell.grads).clone())
        self._source_grads = None

    def _gather_columns(self, lanes: Lanes) -> None:
        column, columns = self.grid.coordinate[2], self.grid.shape[2]
        sent, sent_sizes = [], []
        for target in range(columns):
            parts = [self._in_source(cell.grads) for cell in self._cells_of(target)]
            sent += parts
            sent_sizes.append(sum(part.numel() for part in parts))
        mine = self._cells_of(column)
        layouts, output_sizes = [], []
        for source in range(columns):
            offsets: dict[Piece, tuple[int, int]] = {}
            end = 0
            for cell in mine:
                end = self._place_gradients(cell.pieces, source, end, offsets)
            layouts.append(offsets)
            output_sizes.append(end)
        output = torch.empty(sum(output_sizes), dtype=self._grad_dtype, device=self.device)
        packed = torch.cat(sent) if sent else output.new_empty(0)
        lanes.reduce_tp.exchange(output, output_sizes, packed, sent_sizes).wait()
        received = output.split(output_sizes)
        for piece in (piece for cell in mine for piece in cell.pieces if piece.spec.trainable):
            full = torch.empty(piece.shape, dtype=self._grad_dtype, device=self.device)
            count = torch.zeros((), dtype=self._grad_dtype, device=self.device)
            for source, (part, offsets) in enumerate(zip(received, layouts, strict=True)):
                if piece.dp.tp_dim is None and source != column:
                    continue  # every column has the same gradient
                shard, seen = self._local_gradient(part, piece, *offsets[piece], source)
                local_part(full, piece.dp.tp_dim, source, columns).copy_(shard)
                count += seen
            piece.accumulate(full, count)

    def drop_gradients(self) -> None:
        """Forget local, travelling and reduced gradients."""
        self._grads, self._present, self._source_grads = None, set(), None
        for piece in self.pieces:
            piece.drop_gradient()


def _typed(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View of the bytes from ``offset`` on as a tensor."""
    return buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _merge(spans: Iterable[tuple[tuple[int, int], int]]) -> list[tuple[tuple[int, int], int]]:
    """Join neighbouring ranges that have the same key; gaps of alignment between them are included."""
    merged: list[tuple[tuple[int, int], int]] = []
    for (begin, end), key in spans:
        if merged and merged[-1][1] == key and begin <= round_up(merged[-1][0][1], ALIGN_BYTES):
            merged[-1] = ((merged[-1][0][0], end), key)
        else:
            merged.append(((begin, end), key))
    return merged
