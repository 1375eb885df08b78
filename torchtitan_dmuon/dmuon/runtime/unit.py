"""The state machine of one unit: the dedicated parameters of one hook boundary, moved together.

A unit knows how to bring its weights here, show and hide them, and reduce its gradients. It does not know when:
that is ``schedule.py``.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from ..transport.grid import Lanes
from ..transport.lane import Pending
from .pack import OwnedPack
from .param import DedicatedParam, Piece
from .rows import RowPack

Pack = OwnedPack | RowPack


class Weights(enum.Enum):
    """Where a unit's full weights are."""

    ABSENT = "absent"  # only the sources have them
    IN_FLIGHT = "in flight"  # broadcasts launched
    HIDDEN = "hidden"  # here, while the parameters show placeholders (Z2 between passes)
    SHOWN = "shown"  # the parameters show them


class Unit:
    """One hook boundary.

    Args:
        name: canonical name of the boundary module; empty for the root.
        module: the boundary.
        packs: storage of its parameters.
        lanes: where its collectives run.
        pinned: other boundaries lie inside this one, so its weights stay from its forward to the end of backward.
        input_dtype, output_dtype: casts of the boundary's floating inputs and outputs; ``None`` leaves them.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        packs: Sequence[Pack],
        lanes: Lanes,
        pinned: bool,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.module = module
        self.packs = list(packs)
        self.lanes = lanes
        self.pinned = pinned
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.weights = Weights.ABSENT
        self.active_calls = 0  # forward calls of the boundary that have begun and not ended
        self.reduce_launched = False  # in the backward pass that is running
        self._pending: list[Pending] = []
        self._awaiting: set[str] = set()
        self._reductions: deque[list[tuple[Pack, Pending, torch.Tensor]]] = deque()
        self._stages: list[tuple[Pack, Pending]] = []
        self.travelling = False  # reduced along the shard dimension, not yet sent on to the owners
        self.expect_gradients()

    @property
    def params(self) -> list[DedicatedParam]:
        return [dp for pack in self.packs for dp in pack.params]

    @property
    def owned(self) -> list[Piece]:
        """The pieces this rank owns."""
        return [piece for pack in self.packs for piece in pack.owned]

    @property
    def trainable(self) -> list[tuple[Pack, DedicatedParam]]:
        return [(pack, dp) for pack in self.packs for dp in pack.trainable]

    # ---------------------------------------------------------------- weights

    def launch_unshard(self) -> None:
        """Collective unless the weights are here already, which is so on every rank or on none."""
        if self.weights is Weights.ABSENT:
            self._pending = [pack.launch_unshard(self.lanes) for pack in self.packs]
            self.weights = Weights.IN_FLIGHT

    def show(self) -> None:
        """Wait for the weights and let the parameters show them."""
        assert self.weights is not Weights.ABSENT, f"{self.name}: shown before it was launched"
        if self.weights is not Weights.SHOWN:
            self._wait_unshard()
            for pack in self.packs:
                pack.install()
            self.weights = Weights.SHOWN

    def release(self, keep: bool) -> None:
        """Hide the weights; free their memory unless ``keep``."""
        if self.weights is Weights.ABSENT:
            return
        self._wait_unshard()
        if self.weights is Weights.SHOWN:
            for pack in self.packs:
                pack.conceal()
        self.weights = Weights.HIDDEN
        if not keep:
            for pack in self.packs:
                pack.free()
            self.weights = Weights.ABSENT

    def _wait_unshard(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []

    # ---------------------------------------------------------------- gradients

    def expect_gradients(self, once: bool = True) -> None:
        """A backward pass may begin: no parameter has its gradient yet.

        Args:
            once: a parameter has all of its gradient when it has one. Else (the unit ran several times, and may have
                checkpoints inside whose backward is a pass of its own) only :meth:`expect_no_more_gradients` tells.
        """
        self._awaiting = {dp.fqn for _, dp in self.trainable}
        if not once:
            self._awaiting.add("")
        self.reduce_launched = False

    def expect_no_more_gradients(self) -> None:
        """What has not come in this backward pass will not come: zeros stand in for it."""
        self._awaiting.clear()

    def add_gradient(self, pack: Pack, dp: DedicatedParam) -> None:
        """Take the gradient autograd has just put on ``dp.param``."""
        if self.reduce_launched:
            raise RuntimeError(
                f"{dp.fqn}: a gradient arrived after unit {self.name or '<root>'!r} was reduced in the same backward "
                "pass: its weight was used where no forward call of the unit could be seen. Choose a boundary module "
                "that is always called (hook_boundary_predicate)"
            )
        pack.add_gradient(dp)
        self._awaiting.discard(dp.fqn)

    @property
    def gradients_complete(self) -> bool:
        return not self._awaiting

    def launch_reduce(self) -> None:
        """Collective. Begin the reduction along the shard dimension."""
        self.reduce_launched = True
        packs = [pack for pack in self.packs if pack.trainable]
        if packs:
            self._reductions.append([(pack, *pack.launch_reduce(self.lanes)) for pack in packs])

    def finish_shard_stage(self) -> None:
        """Wait for the oldest reduction along the shard dimension."""
        if self._reductions:
            for pack, pending, grads in self._reductions.popleft():
                pack.finish_shard_stage(self.lanes, pending, grads)
            self.travelling = self.lanes.staged
            if not self.travelling:
                self._note_arrival()

    def launch_replicate_stage(self) -> None:
        """Collective. Send on to the owners' replica what the shard stages have gathered."""
        if self.travelling:
            self._stages = [(pack, pack.launch_replicate_stage(self.lanes)) for pack in self.packs if pack.trainable]
            self.travelling = False

    def finish_stages(self) -> None:
        """Collective. Wait for the replicate stage; gather tensor-parallel shards on the owners."""
        for pack, pending in self._stages:
            pack.finish_stages(self.lanes, pending)
        if self._stages:
            self._note_arrival()
        self._stages = []

    def _note_arrival(self) -> None:
        """The current stream has written the gradients of the owned pieces, or added to them."""
        if self.lanes.unshard.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
            for piece in self.owned:
                piece.arrived = arrived

    def drop_gradients(self) -> None:
        """Wait for what is in flight and forget every gradient of this unit."""
        for reductions in self._reductions:
            for _, pending, _ in reductions:
                pending.wait()
        for _, pending in self._stages:
            pending.wait()
        self._reductions.clear()
        self._stages, self.travelling = [], False
        for pack in self.packs:
            pack.drop_gradients()
        self.expect_gradients()
