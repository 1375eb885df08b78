"""What users ask of a dedicated model in a training loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from ..runtime.handle import runtime_of
from ..runtime.param import DedicatedParam, Piece
from ..transport import torch_private


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter, in ``named_parameters`` order, the same list on every rank."""
    return list(runtime_of(model).params)


def get_owned_params(
    model: nn.Module, rank: int | None = None, *, coordinate: tuple[int, int, int] | None = None
) -> list[Piece]:
    """The pieces of one rank, in ``named_parameters`` order: of global ``rank`` (default: this one), or of the rank at
    ``coordinate`` = (replicate, shard, tp) in the meshes, 0 where there is no such mesh. A piece has the ``fqn``,
    ``shape`` and ``numel`` of its parameter; of an expert stack or of shared rows, those of the rank's part. Raises
    ValueError for a rank or a place that the model does not have."""
    runtime = runtime_of(model)
    grid = runtime.grid
    if coordinate is not None:
        if rank is not None or coordinate not in itertools.product(*map(range, grid.shape)):
            raise ValueError(
                f"coordinate must be (replicate, shard, tp) in meshes of sizes {grid.shape}, and go without rank, got "
                f"{coordinate!r} with rank={rank!r}"
            )
        rank = grid.ranks[grid.slot_at(*coordinate)]
    rank = dist.get_rank() if rank is None else rank
    if rank not in grid.ranks:
        raise ValueError(
            f"rank must be a global rank, an int, among the {grid.num_slots} from {min(grid.ranks)} to "
            f"{max(grid.ranks)} that share the model, got {rank!r}; a place is coordinate=(replicate, shard, tp)"
        )
    return [piece for dp in runtime.params for piece in dp.pieces if piece.owner_rank == rank]


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
