"""Tensors inside what a module takes and returns: nested lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``fn`` applied to every tensor inside. A container in which nothing changes is handed through, and
    so is every other object."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    old = _items(value)
    new = {key: map_tensors(fn, item) for key, item in old.items()}
    if all(new[key] is old[key] for key in old):
        return value
    if dataclasses.is_dataclass(value):
        settable = {f.name for f in dataclasses.fields(value) if f.init}
        result = dataclasses.replace(value, **{key: item for key, item in new.items() if key in settable})
        for key in new.keys() - settable:
            object.__setattr__(result, key, new[key])
        return result
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update(new)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*new.values())
    return type(value)(new.values())  # lists, tuples, and the results of torch.max and its kin


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    for item in _items(value).values():
        yield from tensors_in(item)


def _items(value: Any) -> dict[Any, Any]:
    """The items of a container by key or position; empty for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}
