"""The optimizer a config asks for, and clipping that fits it."""

from __future__ import annotations

import torch
from torch import nn

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import ConfigError, JobConfig


def build_optimizer(model: nn.Module, config: JobConfig) -> torch.optim.Optimizer:
    """``dmuon.Muon`` or ``torch.optim.AdamW`` over a parallelized and materialised model."""
    opt = config.optimizer
    if opt.name == "AdamW":
        return torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=opt.lr,
            betas=(opt.beta1, opt.beta2),
            eps=opt.eps,
            weight_decay=opt.weight_decay,
            fused=opt.implementation == "fused",
            foreach=opt.implementation == "foreach",
        )
    return dmuon.Muon(
        model,
        lr=opt.lr,
        momentum=config.dmuon.momentum,
        nesterov=config.dmuon.nesterov,
        weight_decay=opt.weight_decay,
        adamw_lr=opt.lr if config.dmuon.adamw_lr is None else config.dmuon.adamw_lr,
        adamw_betas=(opt.beta1, opt.beta2),
        adamw_weight_decay=opt.weight_decay,
        adamw_eps=opt.eps,
        ns_backend=build_newton_schulz(config),
        scale=config.dmuon.scale,
        adamw_implementation=opt.implementation,
    )


def build_newton_schulz(config: JobConfig) -> dmuon.NewtonSchulz:
    """Raises ConfigError when the ``[dmuon]`` keys do not go together."""
    section = config.dmuon
    try:
        return dmuon.NewtonSchulz(section.ns_backend, section.ns_coefficients, steps=section.ns_steps)
    except ValueError as error:
        raise ConfigError("dmuon.ns_backend, ns_coefficients, ns_steps", None, str(error)) from None


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, lanes: list[dmuon.Lane]) -> torch.Tensor:
    """Clip every gradient by one joint 2-norm. Collective over ``lanes``, which span all ranks. Returns the
    norm before clipping, the same everywhere."""
    if isinstance(optimizer, dmuon.Muon):
        return dmuon.clip_total_grad_norm_(optimizer, max_norm)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return dmuon.clip_gradients_(gradients, max_norm, lanes)


def guarded_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """``optimizer.step()`` that changes nothing where ``found_inf`` (0-D float, on the device) is not zero. The host
    does not wait; the AdamW kernels must be fused."""
    if isinstance(optimizer, dmuon.Muon):
        optimizer.step(found_inf=found_inf)
    else:
        # The protocol of torch.amp.GradScaler, which fused AdamW implements.
        optimizer.found_inf, optimizer.grad_scale = found_inf, None
        optimizer.step()
        optimizer.zero_grad()
