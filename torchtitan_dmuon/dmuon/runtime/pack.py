"""Where every piece of a unit lies in the buffers that its collectives carry, and the exchange with tensor-parallel
columns, which have other places than this rank.

The pieces of one unit are packed owner after owner, so that the weights (or gradients) of one owner are one range. A
parameter of several pieces (an expert stack, shared rows) stays in one range of its own, because the forward reads it
as one tensor. Weights are measured in bytes, since their dtypes may differ; gradients in elements of one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..transport.grid import Grid
from ..transport.lane import Lane
from .param import DedicatedParam, Piece

# Parameters begin at multiples of this many bytes: any dtype can be viewed there, loads are wide, and inductor need not
# copy misaligned inputs.
ALIGN_BYTES = 128

Span = tuple[int, int]  # begin and end

REPLICATE, SHARD = 0, 1  # axes of the grid


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Cell:
    """Pieces that follow each other in the buffers and have one owner, who is at ``place`` (replicate, shard, tp)."""

    place: tuple[int, int, int]
    pieces: list[Piece]


@dataclass
class Packing:
    """Places in one buffer.

    Attributes:
        start: of every piece.
        count: of gradients: the place of the element that counts the ranks which had one.
        spans: of every cell.
        size: of the buffer.
    """

    start: dict[Piece, int] = field(default_factory=dict)
    count: dict[Piece, int] = field(default_factory=dict)
    spans: dict[Cell, Span] = field(default_factory=dict)
    size: int = 0


def pack_weights(cells: Iterable[Cell], column: int) -> Packing:
    """Places, in bytes, of the weights that a tensor-parallel column holds. The pieces of one parameter follow each
    other without a gap: the parameter is one view of the buffer."""
    packing, end = Packing(), 0
    before: DedicatedParam | None = None
    for cell in cells:
        for piece in cell.pieces:
            if piece.dp is not before:
                end, before = round_up(end, ALIGN_BYTES), piece.dp
            packing.start[piece] = end
            end += math.prod(piece.local_shape(column)) * piece.spec.param_dtype.itemsize
        packing.spans[cell] = (packing.start[cell.pieces[0]], end)
    packing.size = round_up(end, ALIGN_BYTES)
    return packing


def pack_gradients(cells: Iterable[Cell], column: int, itemsize: int) -> Packing:
    """Places, in elements of ``itemsize`` bytes, of the gradients that a tensor-parallel column holds. Behind the
    gradients of a cell lies one element for each piece, in which the ranks that had a gradient are counted: reduced
    together with the gradients, the counts tell the owner which pieces no rank has used."""
    packing, align = Packing(), ALIGN_BYTES // itemsize
    end = 0
    for cell in cells:
        begin, trainable = end, [piece for piece in cell.pieces if piece.spec.trainable]
        for piece in trainable:
            packing.start[piece] = end
            end = round_up(end + math.prod(piece.local_shape(column)), align)
        packing.count |= {piece: end + index for index, piece in enumerate(trainable)}
        end = round_up(end + len(trainable), align)
        packing.spans[cell] = (begin, end)
    packing.size = end
    return packing


def typed(buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View of the bytes of ``buffer`` from ``start`` on as a tensor."""
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def gradient_view(
    buffer: torch.Tensor, packing: Packing, piece: Piece, column: int, begin: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of (gradient [local shape of the column], its 0-D count) in a buffer that holds the places of ``packing``
    from ``begin`` on."""
    shape, start = piece.local_shape(column), packing.start[piece] - begin
    return buffer[start : start + math.prod(shape)].view(shape), buffer[packing.count[piece] - begin]


class Pack:
    """The parameters of one unit as this rank packs them.

    Attributes:
        params: in the order of the buffers; those of several pieces come last.
        cells: all of them; ``own_cells`` those whose source is this rank's shard.
        weights, gradients: places in this column's packed buffers.
        weight_segments, gradient_segments: ranges of these, each with the shard it comes from, or goes to.
        own_weights: (begin, end) in the packed weights and begin in the source's own buffer of ``own_bytes`` bytes, for
            every range that this rank is the source of.
        publish_segments: ranges of that buffer, each with the replica it comes from.
        replicate_segments: ranges of the packed gradients that this rank is the source of, each with the replica it
            goes to.
    """

    def __init__(self, params: Sequence[DedicatedParam], grid: Grid) -> None:
        self.grid = grid
        single = [dp for dp in params if len(dp.pieces) == 1]
        single.sort(key=lambda dp: self._order(dp.pieces[0]))
        self.params = [*single, *(dp for dp in params if len(dp.pieces) > 1)]
        self.trainable = [dp for dp in self.params if dp.spec.trainable]
        self.pieces = [piece for dp in self.params for piece in dp.pieces]
        self.owned = [piece for piece in self.pieces if piece.is_owned]
        self.cells: list[Cell] = []
        for piece in self.pieces:
            place = grid.coordinate_of(piece.owner)
            if len(piece.dp.pieces) == 1 and self.cells and self.cells[-1].place == place:
                self.cells[-1].pieces.append(piece)
            else:
                self.cells.append(Cell(place, [piece]))
        self.own_cells = [cell for cell in self.cells if cell.place[SHARD] == grid.coordinate[SHARD]]
        self.grad_itemsize = self.trainable[0].spec.grad_dtype.itemsize if self.trainable else 4
        self.weights = pack_weights(self.cells, grid.coordinate[2])
        self.gradients = pack_gradients(self.cells, grid.coordinate[2], self.grad_itemsize)
        self.weight_segments = self._joined(self.weights.spans, SHARD)
        self.gradient_segments = self._joined(self.gradients.spans, SHARD)
        self.own_weights, self.own_bytes = [], 0
        for (begin, end), shard in self.weight_segments:
            if shard == grid.coordinate[SHARD]:
                self.own_weights.append((begin, end, self.own_bytes))
                self.own_bytes = round_up(self.own_bytes + end - begin, ALIGN_BYTES)
        self.publish_segments = self._joined({cell: self._own_span(cell) for cell in self.own_cells}, REPLICATE)
        gradients = {cell: self.gradients.spans[cell] for cell in self.own_cells}
        self.replicate_segments = self._joined(gradients, REPLICATE)

    def _order(self, piece: Piece) -> tuple[int, int, int]:
        replicate, shard, tp = self.grid.coordinate_of(piece.owner)
        return shard, replicate, tp

    def cells_of(self, column: int) -> list[Cell]:
        """The cells whose source is this rank's shard and whose owner is in this replica and in ``column``."""
        return [cell for cell in self.own_cells if cell.place == (*self.grid.coordinate[:2], column)]

    def _joined(self, spans: Mapping[Cell, Span], axis: int) -> list[tuple[Span, int]]:
        """The spans with their cells' places along ``axis``. Spans of neighbouring cells with one place are joined,
        together with the gap of alignment between them."""
        joined: list[tuple[Span, int]] = []
        before: int | None = None
        for cell in self.cells:
            here = cell.place[axis] if cell in spans else None
            if here is not None and here == before:
                joined[-1] = ((joined[-1][0][0], spans[cell][1]), here)
            elif here is not None:
                joined.append((spans[cell], here))
            before = here
        return joined

    def own_start(self, piece: Piece) -> int:
        """Where a piece that this rank is the source of begins in the source's own buffer."""
        start = self.weights.start[piece]
        return next(own + start - begin for begin, end, own in self.own_weights if begin <= start <= end)

    def _own_span(self, cell: Cell) -> Span:
        begin, end = self.weights.spans[cell]
        start = self.own_start(cell.pieces[0])
        return start, start + end - begin


# -------------------------------------------------------------------- between an owner and tensor-parallel columns


def publish_to_columns(pack: Pack, lane: Lane, own_view: Callable[[Piece], torch.Tensor]) -> None:
    """Collective. Every owner sends each column of its replica the column's part of its weights, in ``param_dtype``,
    which the column writes into ``own_view(piece)``."""
    device, (_, _, column), columns = pack.grid.device, pack.grid.coordinate, range(pack.grid.shape[2])
    sent, sent_sizes = [], []
    for target in columns:
        packing = pack_weights(pack.cells_of(column), target)
        buffer = torch.empty(packing.size, dtype=torch.uint8, device=device)
        for piece, start in packing.start.items():
            part = piece.local_part(piece.master, target)
            typed(buffer, start, piece.spec.param_dtype, part.shape).copy_(part)
        sent.append(buffer)
        sent_sizes.append(packing.size)
    received = [pack_weights(pack.cells_of(owner), column) for owner in columns]
    sizes = [packing.size for packing in received]
    output = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    lane.exchange(output, sizes, torch.cat(sent), sent_sizes).wait()
    for part, packing in zip(output.split(sizes), received, strict=True):
        for piece, start in packing.start.items():
            view = own_view(piece)
            view.copy_(typed(part, start, piece.spec.param_dtype, view.shape))


def gather_gradients(pack: Pack, lane: Lane, held_part: Callable[[Cell], torch.Tensor], dtype: torch.dtype) -> None:
    """Collective. Every column sends each owner of its replica the column's part of the owner's gradients, which are
    ``held_part(cell)`` in the order of :func:`pack_gradients`; the owners add the whole to their gradients."""
    device, (_, _, column), columns = pack.grid.device, pack.grid.coordinate, range(pack.grid.shape[2])
    sent, sent_sizes = [], []
    for target in columns:
        parts = [held_part(cell) for cell in pack.cells_of(target)]
        sent += parts
        sent_sizes.append(sum(part.numel() for part in parts))
    mine = pack.cells_of(column)
    received = [pack_gradients(mine, source, dtype.itemsize) for source in columns]
    sizes = [packing.size for packing in received]
    output = torch.empty(sum(sizes), dtype=dtype, device=device)
    lane.exchange(output, sizes, torch.cat(sent) if sent else output.new_empty(0), sent_sizes).wait()
    parts = output.split(sizes)
    for piece in (piece for cell in mine for piece in cell.pieces if piece.spec.trainable):
        whole = torch.empty(piece.shape, dtype=dtype, device=device)
        count = torch.zeros((), dtype=dtype, device=device)
        # Every column has the same gradient of a parameter that tensor parallelism does not cut.
        for source in columns if piece.dp.tp_dim is not None else [column]:
            gradient, seen = gradient_view(parts[source], received[source], piece, source)
            piece.local_part(whole, source).copy_(gradient)
            count += seen
        piece.accumulate(whole, count)
