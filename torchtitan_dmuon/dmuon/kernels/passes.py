"""Triton kernels for passes over memory: those before and after Newton-Schulz, for a whole stack of matrices at once,
and the one that packs a gradient (:func:`accumulate`). Of a stack:

1. momentum: read gradient and momentum, write the momentum, sum the squares of the Nesterov input (12 bytes an element
   in float32)
2. input: read both again and write the normalised Nesterov input in the dtype of the iteration (10)
3. weights: read the result and the weight, write the weight, also in the dtype in which it is sent (10, and 2)

The matrices of a stack lie in tensors of their own, so a kernel gets a table of addresses. Whether a matrix moves at
all (was there a gradient, is everything finite) is read from the device; where it does not, nothing of it is written
and its input is zero. Sums are taken in a fixed order that depends on the size of a matrix only.
``optimizer/matrices.py`` has the same passes in PyTorch. Importing this module needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 2048, 4

# Most programs, hence partial sums, of one matrix.
_PROGRAMS = 1024

_ALIGNMENT, _ALIGNED_ELEMENTS = 16, 8  # of addresses (in bytes) and of rows, for wide loads

_LARGE = 1 << 21  # elements

_MAX_NUMEL = 1 << 30  # of one matrix, whose elements are counted with 32 bits

_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}

# Columns of the table: addresses of gradient, momentum, weight, count of gradients and source weight, elements from row
# to row.
_FIELDS = tl.constexpr(6)


@triton.jit
def _address(table, matrix, field: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer out of the table."""
    address = tl.load(table + matrix * _FIELDS + field).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _moving(table, matrix, numel, found_inf, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr):
    """How many elements of a matrix move: all if there was a gradient and everything is finite, else none."""
    moving = tl.where(tl.load(_address(table, matrix, 3, COUNT, False)) != 0, numel, 0)
    if HAS_FOUND_INF:
        moving = tl.where(tl.load(found_inf) == 0, moving, 0)
    return moving


