"""One forward pass as the backward passes after it must know it."""

from __future__ import annotations

import torch

from .unit import Unit


class ForwardPass:
    """What one forward pass did; the hooks on its outputs know it.

    Attributes:
        orderly: the units ran in their order.
        repeated: a unit ran again, other than at once.
        again: the units that ran again at once.
        spent: its graph has been used up.
        has_grad: it was run with gradients.
    """

    def __init__(self) -> None:
        self.orderly = True
        self.repeated = False
        self.again: set[Unit] = set()
        self.spent = False
        self.has_grad = torch.is_grad_enabled()
        self._place = -1
        self._seen: set[Unit] = set()

    def enter(self, unit: Unit, place: int) -> None:
        """The unit at this place in the order is called. A pinned one is called around the others, in any order."""
        at_once = place == self._place
        # A unit without grad in a pass with grad is inside a reentrant checkpoint: its backward is a pass of its own.
        reentrant = torch.is_grad_enabled() != self.has_grad
        if reentrant or (not unit.pinned and place < self._place):
            self.orderly = False
        if unit in self._seen and at_once and not reentrant:
            self.again.add(unit)
        elif unit in self._seen:
            self.repeated = True
        self._seen.add(unit)
        if not unit.pinned:
            self._place = place
