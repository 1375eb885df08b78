"""Whole tensors from the parts that ranks hold, and back, one tensor at a time: no device ever holds a whole model that
was not asked for. Everything here is collective over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .pieces import Size, pair_parts, parts_of, slices_of

Tensors = Mapping[str, torch.Tensor]


def gather_whole(live: Tensors, device: torch.device, keep_on: torch.device | None) -> dict[str, torch.Tensor]:
    """Every tensor whole, as a copy. The first rank that holds a part broadcasts it.

    Args:
        live: this rank's tensors by name.
        device: of the communication.
        keep_on: where this rank keeps the copies; ``None``: nowhere, it only takes part and gets an empty dict.
    """
    held = {name: parts_of(tensor) for name, tensor in live.items()}
    everyone = _all_gather(
        {n: (whole, [(at, tuple(part.shape), part.dtype) for part, at in parts]) for n, (whole, parts) in held.items()}
    )
    gathered: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for there in everyone for name in there):
        whole = next(there[name][0] for there in everyone if name in there)
        senders: dict[Size, tuple[int, Size, torch.dtype]] = {}
        for rank, there in enumerate(everyone):
            for offset, size, dtype in there[name][1] if name in there else ():
                senders.setdefault(offset, (rank, size, dtype))
        own = {offset: part for part, offset in held[name][1]} if name in held else {}
        for offset, (sender, size, dtype) in sorted(senders.items()):
            if sender == dist.get_rank():
                part = own[offset].detach().to(device).contiguous()
            else:
                part = torch.empty(size, dtype=dtype, device=device)
            dist.broadcast(part, sender)
            if keep_on is not None:
                if name not in gathered:
                    gathered[name] = torch.empty(whole, dtype=dtype, device=keep_on)
                gathered[name][slices_of(offset, size)].copy_(part)
    return gathered


@torch.no_grad()
def copy_whole(live: Tensors, state: Tensors, *, strict: bool) -> None:
    """Copy into this rank's parts from whole tensors that every rank has.

    Args:
        live: this rank's tensors by name.
        state: whole tensors by name, on any device.
        strict: a tensor missing from ``state``, or in it without being here, is an error.

    Raises:
        KeyError, ValueError: on every rank, naming the first tensor that is missing, unknown or of another shape.
    """
    _raise_first(_problem(_all_sizes(live), state, strict))
    for name in live.keys() & state.keys():
        for part, values in pair_parts(name, live[name], state[name]):
            part.copy_(values)


@torch.no_grad()
def broadcast_whole(live: Tensors, state: Tensors, device: torch.device, *, strict: bool) -> None:
    """As :func:`copy_whole`, from the whole tensors that rank 0 has, broadcast over ``device``."""
    sizes, is_first = _all_sizes(live), dist.get_rank() == 0
    _raise_first(_problem(sizes, state, strict) if is_first else None)
    order = [[(name, tensor.dtype) for name, tensor in state.items() if name in sizes]]
    dist.broadcast_object_list(order, src=0)
    for name, dtype in order[0]:
        if is_first:
            whole = state[name].detach().to(device).contiguous()
        else:
            whole = torch.empty(sizes[name], dtype=dtype, device=device)
        dist.broadcast(whole, 0)
        for part, values in pair_parts(name, live[name], whole) if name in live else ():
            part.copy_(values)


def _all_gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _all_sizes(live: Tensors) -> dict[str, Size]:
    """Of every tensor that some rank holds a part of."""
    everyone = _all_gather({name: parts_of(tensor)[0] for name, tensor in live.items()})
    return {name: whole for there in everyone for name, whole in there.items()}


def _raise_first(problem: Exception | None) -> None:
    """On every rank, the problem of the first rank that has one."""
    for found in _all_gather(problem):
        if found is not None:
            raise found


def _problem(sizes: Mapping[str, Size], state: Tensors, strict: bool) -> Exception | None:
    for name, size in sizes.items():
        if name not in state:
            if strict:
                return KeyError(f"{name} is missing from the state dict")
        elif tuple(state[name].shape) != size:
            return ValueError(f"{name} has shape {list(state[name].shape)} in the state dict, here {list(size)}")
    extra = sorted(state.keys() - sizes.keys())
    return KeyError(f"{extra[0]} is in the state dict but not here") if strict and extra else None
