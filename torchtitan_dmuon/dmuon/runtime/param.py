"""The vocabulary of storage: a dedicated parameter, the pieces of it that ranks own, and what it shows meanwhile.

The two kinds of storage behind them are in ``owned.py`` (one owner a piece) and ``rows.py`` (every rank owns rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..kernels.select import triton_passes
from ..ownership.policy import ParamSpec
from ..transport.grid import Grid
from ..transport.tensor_parallel import local_shape
from ..transport.torch_private import local_tensor

# Offsets are multiples of this many bytes, so that any dtype can be viewed, vector loads are aligned, and inductor
# need not copy misaligned inputs.
ALIGN_BYTES = 128


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a parameter shows while its weight is not here: NaN of the true shape, one element of memory."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def accumulate(into: torch.Tensor, grad: torch.Tensor, add: bool) -> None:
    """``into`` = ``grad``, or ``into`` += ``grad`` where ``add``, in the dtype of ``into``."""
    fused = triton_passes(into.device)
    if fused is not None and fused.accumulate(into, grad, add):
        return
    if add:
        into.add_(grad)
    else:
        into.copy_(grad)


class Piece:
    """What one rank owns of a parameter: all of it, a run of experts of a 3-D stack, or (``sharded_adamw``) a run of
    rows.

    Attributes:
        dp: the parameter.
        start, stop: range of the first dimension.
        owner: slot of the owner; ``owner_rank`` its global rank.
        is_owned: whether that is this rank.
        shape: of the piece, not split by tensor parallelism (``sharded_adamw``: of this rank's rows).
        copies: number of ranks that hold the same piece; 1 but for replicated rows.
        master: the owner's weight [shape, master_dtype]; ``None`` elsewhere and before materialisation.
        source: the same in ``param_dtype``, from which it is broadcast; ``None`` where that is the master itself or
            tensor parallelism cuts it in parts. Whoever changes the master inside a step also changes this.
        grad: the owner's reduced gradient [shape, grad_dtype]; ``None`` elsewhere and while there is none.
        grad_count: 0-D tensor on the owner, zero when no rank had a gradient (then ``grad`` is all zeros).
        arrived: on CUDA, when ``grad`` is complete.

    ``grad`` may still be on its way: :meth:`wait_gradient` before it is read.
    """

    def __init__(self, dp: DedicatedParam, start: int, stop: int, owner: int, owner_rank: int, is_owned: bool):
        self.dp = dp
        self.start = start
        self.stop = stop
        self.owner = owner
        self.owner_rank = owner_rank
        self.is_owned = is_owned
        self.shape: tuple[int, ...] = (stop - start, *dp.shape[1:]) if dp.shape else ()
        self.copies = 1
        self.master: torch.Tensor | None = None
        self.compute_weight: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.grad_count: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    @property
    def fqn(self) -> str:
        return self.dp.fqn

    @property
    def param(self) -> nn.Parameter:
        return self.dp.param

    @property
    def spec(self) -> ParamSpec:
        return self.dp.spec

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.dp.shape

    def accumulate(self, grad: torch.Tensor, count: torch.Tensor) -> None:
        """Add a reduced gradient to what has come since the last ``zero_grad``."""
        if self.grad is None:
            self.grad, self.grad_count = grad, count
        else:
            self.grad.add_(grad)
            self.grad_count.add_(count)

    def refresh_compute_weight(self) -> None:
        """Bring ``source`` up to date with ``master``."""
        if self.compute_weight is not None:
            self.compute_weight.copy_(self.master)

    def wait_gradient(self) -> None:
        """Make the current stream wait for the gradient, which may have been delivered on another one."""
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
        tp_dim: the dimension tensor parallelism shards; ``None`` when every column has all of it.
        tp_column, tp_columns: this rank's tensor-parallel place.
        pieces: its owners' parts; one, but for expert stacks and sharded rows.
    """

    def __init__(self, fqn: str, param: nn.Parameter, spec: ParamSpec, tp_dim: int | None, grid: Grid):
        self.fqn = fqn
        self.param = param
        self.spec = spec
        self.tp_dim = tp_dim
        self.tp_column, self.tp_columns = grid.coordinate[2], grid.shape[2]
        self.pieces: list[Piece] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this tensor-parallel column holds."""
        return local_shape(self.shape, self.tp_dim, self.tp_column, self.tp_columns)

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
