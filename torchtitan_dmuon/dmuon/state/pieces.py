"""Tensors of which a rank holds parts, or none, in the form ``torch.distributed.checkpoint`` (DCP) saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..runtime.param import Piece

Size = tuple[int, ...]
Part = tuple[torch.Tensor, Size]  # a part of a larger tensor, and the offset at which it begins


def _on_each_part(method: Callable[..., torch.Tensor]) -> Callable[..., PartialTensor]:
    def mapped(self: PartialTensor, *args: Any, **kwargs: Any) -> PartialTensor:
        return self._map(lambda part: method(part, *args, **kwargs))

    return mapped


class PartialTensor(torch.Tensor):
    """The parts of a larger tensor that this rank holds, in the form DCP asks a tensor for. Unlike a DTensor's shard
    they are any number and of any size. ``size()`` is that of the whole; memory is shared with the parts."""

    _whole: Size
    _parts: list[Part]

    @staticmethod
    def of(whole: Sequence[int], parts: list[Part], dtype: torch.dtype | None = None) -> PartialTensor:
        """Of a whole of size (8, 768, 3072), parts may be [(tensor (2, 768, 3072), its offset (4, 0, 0)), ...]. Where
        other ranks hold all of it, there are no parts, and ``dtype`` must be given."""
        like = parts[0][0].detach() if parts else torch.empty(0, dtype=dtype)
        partial = torch.Tensor._make_subclass(PartialTensor, like)
        partial._whole, partial._parts = tuple(whole), parts
        return partial

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartialTensor:
        return PartialTensor.of(self._whole, [(change(part), offset) for part, offset in self._parts], self.dtype)

    clone, detach = _on_each_part(torch.Tensor.clone), _on_each_part(torch.Tensor.detach)
    cpu, to = _on_each_part(torch.Tensor.cpu), _on_each_part(torch.Tensor.to)

    def __deepcopy__(self, memo: dict) -> PartialTensor:
        return self._map(lambda part: part.detach().clone())

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        raise RuntimeError(
            "a part of a tensor, whose rest other ranks hold, cannot be pickled: save the dict by "
            "torch.distributed.checkpoint (dcp.save), or take whole tensors with full_state_dict=True"
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"{list(part.shape)} at {list(offset)}" for part, offset in self._parts)
        return f"PartialTensor(of {list(self._whole)}: {parts or 'no part on this rank'})"

    def size(self, dim: int | None = None) -> torch.Size | int:
        return torch.Size(self._whole) if dim is None else self._whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(part.shape)) for part, offset in self._parts]

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


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for a whole one of which each rank holds parts."""
    return isinstance(tensor, PartialTensor | DTensor)


def parts_of(tensor: torch.Tensor) -> tuple[Size, list[Part]]:
    """(size of the whole, the live parts that this rank holds) of any tensor of a state dict. A rank whose DTensor
    shard is empty holds no part."""
    if isinstance(tensor, PartialTensor):
        return tensor._whole, tensor._parts
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        (chunk,) = tensor.__create_chunk_list__()  # knows FSDP2's strided shards under tensor parallelism
        return tuple(tensor.shape), [(local, tuple(chunk.offsets))] if local.numel() else []
    return tuple(tensor.shape), [(tensor, (0,) * tensor.ndim)]


def slices_of(offset: Size, size: Sequence[int]) -> tuple[slice, ...]:
    """Where a part lies in the whole: ``whole[slices_of(offset, part.shape)]``."""
    return tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))


def pair_parts(name: str, live: torch.Tensor, saved: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each part of ``live`` with its values in ``saved``, which is a whole tensor or has the same parts. Raises
    ValueError where it is neither."""
    if not isinstance(saved, torch.Tensor):
        raise ValueError(f"{name} is a {type(saved).__name__} in the state dict, expected a tensor")
    (whole, parts), (saved_whole, saved_parts) = parts_of(live), parts_of(saved)
    if saved_whole != whole:
        raise ValueError(f"{name} has shape {list(saved_whole)} in the state dict, here {list(whole)}")
    if not is_partial(saved):
        return [(part, saved[slices_of(offset, part.shape)]) for part, offset in parts]
    found = {offset: part for part, offset in saved_parts}
    if any(offset not in found or found[offset].shape != part.shape for part, offset in parts):
        raise ValueError(f"{name}: this rank holds another part of it than the state dict; load through DCP instead")
    return [(part, found[offset]) for part, offset in parts]


def logical_tensor(owned: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """The tensor of one parameter from those of the pieces that this rank owns: a weight, or a state. A state is a
    scalar (a step count), the same for all pieces, or has the first dimension of its piece: of a piece (2, 768, 3072)
    out of 8 experts, a state (2, 768, 1) becomes a part of (8, 768, 1)."""
    piece, tensor = owned[0]
    if piece.is_whole or not tensor.ndim:
        return tensor
    whole = [piece.dp.shape[0], *tensor.shape[1:]]
    parts = [(part, (held.start, *(0,) * (part.ndim - 1))) for held, part in owned]
    return PartialTensor.of(whole, parts)
