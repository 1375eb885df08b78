"""Triton kernels for passes over memory: those before and after Newton-Schulz, for a whole stack of matrices at once,
and the one that packs a gradient (:func:`accumulate`). With float32 tensors and a float16 iteration they move:

1. momentum, 12 bytes an element: read gradient and momentum, write the momentum, sum the squares of the Nesterov input
2. input, 10 bytes: read both again, write the normalised Nesterov input in the dtype of the iteration
3. weights, 12 bytes: read the update and the master, write the master and the compute weight (bfloat16)

The matrices of a stack lie in tensors of their own: a kernel gets a table of their addresses. It reads from the device
whether a matrix moves at all; if not, it writes nothing of it, and the input is zero. Sums are taken in a fixed order
that depends on the size of a matrix only. ``optimizer/matrices.py`` has the same passes in PyTorch. Importing this
module needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 2048, 4  # elements of a block, warps of a program
_PROGRAMS = 1024  # most programs, hence partial sums, of one matrix
_ALIGNMENT, _ALIGNED_ELEMENTS = 16, 8  # of addresses (in bytes) and of rows, for wide loads
_LARGE = 1 << 21  # elements
_MAX_NUMEL = 1 << 30  # of one matrix: the kernels count its elements with 32 bits
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

# Columns of the table: the addresses of gradient, momentum, master, compute weight and count; elements from row to row.
_FIELDS = tl.constexpr(6)


@triton.jit
def _address(table, matrix, field: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer out of the table."""
    address = tl.load(table + matrix * _FIELDS + field).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _moving(table, found_inf, matrix, numel, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr):
    """How many elements of a matrix move: all if some rank had a gradient and everything is finite, else none."""
    moving = tl.where(tl.load(_address(table, matrix, 4, COUNT, False)) != 0, numel, 0)
    if HAS_FOUND_INF:
        moving = tl.where(tl.load(found_inf) == 0, moving, 0)
    return moving


