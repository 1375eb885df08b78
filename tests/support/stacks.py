"""Stacks of made-up pieces, and the update of one by the fused kernels against PyTorch's operations and float64. Used
on the CPU by Triton's interpreter (tests/dmuon/kernels/test_passes.py) and on GPUs (tests/gpu/test_passes.py)."""

import math
from types import SimpleNamespace

import torch

from torchtitan_dmuon.dmuon.kernels.newton_schulz import NewtonSchulz
from torchtitan_dmuon.dmuon.optimizer import stack as stack_module
from torchtitan_dmuon.dmuon.optimizer.matrices import MatrixView
from torchtitan_dmuon.dmuon.optimizer.normuon import NorMuon
from torchtitan_dmuon.dmuon.optimizer.stack import MatrixStack, UpdateRule
from torchtitan_dmuon.dmuon.ownership.spec import COLUMNS, ROWS, Block, BlockSplit

GROUP = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.5}

# name -> (shape of the pieces, blocks, which block)
LAYOUTS = {
    "matrices": ((24, 40), None, None),
    "odd": ((23, 37), None, None),
    "experts": ((3, 16, 24), None, None),
    "rows": ((32, 24), BlockSplit((Block(0, 8), Block(8, 24))), 1),
    "columns": ((24, 48), BlockSplit((Block(0, 16), Block(16, 32)), COLUMNS), 1),
    "odd columns": ((3, 15, 27), BlockSplit((Block(0, 10), Block(10, 17)), COLUMNS), 0),
    "interleaved": ((32, 24), BlockSplit((Block(0, 4, 4, 8), Block(4, 4, 4, 8)), ROWS), 0),
}
# Triton's interpreter cuts bfloat16 off, it does not round.
SOURCE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DTYPES = {
    "float32": (torch.float32,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "mixed": (torch.bfloat16, torch.float32, torch.bfloat16),
}


class FakePiece(SimpleNamespace):
    def refresh_compute_weight(self):
        if self.compute_weight is not None:
            self.compute_weight.copy_(self.master)


def pieces(layout, dtypes, device, count=3, scale=1):
    """``count`` pieces with random contents; the second has had no gradient."""
    shape, blocks, _ = LAYOUTS[layout]
    shape = (*shape[:-2], shape[-2] * scale, shape[-1] * scale)
    if blocks is not None:
        cut = (Block(b.start * scale, b.size * scale, b.groups, b.period * scale) for b in blocks.blocks)
        blocks = BlockSplit(tuple(cut), blocks.dim)
    grad, momentum, master = DTYPES[dtypes]
    made = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        tensors = [torch.randn(shape, generator=generator).to(device) for _ in range(3)]
        gone = index == 1
        made.append(
            FakePiece(
                shape=shape,
                numel=math.prod(shape),
                spec=SimpleNamespace(blocks=blocks, transposed=False, optim_dtype=momentum),
                grad=(tensors[0] * (0.0 if gone else 1.0)).to(grad),
                grad_count=torch.tensor(0.0 if gone else 2.0, device=device),
                momentum=tensors[1].to(momentum),
                master=tensors[2].to(master),
                compute_weight=None if master == torch.bfloat16 else tensors[2].to(SOURCE),
                wait_gradient=lambda: None,
                second_moment=torch.rand((*shape[:-1], 1), generator=generator).to(device),
            )
        )
    return made


def stack_of(made, layout, group=GROUP, normuon_beta2=None, **rule):
    _, blocks, which = LAYOUTS[layout]
    views = []
    for piece in made:
        block = None if blocks is None else piece.spec.blocks.blocks[which]
        state = {"momentum_buffer": piece.momentum, "second_moment": piece.second_moment}
        views.append(MatrixView(piece, block, state))
    adjust = None if normuon_beta2 is None else NorMuon(normuon_beta2)
    rule = {"scale": "unit", "cautious_weight_decay": False, "adjust": adjust} | rule
    return MatrixStack(views, group, UpdateRule(NewtonSchulz("direct", kernel="cublas"), **rule))


def update(made, layout, found_inf=None, group=GROUP, passes=None, monkeypatch=None, **rule):
    """One update, by the kernels of the module ``passes`` or, without it, by PyTorch's operations."""
    monkeypatch.setattr(stack_module, "triton_passes", lambda device: passes)
    stack = stack_of(made, layout, group, **rule)
    stack.update(found_inf)
    return stack


def relative(actual, expected):
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def expected_momentum(piece, group=GROUP):
    """In float64, of what stands in ``piece`` before the update."""
    return group["momentum"] * piece.momentum.double() + piece.grad.double()


def assert_same_updates(ours, plain, tolerance):
    for a, b in zip(ours, plain, strict=True):
        assert relative(a.momentum, b.momentum) < tolerance
        assert relative(a.master, b.master) < tolerance
        assert relative(a.second_moment, b.second_moment) < tolerance
        for piece in (a, b):
            assert piece.compute_weight is None or torch.equal(piece.compute_weight, piece.master.to(SOURCE))
