"""What is decided about one parameter, as plain data that every room reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

ROWS, COLUMNS = 0, 1
AXIS_NAMES = ("rows", "columns")

# Wrappers put these parts into a name; the canonical name of a parameter has none of them.
WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_fqn(name: str) -> str:
    """``name`` without the parts that activation checkpointing, compile and FSDP wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


@dataclass(frozen=True)
class Block:
    """One matrix of a fused weight: ``groups`` runs of ``size`` rows (or columns), the first at ``start``, one every
    ``period``. Where 12 heads are stored as [query 64, key 64], all queries are ``Block(0, 64, 12, 128)``."""

    start: int
    size: int
    groups: int = 1
    period: int = 0

    def __len__(self) -> int:
        return self.groups * self.size

    def indices(self) -> list[int]:
        """The rows (or columns), in the block's order."""
        runs = (self.start + group * self.period for group in range(self.groups))
        return [first + offset for first in runs for offset in range(self.size)]


@dataclass(frozen=True)
class BlockSplit:
    """A matrix [m, n] (or each of a stack [..., m, n]) cut along its rows (``dim`` 0) or columns (``dim`` 1)."""

    blocks: tuple[Block, ...]
    dim: int = ROWS

    def check(self, shape: Sequence[int]) -> None:
        """Raises ValueError unless every row (or column) of a matrix of this shape is in exactly one block."""
        length = shape[-2:][self.dim]
        told = f"{AXIS_NAMES[self.dim]} of a matrix {list(shape)}"
        seen = sorted(index for block in self.blocks for index in block.indices())
        if seen != list(range(length)):
            raise ValueError(f"its blocks hold {len(seen)} of the {length} {told}; each must be in exactly one block")

    def shape_of(self, block: Block, shape: Sequence[int]) -> tuple[int, int]:
        """[m, n] of one block of a matrix of this shape."""
        m, n = shape[-2:]
        return (m, len(block)) if self.dim == COLUMNS else (len(block), n)

    def __str__(self) -> str:
        sizes = [len(block) for block in self.blocks]
        told = f"of {sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))
        return f"{len(sizes)} blocks {told} {AXIS_NAMES[self.dim]}"


@dataclass(frozen=True)
class Selection:
    """The parameters that get an owner, by canonical name, in model order.

    Attributes:
        reasons: why each parameter of the model is selected or not.
        names: all names of each of ``params``, with wrapper prefixes; a tied one (embedding and head) has several.
        skipped: those of ``reasons`` of which the parameter is not selected.
        min_matrix_dim: a block with fewer rows stays with the one before it; 0 if a predicate of the user's selects.
    """

    params: dict[str, nn.Parameter]
    reasons: dict[str, str]
    names: dict[str, list[str]]
    skipped: dict[str, str]
    min_matrix_dim: int = 0


@dataclass(frozen=True)
class ParamSpec:
    """Everything decided about one dedicated parameter before any storage is made.

    Attributes:
        fqn, shape: canonical name and global shape.
        route: one of ``ROUTES``.
        trainable: ``requires_grad`` when it was dedicated; a frozen parameter is broadcast but never reduced.
        param_dtype: of the weight in forward and backward.
        grad_dtype: in which gradients are accumulated and reduced.
        master_dtype, optim_dtype: of the owner's weight and of the owner's optimizer state.
        output_dtype: floating outputs of the hook boundary are cast to it; ``None`` leaves them.
        cast_forward_inputs: floating inputs of the boundary are cast to ``param_dtype``; ``None``: only if a rule
            declared one ``param_dtype`` for the whole boundary.
        reason: why the parameter is dedicated, and on this route, for the ownership table.
        declares_param_dtype: a rule gave ``param_dtype``; else ``param_dtype`` is the parameter's own.
        stack: a parameter [E, m, n] is a stack of E matrices, as the experts of a layer are; other shapes ignore it.
        transposed: the matrices are stored [in, out] (``Conv1D``), not [out, in] (``nn.Linear``): some scales differ.
        blocks: the matrices of a fused weight, each orthogonalised by itself; ``None`` for one. A rule may also give
            a function of the shape, such as ``split_heads(128)``.
    """

    fqn: str
    shape: tuple[int, ...]
    route: str
    trainable: bool
    param_dtype: torch.dtype
    grad_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    optim_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | None = None
    reason: str = ""
    declares_param_dtype: bool = False
    stack: bool = False
    transposed: bool = False
    blocks: BlockSplit | None = None


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of chunk ``index`` of ``length`` elements cut as ``torch.chunk`` and DTensor cut: 10 rows over 4
    columns give 3, 3, 3 and 1; the last chunks may be empty."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(start + step, length) - start
