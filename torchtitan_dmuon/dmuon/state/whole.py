"""Whole tensors from the parts that ranks hold, and back, one tensor at a time: no device ever holds a whole model that
was not asked for. Everything here is collective over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

Parts = tuple[tuple[int, ...], list[tuple[torch.Tensor, tuple[int, ...]]]]  # size of the whole; (part, offset)


def gather_full(held: Mapping[str, Parts], device: torch.device, cpu_offload: bool) -> dict[str, torch.Tensor]:
    """Every tensor whole, as a copy: on ``device`` of every rank, or with ``cpu_offload`` in the host memory of rank 0
    only, the others getting an empty dict.

    Args:
        held: this rank's parts by name; a part that several ranks hold is sent by the first of them.
        device: of the communication.
    """
    mine = {
        name: (whole, [(tuple(part.shape), offset, part.dtype) for part, offset in parts])
        for name, (whole, parts) in held.items()
    }
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rank = dist.get_rank()
    receives = rank == 0 or not cpu_offload
    full: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for there in everyone for name in there):
        senders: dict[tuple[int, ...], tuple[int, tuple[int, ...], torch.dtype]] = {}
        for source, there in enumerate(everyone):
            for shape, offset, dtype in there[name][1] if name in there else []:
                senders.setdefault(offset, (source, shape, dtype))
        if not senders:
            continue
        whole = next(there[name][0] for there in everyone if name in there)
        own = {offset: part for part, offset in held[name][1]} if name in held else {}
        for offset, (source, shape, dtype) in sorted(senders.items()):
            if source == rank:
                buffer = own[offset].detach().to(device).contiguous()
            else:
                buffer = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(buffer, source)
            if receives:
                if name not in full:
                    full[name] = torch.empty(whole, dtype=dtype, device="cpu" if cpu_offload else device)
                full[name][_slices(offset, shape)].copy_(buffer)
    return full


@torch.no_grad()
def scatter_full(
    held: Mapping[str, Parts], state: Mapping[str, torch.Tensor], device: torch.device, broadcast: bool, strict: bool
) -> None:
    """Copy whole tensors into this rank's parts.

    Args:
        held: this rank's parts by name, live.
        state: whole tensors by name; with ``broadcast`` only that of rank 0 is read.
        device: of the communication.
        strict: what is missing from ``state``, or superfluous, is an error.

    Raises:
        KeyError, ValueError: on every rank, naming the first tensor that is missing, unknown or of another shape.
    """
    everyone: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: whole for name, (whole, _) in held.items()})
    shapes = {name: whole for there in everyone for name, whole in there.items()}
    problem: Exception | None = _problem(shapes, state, strict) if dist.get_rank() == 0 or not broadcast else None
    problems: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise found
    if broadcast:
        plan = [[(name, tensor.dtype) for name, tensor in state.items() if name in shapes]]
        dist.broadcast_object_list(plan, src=0)
    else:
        plan = [[(name, tensor.dtype) for name, tensor in state.items() if name in held]]
    for name, dtype in plan[0]:
        if not broadcast:
            full = state[name]
        elif dist.get_rank() == 0:
            full = state[name].detach().to(device).contiguous()
        else:
            full = torch.empty(shapes[name], dtype=dtype, device=device)
        if broadcast:
            dist.broadcast(full, 0)
        for part, offset in held[name][1] if name in held else []:
            part.copy_(full[_slices(offset, part.shape)])


def _problem(
    shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor], strict: bool
) -> Exception | None:
    for name, shape in shapes.items():
        if name not in state:
            if strict:
                return KeyError(f"{name} is missing from the state dict")
        elif tuple(state[name].shape) != tuple(shape):
            return ValueError(f"{name} has shape {list(state[name].shape)} in the state dict, here {list(shape)}")
    extra = sorted(state.keys() - shapes.keys())
    return KeyError(f"{extra[0]} is in the state dict but not here") if strict and extra else None


def _slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
