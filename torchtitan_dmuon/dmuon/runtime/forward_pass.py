"""One forward pass, as the backward pass that goes through it must know it."""

from __future__ import annotations

import torch

from .unit import Unit


class ForwardPass:
    """What one forward pass did. The hooks on the pass's outputs hold it.

    Attributes:
        in_order: the units ran in their order, each once or several times at once, and no reentrant checkpoint hid a
            unit's graph. Then, and only then, backward needs nothing more of the units behind the one that it reaches.
        again: units that were called several times in a row. Reentrant checkpoints inside such a unit give a parameter
            its gradient in several parts; the first part must not pass for the whole.
        spent: a backward pass has used up the graph.
        has_grad: the pass ran with gradients.
    """

    def __init__(self) -> None:
        self.in_order = True
        self.again: set[Unit] = set()
        self.spent = False
        self.has_grad = torch.is_grad_enabled()
        self._place = -1
        self._seen: set[Unit] = set()

    def enter(self, unit: Unit, place: int) -> None:
        """Unit number ``place`` is called. A pinned unit (-1) is called around the others, at any time."""
        # A unit without grad inside a pass with grad is in a reentrant checkpoint: its backward is a pass of its own.
        reentrant = torch.is_grad_enabled() != self.has_grad
        if unit in self._seen and place == self._place and not reentrant:
            self.again.add(unit)
        elif unit in self._seen or reentrant or (not unit.pinned and place < self._place):
            self.in_order = False
        self._seen.add(unit)
        if not unit.pinned:
            self._place = place
