"""The result of dedicating a model, and how it is found from the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ..ownership.assignment import Assignment
from ..ownership.classify import canonical_fqn
from ..transport.grid import Grid
from ..transport.lane import Lanes
from .param import Piece
from .schedule import UnitSchedule
from .unit import Unit

RUNTIME_ATTRIBUTE = "_dmuon_runtime"


class Runtime:
    """The result of dedicating one model. Users reach it through ``extras/controls.py``.

    Attributes:
        units: in forward order.
        params: every dedicated parameter, in ``named_parameters`` order; the same on every rank.
        specs: as they were dedicated; an optimizer may force other routes later.
        skipped: canonical name -> why the parameter was not dedicated.
        replicate_async: new weights travel to replicas and columns while the next step begins; the optimizer's choice.
        materialised: weights exist; the same on every rank, also on one that owns nothing.
        verify: raises RuntimeError where the model no longer holds the dedicated parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        lanes: Lanes,
        grid: Grid,
        assignment: Assignment,
        schedule: UnitSchedule,
        skipped: dict[str, str],
    ) -> None:
        self.units = units
        self.lanes = lanes
        self.grid = grid
        self.assignment = assignment
        self.schedule = schedule
        self.skipped = skipped
        order = {canonical_fqn(name): index for index, (name, _) in enumerate(model.named_parameters())}
        self.params = sorted((dp for unit in units for dp in unit.params), key=lambda dp: order[dp.fqn])
        self.specs = {dp.param: dp.spec for dp in self.params}
        self.replicate_async = True
        self.materialised = False
        self.verify: Callable[[], None] = lambda: None  # set by guards.py

    def __reduce__(self) -> NoReturn:
        refuse_copy("the runtime of a dedicated model")

    def check_usable(self, wanted: str) -> None:
        """Raises RuntimeError, on every rank, while the model is on meta, or where it has lost a dedicated
        parameter."""
        self.verify()
        if not self.materialised:
            raise RuntimeError(f"{self.params[0].fqn} has no weight yet: call dmuon.materialize before {wanted}")

    @property
    def owned(self) -> list[Piece]:
        """The pieces this rank owns, in unit order."""
        return [piece for unit in self.units for piece in unit.owned]

    def wait_publish(self) -> None:
        """The current stream waits until no compute weight is being sent."""
        for unit in self.units:
            unit.wait_publish()

    def collect_gradients(self) -> None:
        """Reductions launched by backward go on to the owners; ``Piece.wait_gradient`` waits for the rest of their
        way."""
        self._check_frozen()
        self.schedule.collect_gradients()

    def wait_gradients(self) -> None:
        """Reductions launched by backward are finished; owners hold the averaged gradients."""
        self.collect_gradients()
        self.lanes.join("reduce")

    def arrived(self) -> list[Piece]:
        """The pieces this rank owns that have a gradient, after :meth:`wait_gradients`.

        Raises:
            RuntimeError: the last backward ran under ``no_sync``, whose gradients nobody has reduced.
        """
        if self.schedule.holds_back:
            raise RuntimeError("gradients are held back by no_sync: run the last backward of a step outside of it")
        self.wait_gradients()
        return [piece for piece in self.owned if piece.grad is not None]

    def _check_frozen(self) -> None:
        for dp in self.params:
            if dp.param.requires_grad and not dp.spec.trainable:
                raise RuntimeError(
                    f"{dp.fqn} was frozen when it was dedicated and now requires a gradient, for which nothing was "
                    "built; set requires_grad before dedicate_params"
                )

    def begin_update(self) -> None:
        """The owners are about to change masters and compute weights: unsharded weights are stale, and nothing reads
        the compute weights any more."""
        self.schedule.invalidate_weights()
        self.wait_publish()

    def publish(self) -> None:
        """Collective with replicas or tensor parallelism. The owners have changed masters and compute weights: bring
        every source up to date. The next unshard of a unit waits for the unit's weights."""
        for unit in self.units:
            unit.publish()
        if not self.replicate_async:
            self.wait_publish()

    def refresh_and_publish(self) -> None:
        """As :meth:`publish`, where only the masters have changed."""
        self.begin_update()
        with torch.no_grad():
            for piece in self.owned:
                piece.refresh_compute_weight()
        self.publish()

    def barrier(self) -> None:
        """Collective. A fence for diagnosis (``DMUON_ISOLATED_PG_BARRIER=1``): nothing of ours is in flight beyond."""
        self.wait_publish()
        for lane in self.lanes.all:
            lane.all_reduce(torch.zeros((), device=lane.device))
        if self.grid.device.type == "cuda":
            torch.cuda.synchronize(self.grid.device)


def refuse_copy(name: str, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot be copied: dedicated parameters live on their owners, the copy would hold placeholders (NaN). "
        "Copy the model before dedicate_params, or dedicate a second one and fill it by "
        "dmuon.set_model_state_dict(second, dmuon.get_model_state_dict(model)); an average of the weights (EMA) is "
        "kept of the tensors of get_model_state_dict"
    )


def find_runtime(model: nn.Module) -> Runtime | None:
    """The runtime of ``model``, or of the one module inside it that was dedicated.

    Raises:
        RuntimeError: several modules inside it were dedicated, each by itself.
    """
    found = {name: module for name, module in model.named_modules() if RUNTIME_ATTRIBUTE in vars(module)}
    if len(found) > 1:
        raise RuntimeError(
            f"dedicate_params was called on {' and on '.join(map(canonical_fqn, found))}, which share no owners: "
            "call it once, on a module that holds them all (a predicate chooses among its parameters), or use each "
            "of them by itself, with an optimizer of its own"
        )
    return next((vars(module)[RUNTIME_ATTRIBUTE] for module in found.values()), None)


def runtime_of(model: nn.Module) -> Runtime:
    """As :func:`find_runtime`. Raises RuntimeError also when ``dedicate_params`` was not called."""
    runtime = find_runtime(model)
    if runtime is not None:
        return runtime
    raise RuntimeError(f"{type(model).__name__} has no dedicated parameters: call dmuon.dedicate_params first")
