"""Triton kernel for products that are known to be symmetric, ``C = beta * D + alpha * A @ B + diagonal * I``, batched.

The kernel computes the upper triangle of C only, tile by tile. It stores each element above the diagonal twice, at
(p, q) and at (q, p), and each on the diagonal once. So C equals its transpose bit for bit, every element has one
writer, and the kernel does about half of the operations of a full product. Importing this module needs Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TMA_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class TileConfig:
    """How the kernel cuts its work.

    Attributes:
        block_m, block_n: rows and columns of C that one program computes: a square, or two side by side.
        block_k: of the inner dimension, per pipeline stage.
        warps, stages: warps of a program and depth of its software pipeline.
        group: tile rows that programs visit together, so that their operands stay in L2.
        tma: programs load through tensor descriptors (SM90 and later) instead of pointers.
        registers: most that a thread may use; with fewer, two programs share a multiprocessor.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 8
    tma: bool = False
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.block_n not in (self.block_m, 2 * self.block_m):
            raise ValueError(f"block_n must be block_m or twice that, got {self.block_m} x {self.block_n}")


# ------------------------------------------------------------------ which program computes which tile


@triton.jit
def _triangle_row(index):
    """Row of entry ``index`` in a lower triangle that is counted row by row: entries 0; 1, 2; 3, 4, 5 lie in rows 0, 1
    and 2. The two comparisons repair the rounding of the square root."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row += ((row + 1) * (row + 2) // 2 <= index).to(tl.int32)
    row -= (row * (row + 1) // 2 > index).to(tl.int32)
    return row


@triton.jit
def _triangle_pair(index, size, GROUP: tl.constexpr):
    """(large, small), large >= small, of entry ``index`` of a ``size`` x ``size`` triangle. Programs visit bands of
    GROUP rows column by column, so that those that run together share operands."""
    first = _triangle_row(index) // GROUP * GROUP
    height = tl.minimum(GROUP, size - first)
    rest = index - first * (first + 1) // 2
    rectangle = first * height
    inner = tl.maximum(rest - rectangle, 0)
    inner_row = _triangle_row(inner)
    large = tl.where(rest < rectangle, rest % height, inner_row)
    small = tl.where(rest < rectangle, rest // height, first + inner - inner_row * (inner_row + 1) // 2)
    return first + large, small


@triton.jit
def _locate(tile, per_matrix, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(matrix, first row, first column) of a tile. Squares of BLOCK_N x BLOCK_N form the triangle; each is cut in
    BLOCK_N / BLOCK_M tiles. The tiles below the last row come last of all, and no program is launched for them."""
    RATIO: tl.constexpr = BLOCK_N // BLOCK_M
    index = tile % per_matrix
    column, row = _triangle_pair(index // RATIO, tl.cdiv(size, BLOCK_N), GROUP)
    return (tile // per_matrix).to(tl.int64), (row * RATIO + index % RATIO) * BLOCK_M, column * BLOCK_N


# ------------------------------------------------------------------ one tile


@triton.jit
def _store_square(
    acc, d, c, row, column, size, alpha, beta, diagonal, stride_dm, stride_dn, stride_cm, stride_cn,
    HAS_D: tl.constexpr, HAS_DIAGONAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale and add to a square tile, store it and its mirror image. A tile below the diagonal is not stored."""
    # Offsets to the tile have 64 bits, those inside it 32: every thread keeps one of these an element.
    origin_row, origin_column = row.to(tl.int64), column.to(tl.int64)
    down, right = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (down < size - row) & (right < size - column)
    acc *= alpha
    if HAS_D:
        d += origin_row * stride_dm + origin_column * stride_dn
        acc += beta * tl.load(d + down * stride_dm + right * stride_dn, mask=inside, other=0.0).to(tl.float32)
    if HAS_DIAGONAL:
        acc = tl.where(row + down == column + right, acc + diagonal, acc)
    value = acc.to(c.dtype.element_ty)
    local = down * stride_cm + right * stride_cn
    direct = c + origin_row * stride_cm + origin_column * stride_cn + local
    if column > row:
        tl.store(direct, value, mask=inside)
        mirror = c + origin_column * stride_cm + origin_row * stride_cn + local
        tl.store(mirror, tl.trans(value), mask=(down < size - column) & (right < size - row))
    elif column == row:
        tl.store(direct, tl.where(down <= right, value, tl.trans(value)), mask=inside)


# Counts of tiles differ from shape to shape: Triton compiles no kernel of its own for those that 16 divides.
@triton.jit(do_not_specialize=["per_matrix"])
def _product_kernel(
    a, b, d, c, per_matrix, size, depth, alpha, beta, diagonal,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_db, stride_dm, stride_dn, stride_cb, stride_cm, stride_cn,
    TMA: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_D: tl.constexpr, HAS_DIAGONAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile. With TMA ``a`` and ``b`` are descriptors, in whose first dimension the batch lies flat; else pointers.
    In place of rows past the edge of its matrix a tile loads others and does not store their results."""
    matrix, row, column = _locate(tl.program_id(0), per_matrix, size, BLOCK_M, BLOCK_N, GROUP)
    index = matrix.to(tl.int32)
    if not TMA:
        inner = tl.arange(0, BLOCK_K)
        rows = tl.arange(0, BLOCK_M) % (size - row)
        columns = tl.arange(0, BLOCK_N) % (size - column)
        a += matrix * stride_ab + row.to(tl.int64) * stride_am
        b += matrix * stride_bb + column.to(tl.int64) * stride_bn
        a_tile = a + rows[:, None] * stride_am + inner[None, :] * stride_ak
        b_tile = b + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if TMA:
            left = a.load([index * size + row, start]) if A_K_MAJOR else a.load([index * depth + start, row]).T
            right = b.load([index * size + column, start]).T if B_K_MAJOR else b.load([index * depth + start, column])
        elif EVEN_K:
            left, right = tl.load(a_tile), tl.load(b_tile)
        else:
            left = tl.load(a_tile, mask=inner[None, :] < depth - start, other=0.0)
            right = tl.load(b_tile, mask=inner[:, None] < depth - start, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        if not TMA:
            a_tile += BLOCK_K * stride_ak
            b_tile += BLOCK_K * stride_bk
    d += matrix * stride_db
    c += matrix * stride_cb
    squares = (acc,) if BLOCK_M == BLOCK_N else acc.reshape(BLOCK_M, 2, BLOCK_M).permute(0, 2, 1).split()
    for i in tl.static_range(BLOCK_N // BLOCK_M):
        _store_square(
            squares[i], d, c, row, column + i * BLOCK_M, size, alpha, beta, diagonal,
            stride_dm, stride_dn, stride_cm, stride_cn, HAS_D, HAS_DIAGONAL, BLOCK_M,
        )  # fmt: skip


# Under TRITON_INTERPRET=1 the decorator gives another object, which runs on the CPU.
_INTERPRETED = not isinstance(_product_kernel, JITFunction)


# ------------------------------------------------------------------ the host's side


@functools.lru_cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernel cannot run on ``device``; None where it can."""
    if _INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    if torch.version.hip is not None:
        return "written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs SM80 or later, this is SM{major}{minor}"


@functools.lru_cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors); the interpreter takes the place of a small Hopper GPU."""
    if device.type != "cuda":
        return (9, 0), 4
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def choose_tiles(
    s: int, k: int, batch: int, capability: tuple[int, int], multiprocessors: int, addend: bool = True
) -> TileConfig:
    """The configuration for ``batch`` products [s, k] x [k, s], to which ``d`` is added or not. The rule is fixed, so
    that a run is reproducible; ``scripts/bench_newton_schulz.py --sweep`` measures the configurations."""
    hopper = capability >= (9, 0)
    rows = -(-s // 128)
    tiles = batch * rows * (rows + 1) // 2
    if not hopper:
        few = tiles < multiprocessors  # too few large tiles to occupy the GPU
        return TileConfig(64, 64, 64, warps=4, stages=3) if few else TileConfig(128, 128, 32, warps=4, stages=3)
    if tiles < 2 * multiprocessors:
        return TileConfig(64, 128, 64, warps=4, stages=4, tma=True)
    if not addend and k > 4096 and tiles >= 12 * multiprocessors:
        # So many waves that the last one hardly counts: larger tiles read their operands less often.
        return TileConfig(128, 256, 64, warps=8, stages=3, tma=True)
    if k < 2048 or (k <= 4096 and tiles < 8 * multiprocessors):
        # Two programs share a multiprocessor: one stores while the other multiplies.
        return TileConfig(128, 128, 64, warps=8, stages=3, tma=True, registers=128)
    if addend or tiles >= 8 * multiprocessors:
        return TileConfig(128, 128, 64, warps=4, stages=3, tma=True)
    return TileConfig(128, 128, 128, warps=8, stages=3, tma=True)


def _descriptor(operand: torch.Tensor, block: int, block_k: int) -> tuple[TensorDescriptor, bool] | None:
    """A descriptor of ``operand`` [B, s, k] with the batch flat in its first dimension, and whether k is contiguous;
    None where no descriptor can describe the layout."""
    k_major = operand.stride(2) == 1
    t = operand if k_major else operand.mT
    batch, rows, columns = t.shape
    pitch = t.stride(1)
    aligned = t.data_ptr() % _TMA_ALIGNMENT == 0 and pitch * t.element_size() % _TMA_ALIGNMENT == 0
    flat = t.stride(2) == 1 and (batch == 1 or t.stride(0) == rows * pitch)
    # Where k runs along the flat rows, its last block must not run into the next matrix.
    if not (aligned and flat and (k_major or batch == 1 or rows % block_k == 0)):
        return None
    shape = [block, block_k] if k_major else [block_k, block]
    return TensorDescriptor(t, [batch * rows, columns], [pitch, 1], shape), k_major


def _check(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor | None, out: torch.Tensor) -> None:
    """Raises as :func:`symmetric_product`."""
    if a.ndim != 3 or b.shape != a.mT.shape:
        raise ValueError(f"a and b must be [B, s, k] and [B, k, s], got {list(a.shape)} and {list(b.shape)}")
    square = (a.shape[0], a.shape[1], a.shape[1])
    for name, t in (("d", d), ("out", out)):
        if t is not None and t.shape != square:
            raise ValueError(f"{name} must be {list(square)}, got {list(t.shape)}")
    if any(t is not None and (t.dtype != a.dtype or t.device != a.device) for t in (b, d, out)):
        raise ValueError("a, b, d and out must have one dtype and one device")
    if a.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {a.dtype}")
    if (why := unavailable(a.device)) is not None:
        raise RuntimeError(f"the Triton kernel cannot run here: {why}")
    if out.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in (a, b)} - {0}:
        raise ValueError("out must not share memory with a or b")


def symmetric_product(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    out: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """``beta * d + alpha * a @ b + diagonal * I`` where the caller knows that ``a @ b`` is symmetric. The sum is
    accumulated in float32 and rounded once.

    ``b = a.mT`` gives the Gram matrix of the rows; for a tall X, ``a = x.mT`` and ``b = x`` give X^T X without a copy.

    Args:
        a, b: [B, s, k] and [B, k, s], of one dtype of ``DTYPES``, any strides.
        d: [B, s, s], symmetric (the kernel reads its upper triangle only).
        out: [B, s, s], any strides. It may be ``d``; it must not overlap ``a`` or ``b``, which the kernel still reads
            while it writes.
        config: default the fixed rule of :func:`choose_tiles`. With ``tma``, operands that no descriptor can
            describe are loaded through pointers.

    Returns:
        ``out``, exactly symmetric.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together. RuntimeError: no kernel for this device.
    """
    if out is None:
        out = torch.empty((a.shape[0], a.shape[1], a.shape[1]), dtype=a.dtype, device=a.device)
    _check(a, b, d, out)
    batch, s, k = a.shape
    if out.numel() == 0:
        return out
    if config is None:
        config = choose_tiles(s, k, batch, *_device(a.device), addend=d is not None)
        if a.dtype == torch.float32:  # the rule is for 16 bits, and shared memory is no larger for 32
            config = replace(config, block_k=config.block_k // 2)
    ratio = config.block_n // config.block_m
    blocks = -(-s // config.block_n)
    # Less the tiles of the last block that lie below the last row.
    per_matrix = blocks * (blocks + 1) // 2 * ratio - (blocks * ratio - -(-s // config.block_m))
    addend = out if d is None else d
    described = [None]
    if config.tma and k > 0:
        described = [_descriptor(t, n, config.block_k) for t, n in ((a, config.block_m), (b.mT, config.block_n))]
    tma = None not in described
    operands, k_majors = zip(*described, strict=True) if tma else ((a, b), (False, False))
    # With TMA the kernel uses neither strides nor EVEN_K: constants keep it one compiled kernel.
    strides = (0,) * 6 if tma else (*a.stride(), *b.stride())
    with torch.cuda.device_of(a):
        _product_kernel[(batch * per_matrix,)](
            *operands, addend, out, per_matrix, s, k, alpha, beta, diagonal,
            *strides, *addend.stride(), *out.stride(),
            tma, *k_majors, tma or k % config.block_k == 0, d is not None, diagonal != 0.0,
            config.block_m, config.block_n, config.block_k, config.group,
            num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
        )  # fmt: skip
    return out
