"""State as logical tensors by canonical name, in the form ``torch.distributed.checkpoint`` saves and loads.

Every tensor is held by exactly one writer: a dedicated parameter and its momentum by the owner, FSDP2 tensors as
DTensors. Keys of tensors that live elsewhere are absent here, which is how DCP learns who writes and reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .adamw import new_state
from .classify import canonical_fqn
from .fsdp2 import is_dedicated, sharded_parameters
from .muon import Muon
from .runtime import find_runtime
from .storage import Piece
from .tensor_parallel import chunk_bounds


def get_model_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of the model: owned masters, FSDP2 DTensors, plain parameters, persistent buffers.

    The tensors are the live ones: loading into them in place and then calling :func:`publish_weights`
    loads the model. Not collective. A tensor with several names (tied) has its first one.
    """
    state: dict[str, torch.Tensor] = {}
    for name, param in sharded_parameters(model):
        if not is_dedicated(param):
            state[canonical_fqn(name)] = param.detach()
    runtime = find_runtime(model)
    if runtime is not None:
        state |= _logical({piece: piece.master for piece in runtime.owned})
    state |= persistent_buffers(model)
    return state


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that ``state_dict`` would hold, by canonical name."""
    buffers = {}
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                buffers[canonical_fqn(f"{prefix}.{leaf}" if prefix else leaf)] = buffer
    return buffers


@torch.no_grad()
def set_model_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy ``state`` (as from :func:`get_model_state_dict`) into the model and publish the owners' weights.

    Raises:
        KeyError: a tensor this rank holds is missing from ``state``. ValueError: it is there in another layout.
    """
    for name, tensor in get_model_state_dict(model).items():
        if name not in state:
            raise KeyError(f"{name} is missing from the state dict")
        if state[name] is not tensor:
            _copy(name, tensor, state[name])
    publish_weights(model)


def _copy(name: str, to: torch.Tensor, source: torch.Tensor) -> None:
    """Raises ValueError when the two hold different parts of the tensor."""
    here, there = _local_parts(to), _local_parts(source)
    if [part.shape for part in here] != [part.shape for part in there]:
        raise ValueError(f"{name}: this rank holds another part of it than the state dict; load through DCP instead")
    for part, values in zip(here, there, strict=True):
        part.copy_(values)


def _local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(tensor, Chunks):
        return [part for part, _ in tensor._parts]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def publish_weights(model: nn.Module) -> None:
    """After owned masters were changed in place: let the next forward see them. Nothing without dedication."""
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.publish()


def get_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of the state of a ``Muon`` or ``torch.optim.AdamW``, as ``<canonical name>.<state name>``: the
    live tensors, created where no step has been taken yet. Load into them in place. Not collective."""
    state: dict[str, torch.Tensor] = {}
    if isinstance(optimizer, Muon):
        owned: dict[str, dict[Piece, torch.Tensor]] = defaultdict(dict)
        for piece in optimizer.runtime.owned:
            if piece.spec.trainable:
                for key, value in optimizer.state_of(piece).items():
                    owned[key][piece] = value
        for key, values in owned.items():
            state |= {f"{fqn}.{key}": tensor for fqn, tensor in _logical(values).items()}
    dedicated = {id(p) for p in model.parameters() if is_dedicated(p)}
    step_device = {id(p): p.device if fused else "cpu" for p, fused in _plain_adamw(optimizer)}
    for name, param in sharded_parameters(model):
        if id(param) in dedicated or id(param) not in step_device:
            continue
        if param not in optimizer.state:
            optimizer.state[param] = new_state(param, step_device[id(param)])
        state |= {f"{canonical_fqn(name)}.{key}": value for key, value in optimizer.state[param].items()}
    return state


def _plain_adamw(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, bool]]:
    """The parameters PyTorch's AdamW updates, with whether it is fused."""
    inner = [plain for _, plain in optimizer.plain_adamw] if isinstance(optimizer, Muon) else [optimizer]
    for plain in inner:
        for group in plain.param_groups:
            yield from ((param, bool(group["fused"])) for param in group["params"])


def _logical(tensors: dict[Piece, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By parameter name: the tensor of a whole piece, ``Chunks`` where this rank has a part. A state without the shape
    of its piece (a step count) is the same for all parts."""
    parts: dict[str, list[tuple[Piece, torch.Tensor]]] = defaultdict(list)
    for piece, tensor in tensors.items():
        parts[piece.fqn].append((piece, tensor))
    logical = {}
    for fqn, found in parts.items():
        piece, tensor = found[0]
        if piece.is_whole or tensor.ndim == 0:
            logical[fqn] = tensor
        else:
            # A statistic of rows has one column where the weight has many.
            sizes = zip(piece.dp.shape, piece.shape, tensor.shape, strict=True)
            whole = tuple(full if held == part else held for full, part, held in sizes)
            logical[fqn] = Chunks.of(whole, [(part, _offset(p)) for p, part in found if part.numel()])
    return {fqn: tensor for fqn, tensor in logical.items() if tensor is not None}


def _offset(piece: Piece) -> tuple[int, ...]:
    """Where a piece begins in its parameter."""
    offset = [piece.start] + [0] * (len(piece.shape) - 1)
    dp = piece.dp
    if piece.spec.route == "sharded_adamw" and dp.tp_dim is not None:
        offset[dp.tp_dim] += chunk_bounds(dp.shape[dp.tp_dim], dp.tp_columns)[dp.tp_column][0]
    return tuple(offset)


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

    def size(self, dim: int | None = None) -> torch.Size | int:
        return torch.Size(self._whole) if dim is None else self._whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(part.shape))
            for part, offset in self._parts
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._parts[0][0])
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
