"""A dedicated parameter, and the pieces of it that ranks own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..ownership.spec import ParamSpec, chunk_bounds
from ..transport.grid import Grid
from ..transport.torch_private import local_tensor


class Piece:
    """A run of a parameter's first dimension that one rank owns: all of it, some experts of a stack, or (route
    ``sharded_adamw``) some rows. A piece has one owner in the whole grid.

    Attributes:
        dp: the parameter, with its name ``fqn`` and ``nn.Parameter``, ``param``.
        start, stop: range of the first dimension.
        owner: the owner's slot in the grid; ``owner_rank`` its global rank.
        is_owned: whether this rank is the owner.
        shape: (stop - start, ...), not cut by tensor parallelism.
        master: the owner's weight [shape, master_dtype]; ``None`` elsewhere and before materialisation.
        compute_weight: the owner's weight [shape, param_dtype], from which forward broadcasts start. ``None`` where the
            master itself is broadcast, or tensor parallelism cuts the weight. Whoever changes the master inside a step
            also changes the compute weight.
        grad: the owner's reduced gradient [shape, grad_dtype]; ``None`` elsewhere and while there is none. It may still
            be on its way: call :meth:`wait_gradient` before reading it.
        grad_count: 0-D tensor on the owner: how many ranks had a gradient. Where it is zero, ``grad`` is all zeros.
        arrived: on CUDA, the event after which ``grad`` is complete.
    """

    def __init__(self, dp: DedicatedParam, start: int, stop: int, owner: int) -> None:
        self.dp, self.fqn, self.param = dp, dp.fqn, dp.param
        self.start = start
        self.stop = stop
        self.owner = owner
        self.owner_rank = dp.grid.ranks[owner]
        self.is_owned = owner == dp.grid.slot
        self.shape: tuple[int, ...] = (stop - start, *dp.shape[1:]) if dp.shape else ()
        self.master: torch.Tensor | None = None
        self.compute_weight: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.grad_count: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    @property
    def spec(self) -> ParamSpec:
        return self.dp.spec

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.dp.shape

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """View of the piece in a tensor of the parameter's shape."""
        return whole if self.is_whole else whole[self.start : self.stop]

    def local_shape(self, column: int) -> tuple[int, ...]:
        """Shape of the part of the piece that a tensor-parallel column holds."""
        dim = self.dp.tp_dim
        return self.shape if dim is None else (*self.shape[:dim], self._span(column)[1], *self.shape[dim + 1 :])

    def local_part(self, full: torch.Tensor, column: int) -> torch.Tensor:
        """View of the part of ``full`` [shape] that a tensor-parallel column holds."""
        return full if self.dp.tp_dim is None else full.narrow(self.dp.tp_dim, *self._span(column))

    def _span(self, column: int) -> tuple[int, int]:
        """(start, size) along ``tp_dim``, within the piece, of the column's part."""
        dim = self.dp.tp_dim
        start, size = chunk_bounds(self.dp.shape[dim], self.dp.grid.shape[2], column)
        if dim > 0:
            return start, size
        # Rows 0 to 3 of 8 and a column with rows 2 to 5 share rows 2 and 3.
        begin, end = (min(max(at, self.start), self.stop) for at in (start, start + size))
        return begin - self.start, end - begin

    def accumulate(self, grad: torch.Tensor, count: torch.Tensor) -> None:
        """Add a reduced gradient to the one since the last ``zero_grad``."""
        if self.grad is None:
            self.grad, self.grad_count = grad, count
        else:
            self.grad.add_(grad)
            self.grad_count.add_(count)

    def refresh_compute_weight(self) -> None:
        """Bring ``compute_weight`` up to date with ``master``."""
        if self.compute_weight is not None:
            self.compute_weight.copy_(self.master)

    def wait_gradient(self) -> None:
        """Make the current stream wait for the gradient, which another stream may have delivered."""
        if self.arrived is not None:
            self.arrived.wait()

    def drop_gradient(self) -> None:
        self.grad = self.grad_count = self.arrived = None

    def __repr__(self) -> str:
        part = "" if self.is_whole else f"[{self.start}:{self.stop}]"
        return f"Piece({self.fqn}{part}, {list(self.shape)}, {self.spec.route}, owner rank {self.owner_rank})"


class DedicatedParam:
    """One dedicated parameter.

    Attributes:
        fqn: canonical name.
        param: the model's ``nn.Parameter``, the same object for the whole run.
        spec: route, dtypes and reason.
        tp_dim: the dimension that tensor parallelism shards; ``None`` when every column has the whole parameter.
        pieces: in the order of the first dimension; several of an expert stack and of shared rows, else one.
    """

    def __init__(
        self,
        fqn: str,
        param: nn.Parameter,
        spec: ParamSpec,
        tp_dim: int | None,
        grid: Grid,
        runs: Sequence[tuple[int, int, int]],
    ) -> None:
        """``runs`` has (start, stop, owner's slot) of every piece."""
        self.fqn = fqn
        self.param = param
        self.spec = spec
        self.tp_dim = tp_dim
        self.grid = grid
        self.pieces = [Piece(self, *run) for run in runs]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this tensor-parallel column's part."""
        if self.tp_dim is None:
            return self.shape
        _, size = chunk_bounds(self.shape[self.tp_dim], self.grid.shape[2], self.grid.coordinate[2])
        return (*self.shape[: self.tp_dim], size, *self.shape[self.tp_dim + 1 :])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def owner_rank(self) -> int:
        """Global rank of the owner (of the first piece)."""
        return self.pieces[0].owner_rank

    def show(self, weight: torch.Tensor) -> None:
        """Let the parameter read ``weight`` [local_shape, param_dtype]."""
        local_tensor(self.param).data = weight

    def take_gradient(self) -> torch.Tensor:
        """This rank's gradient [local_shape], taken off the parameter."""
        grad, self.param.grad = self.param.grad, None
        if isinstance(grad, DTensor):
            if grad.placements != self.param.placements:  # partial sums under sequence parallelism
                grad = grad.redistribute(placements=self.param.placements)
            grad = grad.to_local()
        return grad

    def __repr__(self) -> str:
        return f"DedicatedParam({self.fqn}, {list(self.shape)}, {self.spec.route}, owner rank {self.owner_rank})"
