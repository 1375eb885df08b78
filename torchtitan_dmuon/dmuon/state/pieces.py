"""A tensor of which this rank holds parts, or none, in the form ``torch.distributed.checkpoint`` saves and loads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..runtime.param import Piece


def logical_tensors(tensors: dict[Piece, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By parameter name: the tensor of a whole piece, ``Chunks`` where this rank has a part. A state needs not have the
    shape of its piece: a dimension as long as the piece's is cut like it, any other is whole, and a scalar (a step
    count) is one for all parts."""
    parts: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for piece, tensor in tensors.items():
        parts[piece.fqn].append((piece, tensor))
    logical = {}
    for fqn, found in parts.items():
        piece, tensor = found[0]
        if piece.is_whole or not tensor.ndim:
            logical[fqn] = tensor
        else:
            whole = [
                full if own == cut else own
                for own, cut, full in zip(tensor.shape, piece.shape, piece.dp.shape, strict=False)
            ]
            whole += tensor.shape[len(whole) :]
            logical[fqn] = Chunks.of(tuple(whole), [(part, _offset(p, part)) for p, part in found])
    return logical


def _offset(piece: Piece, tensor: torch.Tensor) -> tuple[int, ...]:
    """Where a piece's tensor begins in that of its parameter."""
    begin = [piece.start] + [0] * (len(piece.shape) - 1)
    offset = [first if own == cut else 0 for own, cut, first in zip(tensor.shape, piece.shape, begin, strict=False)]
    return tuple(offset + [0] * (tensor.ndim - len(offset)))


class Chunks(torch.Tensor):
    """Parts of a larger tensor, each at its offset, in the form DCP asks a tensor for (as DTensor does, but for parts
    of any size). It has the size of the whole and shares memory with the parts."""

    _whole: tuple[int, ...]
    _parts: list[tuple[torch.Tensor, tuple[int, ...]]]

    @staticmethod
    def of(whole: tuple[int, ...], parts: list[tuple[torch.Tensor, tuple[int, ...]]]) -> Chunks | None:
        """``None`` when there are no parts."""
        if not parts:
            return None
        chunks = torch.Tensor._make_subclass(Chunks, parts[0][0].detach())
        chunks._whole, chunks._parts = tuple(whole), parts
        return chunks

    @staticmethod
    def absent(whole: tuple[int, ...], dtype: torch.dtype) -> Chunks:
        """A tensor of which other ranks hold all parts."""
        chunks = torch.Tensor._make_subclass(Chunks, torch.empty(0, dtype=dtype))
        chunks._whole, chunks._parts = tuple(whole), []
        return chunks

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Chunks:
        return _rebuild(self._whole, [(change(part), offset) for part, offset in self._parts], self.dtype)

    def __deepcopy__(self, memo: dict) -> Chunks:
        return self._map(lambda part: part.detach().clone())

    def clone(self, *args: Any, **kwargs: Any) -> Chunks:
        return self._map(lambda part: part.clone(*args, **kwargs))

    def detach(self) -> Chunks:
        return self._map(torch.Tensor.detach)

    def cpu(self, *args: Any, **kwargs: Any) -> Chunks:
        return self._map(lambda part: part.cpu(*args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> Chunks:
        return self._map(lambda part: part.to(*args, **kwargs))

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _rebuild, (self._whole, self._parts, self.dtype)

    def __repr__(self) -> str:
        parts = ", ".join(f"{list(part.shape)} at {list(offset)}" for part, offset in self._parts)
        return f"Chunks(of {list(self._whole)}: {parts or 'no part on this rank'})"

    def size(self, dim: int | None = None) -> torch.Size | int:
        return torch.Size(self._whole) if dim is None else self._whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(part.shape))
            for part, offset in self._parts
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self._whole)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for part, offset in self._parts if torch.Size(offset) == index.offset)


def _rebuild(whole: tuple[int, ...], parts: list[tuple[torch.Tensor, tuple[int, ...]]], dtype: torch.dtype) -> Chunks:
    return Chunks.of(whole, parts) if parts else Chunks.absent(whole, dtype)


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether this rank holds no part of it, only its name and size."""
    return isinstance(tensor, Chunks) and not tensor._parts


def parts_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[torch.Tensor, tuple[int, ...]]]]:
    """(size of the whole, the live parts of it that this rank holds, each with its offset) of any tensor of these
    state dicts. A rank whose DTensor shard is empty has no part."""
    if isinstance(tensor, Chunks):
        return tensor._whole, tensor._parts
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        (chunk,) = tensor.__create_chunk_list__()  # knows FSDP2's strided shards under tensor parallelism
        return tuple(tensor.shape), [(local, tuple(chunk.offsets))] if local.numel() else []
    return tuple(tensor.shape), [(tensor, (0,) * tensor.ndim)]