@triton.jit
def _places(index, table, matrix, columns, STRIDED: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the elements of a matrix lie that are numbered row by row."""
    if STRIDED:
        stride = tl.load(table + matrix * _FIELDS + 5)
        if ALIGNED:
            stride = tl.multiple_of(stride, 8)
        index = (index // columns).to(tl.int64) * stride + index % columns
    return index


@triton.jit
def _momentum_kernel(
    table, found_inf, partials, numel, columns, mu,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    NESTEROV: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    moving = _moving(table, matrix, numel, found_inf, COUNT, HAS_FOUND_INF)
    grad = _address(table, matrix, 0, GRAD, ALIGNED)
    momentum = _address(table, matrix, 1, MOMENTUM, ALIGNED)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < moving
        at = _places(index, table, matrix, columns, STRIDED, ALIGNED)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        new = (mu * tl.load(momentum + at, mask=inside, other=0.0).to(tl.float32) + g).to(MOMENTUM)
        tl.store(momentum + at, new, mask=inside)
        value = new.to(tl.float32)
        if NESTEROV:
            value = g + mu * value
        squares += value * value
    tl.store(partials + matrix * tl.num_programs(1) + tl.program_id(1), tl.sum(squares))


@triton.jit
def _input_kernel(
    table, found_inf, partials, out, numel, columns, mu, eps,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    NESTEROV: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    moving = _moving(table, matrix, numel, found_inf, COUNT, HAS_FOUND_INF)
    grad = _address(table, matrix, 0, GRAD, ALIGNED)
    momentum = _address(table, matrix, 1, MOMENTUM, ALIGNED)
    scale = _scale(partials, matrix, eps, SLOTS)
    out += matrix.to(tl.int64) * numel
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < moving
        at = _places(index, table, matrix, columns, STRIDED, ALIGNED)
        value = tl.load(momentum + at, mask=inside, other=0.0).to(tl.float32)
        if NESTEROV:
            value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) + mu * value
        tl.store(out + index, (value * scale).to(out.dtype.element_ty), mask=index < numel)


@triton.jit
def _scale(partials, matrix, eps, SLOTS: tl.constexpr):
    """One over the norm whose partial sums of squares these are."""
    slots = tl.arange(0, SLOTS)
    programs = tl.num_programs(1)
    total = tl.sum(tl.load(partials + matrix * programs + slots, mask=slots < programs, other=0.0))
    return 1.0 / (tl.sqrt(total) + eps)


@triton.jit
def _weight_kernel(
    table, found_inf, update, numel, columns, step_size, decay,
    MASTER: tl.constexpr, SOURCE: tl.constexpr, COUNT: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    CAUTIOUS: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0)
    moving = _moving(table, matrix, numel, found_inf, COUNT, HAS_FOUND_INF)
    master = _address(table, matrix, 2, MASTER, ALIGNED)
    if SOURCE is not None:
        source = _address(table, matrix, 4, SOURCE, ALIGNED)
    update += matrix.to(tl.int64) * numel
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < moving
        at = _places(index, table, matrix, columns, STRIDED, ALIGNED)
        weight = tl.load(master + at, mask=inside, other=0.0).to(tl.float32)
        change = step_size * tl.load(update + index, mask=inside, other=0.0).to(tl.float32)
        decayed = weight * (1.0 - decay)
        if CAUTIOUS:
            decayed = tl.where(change * weight >= 0, decayed, weight)
        new = (decayed - change).to(MASTER)
        tl.store(master + at, new, mask=inside)
        if SOURCE is not None:
            tl.store(source + at, new.to(SOURCE), mask=inside)


@triton.jit
def _squares_kernel(x, partials, numel, BLOCK: tl.constexpr):
    """The sums of squares of a contiguous stack."""
    matrix = tl.program_id(0)
    x += matrix.to(tl.int64) * numel
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < numel, other=0.0).to(tl.float32)
        squares += value * value
    tl.store(partials + matrix * tl.num_programs(1) + tl.program_id(1), tl.sum(squares))


@triton.jit
def _normalize_kernel(x, partials, out, numel, eps, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    matrix = tl.program_id(0)
    scale = _scale(partials, matrix, eps, SLOTS)
    x += matrix.to(tl.int64) * numel
    out += matrix.to(tl.int64) * numel
    for start in range(tl.program_id(1) * BLOCK, numel, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < numel, other=0.0).to(tl.float32)
        tl.store(out + index, (value * scale).to(out.dtype.element_ty), mask=index < numel)


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
        grad, momentum, master, source: [B, m, n], rows contiguous; no ``source`` where the master itself is sent.
        count: 0-D, not zero where there was a gradient.
    """

    grad: torch.Tensor
    momentum: torch.Tensor
    master: torch.Tensor
    source: torch.Tensor | None
    count: torch.Tensor

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        tensors = (self.grad, self.momentum, self.master)
        return tensors if self.source is None else (*tensors, self.source)

    def layout(self) -> tuple | None:
        """What the operands of one stack must have in common; None where the kernels cannot take them."""
        tensors = self._tensors
        if self.grad.stride(2) != 1 or any(t.stride() != self.grad.stride() for t in tensors):
            return None
        if any(t.dtype not in _DTYPES for t in (*tensors, self.count)) or self.grad[0].numel() > _MAX_NUMEL:
            return None
        source = None if self.source is None else self.source.dtype
        return (self.grad.shape[1:], self.grad.dtype, self.momentum.dtype, self.master.dtype, source, self.count.dtype)

    def rows(self) -> list[tuple[int, ...]]:
        """Of the table, one a matrix."""
        step, row = self.grad.stride()[:2]

        def addresses(matrix: int) -> tuple[int, ...]:
            grad, momentum, master, *source = (t.data_ptr() + matrix * step * t.element_size() for t in self._tensors)
            return grad, momentum, master, self.count.data_ptr(), source[0] if source else 0, row

        return [addresses(matrix) for matrix in range(len(self.grad))]


class StackPasses:
    """The passes over one stack of B matrices [m, n]; between two calls to one object only addresses may change."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._table: torch.Tensor | None = None

    def point_at(self, operands: Sequence[Operand]) -> bool:
        """Take these matrices, in this order. False, and nothing done, where the kernels cannot take them."""
        layouts = {operand.layout() for operand in operands}
        if None in layouts or len(layouts) > 1:
            return False
        (m, self._n), grad, momentum, master, source, count = layouts.pop()
        rows = [row for operand in operands for row in operand.rows()]
        self._strided = any(row[5] != self._n for row in rows) and m > 1
        aligned = all(address % _ALIGNMENT == 0 for row in rows for address in (*row[:3], row[4]))
        self._aligned = aligned and not (self._strided and any(row[5] % _ALIGNED_ELEMENTS for row in rows))
        self._dtypes = {
            "GRAD": _DTYPES[grad],
            "MOMENTUM": _DTYPES[momentum],
            "MASTER": _DTYPES[master],
            "SOURCE": None if source is None else _DTYPES[source],
            "COUNT": _DTYPES[count],
        }
        self._m, self._batch = m, len(rows)
        if rows != self._rows or self._table is None:
            # Steps give the same addresses again and again; if not, the copy still does not make the host wait.
            device = operands[0].master.device
            table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._table, self._rows = table.to(device, non_blocking=True), rows
        return True

    def nesterov_input(
        self, mu: float, nesterov: bool, found_inf: torch.Tensor | None, dtype: torch.dtype, eps: float
    ) -> torch.Tensor:
        """Update the momenta, ``M = mu M + G``, and return ``G + mu M`` (or ``M``) over its norms, [B, m, n] in
        ``dtype``; zero for matrices that do not move."""
        numel = self._m * self._n
        programs = _programs(numel)
        partials = torch.empty(self._batch, programs, device=self._table.device)
        out = torch.empty(self._batch, self._m, self._n, dtype=dtype, device=self._table.device)
        common = self._common(found_inf, "GRAD", "MOMENTUM") | {"NESTEROV": nesterov}
        flag = self._table if found_inf is None else found_inf
        grid = (self._batch, programs)
        with torch.cuda.device_of(out):
            _momentum_kernel[grid](self._table, flag, partials, numel, self._n, float(mu), **common)
            slots = triton.next_power_of_2(programs)
            _input_kernel[grid](self._table, flag, partials, out, numel, self._n, float(mu), eps, SLOTS=slots, **common)
        return out

    def move_weights(
        self, update: torch.Tensor, step_size: float, decay: float, cautious: bool, found_inf: torch.Tensor | None
    ) -> None:
        """``W -= decay * W`` (where ``cautious``, only if update and weight do not differ in sign), then
        ``W -= step_size * update``, in masters and sources.

        Args:
            update: [B, m, n], contiguous, of any floating dtype of the kernels.
        """
        numel = self._m * self._n
        common = self._common(found_inf, "MASTER", "SOURCE")
        flag = self._table if found_inf is None else found_inf
        with torch.cuda.device_of(update):
            _weight_kernel[(self._batch, _programs(numel))](
                self._table, flag, update, numel, self._n, float(step_size), float(decay), CAUTIOUS=cautious, **common
            )

    def _common(self, found_inf: torch.Tensor | None, *dtypes: str) -> dict[str, object]:
        return {
            **{name: self._dtypes[name] for name in (*dtypes, "COUNT")},
            "HAS_FOUND_INF": found_inf is not None,
            "STRIDED": self._strided,
            "ALIGNED": self._aligned,
            "BLOCK": _BLOCK,
            "num_warps": _WARPS,
        }


def _programs(numel: int) -> int:
    """Programs for one matrix: its size alone decides, so that its sums do not depend on the stack."""
    return max(1, min(_PROGRAMS, -(-numel // _BLOCK)))


def normalized(x: torch.Tensor, dtype: torch.dtype, eps: float) -> torch.Tensor | None:
    """``x`` [B, m, n] over its Frobenius norms plus ``eps``, in ``dtype``; None for what the kernels cannot take."""
    numel = x.shape[1] * x.shape[2]
    if not x.is_contiguous() or x.dtype not in _DTYPES or not 0 < numel <= _MAX_NUMEL or not len(x):
        return None
    programs = _programs(numel)
    partials = torch.empty(len(x), programs, device=x.device)
    out = torch.empty_like(x, dtype=dtype)
    grid, slots = (len(x), programs), triton.next_power_of_2(programs)
    with torch.cuda.device_of(x):
        _squares_kernel[grid](x, partials, numel, BLOCK=_BLOCK, num_warps=_WARPS)
        _normalize_kernel[grid](x, partials, out, numel, eps, BLOCK=_BLOCK, SLOTS=slots, num_warps=_WARPS)
    return out


def accumulate(into: torch.Tensor, grad: torch.Tensor, *, add: bool) -> bool:
    """``into`` = ``grad``, or ``into`` += ``grad`` where ``add``, in the dtype of ``into``. False, and nothing done,
    where PyTorch's own kernels are as fast: of one dtype (those of two read or write narrowly), or small (a launch of
    Triton's takes the host longer)."""
    if into.dtype == grad.dtype or grad.numel() < _LARGE or not (into.is_contiguous() and grad.is_contiguous()):
        return False
    if into.dtype not in _DTYPES or grad.dtype not in _DTYPES:
        return False
    with torch.cuda.device_of(into):
        _accumulate_kernel[(-(-grad.numel() // _BLOCK),)](
            into, grad, grad.numel(), ADD=add, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return True
