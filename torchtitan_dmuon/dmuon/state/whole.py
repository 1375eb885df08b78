"""Whole tensors from the parts that ranks hold, and back, one tensor at a time: no device ever holds a whole model that
was not asked for. Everything here is collective over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    mine = {(name, offset): part for name, tensor in live.items() for part, offset in parts_of(tensor)[1]}
    layout = {at: (parts_of(live[at[0]])[0], tuple(part.shape), part.dtype) for at, part in mine.items()}
    plan: dict[tuple[str, Size], tuple] = {}
    for rank, there in enumerate(_all_gather(layout)):
        for at, told in there.items():
            plan.setdefault(at, (rank, *told))
    gathered: dict[str, torch.Tensor] = {}
    for (name, offset), (sender, whole, size, dtype) in plan.items():
        own = mine[name, offset] if sender == dist.get_rank() else None
        part = _broadcast(own, sender, size, dtype, device)
        if keep_on is not None:
            if name not in gathered:
                gathered[name] = torch.empty(whole, dtype=dtype, device=keep_on)
            gathered[name][slices_of(offset, size)].copy_(part)
    return gathered


@torch.no_grad()
def scatter_whole(live: Tensors, state: Tensors, send_over: torch.device | None, *, strict: bool) -> None:
    """Copy whole tensors into this rank's parts.

    Args:
        live: this rank's tensors by name.
        state: whole tensors by name, on any device.
        send_over: the device over which rank 0 sends its ``state``, the only one that is read; ``None``: every rank has
            one, and nothing is sent.
        strict: a tensor missing from ``state``, or in it without being here, is an error.

    Raises:
        KeyError, ValueError: on every rank, naming the first tensor that is missing, unknown or of another shape.
    """
    everyone = _all_gather({name: parts_of(tensor)[0] for name, tensor in live.items()})
    sizes = {name: size for there in everyone for name, size in there.items()}
    is_read = send_over is None or dist.get_rank() == 0
    for problem in _all_gather(_problem(sizes, state, strict) if is_read else None):
        if problem is not None:
            raise problem
    for name, whole in state.items() if send_over is None else _sent(state, sizes, send_over):
        for part, values in pair_parts(name, live[name], whole) if name in live else ():
            part.copy_(values)


def _sent(state: Tensors, sizes: Mapping[str, Size], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    order = [[(name, tensor.dtype) for name, tensor in state.items() if name in sizes]]
    dist.broadcast_object_list(order, src=0)
    for name, dtype in order[0]:
        mine = state[name] if dist.get_rank() == 0 else None
        yield name, _broadcast(mine, 0, sizes[name], dtype, device)


def _broadcast(
    mine: torch.Tensor | None, sender: int, size: Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``mine`` of the rank ``sender``; the others pass ``None``."""
    if mine is None:
        tensor = torch.empty(size, dtype=dtype, device=device)
    else:
        tensor = mine.detach().to(device).contiguous()
    dist.broadcast(tensor, sender)
    return tensor


def _all_gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _problem(sizes: Mapping[str, Size], state: Tensors, strict: bool) -> Exception | None:
    for name, size in sizes.items():
        if name not in state:
            if strict:
                return KeyError(f"{name} is missing from the state dict")
        elif tuple(state[name].shape) != size:
            return ValueError(f"{name} has shape {list(state[name].shape)} in the state dict, here {list(size)}")
    extra = sorted(state.keys() - sizes.keys())
    return KeyError(f"{extra[0]} is in the state dict but not here") if strict and extra else None
