"""The private state of ``torchtitan_dmuon`` and ``models`` that tests look at. No other test file reads a ``_name`` of
ours (held by ``tests/test_citations.py``), so that a renamed one is followed here alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import nn

from torchtitan_dmuon.checkpoint import saving
from torchtitan_dmuon.dmuon import Muon
from torchtitan_dmuon.dmuon.optimizer import groups
from torchtitan_dmuon.dmuon.optimizer.stack import MatrixStack
from torchtitan_dmuon.dmuon.ownership import fused_weights
from torchtitan_dmuon.dmuon.runtime.handle import Runtime
from torchtitan_dmuon.dmuon.runtime.unit import Unit
from torchtitan_dmuon.dmuon.transport.lane import Lane, _adjacent
from torchtitan_dmuon.trainer import Trainer


def runtime_of(model: nn.Module) -> Runtime:
    """What dedication has put on the model."""
    return vars(model)["_dmuon_runtime"]


def is_unsharded(unit: Unit) -> bool:
    """Whether the buffer of all the unit's weights has memory now."""
    return unit._packed.untyped_storage().nbytes() > 0


def own_part(unit: Unit) -> torch.Tensor:
    """The bytes of this rank's own weights in the compute dtype."""
    return unit._own


def has_packed_gradients(unit: Unit) -> bool:
    """Whether the buffer of the unit's gradients exists now."""
    return unit._gradients is not None


@contextlib.contextmanager
def after_arrival(told: Callable[[Unit], None]) -> Iterator[None]:
    """``told`` is called with a unit after the unit has noted that its reduced gradients are there."""
    original = Unit._note_arrival

    def note(unit: Unit) -> None:
        original(unit)
        told(unit)

    with mock.patch.object(Unit, "_note_arrival", note):
        yield


def stacks_of(optimizer: Muon) -> Sequence[MatrixStack]:
    """The stacks of matrices in the order of their updates."""
    return optimizer._stacks


def adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view over ``parts`` if they lie in one storage, one behind the other."""
    return _adjacent(parts)


def takes_uneven_parts(lane: Lane) -> bool:
    """Whether the backend gathers and scatters parts of different sizes."""
    return lane._uneven


def let_take_uneven_parts(lane: Lane, takes: bool) -> None:
    """Makes the lane believe that the backend does, or does not."""
    lane._uneven = takes


@contextlib.contextmanager
def checksums_changed(change: Callable[[dict], dict]) -> Iterator[None]:
    """Each rank's sums of the files that it has written, name -> (bytes, CRC), go through ``change``."""
    original = saving._own_checksums
    with mock.patch.object(saving, "_own_checksums", lambda *args, **kwargs: change(original(*args, **kwargs))):
        yield


def group_keys() -> set[str]:
    """The keys that a parameter group may have."""
    return set(groups._KEYS)


def known_linears() -> set[str]:
    """The names of linear layers whose weights may be fused."""
    return {name for names, _, _ in fused_weights.FUSED for name in names.split("|")}


def find_inf_on_device(trainer: Trainer) -> None:
    """Makes the trainer leave its flag of a step that is not finite on the device, as fused optimizers on CUDA do."""
    trainer._found_inf_on_device = True
