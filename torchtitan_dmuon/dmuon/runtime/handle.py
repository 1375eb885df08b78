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
    """The result of dedicating one model. Users reach it through the functions of this module.

    Attributes:
        units: in forward order.
        params: every dedicated parameter, in ``named_parameters`` order; the same on every rank.
        specs: as they were dedicated; an optimizer may force other routes later.
        skipped: canonical name -> why the parameter was not dedicated.
        replicate_async: new weights travel to replicas and columns while the next step begins.
        may_move: ``.to()`` and its kin are allowed for now.
        materialised: weights exist; the same on every rank, also on one that owns nothing.
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
        replicate_async: bool,
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
        self.replicate_async = replicate_async
        self.may_move = False
        self.materialised = False

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
        """The owners are about to change masters and compute weights: unsharded weights are stale, and nothing reads
        the compute weights any more."""
        self.schedule.invalidate_weights()
        self.wait_publish()

    def publish(self) -> None:
        """Collective with replicas or tensor parallelism. The owners have changed masters and compute weights: bring
        every source up to date. The next unshard of a unit waits for the unit's weights."""
        self.schedule.invalidate_weights()
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

    def zero_grad(self) -> None:
        self.schedule.drop_gradients()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Allows ``.to()`` and its kin, for code that leaves dedicated parameters alone."""
        self.may_move = True
        try:
            yield
        finally:
            self.may_move = False


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


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter, in ``named_parameters`` order, the same list on every rank."""
    return list(runtime_of(model).params)


def get_owned_params(model: nn.Module, rank: int | None = None) -> list[Piece]:
    """The pieces that global ``rank`` (default: this one) owns, in ``named_parameters`` order. A piece has the ``fqn``,
    ``shape`` and ``numel`` of its parameter; of an expert stack or of shared rows, those of the rank's part."""
    rank = dist.get_rank() if rank is None else rank
    return [piece for dp in runtime_of(model).params for piece in dp.pieces if piece.owner_rank == rank]


def ignored_params(model: nn.Module) -> set[nn.Parameter]:
    """The dedicated parameters, for ``fully_shard(..., ignored_params=...)``."""
    return {dp.param for dp in runtime_of(model).params}


def set_gradient_divide_factor(model: nn.Module, factor: float) -> None:
    """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks, also in the FSDP2 modules
    that the model has by now. 1.0 leaves sums, for a loss already divided by the global number of tokens."""
    if not factor > 0:
        raise ValueError(f"factor must be positive, got {factor}")
    runtime_of(model).schedule.divide_factor = float(factor)
    torch_private.set_fsdp_divide_factor(model, float(factor))


def set_timeout(model: nn.Module, timeout: timedelta) -> None:
    """Change the timeout of DMuon's own process groups."""
    for lane in runtime_of(model).lanes.all:
        torch_private.set_group_timeout(lane.group, lane.device, timeout)


def set_requires_all_reduce(model: nn.Module, required: bool) -> None:
    """Whether the next backward passes send gradients beyond the shard dimension (to other replicas and to
    tensor-parallel owners), as FSDP2's method of the same name, which is set too. Pass ``False`` for all but the last
    micro-batch of an accumulation; ``step`` and clipping send on what has been left."""
    runtime_of(model).schedule.all_reduce_gradients = required
    torch_private.set_fsdp_requires_all_reduce(model, required)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally, without any reduction, for dedicated and for FSDP2 parameters. The first backward
    outside reduces the accumulated gradients. Holds one full unsharded gradient per rank."""
    schedule = runtime_of(model).schedule
    if not schedule.sync_gradients:  # inside another no_sync, which will end it
        yield
        return
    schedule.sync_gradients = False
    torch_private.set_fsdp_gradient_sync(model, False)
    try:
        yield
    finally:
        schedule.sync_gradients = True
        torch_private.set_fsdp_gradient_sync(model, True)
