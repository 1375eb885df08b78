"""Where the numbers of dedicated parameters live.

``OwnedPack`` holds the parameters of one unit that have a single owner each: the packed compute buffer the forward
reads, this rank's source weights, the owner's fp32 masters, and the packed gradients. It launches collectives when it
is told to; when that happens is the unit's and the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .lanes import Lane, Pending
from .policy import ParamSpec

# Offsets are multiples of this many bytes, so that any dtype can be viewed, vector loads are aligned, and inductor
# need not copy misaligned inputs.
_ALIGN_BYTES = 128


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a parameter shows while its weight is not here: NaN of the true shape, one element of memory."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


class DedicatedParam:
    """One dedicated parameter.

    Attributes:
        fqn: canonical name.
        param: the model's ``nn.Parameter``, the same object for the whole run.
        spec: route, dtypes and reason.
        owner: slot of the owner; ``owner_rank`` its global rank.
        is_owned: whether that is this rank.
        master: the owner's weight [shape, master_dtype]; ``None`` elsewhere and before materialisation.
        grad: the owner's reduced gradient [shape, grad_dtype]; ``None`` elsewhere and while there is none.
        grad_count: 0-D tensor on the owner, zero when no rank had a gradient (then ``grad`` is all zeros).
    """

    def __init__(self, fqn: str, param: nn.Parameter, spec: ParamSpec, owner: int, owner_rank: int, is_owned: bool):
        self.fqn = fqn
        self.param = param
        self.spec = spec
        self.owner = owner
        self.owner_rank = owner_rank
        self.is_owned = is_owned
        self.master: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.grad_count: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def numel(self) -> int:
        return self.param.numel()

    def __repr__(self) -> str:
        return f"DedicatedParam({self.fqn}, {list(self.shape)}, {self.spec.route}, owner rank {self.owner_rank})"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class OwnedPack:
    """The owned parameters of one unit, packed owner after owner.

    Args:
        params: in model order.
        lane_size: number of ranks of the shard group; owners are ranks of it.
        rank: this rank in the shard group.
        device: of every buffer.
        divide_factor: called at reduction time; the summed gradient is divided by it.
    """

    def __init__(
        self,
        params: Sequence[DedicatedParam],
        lane_size: int,
        rank: int,
        device: torch.device,
        divide_factor: Callable[[], float],
    ) -> None:
        self.params = sorted(params, key=lambda dp: dp.owner)  # stable: model order within an owner
        self.rank = rank
        self.device = device
        self.always_unsharded = lane_size == 1
        self._divide_factor = divide_factor
        self.trainable = [dp for dp in self.params if dp.spec.trainable]
        self._layout_weights(lane_size)
        self._layout_gradients(lane_size)

    # ---------------------------------------------------------------- weights

    def _layout_weights(self, lane_size: int) -> None:
        offsets, self._weight_segments, end = [], [], 0
        for owner in range(lane_size):
            start = end
            for dp in self.params:
                if dp.owner == owner:
                    offsets.append(end)
                    end = _round_up(end + dp.numel * dp.spec.param_dtype.itemsize, _ALIGN_BYTES)
            self._weight_segments.append((start, end))
        own_start, own_end = self._weight_segments[self.rank]
        self._source = torch.empty(own_end - own_start, dtype=torch.uint8, device=self.device)
        if self.always_unsharded:
            self._packed = self._source
        else:
            self._packed = torch.empty(end, dtype=torch.uint8, device=self.device)
        self._views = [self._typed(self._packed, off, dp) for off, dp in zip(offsets, self.params, strict=True)]
        self._placeholders = [placeholder(dp.shape, dp.spec.param_dtype, self.device) for dp in self.params]
        # The source weight of each owned parameter, which every broadcast starts from.
        self._sources = {
            dp.fqn: self._typed(self._source, off - own_start, dp)
            for off, dp in zip(offsets, self.params, strict=True)
            if dp.owner == self.rank
        }
        self.free()

    @staticmethod
    def _typed(buffer: torch.Tensor, offset: int, dp: DedicatedParam) -> torch.Tensor:
        dtype = dp.spec.param_dtype
        return buffer[offset : offset + dp.numel * dtype.itemsize].view(dtype).view(dp.shape)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed compute buffer."""
        return self._weight_segments[-1][1]

    def allocate_masters(self) -> None:
        """Give every owned parameter its (uninitialised) master. A master in the compute dtype is the source weight
        itself, so nothing is stored twice."""
        for dp in self.params:
            if dp.is_owned and dp.master is None:
                source = self._sources[dp.fqn]
                same = dp.spec.master_dtype == dp.spec.param_dtype
                dp.master = source if same else torch.empty(dp.shape, dtype=dp.spec.master_dtype, device=self.device)

    def publish(self) -> None:
        """Owner: bring the source weights up to date with the masters."""
        for dp in self.params:
            if dp.is_owned and dp.master is not None:
                source = self._sources[dp.fqn]
                if source.data_ptr() != dp.master.data_ptr():
                    source.copy_(dp.master)

    def launch_unshard(self, lane: Lane) -> Pending:
        """Collective. Fill the packed buffer: every owner broadcasts its segment."""
        if self.always_unsharded:
            return Pending([])
        self._packed.untyped_storage().resize_(self._packed.numel())
        start, end = self._weight_segments[self.rank]
        self._packed[start:end].copy_(self._source)
        return lane.broadcast(
            (self._packed[start:end], owner) for owner, (start, end) in enumerate(self._weight_segments) if end > start
        )

    def install(self) -> None:
        """Let the parameters show their weights."""
        for dp, view in zip(self.params, self._views, strict=True):
            dp.param.data = view

    def conceal(self) -> None:
        """Let the parameters show placeholders; the packed buffer stays as it is."""
        for dp, nan in zip(self.params, self._placeholders, strict=True):
            dp.param.data = nan

    def free(self) -> None:
        """Give the packed buffer's memory back. Tensors saved for backward keep pointing at the same storage, which
        ``launch_unshard`` fills again before they are read."""
        if not self.always_unsharded:
            self._packed.untyped_storage().resize_(0)

    # ---------------------------------------------------------------- gradients

    def _layout_gradients(self, lane_size: int) -> None:
        """Per owner: its trainable gradients, then one element per parameter that counts the ranks which had one.
        Summed together with the gradients, the counts tell the owner what was skipped everywhere."""
        self._grad_dtype = self.trainable[0].spec.grad_dtype if self.trainable else torch.float32
        align = _ALIGN_BYTES // self._grad_dtype.itemsize
        self._grad_offset: dict[str, int] = {}
        self._count_offset: dict[str, int] = {}
        self._grad_segments, end = [], 0
        for owner in range(lane_size):
            start = end
            mine = [dp for dp in self.trainable if dp.owner == owner]
            for dp in mine:
                self._grad_offset[dp.fqn] = end
                end = _round_up(end + dp.numel, align)
            for position, dp in enumerate(mine):
                self._count_offset[dp.fqn] = end + position
            end = _round_up(end + len(mine), align)
            self._grad_segments.append((start, end))
        self._counts = torch.tensor(
            [self._count_offset[dp.fqn] for dp in self.trainable], dtype=torch.int64, device=self.device
        )
        self._grads: torch.Tensor | None = None  # packed, unreduced
        self._present: set[str] = set()
        self._own: torch.Tensor | None = None  # this owner's segment, reduced and accumulated

    @property
    def grad_bytes(self) -> int:
        """Bytes of the packed gradient buffer."""
        return self._grad_segments[-1][1] * self._grad_dtype.itemsize

    def add_gradient(self, dp: DedicatedParam, grad: torch.Tensor) -> None:
        """Accumulate a local gradient [shape] into the packed buffer."""
        slot = self._grad_view(self._packed_gradients(), dp)
        if dp.fqn in self._present:
            slot.add_(grad)
        else:
            slot.copy_(grad)
            self._present.add(dp.fqn)

    def _packed_gradients(self) -> torch.Tensor:
        if self._grads is None:
            self._grads = torch.empty(self._grad_segments[-1][1], dtype=self._grad_dtype, device=self.device)
        return self._grads

    def _grad_view(self, buffer: torch.Tensor, dp: DedicatedParam, base: int = 0) -> torch.Tensor:
        start = self._grad_offset[dp.fqn] - base
        return buffer[start : start + dp.numel].view(dp.shape)

    def launch_reduce(self, lane: Lane) -> tuple[Pending, torch.Tensor]:
        """Collective. Sum the packed gradients onto their owners; a parameter without a local gradient sends zeros.
        Returns what ``finish_reduce`` needs."""
        grads = self._packed_gradients()
        grads.index_fill_(0, self._counts, 1.0)
        for dp in self.trainable:
            if dp.fqn not in self._present:
                self._grad_view(grads, dp).zero_()
                grads[self._count_offset[dp.fqn]].zero_()
        self._grads, self._present = None, set()
        pending = lane.reduce(
            (grads[start:end], owner) for owner, (start, end) in enumerate(self._grad_segments) if end > start
        )
        return pending, grads

    def finish_reduce(self, pending: Pending, grads: torch.Tensor) -> None:
        """Wait, and add this owner's segment to the gradient it has accumulated since the last ``zero_grad``."""
        pending.wait()
        start, end = self._grad_segments[self.rank]
        if start == end:
            return
        segment = grads[start:end]
        if (factor := self._divide_factor()) != 1.0:
            segment.div_(factor)
        if self._own is None:
            # Cloned, so that the other owners' segments of the packed buffer can be freed.
            self._own = segment if self.always_unsharded else segment.clone()
            for dp in self.trainable:
                if dp.is_owned:
                    dp.grad = self._grad_view(self._own, dp, base=start)
                    dp.grad_count = self._own[self._count_offset[dp.fqn] - start]
        else:
            self._own.add_(segment)

    def drop_gradients(self) -> None:
        """Forget local and reduced gradients."""
        self._grads, self._present, self._own = None, set(), None
        for dp in self.trainable:
            dp.grad = dp.grad_count = None
