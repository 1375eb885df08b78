"""Programs of a step, ``(model, rank)``, that several tests run; and what one process gives for a program."""

from __future__ import annotations

import pytest
import torch

from tests.support.oracle import batch, loss_of


def plain(model, rank):
    tokens, labels = batch(1, rank)
    loss_of(model(tokens), labels).backward()


def backward_that_raised(model, rank):
    """What came before it raised stays, as in plain PyTorch."""

    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("planned")

    tokens, labels = batch(4, rank)
    handle = model.layers[1].norm.register_forward_hook(lambda m, a, out: Breaking.apply(out))
    with pytest.raises(ArithmeticError):
        loss_of(model(tokens), labels).backward()
    handle.remove()


def forward_that_raised(model, rank):
    """Returns the exception, with all it holds."""
    handle = model.layers[1].norm.register_forward_hook(lambda m, a, out: out.view(-1, 1000))
    with pytest.raises(RuntimeError, match="invalid for input of size") as raised:
        model(batch(4, rank)[0])
    handle.remove()
    return raised


def oracle_gradients(model_class, program, world, **kwargs):
    """Mean over ranks of what ``program`` gives on one process."""
    model = model_class(**kwargs)
    for rank in range(world):
        program(model, rank)
    return {n: None if p.grad is None else p.grad / world for n, p in model.named_parameters()}
