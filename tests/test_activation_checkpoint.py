"""What selective recomputation by operation saves, and what it computes again."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.pool import distributed
from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.parallel.activation_checkpoint import apply_activation_checkpointing

PRODUCT = torch.ops.aten.mm.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


class Count(TorchDispatchMode):
    """Counts the operations of a block of code."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.of[op] = self.of.get(op, 0) + 1
        return op(*args, **(kwargs or {}))


class Block(nn.Module):
    """Four products, and a reduce-scatter in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).sin()


@distributed(world=2)
def test_every_second_product_and_the_reduce_scatter_are_saved(rank, world):
    argv = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
    blocks = nn.ModuleList([Block()])
    apply_activation_checkpointing(blocks, load_config(argv).activation_checkpoint)
    for _ in range(2):  # each forward counts anew
        with Count() as forward:
            out = blocks[0](torch.ones(2, 4, requires_grad=True))
        with Count() as backward:
            out.sum().backward()
        assert (forward.of[PRODUCT], forward.of[SCATTER]) == (4, 1)
        assert backward.of[PRODUCT] == 2 * 4 + 2  # two of each product's backward, and those not saved
        assert SCATTER not in backward.of