@triton.jit
def _places(start, table, matrix, columns, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """(numbers, offsets) of a block of elements of a matrix, numbered row by row."""
    index = start + tl.arange(0, BLOCK)
    at = index
    if STRIDED:
        stride = tl.load(table + matrix * _FIELDS + 5)
        if ALIGNED:
            stride = tl.multiple_of(stride, 8)
        at = (index // columns).to(tl.int64) * stride + index % columns
    return index, at


@triton.jit
def _scale(partials, matrix, eps, SLOTS: tl.constexpr):
    """One over the norm of a matrix: ``partials`` are sums of its squares."""
    slots = tl.arange(0, SLOTS)
    programs = tl.num_programs(1)
    total = tl.sum(tl.load(partials + matrix * programs + slots, mask=slots < programs, other=0.0))
    return 1.0 / (tl.sqrt(total) + eps)


@triton.jit
def _input_kernel(
    table, found_inf, numel, columns, partials, out, mu, eps,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, NESTEROV: tl.constexpr,
    FIRST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Pass 1 (FIRST), which writes the momentum and ``partials``, or pass 2, which writes ``out``."""
    matrix = tl.program_id(0)
    moving = _moving(table, found_inf, matrix, numel, COUNT, HAS_FOUND_INF)
    grad = _address(table, matrix, 0, GRAD, ALIGNED)
    momentum = _address(table, matrix, 1, MOMENTUM, ALIGNED)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    if not FIRST:
        scale = _scale(partials, matrix, eps, SLOTS)
        out += matrix.to(tl.int64) * numel
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index, at = _places(start, table, matrix, columns, STRIDED, ALIGNED, BLOCK)
        inside = index < moving
        value = tl.load(momentum + at, mask=inside, other=0.0).to(tl.float32)
        if FIRST or NESTEROV:
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if FIRST:
            new = (mu * value + g).to(MOMENTUM)
            tl.store(momentum + at, new, mask=inside)
            value = new.to(tl.float32)
        if NESTEROV:
            value = g + mu * value
        if FIRST:
            squares += value * value
        else:
            tl.store(out + index, (value * scale).to(out.dtype.element_ty), mask=index < numel)
    if FIRST:
        tl.store(partials + matrix * tl.num_programs(1) + tl.program_id(1), tl.sum(squares))


@triton.jit
def _weight_kernel(
    table, found_inf, numel, columns, update, step_size, decay,
    MASTER: tl.constexpr, COMPUTE: tl.constexpr, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, CAUTIOUS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    moving = _moving(table, found_inf, matrix, numel, COUNT, HAS_FOUND_INF)
    master = _address(table, matrix, 2, MASTER, ALIGNED)
    if COMPUTE is not None:
        compute_weight = _address(table, matrix, 3, COMPUTE, ALIGNED)
    update += matrix.to(tl.int64) * numel
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index, at = _places(start, table, matrix, columns, STRIDED, ALIGNED, BLOCK)
        inside = index < moving
        weight = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
        change = step_size * tl.load(update + index, mask=inside, other=0.0).to(tl.float32)
        decayed = weight * (1.0 - decay)
        if CAUTIOUS:
            decayed = tl.where(change * weight >= 0, decayed, weight)
        new = (decayed - change).to(MASTER)
        tl.store(master + at, new, mask=inside)
        if COMPUTE is not None:
            tl.store(compute_weight + at, new.to(COMPUTE), mask=inside)


@triton.jit
def _normalize_kernel(x, numel, partials, out, eps, BLOCK: tl.constexpr, FIRST: tl.constexpr, SLOTS: tl.constexpr):
    """Of a contiguous stack the sums of squares into ``partials`` (FIRST), or ``x`` over its norms into ``out``."""
    matrix = tl.program_id(0)
    x += matrix.to(tl.int64) * numel
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    if not FIRST:
        scale = _scale(partials, matrix, eps, SLOTS)
        out += matrix.to(tl.int64) * numel
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < numel, other=0.0).to(tl.float32)
        if FIRST:
            squares += value * value
        else:
            tl.store(out + index, (value * scale).to(out.dtype.element_ty), mask=index < numel)
    if FIRST:
        tl.store(partials + matrix * tl.num_programs(1) + tl.program_id(1), tl.sum(squares))


@triton.jit
def _accumulate_kernel(into, grad, numel, ADD: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    value = tl.load(grad + index, mask=inside).to(tl.float32)
    if ADD:
        value += tl.load(into + index, mask=inside).to(tl.float32)
    tl.store(into + index, value.to(into.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------ the host's side


@dataclass(frozen=True)
class Operand:
    """The tensors of some matrices of one shape, all with the same strides.

    Attributes:
        grad, momentum, master, compute_weight: [B, m, n], rows contiguous; ``compute_weight`` is None where the owner
            sends the master itself.
        count: 0-D, zero where no rank had a gradient.
    """

    grad: torch.Tensor
    momentum: torch.Tensor
    master: torch.Tensor
    compute_weight: torch.Tensor | None
    count: torch.Tensor

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the table. Without a compute weight the kernels do not use the fourth address."""
        last = self.master if self.compute_weight is None else self.compute_weight
        return self.grad, self.momentum, self.master, last

    def layout(self) -> tuple | None:
        """What the operands of one stack must have in common; None where the kernels cannot take them."""
        tensors = self._tensors
        if self.grad.stride(2) != 1 or any(t.stride() != self.grad.stride() for t in tensors):
            return None
        dtypes = [_DTYPES.get(t.dtype) for t in (*tensors, self.count)]
        if None in dtypes or self.grad[0].numel() > _MAX_NUMEL:
            return None
        if self.compute_weight is None:
            dtypes[3] = None
        return (*self.grad.shape[1:], *dtypes)

    def rows(self) -> list[tuple[int, ...]]:
        """Rows of the table, one a matrix."""
        step, pitch = self.grad.stride()[:2]
        starts = [(t.data_ptr(), step * t.element_size()) for t in self._tensors]
        count = self.count.data_ptr()
        return [(*(at + size * i for at, size in starts), count, pitch) for i in range(len(self.grad))]


class StackPasses:
    """The passes over one stack of B matrices [m, n]. Between two calls to one object only addresses may change."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._table: torch.Tensor | None = None

    def point_at(self, operands: Sequence[Operand]) -> bool:
        """Take these matrices, in this order. False, and nothing done, where the kernels cannot take them."""
        layouts = {operand.layout() for operand in operands}
        if None in layouts or len(layouts) > 1:
            return False
        self._m, self._n, *self._dtypes = layouts.pop()
        rows = [row for operand in operands for row in operand.rows()]
        self._strided = any(row[5] != self._n for row in rows) and self._m > 1
        aligned = all(address % _ALIGNMENT == 0 for row in rows for address in row[:4])
        self._aligned = aligned and not (self._strided and any(row[5] % _ALIGNED_ELEMENTS for row in rows))
        if rows != self._rows or self._table is None:
            # Addresses rarely change from step to step. Where they do, the copy does not make the host wait.
            device = operands[0].master.device
            table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._table, self._rows = table.to(device, non_blocking=True), rows
        return True

    def nesterov_input(
        self, mu: float, nesterov: bool, found_inf: torch.Tensor | None, dtype: torch.dtype, eps: float
    ) -> torch.Tensor:
        """Update the momenta, ``M = mu M + G``, and return ``G + mu M`` (or ``M``) over its norms, [B, m, n] in
        ``dtype``; zero for matrices that do not move."""
        partials = torch.empty(len(self._rows), _programs(self._m * self._n), device=self._table.device)
        out = torch.empty(len(self._rows), self._m, self._n, dtype=dtype, device=self._table.device)
        constants = {"GRAD": self._dtypes[0], "MOMENTUM": self._dtypes[1], "NESTEROV": nesterov}
        for sums in _passes(partials):
            self._launch(_input_kernel, found_inf, partials, out, float(mu), eps, **constants, **sums)
        return out

    def move_weights(
        self, update: torch.Tensor, step_size: float, decay: float, cautious: bool, found_inf: torch.Tensor | None
    ) -> None:
        """``W -= decay * W`` (where ``cautious``, only if update and weight do not differ in sign), then
        ``W -= step_size * update``, in masters and compute weights.

        Args:
            update: [B, m, n], contiguous, of any dtype of the kernels.
        """
        constants = {"MASTER": self._dtypes[2], "COMPUTE": self._dtypes[3], "CAUTIOUS": cautious}
        self._launch(_weight_kernel, found_inf, update, float(step_size), float(decay), **constants)

    def _launch(
        self, kernel: triton.JITFunction, found_inf: torch.Tensor | None, *arguments: object, **constants: object
    ) -> None:
        numel, has_found_inf = self._m * self._n, found_inf is not None
        with torch.cuda.device_of(self._table):
            kernel[(len(self._rows), _programs(numel))](
                self._table, found_inf if has_found_inf else self._table, numel, self._n, *arguments,
                COUNT=self._dtypes[4], HAS_FOUND_INF=has_found_inf, STRIDED=self._strided, ALIGNED=self._aligned,
                BLOCK=_BLOCK, num_warps=_WARPS, **constants,
            )  # fmt: skip


def _programs(numel: int) -> int:
    """Programs for one matrix. Only its size decides, so its sums do not depend on the stack."""
    return max(1, min(_PROGRAMS, -(-numel // _BLOCK)))


def _passes(partials: torch.Tensor) -> tuple[dict[str, object], dict[str, object]]:
    """The constants of the pass that writes ``partials`` [B, programs], and of that which reads them."""
    return {"FIRST": True, "SLOTS": 0}, {"FIRST": False, "SLOTS": triton.next_power_of_2(partials.shape[1])}


def normalized(x: torch.Tensor, dtype: torch.dtype, eps: float) -> torch.Tensor | None:
    """``x`` [B, m, n] over its Frobenius norms plus ``eps``, in ``dtype``; None where the kernels cannot take ``x``."""
    numel = x.shape[1] * x.shape[2]
    if not x.is_contiguous() or x.dtype not in _DTYPES or not 0 < numel <= _MAX_NUMEL or not len(x):
        return None
    partials, out = torch.empty(len(x), _programs(numel), device=x.device), torch.empty_like(x, dtype=dtype)
    with torch.cuda.device_of(x):
        for sums in _passes(partials):
            _normalize_kernel[partials.shape](x, numel, partials, out, eps, BLOCK=_BLOCK, num_warps=_WARPS, **sums)
    return out


def accumulate(into: torch.Tensor, grad: torch.Tensor, *, add: bool) -> bool:
    """``into = grad``, or ``into += grad`` where ``add``, in the dtype of ``into``. False, and nothing done, where
    PyTorch's kernels are as fast: both have one dtype (PyTorch reads or writes two narrowly), or ``grad`` is small
    (launching a Triton kernel takes the host longer)."""
    numel = grad.numel()
    taken = all(t.is_contiguous() and t.dtype in _DTYPES for t in (into, grad))
    if not taken or into.dtype == grad.dtype or numel < _LARGE:
        return False
    with torch.cuda.device_of(into):
        _accumulate_kernel[(-(-numel // _BLOCK),)](into, grad, numel, ADD=add, BLOCK=_BLOCK, num_warps=_WARPS)
    return True
