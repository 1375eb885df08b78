"""When units move. The order of collectives is fixed when the schedule is built and the same on every rank.

Weights. The forward pass launches unshards in the units' order 0, 1, ..., n-1; a rank that enters unit k launches
everything up to k (and ``prefetch`` more), and whatever is left when the root's forward ends. A layer that one rank
skips therefore never leaves another rank alone in a broadcast. Backward does the same in the order n-1, ..., 0. A
unit entered again after its turn starts the next round of the same cycle. A unit is released when a later unit is
entered, not when its forward returns, so calling a layer twice in a row costs nothing.

Gradients. Units are reduced in the order n-1, ..., 0, pinned units last; a unit whose gradients are late holds back
the ones after it, and the end of backward launches the rest, zeros standing in for gradients that never came. With
replicas or tensor parallelism the later stages follow in the same order, a fixed number of units behind.

No rank waits for one that waits for it. When the backward of one forward runs, whose units ran in their order (it is
*orderly*), reaching unit k means that nothing more will come for the units after k: they are reduced before the weights
of k are waited for. So whoever waits for something at place k needs the others only to get to place k, which they can.
In any other pass (layers out of order, reentrant checkpointing, several forwards) reductions are not waited for before
the end.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

import torch

from ..transport.grid import Lanes
from ..transport.torch_private import backward_id, backward_keeps_graph, queue_end_of_backward
from .forward_pass import ForwardPass
from .param import DedicatedParam
from .unit import Pack, Unit, Weights

# Packed gradient buffers in flight before the oldest is waited for: bounds memory without stalling the one being
# filled.
_MAX_REDUCTIONS_IN_FLIGHT = 2


class Phase(enum.Enum):
    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class UnitSchedule:
    """Drives all units of one model.

    Args:
        units: every unit, in forward order.
        lanes: those of the units.
        keep_unsharded: Z2: weights stay here until the optimizer changes them. Otherwise (Z3) they are freed after
            use and broadcast again for backward.
        prefetch: how many units ahead are launched.
    """

    def __init__(self, units: Sequence[Unit], lanes: Lanes, keep_unsharded: bool, prefetch: int) -> None:
        self.pinned = [unit for unit in units if unit.pinned]
        self.cyclic = [unit for unit in units if not unit.pinned]
        self.keep_unsharded = keep_unsharded
        self.prefetch = prefetch
        self.lanes = lanes
        self.sync_gradients = True
        # Whether a backward pass sends gradients beyond the shard dimension, or leaves that to a later one.
        self.all_reduce_gradients = True
        self.phase = Phase.IDLE
        self._forward_order = {unit: index for index, unit in enumerate(self.cyclic)}
        self.reduce_order = [*reversed(self.cyclic), *self.pinned]  # in which gradients arrive
        self._cursor = 0  # unshards launched in this round of the cycle
        self._next_reduce = 0
        self._hold_reductions = False
        # In the shard stage, and whether the next stage follows.
        self._in_flight: deque[tuple[Unit, bool]] = deque()
        self._staged: deque[Unit] = deque()  # in the replicate stage
        self.forward_pass: ForwardPass | None = None  # that is running
        # Those whose backward may come: until it does, or the weights change, which no graph survives. Not until they
        # are collected: that is not at the same time on every rank, and what follows from this must be the same.
        self._passes: list[ForwardPass] = []
        self._orderly = True  # is the backward pass that is running
        self._place = -1  # of the earliest unit it has reached
        self._backward_id: int | None = None  # its own, where known
        # Reductions have been launched since gradients were last dropped; the same on every rank.
        self.has_gradients = False

    @property
    def units(self) -> list[Unit]:
        return [*self.pinned, *self.cyclic]

    # ---------------------------------------------------------------- forward

    def begin_forward(self) -> None:
        """The root's forward begins (or a unit is entered without the root)."""
        if self.phase is Phase.BACKWARD and backward_id() != -1:
            return  # recomputation
        self.settle()
        self._release_all()
        # A weight that autocast has cast in an earlier forward would get its gradient where that forward ran, after the
        # hooks of this one; and the casts would keep the memory that Z3 frees.
        torch.clear_autocast_cache()
        self.forward_pass = ForwardPass()
        self._begin_round(Phase.FORWARD)

    def settle(self) -> None:
        """End a pass that raised, as the ranks have ended it where it did not: with the same collectives."""
        if self.phase is Phase.FORWARD:
            self.end_forward(keep_last=False)
        elif self.phase is Phase.BACKWARD:
            self.end_backward()

    def _begin_round(self, phase: Phase) -> None:
        self.phase = phase
        self._cursor = 0
        for unit in self.pinned:
            unit.launch_unshard()

    def enter_unit(self, unit: Unit) -> None:
        """A boundary's forward begins, in the forward pass or in a recomputation."""
        if self.phase is not Phase.FORWARD:
            self.begin_forward()
        if self.phase is Phase.FORWARD:
            unit.active_calls += 1
            self.forward_pass.enter(unit, self._forward_order.get(unit, -1))
        self._need(unit)

    def leave_unit(self, unit: Unit) -> None:
        """A boundary's forward has returned or raised."""
        if self.phase is Phase.FORWARD and unit.active_calls > 0:
            unit.active_calls -= 1

    def end_forward(self, keep_last: bool) -> None:
        """The root's forward has returned.

        Args:
            keep_last: a backward pass may follow: the last unit and the pinned ones, which it needs first, stay.
        """
        if self.phase is not Phase.FORWARD:
            return
        self._finish_round(self.cyclic)
        self.phase = Phase.IDLE
        self._passes = [forward for forward in self._passes if not forward.spent]
        if self.forward_pass.has_grad:
            self._passes.append(self.forward_pass)
        self.forward_pass = None
        for unit in self.units:
            unit.active_calls = 0
            if not keep_last or not self._stays(unit):
                self._release(unit)

    def _stays(self, unit: Unit) -> bool:
        """Backward needs its weights first, so they are not freed in between."""
        return unit.pinned or unit is self.cyclic[-1]

    def unshards_per_step(self, unit: Unit) -> int:
        """How often one forward, one backward and one optimizer step fetch the weights of ``unit``."""
        return 1 if self.keep_unsharded or self._stays(unit) else 2

    # ---------------------------------------------------------------- unshard order

    def _need(self, unit: Unit) -> None:
        if unit.pinned:
            unit.launch_unshard()
            unit.show()
            return
        order = self.cyclic if self.phase is Phase.FORWARD else self.cyclic[::-1]
        place = self._forward_order[unit]
        if self.phase is Phase.BACKWARD:
            place = len(order) - 1 - place
        if unit.weights is Weights.ABSENT or place >= self._cursor:
            if place < self._cursor:  # its turn in this round is over: finish the round and begin the next
                self._finish_round(order)
                self._cursor = 0
            while self._cursor <= place:
                self._launch_next(order, needed=unit)
        for other in order[:place]:
            if self._done_with(other):
                self._release(other)
        while self._cursor < min(len(order), place + 1 + self.prefetch):
            self._launch_next(order, needed=None)
        unit.show()

    def _launch_next(self, order: Sequence[Unit], needed: Unit | None) -> None:
        unit = order[self._cursor]
        self._cursor += 1
        unit.launch_unshard()
        if needed is not None and unit is not needed and self._done_with(unit):
            self._release(unit)

    def _finish_round(self, order: Sequence[Unit]) -> None:
        while self._cursor < len(order):
            unit = order[self._cursor]
            self._launch_next(order, needed=None)
            if self._cursor < len(order) and not unit.active_calls:
                self._release(unit)

    def _done_with(self, unit: Unit) -> bool:
        if self.phase is Phase.FORWARD:
            return unit.active_calls == 0
        return unit.gradients_complete  # its weights may still be read until its last gradient is there

    def _release(self, unit: Unit) -> None:
        unit.release(keep=self.keep_unsharded)

    def _release_all(self) -> None:
        for unit in self.units:
            self._release(unit)

    # ---------------------------------------------------------------- backward

    def begin_backward(self, forward: ForwardPass | None = None) -> None:
        """A hook of a backward pass fires, the first one or a later one.

        Args:
            forward: the pass on whose output the hook is.
        """
        # Hooks on outputs fire in the outermost pass, those of parameters also in one inside a reentrant checkpoint.
        this = None if forward is None else backward_id()
        if self.phase is Phase.BACKWARD and None not in (this, self._backward_id) and this != self._backward_id:
            self.settle()  # the one before raised
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
            self._backward_id = this
        if forward is not None and not backward_keeps_graph():
            forward.spent = True

    def _begin_backward(self) -> None:
        if self.phase is Phase.FORWARD:
            self.end_forward(keep_last=True)  # a backward inside the root's forward, or a forward without the root
        queue_end_of_backward(self.end_backward)
        # Which of them this one goes through is not known before its end.
        coming = [forward for forward in self._passes if not forward.spent]
        # Under reentrant checkpointing a unit used twice gets its gradient in pieces; it is complete at the end only.
        self._hold_reductions = len(coming) != 1 or coming[0].repeated
        self._orderly = not self._hold_reductions and coming[0].orderly
        self._place = len(self.cyclic)
        self._next_reduce = 0
        for unit in self.units:
            unit.expect_gradients(once=all(unit not in forward.again for forward in coming))
        self._begin_round(Phase.BACKWARD)

    def need_for_backward(self, unit: Unit, forward: ForwardPass) -> None:
        """The gradient of a boundary's output is there: its own backward comes next."""
        self.begin_backward(forward)
        if self._orderly and not unit.pinned:
            place = self._forward_order[unit]
            if place > self._place:
                return  # its turn is over: this output is an earlier unit's too, handed through
            self._place = place
            for later in self.cyclic[place + 1 :]:
                later.expect_no_more_gradients()
            self._launch_reductions(only_complete=True)
        self._need(unit)

    def take_gradient(self, unit: Unit, pack: Pack, dp: DedicatedParam) -> None:
        """Autograd has accumulated a gradient into ``dp.param.grad``."""
        self.begin_backward()
        unit.add_gradient(pack, dp)
        if unit.gradients_complete and not self._hold_reductions:
            self._launch_reductions(only_complete=True)

    def _launch_reductions(self, only_complete: bool) -> None:
        if not self.sync_gradients:
            return
        while self._next_reduce < len(self.reduce_order):
            unit = self.reduce_order[self._next_reduce]
            if only_complete and not unit.gradients_complete:
                return
            self._next_reduce += 1
            unit.launch_reduce()
            self.has_gradients = True
            self._in_flight.append((unit, self.all_reduce_gradients))
            self._advance_stages(leave=_MAX_REDUCTIONS_IN_FLIGHT)

    def _advance_stages(self, leave: int) -> None:
        """Let all but the last ``leave`` units in each stage go on to the next one."""
        if len(self._in_flight) <= leave and len(self._staged) <= leave:
            return
        if self.phase is Phase.BACKWARD and not self._orderly and self._cursor < len(self.cyclic):
            return  # another rank may need an unshard from here before it can send what would be waited for
        with self.lanes.side_stream("reduce"):
            while len(self._in_flight) > leave:
                unit, sent_on = self._in_flight.popleft()
                while unit in self._staged:  # its last gradient must be gone before the next is added up
                    self._staged.popleft().finish_stages()
                unit.finish_shard_stage()
                if unit.travelling and sent_on:
                    unit.launch_replicate_stage()
                    self._staged.append(unit)
            while len(self._staged) > leave:
                self._staged.popleft().finish_stages()

    def end_backward(self) -> None:
        """Autograd has finished the backward pass."""
        self._finish_round(self.cyclic[::-1])
        self._launch_reductions(only_complete=False)
        self.phase = Phase.IDLE
        self._release_all()
        for unit in self.units:
            unit.expect_gradients()

    # ---------------------------------------------------------------- between passes

    def collect_gradients(self) -> None:
        """Collective with more than one stage. Every launched reduction goes on to its owner, beside the compute
        stream: a piece's ``wait_gradient`` waits for the rest of its way."""
        self.settle()
        with self.lanes.side_stream("reduce", always=True):
            self._advance_stages(leave=0)
            for unit in self.reduce_order:  # what passes without all_reduce_gradients have left behind
                unit.launch_replicate_stage()
            for unit in self.reduce_order:
                unit.finish_stages()

    def wait_gradients(self) -> None:
        """As :meth:`collect_gradients`; the current stream waits for all of them."""
        self.collect_gradients()
        self.lanes.join("reduce")

    def invalidate_weights(self) -> None:
        """The optimizer has changed the masters: nothing unsharded may be read again."""
        self._passes.clear()
        for unit in self.units:
            unit.release(keep=False)

    def drop_gradients(self) -> None:
        """``zero_grad``: forget every gradient, and whatever an interrupted pass has left."""
        self.settle()
        self._in_flight.clear()
        self._staged.clear()
        self.has_gradients = False
        for unit in self.units:
            unit.drop_gradients()
