"""Triton kernel for products that are known to be symmetric, ``C = beta * D + alpha * A @ B + diagonal * I``, batched.

Only the upper triangle of C is computed, tile by tile; each element above the diagonal is stored twice, at (p, q) and
at (q, p), and each on it once. So C equals its transpose bit for bit, every element has one writer, and about half of
the operations of a full product are done. Importing this module needs Triton; ``select.py`` decides whether to.
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
        block_m, block_n: rows and columns of C one program computes: a square, or two side by side.
        block_k: of the inner dimension, per pipeline stage.
        warps, stages: warps of a program and depth of its software pipeline.
        group: tile rows visited together, so that their operands stay in L2.
        tma: load through tensor descriptors (SM90 and later) instead of pointers.
        registers: most a thread may use; fewer let two programs share a multiprocessor.
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
    """Row of entry ``index`` in a lower triangle counted row by row: a square root, whose rounding the two
    comparisons repair."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row += ((row + 1) * (row + 2) // 2 <= index).to(tl.int32)
    row -= (row * (row + 1) // 2 > index).to(tl.int32)
    return row


@triton.jit
def _triangle_pair(index, size, GROUP: tl.constexpr):
    """(large, small), large >= small, of entry ``index`` of a ``size`` x ``size`` triangle. Bands of GROUP rows are
    visited column by column, so that programs that run together share operands."""
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
    """(matrix, first row, first column) of a tile. Blocks of BLOCK_N x BLOCK_N form the triangle and are cut in
    BLOCK_N / BLOCK_M tiles; tiles below the last row come last of all and are never launched."""
    RATIO: tl.constexpr = BLOCK_N // BLOCK_M
    index = tile % per_matrix
    column, row = _triangle_pair(index // RATIO, tl.cdiv(size, BLOCK_N), GROUP)
    return (tile // per_matrix).to(tl.int64), (row * RATIO + index % RATIO) * BLOCK_M, column * BLOCK_N


# ------------------------------------------------------------------ one tile


@triton.jit
def _finish_square(
    acc, d, c, row, column, size, alpha, beta, diagonal, stride_dm, stride_dn, stride_cm, stride_cn,
    HAS_D: tl.constexpr, HAS_DIAGONAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale, add, and store a square tile and its mirror image; nothing for a tile below the diagonal."""
    # 64-bit offsets to the tile, 32-bit ones inside it: of those every thread has one an element.
    origin_row, origin_column = row.to(tl.int64), column.to(tl.int64)
    down, right = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (down < size - row) & (right < size - column)
    acc *= alpha
    if HAS_D:
        d += origin_row * stride_dm + origin_column * stride_dn
        acc += beta * tl.load(d + down * stride_dm + right * stride_dn, mask=inside, other=0.0).to(tl.float32)
    if HAS_DIAGONAL:
        acc += tl.where(row + down == column + right, diagonal, 0.0)
    value = acc.to(c.dtype.element_ty)
    local = down * stride_cm + right * stride_cn
    direct = c + origin_row * stride_cm + origin_column * stride_cn + local
    if column > row:
        tl.store(direct, value, mask=inside)
        mirror = c + origin_column * stride_cm + origin_row * stride_cn + local
        tl.store(mirror, tl.trans(value), mask=(down < size - column) & (right < size - row))
    elif column == row:
        tl.store(direct, tl.where(down <= right, value, tl.trans(value)), mask=inside)


@triton.jit
def _finish(
    acc, d, c, matrix, row, column, size, alpha, beta, diagonal,
    stride_db, stride_dm, stride_dn, stride_cb, stride_cm, stride_cn,
    HAS_D: tl.constexpr, HAS_DIAGONAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """:func:`_finish_square` on the one or two squares of a tile."""
    d += matrix * stride_db
    c += matrix * stride_cb
    if BLOCK_M == BLOCK_N:
        _finish_square(
            acc, d, c, row, column, size, alpha, beta, diagonal,
            stride_dm, stride_dn, stride_cm, stride_cn, HAS_D, HAS_DIAGONAL, BLOCK_M,
        )  # fmt: skip
    else:
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_M).permute(0, 2, 1).split()
        _finish_square(
            left, d, c, row, column, size, alpha, beta, diagonal,
            stride_dm, stride_dn, stride_cm, stride_cn, HAS_D, HAS_DIAGONAL, BLOCK_M,
        )  # fmt: skip
        _finish_square(
            right, d, c, row, column + BLOCK_M, size, alpha, beta, diagonal,
            stride_dm, stride_dn, stride_cm, stride_cn, HAS_D, HAS_DIAGONAL, BLOCK_M,
        )  # fmt: skip


# Counts of tiles differ from shape to shape: no kernel of its own for those that 16 divides.
@triton.jit(do_not_specialize=["per_matrix"])
def _pointer_kernel(
    a, b, d, c, per_matrix, size, depth, alpha, beta, diagonal,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    stride_db, stride_dm, stride_dn, stride_cb, stride_cm, stride_cn,
    HAS_D: tl.constexpr, HAS_DIAGONAL: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    matrix, row, column = _locate(tl.program_id(0), per_matrix, size, BLOCK_M, BLOCK_N, GROUP)
    # Rows past the edge read others again instead of being masked; their results are not stored.
    rows = tl.arange(0, BLOCK_M) % (size - row)
    columns = tl.arange(0, BLOCK_N) % (size - column)
    inner = tl.arange(0, BLOCK_K)
    a += matrix * stride_ab + row.to(tl.int64) * stride_am
    b += matrix * stride_bb + column.to(tl.int64) * stride_bn
    a_tile = a + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_tile = b + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a_tile), tl.load(b_tile)
        else:
            left = tl.load(a_tile, mask=inner[None, :] < depth - start, other=0.0)
            right = tl.load(b_tile, mask=inner[:, None] < depth - start, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk
    _finish(
        acc, d, c, matrix, row, column, size, alpha, beta, diagonal,
        stride_db, stride_dm, stride_dn, stride_cb, stride_cm, stride_cn, HAS_D, HAS_DIAGONAL, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["per_matrix"])
def _descriptor_kernel(
    a, b, d, c, per_matrix, size, depth, alpha, beta, diagonal,
    stride_db, stride_dm, stride_dn, stride_cb, stride_cm, stride_cn,
    HAS_D: tl.constexpr, HAS_DIAGONAL: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    matrix, row, column = _locate(tl.program_id(0), per_matrix, size, BLOCK_M, BLOCK_N, GROUP)
    # The batch lies flat in the first dimension of a descriptor. Rows past the edge of a matrix are those of the next
    # one; their results are not stored.
    index = matrix.to(tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if A_K_MAJOR:
            left = a.load([index * size + row, start])
        else:
            left = a.load([index * depth + start, row]).T
        if B_K_MAJOR:
            right = b.load([index * size + column, start]).T
        else:
            right = b.load([index * depth + start, column])
        acc = tl.dot(left, right, acc, input_precision="ieee")
    _finish(
        acc, d, c, matrix, row, column, size, alpha, beta, diagonal,
        stride_db, stride_dm, stride_dn, stride_cb, stride_cm, stride_cn, HAS_D, HAS_DIAGONAL, BLOCK_M, BLOCK_N,
    )  # fmt: skip


# Under TRITON_INTERPRET=1 the decorator gives something else, which runs on the CPU.
_INTERPRETED = not isinstance(_pointer_kernel, JITFunction)


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


def choose_tiles(
    s: int, k: int, batch: int, capability: tuple[int, int], multiprocessors: int, addend: bool = True
) -> TileConfig:
    """The configuration for ``batch`` products [s, k] x [k, s], to which ``d`` is added or not: a fixed rule, so that a
    run is reproducible.

    ``scripts/bench_newton_schulz.py --sweep`` measures what it decides between.
    """
    hopper = capability >= (9, 0)
    rows = -(-s // 128)
    tiles = batch * rows * (rows + 1) // 2
    if not hopper:
        few = tiles < multiprocessors  # too few large tiles to occupy the GPU
        return TileConfig(64, 64, 64, warps=4, stages=3) if few else TileConfig(128, 128, 32, warps=4, stages=3)
    if tiles < 2 * multiprocessors:
        return TileConfig(64, 128, 64, warps=4, stages=4, tma=True)
    if not addend and k > 4096 and tiles >= 12 * multiprocessors:
        # Many waves, so that the last one hardly counts: larger tiles read their operands less often.
        return TileConfig(128, 256, 64, warps=8, stages=3, tma=True)
    if k < 2048 or (k <= 4096 and tiles < 8 * multiprocessors):
        # Two programs a multiprocessor, one's stores under the other's products.
        return TileConfig(128, 128, 64, warps=8, stages=3, tma=True, registers=128)
    if addend or tiles >= 8 * multiprocessors:
        return TileConfig(128, 128, 64, warps=4, stages=3, tma=True)
    return TileConfig(128, 128, 128, warps=8, stages=3, tma=True)


def _flat(t: torch.Tensor) -> torch.Tensor | None:
    """[B, r, c] as [B * r, c] for a descriptor, or None where the layout has no such view or is not aligned."""
    batch, rows, _ = t.shape
    aligned = t.data_ptr() % _TMA_ALIGNMENT == 0 and t.stride(1) * t.element_size() % _TMA_ALIGNMENT == 0
    if t.stride(2) != 1 or not aligned or (batch > 1 and t.stride(0) != rows * t.stride(1)):
        return None
    return t.as_strided((batch * rows, t.shape[2]), (t.stride(1), 1))


def _descriptors(
    a: torch.Tensor, b: torch.Tensor, config: TileConfig
) -> tuple[TensorDescriptor, TensorDescriptor, bool, bool] | None:
    """Descriptors of both operands and whether each has the inner dimension contiguous; None where TMA cannot."""
    made = []
    for operand, block in ((a, config.block_m), (b.mT, config.block_n)):  # [B, s, k]
        k_major = operand.stride(2) == 1
        flat = _flat(operand if k_major else operand.mT)
        # With the inner dimension along the flat rows, its last block would run into the next matrix.
        if flat is None or not (k_major or len(a) == 1 or a.shape[2] % config.block_k == 0):
            return None
        shape = [block, config.block_k] if k_major else [config.block_k, block]
        made.append((TensorDescriptor(flat, list(flat.shape), list(flat.stride()), shape), k_major))
    (left, left_k_major), (right, right_k_major) = made
    return left, right, left_k_major, right_k_major


def _check(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor | None, out: torch.Tensor) -> None:
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
    """``beta * d + alpha * a @ b + diagonal * I`` where the caller knows that ``a @ b`` is symmetric; accumulated in
    float32 and rounded once.

    ``b = a.mT`` gives the Gram matrix of the rows; for a tall X, ``a = x.mT`` and ``b = x`` give X^T X without a copy.

    Args:
        a, b: [B, s, k] and [B, k, s], of one dtype of ``DTYPES``, any strides.
        d: [B, s, s], symmetric (only its upper triangle counts).
        out: [B, s, s], any strides. It may be ``d``; it must not overlap ``a`` or ``b``, which are still read while
            it is written.
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
    if (why := unavailable(a.device)) is not None:
        raise RuntimeError(f"the Triton kernel cannot run here: {why}")
    if out.numel() == 0:
        return out
    if a.shape[2] == 0:
        out = out.zero_() if d is None else torch.mul(d, beta, out=out)
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return out
    if out.untyped_storage().data_ptr() in (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()):
        raise ValueError("out must not share memory with a or b")
    if config is None:
        batch, s, k = a.shape
        config = choose_tiles(s, k, batch, *_device(a.device), addend=d is not None)
        if a.dtype == torch.float32:  # the rule is for 16 bits; shared memory is what it is
            config = replace(config, block_k=config.block_k // 2)
    with torch.cuda.device_of(a):
        _launch(a, b, d, alpha, beta, diagonal, out, config)
    return out


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    alpha: float,
    beta: float,
    diagonal: float,
    out: torch.Tensor,
    config: TileConfig,
) -> None:
    batch, s, k = a.shape
    ratio = config.block_n // config.block_m
    blocks = -(-s // config.block_n)
    # Less the tiles of the last block that lie below the last row.
    per_matrix = blocks * (blocks + 1) // 2 * ratio - (blocks * ratio - -(-s // config.block_m))
    addend = out if d is None else d
    common = {
        "HAS_D": d is not None,
        "HAS_DIAGONAL": diagonal != 0.0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": config.registers,
    }
    described = _descriptors(a, b, config) if config.tma else None
    if described is None:
        _pointer_kernel[(batch * per_matrix,)](
            a, b, addend, out, per_matrix, s, k, alpha, beta, diagonal,
            *a.stride(), *b.stride(), *addend.stride(), *out.stride(),
            EVEN_K=k % config.block_k == 0, **common,
        )  # fmt: skip
    else:
        left, right, left_k_major, right_k_major = described
        _descriptor_kernel[(batch * per_matrix,)](
            left, right, addend, out, per_matrix, s, k, alpha, beta, diagonal,
            *addend.stride(), *out.stride(), A_K_MAJOR=left_k_major, B_K_MAJOR=right_k_major, **common,
        )  # fmt: skip


@functools.lru_cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """(compute capability, multiprocessors); what the interpreter has stands for a small Hopper GPU."""
    if device.type != "cuda":
        return (9, 0), 4
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
