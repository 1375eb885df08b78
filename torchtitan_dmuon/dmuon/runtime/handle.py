"""What users ask of a dedicated model, and the object behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..ownership.assignment import Assignment
from ..ownership.classify import canonical_fqn
from ..transport import torch_private
from ..transport.grid import Grid, Lanes
from .param import DedicatedParam, Piece
from .schedule import UnitSchedule
from .unit import Unit

RUNTIME_ATTRIBUTE = "_dmuon_runtime"


class Runtime:
    """All that dedication has made for one model. Users reach it through the functions of this module."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        lanes: Lanes,
        grid: Grid,
        assignment: Assignment,
        schedule: UnitSchedule,
        skipped: dict[str, str],
        replicate_async: bool,
    ) -> None:
        self.model = model
        self.units = units
        self.lanes = lanes
        self.grid = grid
        self.assignment = assignment
        self.schedule = schedule
        self.skipped = skipped  # canonical name -> why it was not dedicated
        order = {canonical_fqn(name): index for index, (name, _) in enumerate(model.named_parameters())}
        self.params = sorted((dp for unit in units for dp in unit.params), key=lambda dp: order[dp.fqn])
        self.specs = {dp.param: dp.spec for dp in self.params}  # as dedicated; an optimizer may force other routes
        self.replicate_async = replicate_async
        self.divide_factor = float(grid.shape[0] * grid.shape[1])
        self.may_move = False
        self.materialised = False  # the same on every rank, also one that owns nothing

    def __reduce__(self) -> NoReturn:
        refuse_copy("the runtime of a dedicated model")

    def check_materialised(self, wanted: str) -> None:
        """Raises RuntimeError, on every rank, while the model is on meta."""
        if not self.materialised:
            raise RuntimeError(f"{self.params[0].fqn} has no weight yet: call dmuon.materialize before {wanted}")

    @property
    def owned(self) -> list[Piece]:
        """The pieces this rank owns, in unit order."""
        return [piece for unit in self.units for piece in unit.owned]

    def wait_publish(self) -> None:
        """No source weight is being sent any more, on the current stream's clock."""
        for unit in self.units:
            for pack in unit.packs:
                pack.wait_publish(self.lanes)

    def collect_gradients(self) -> None:
        """Reductions launched by backward go on to the owners; each piece's ``wait_gradient`` waits for its own."""
        self._check_frozen()
        self.schedule.collect_gradients()

    def wait_gradients(self) -> None:
        """Reductions launched by backward are finished; owners hold the averaged gradients."""
        self._check_frozen()
        self.schedule.wait_gradients()

    def _check_frozen(self) -> None:
        for dp in self.params:
            if dp.param.requires_grad and not dp.spec.trainable:
                raise RuntimeError(
                    f"{dp.fqn} was frozen when it was dedicated and now requires a gradient, for which nothing was "
                    "built; set requires_grad before dedicate_params"
                )

    def begin_update(self) -> None:
        """Masters and source weights are about to change: nothing reads them any more, and what is unsharded is
        forgotten."""
        self.schedule.invalidate_weights()
        self.wait_publish()

    def publish(self, refresh: bool = True) -> None:
        """Collective with replicas or tensor parallelism. The masters have changed: forget what is unsharded and bring
        every source up to date; the units' next unshards wait for theirs.

        Args:
            refresh: whoever changed the masters has not called ``Piece.refresh_source``.
        """
        self.schedule.invalidate_weights()
        for unit in self.units:
            for pack in unit.packs:
                pack.publish(self.lanes, refresh)
        if not self.replicate_async:
            self.wait_publish()

    def barrier(self) -> None:
        """Collective. A fence for diagnosis (``DMUON_ISOLATED_PG_BARRIER=1``): nothing of ours is in flight beyond."""
        self.wait_publish()
        for lane in self.lanes.all:
            lane.all_reduce(torch.zeros((), device=lane.device))
        if self.grid.device.type == "cuda":
            torch.cuda.synchronize(self.grid.device)

    def zero_grad(self) -> None:
        self.schedule.drop_gradients()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Lifts the guard on ``.to()`` and its kin, for code that leaves dedicated parameters alone."""
        self.may_move = True
        try:
            yield
        finally:
            self.may_move = False


def find_runtime(model: nn.Module) -> Runtime | None:
    """The runtime attached to ``model`` or to the one module inside it that was dedicated.

    Raises:
        RuntimeError: several modules inside it were, each by itself.
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


def refuse_copy(name: str, *_: Any) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot be copied: dedicated parameters live on their owners, the copy would hold placeholders (NaN). "
        "Copy the model before dedicate_params, or dedicate a second one and fill it by "
        "dmuon.set_model_state_dict(second, dmuon.get_model_state_dict(model)); an average of the weights (EMA) is "
        "kept of the tensors of get_model_state_dict"
    )


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter, in ``named_parameters`` order, the same list on every rank."""
    return list(runtime_of(model).params)


def get_owned_params(model: nn.Module, rank: int | None = None) -> list[Piece]:
    """What global ``rank`` (default: this one) owns, in ``named_parameters`` order. A piece has the ``fqn``, ``shape``
    and ``numel`` of its parameter; of an expert stack or of shared rows it is the part that the rank owns."""
    rank = dist.get_rank() if rank is None else rank
    return [piece for dp in runtime_of(model).params for piece in dp.pieces if piece.owner_rank == rank]


def ignored_params(model: nn.Module) -> set[nn.Parameter]:
    """What to pass to ``fully_shard(..., ignored_params=...)``."""
    return {dp.param for dp in runtime_of(model).params}


def set_gradient_divide_factor(model: nn.Module, factor: float) -> None:
    """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks, in FSDP2 modules that the
    model has by now as well. 1.0 leaves sums, for a loss already divided by the global number of tokens."""
    if not factor > 0:
        raise ValueError(f"factor must be positive, got {factor}")
    runtime_of(model).divide_factor = float(factor)
    torch_private.set_fsdp_divide_factor(model, float(factor))


def set_timeout(model: nn.Module, timeout: timedelta) -> None:
    """Change the timeout of DMuon's own process groups."""
    runtime = runtime_of(model)
    for lane in runtime.lanes.all:
        torch_private.set_group_timeout(lane.group, lane.device, timeout)


def set_requires_all_reduce(model: nn.Module, required: bool) -> None:
    """Whether the next backward passes send gradients beyond the shard dimension (to other replicas and to
    tensor-parallel owners), as FSDP2's method of the same name, which is set too. Pass ``False`` for all but the last
    micro-batch of an accumulation; ``step`` and clipping send on whatever has been left."""
    runtime_of(model).schedule.all_reduce_gradients = required
    torch_private.set_fsdp_requires_all_reduce(model, required)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally, without any reduction, for dedicated and for FSDP2 parameters. The first backward
    outside reduces what has gathered. Holds one full unsharded gradient per rank."""
    runtime = runtime_of(model)
    if not runtime.schedule.sync_gradients:  # inside another one, which will end it
        yield
        return
    runtime.schedule.sync_gradients = False
    torch_private.set_fsdp_gradient_sync(model, False)
    try:
        yield
    finally:
        runtime.schedule.sync_gradients = True
        torch_private.set_fsdp_gradient_sync(model, True)
