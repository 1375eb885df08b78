"""When units move. The order of collectives is fixed when the schedule is built and is the same on every rank.

Weights. A forward pass unshards the units in their order 0, 1, ..., n-1. A rank that enters unit k launches everything
up to k, and ``prefetch`` units more; the end of the root's forward launches the rest. So a rank that skips a layer
leaves no other rank alone in a broadcast. A backward pass does the same in the order n-1, ..., 0. A unit that is
entered after its turn begins the next round of the same cycle. A unit is resharded when a later unit is entered, not
when its own forward returns: calling a layer twice in a row costs nothing.

Gradients. Units are reduced in the order n-1, ..., 0, pinned units last. A unit whose gradients are late holds back the
units behind it; the end of backward launches the rest, with zeros for gradients that never came. With replicas or
tensor parallelism the later stages follow in the same order, a fixed number of units behind.

``docs/design/collectives.md`` says why no rank can wait for ever, and names the test for every reason.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Sequence

import torch

from ..transport.lane import Lanes
from ..transport.torch_private import backward_id, backward_keeps_graph, queue_end_of_backward
from .forward_pass import ForwardPass
from .param import DedicatedParam
from .unit import Reduction, Stage, Unit, Weights

logger = logging.getLogger(__name__)

# Reductions in each stage before the oldest is waited for: they bound the memory of packed gradients without stalling
# the unit whose gradients are being packed.
MAX_REDUCTIONS_IN_FLIGHT = 2


class Phase(enum.Enum):
    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class UnitSchedule:
    """Drives all units of one model. Its methods are called by hooks, under the names of FSDP2's.

    Args:
        units: every unit, in forward order.
        lanes: those of the units.
        reshard_after_forward: Z3: weights are resharded after use and broadcast again for backward. Otherwise (Z2)
            they stay here until the optimizer changes them.
        prefetch: how many units ahead are unsharded.
        divide_factor: the sum of the gradients over the data-parallel ranks is divided by it.
    """

    def __init__(
        self, units: Sequence[Unit], lanes: Lanes, reshard_after_forward: bool, prefetch: int, divide_factor: float
    ) -> None:
        self.pinned = [unit for unit in units if unit.pinned]
        self.cyclic = [unit for unit in units if not unit.pinned]
        self.units = [*self.pinned, *self.cyclic]
        self.lanes = lanes
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self.divide_factor = divide_factor
        self.sync_gradients = True
        self.all_reduce_gradients = True  # else a backward pass stops after the shard stage
        self.phase = Phase.IDLE
        self._place_of = {unit: place for place, unit in enumerate(self.cyclic)}
        # In which gradients arrive; units without a trainable parameter have none.
        self.reduce_order = [unit for unit in (*reversed(self.cyclic), *self.pinned) if unit.trainable]
        self._launched = 0  # units that are unsharded in this round of the cycle
        self._next_reduce = 0
        self._reductions: list[Reduction] = []  # on their way, oldest first
        self.forward_pass: ForwardPass | None = None  # that is running
        # Passes whose backward may come: until it does, or the weights change, which no graph survives. Not until
        # Python collects them: ranks do that at different times, and must decide alike.
        self._passes: list[ForwardPass] = []
        self._weights_version = 0
        self._in_order = True  # the running backward goes through one forward pass that was in order
        self._place = -1  # of the earliest unit that the running backward has reached
        self._backward_id: int | None = None  # the running backward's, where known
        # A reduction has been launched since gradients were last dropped; the same on every rank.
        self.has_gradients = False
        self.holds_back = False  # the last backward pass left its gradients unreduced on this rank

    # ---------------------------------------------------------------- forward

    def root_pre_forward(self) -> None:
        """The root's forward begins, or a unit is entered without the root."""
        if self.phase is Phase.BACKWARD and backward_id() != -1:
            return  # recomputation
        logger.debug("forward begins")
        self.settle()
        for unit in self.units:
            self._release(unit)
        # A weight that autocast has cast in an earlier forward would get its gradient where that forward ran, after the
        # hooks of this one; and the casts would keep the memory that Z3 gives back.
        torch.clear_autocast_cache()
        self.forward_pass = ForwardPass(self._weights_version)
        self._begin_round(Phase.FORWARD)

    def settle(self) -> None:
        """End a pass that raised, with the collectives with which it ended on ranks on which it did not raise."""
        if self.phase is Phase.FORWARD:
            self.root_post_forward(backward_follows=False)
        elif self.phase is Phase.BACKWARD:
            self.root_post_backward()

    def _begin_round(self, phase: Phase) -> None:
        self.phase = phase
        self._launched = 0
        for unit in self.pinned:
            unit.unshard()

    def pre_forward(self, unit: Unit) -> None:
        """A boundary's forward begins, in the forward pass or in a recomputation."""
        logger.debug("pre_forward %s", unit)
        if self.phase is not Phase.FORWARD:
            self.root_pre_forward()
        if self.phase is Phase.FORWARD:
            unit.active_calls += 1
            self.forward_pass.enter(unit, self._place_of.get(unit))
        self._need(unit)

    def post_forward(self, unit: Unit) -> None:
        """A boundary's forward has returned or raised."""
        logger.debug("post_forward %s", unit)
        if self.phase is Phase.FORWARD and unit.active_calls > 0:
            unit.active_calls -= 1

    def root_post_forward(self, backward_follows: bool) -> None:
        """The root's forward has returned. If ``backward_follows``, the last unit and the pinned ones stay unsharded,
        since backward needs them first."""
        if self.phase is not Phase.FORWARD:
            return
        logger.debug("forward ends")
        self._finish_round(self.cyclic)
        self.phase = Phase.IDLE
        self._passes = [forward for forward in self._passes if not forward.spent]
        if self.forward_pass.has_grad:
            self._passes.append(self.forward_pass)
        self.forward_pass = None
        for unit in self.units:
            unit.active_calls = 0
            if not backward_follows or not self.stays(unit):
                self._release(unit)

    def stays(self, unit: Unit) -> bool:
        """Whether forward leaves the unit's weights for backward also under Z3."""
        return unit.pinned or unit is self.cyclic[-1]

    # ---------------------------------------------------------------- which unit is unsharded next

    def _need(self, unit: Unit) -> None:
        """Show the unit's weights, and launch what the order puts before and shortly after them."""
        if unit.pinned:
            unit.unshard()
            unit.show()
            return
        order, place = self.cyclic, self._place_of[unit]
        if self.phase is Phase.BACKWARD:
            order, place = order[::-1], len(order) - 1 - place
        if unit.weights is Weights.ABSENT or place >= self._launched:
            if place < self._launched:  # the unit's turn in this round is over
                self._finish_round(order)
                self._launched = 0
            while self._launched <= place:
                passed = self._launch_next(order)
                if passed is not unit and self._done_with(passed):
                    self._release(passed)
        for other in order[:place]:
            if self._done_with(other):
                self._release(other)
        while self._launched < min(len(order), place + 1 + self.prefetch):
            self._launch_next(order)
        unit.show()

    def _launch_next(self, order: Sequence[Unit]) -> Unit:
        unit = order[self._launched]
        self._launched += 1
        unit.unshard()
        return unit

    def _finish_round(self, order: Sequence[Unit]) -> None:
        while self._launched < len(order):
            unit = self._launch_next(order)
            if self._launched < len(order) and not unit.active_calls:
                self._release(unit)

    def _done_with(self, unit: Unit) -> bool:
        if self.phase is Phase.FORWARD:
            return unit.active_calls == 0
        return unit.gradients_complete  # until then backward may still read its weights

    def _release(self, unit: Unit) -> None:
        if self.reshard_after_forward:
            unit.reshard()
        else:
            unit.hide()

    # ---------------------------------------------------------------- backward

    def root_pre_backward(self, forward: ForwardPass | None = None) -> None:
        """A hook of a backward pass fires, the first one or a later one. Hooks on outputs name the forward pass that
        they belong to."""
        if torch.is_grad_enabled():
            raise RuntimeError("backward with create_graph=True (double backward) does not reach dedicated parameters")
        if forward is not None and forward.weights_version != self._weights_version:
            raise RuntimeError("backward through a forward pass whose weights the optimizer has changed: run it before")
        # Hooks of parameters fire also in a backward pass inside a reentrant checkpoint, those on outputs do not.
        running = None if forward is None else backward_id()
        if self.phase is Phase.BACKWARD and None not in (running, self._backward_id) and running != self._backward_id:
            self.settle()  # the one before raised
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
            self._backward_id = running
        if forward is not None and not backward_keeps_graph():
            forward.spent = True

    def _begin_backward(self) -> None:
        logger.debug("backward begins")
        if self.phase is Phase.FORWARD:  # a backward inside the root's forward, or a forward without the root
            self.root_post_forward(backward_follows=True)
        queue_end_of_backward(self.root_post_backward)
        coming = [forward for forward in self._passes if not forward.spent]
        self._in_order = len(coming) == 1 and coming[0].in_order
        self._place = len(self.cyclic)
        self._next_reduce = 0
        for unit in self.units:
            unit.expect_gradients(each_once=all(unit not in forward.again for forward in coming))
        self._begin_round(Phase.BACKWARD)

    def pre_backward(self, unit: Unit, forward: ForwardPass) -> None:
        """The gradient of a boundary's output is there: the boundary's own backward comes next."""
        logger.debug("pre_backward %s", unit)
        self.root_pre_backward(forward)
        if self._in_order and not unit.pinned:
            place = self._place_of[unit]
            if place > self._place:
                return  # its turn is over: an earlier unit has handed this output through
            self._place = place
            for later in self.cyclic[place + 1 :]:
                later.expect_no_more_gradients()
            self._launch_complete_reductions()
        self._need(unit)

    def post_accumulate_grad(self, unit: Unit, dp: DedicatedParam) -> None:
        """Autograd has accumulated a gradient into ``dp.param.grad``."""
        self.root_pre_backward()
        unit.pack_gradient(dp)
        if unit.gradients_complete and self._in_order:
            self._launch_complete_reductions()

    def root_post_backward(self) -> None:
        """Autograd has finished the backward pass."""
        logger.debug("backward ends")
        self._finish_round(self.cyclic[::-1])
        for unit in self.reduce_order:
            unit.expect_no_more_gradients()
        self._launch_complete_reductions()
        self.holds_back = not self.sync_gradients
        self.phase = Phase.IDLE
        for unit in self.units:
            self._release(unit)
            unit.expect_gradients()

    # ---------------------------------------------------------------- the gradients' way to their owners

    def _launch_complete_reductions(self) -> None:
        """Collective. Reduce the units whose turn it is and whose gradients are complete."""
        while self.sync_gradients and self._next_reduce < len(self.reduce_order):
            unit = self.reduce_order[self._next_reduce]
            if not unit.gradients_complete:
                return
            logger.debug("reduce %s", unit)
            self._next_reduce += 1
            self._reductions.append(unit.launch_reduce(goes_on=self.all_reduce_gradients))
            self.has_gradients = True
            with self.lanes.side_stream("reduce") if self.lanes.staged else contextlib.nullcontext():
                self._advance(leave=MAX_REDUCTIONS_IN_FLIGHT)

    def _in_stage(self, stage: Stage) -> list[Reduction]:
        return [reduction for reduction in self._reductions if reduction.stage is stage]

    def _advance(self, leave: int) -> None:
        """Let all but the youngest ``leave`` reductions of each stage go on to the next stage."""
        while len(in_stage := self._in_stage(Stage.SHARD)) > leave:
            reduction, unit = in_stage[0], in_stage[0].unit
            while any(other.unit is unit for other in self._in_stage(Stage.REPLICATE)):
                self._finish_oldest()  # the unit's last sums must be gone before the next are added up
            unit.finish_shard_stage(reduction, self.divide_factor)
            if reduction.goes_on and self.lanes.staged:
                reduction.stage, reduction.pending = Stage.REPLICATE, unit.launch_replicate_stage()
            else:
                self._reductions.remove(reduction)
        while len(self._in_stage(Stage.REPLICATE)) > leave:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        oldest = self._in_stage(Stage.REPLICATE)[0]
        oldest.unit.finish_replicate_stage(oldest.pending)
        self._reductions.remove(oldest)

    def collect_gradients(self) -> None:
        """Collective with more than one stage. Every launched reduction goes on to its owner, beside the compute
        stream: ``Piece.wait_gradient`` waits for the rest of its way."""
        self.settle()
        with self.lanes.side_stream("reduce"):
            self._advance(leave=0)
            if self.lanes.staged:  # what passes without all_reduce_gradients have left behind
                held = [unit for unit in self.reduce_order if unit.held is not None]
                for unit, pending in [(unit, unit.launch_replicate_stage()) for unit in held]:
                    unit.finish_replicate_stage(pending)

    def invalidate_weights(self) -> None:
        """The masters are about to change, or have changed: nothing unsharded may be read again."""
        self._passes.clear()
        self._weights_version += 1
        for unit in self.units:
            unit.reshard()

    def drop_gradients(self) -> None:
        """``zero_grad``: forget every gradient, and what an interrupted pass has left."""
        self.settle()
        for reduction in self._reductions:
            reduction.pending.wait()
        self._reductions.clear()
        self.has_gradients = self.holds_back = False
        for unit in self.units:
            unit.drop_gradients()
