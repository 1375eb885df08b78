"""One forward pass, as the backward pass that goes through it must know it."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class ForwardPass:
    """What one forward pass did. The hooks on the pass's outputs hold it.

    Attributes:
        in_order: the units ran in their order, each once or several times at once, and no reentrant checkpoint hid a
            unit's graph. Then, and only then, backward needs nothing more of the units behind the one that it reaches.
        again: units that were called several times in a row. Reentrant checkpoints inside such a unit give a parameter
            its gradient in several parts; the first part must not pass for the whole.
        spent: a backward pass has used up the graph.
        has_grad: the pass ran with gradients.
        weights_version: of the weights that the pass has read.
    """

    def __init__(self, weights_version: int) -> None:
        self.weights_version = weights_version
        self.in_order = True
        self.again: set[Hashable] = set()
        self.spent = False
        self.has_grad = torch.is_grad_enabled()
        self._place: int | None = None
        self._seen: set[Hashable] = set()

    def enter(self, unit: Hashable, place: int | None) -> None:
        """The unit at this place in the order is called. A pinned unit has no place: it is called around the others."""
        # A unit without grad inside a pass with grad is in a reentrant checkpoint: its backward is a pass of its own.
        reentrant = torch.is_grad_enabled() != self.has_grad
        backwards = None not in (place, self._place) and place < self._place
        if unit in self._seen and place == self._place and not reentrant:
            self.again.add(unit)
        elif unit in self._seen or reentrant or backwards:
            self.in_order = False
        self._seen.add(unit)
        if place is not None:
            self._place = place
