"""The stage between an owner and the tensor-parallel columns: the owner holds whole matrices, each column its part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..transport.lane import Lane
from .pack import Cell, Pack, gradient_view, pack_gradients, pack_weights, typed
from .param import Piece


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
