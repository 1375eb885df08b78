"""The optimizer a config asks for, and clipping that fits it."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.clock import Clock, Stopwatch
from torchtitan_dmuon.config import ConfigError, JobConfig, Problems
from torchtitan_dmuon.families import AttentionHeads, get_model_spec
from torchtitan_dmuon.parallel import Meshes

_BASE_GROUP = "base"


def build_optimizer(model: nn.Module, config: JobConfig) -> torch.optim.Optimizer:
    """``dmuon.Muon`` or ``torch.optim.AdamW`` over a parallelized and materialised model.

    Raises:
        ConfigError: a pattern of ``optimizer.param_groups`` that matches no parameter, or keys that do not go together.
    """
    opt, section = config.optimizer, config.dmuon
    groups = group_parameters(model, opt.param_groups)
    if opt.name == "AdamW":
        return torch.optim.AdamW(
            [_adamw_group(group) for group in groups],
            lr=opt.lr,
            betas=(opt.beta1, opt.beta2),
            eps=opt.eps,
            weight_decay=opt.weight_decay,
            fused=opt.implementation == "fused",
            foreach=opt.implementation == "foreach",
        )
    qk_clip = None
    if section.qk_clip_threshold is not None:
        degree = config.parallelism.tensor_parallel_degree
        qk_clip = track_attention(model, clipped_heads(model, config), section.qk_clip_threshold, degree)
    try:
        return dmuon.Muon(
            model,
            lr=opt.lr,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=opt.weight_decay,
            adamw_lr=opt.lr if section.adamw_lr is None else section.adamw_lr,
            adamw_betas=(opt.beta1, opt.beta2),
            adamw_weight_decay=opt.weight_decay,
            adamw_eps=opt.eps,
            param_groups=groups if opt.param_groups else None,
            ns_backend=build_newton_schulz(config),
            scale=section.scale,
            normuon=section.normuon,
            normuon_beta2=section.normuon_beta2,
            cautious_weight_decay=section.cautious_weight_decay,
            qk_clip=qk_clip,
            adamw_implementation=opt.implementation,
            replicate_async=section.replicate_async,
        )
    except ValueError as error:
        raise ConfigError("[optimizer] and [dmuon]", None, str(error)) from None


def group_parameters(model: nn.Module, tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Semantic groups of ``dmuon.Muon``: the trainable parameters by the patterns of each table, the rest in ``base``.
    A parameter belongs to the first table that has a pattern for it.

    Raises:
        ConfigError: a pattern that matches nothing, or a table that the ones before it leave nothing.
    """
    left = {dmuon.canonical_fqn(name): p for name, p in model.named_parameters() if p.requires_grad}
    everything = list(left)
    groups = []
    problems = Problems()
    for position, table in enumerate(tables):
        hits = {pattern: fnmatch.filter(everything, pattern) for pattern in table["patterns"]}
        for pattern in (pattern for pattern, names in hits.items() if not names):
            problem = f"table {position}: pattern {pattern!r} matches no trainable parameter of the model"
            problems.add(ConfigError("optimizer.param_groups", None, problem))
        names = dict.fromkeys(name for found in hits.values() for name in found)
        params = [left.pop(name) for name in names if name in left]
        if names and not params:
            problem = f"table {position}: every parameter of its patterns is in an earlier table: put it before those"
            problems.add(ConfigError("optimizer.param_groups", None, problem))
        values = {name: value for name, value in table.items() if name != "patterns" and value is not None}
        groups.append({"group_name": f"group{position}", **values, "params": params})
    problems.raise_if_any()
    if left or not tables:
        groups.append({"group_name": _BASE_GROUP, "params": list(left.values())})
    return groups


def base_group(optimizer: torch.optim.Optimizer) -> int:
    """Position in ``optimizer.param_groups`` of the group whose learning rate the log shows: the parameters that no
    table takes (of them the matrices, if Muon has any). The first group when the tables take everything."""
    names = [group["group_name"].partition("/")[0] for group in optimizer.param_groups]
    return names.index(_BASE_GROUP) if _BASE_GROUP in names else 0


def _adamw_group(group: dict[str, Any]) -> dict[str, Any]:
    """A semantic group as ``torch.optim.AdamW`` takes it, with the values of its AdamW half."""
    names = {"adamw_betas": "betas", "adamw_eps": "eps", "lr": "lr", "weight_decay": "weight_decay"}
    names |= {"adamw_lr": "lr", "adamw_weight_decay": "weight_decay"}  # later: these win
    chosen = {ours: group[name] for name, ours in names.items() if name in group}
    return {"params": group["params"], "group_name": group["group_name"], **chosen}


def clipped_heads(model: nn.Module, config: JobConfig) -> list[AttentionHeads]:
    """The attention layers that QK-clip acts on: all of them.

    Raises:
        ConfigError: a layer whose logits do not follow from the size of its weights.
    """
    layers = list(get_model_spec(config.model.name).qk_heads(model))
    if not layers or any(heads.clipped is None for heads in layers):
        problem = f"QK-clip changes no logit of {config.model.name}, which normalises queries and keys: leave it out"
        raise ConfigError("dmuon.qk_clip_threshold", None, problem)
    return layers


def track_attention(
    model: nn.Module, layers: list[AttentionHeads], threshold: float, tensor_parallel_degree: int
) -> dmuon.QKClip:
    """Have every attention layer note its largest logits, for QK-clip."""
    device = next(model.parameters()).device
    names = {module: dmuon.canonical_fqn(name) for name, module in model.named_modules()}
    tracked = []
    for heads in layers:
        maxima = heads.track_max_logits(device, tensor_parallel_degree)
        weights = [
            dmuon.HeadWeights(
                f"{names[heads.attention]}.{rows.weight}",
                dmuon.Block(rows.start, rows.size, heads.n_heads, rows.stride),
                rows.exponent,
            )
            for rows in heads.clipped
        ]
        tracked.append(dmuon.QKClipLayer(maxima, tuple(weights)))
    return dmuon.QKClip(tracked, threshold)


class TimedNewtonSchulz(dmuon.NewtonSchulz):
    """Measures its iterations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = Stopwatch(Clock(torch.cuda.is_available()), "newton_schulz")

    def iterate(self, x: torch.Tensor) -> torch.Tensor:
        with self.watch.measure():
            return super().iterate(x)


def build_newton_schulz(config: JobConfig) -> TimedNewtonSchulz:
    """Raises ConfigError when the ``[dmuon]`` keys do not go together."""
    section = config.dmuon
    try:
        return TimedNewtonSchulz(
            section.ns_backend,
            section.ns_coefficients,
            steps=section.ns_steps,
            restart_iterations=section.ns_restart_iterations,
            kernel=section.ns_kernel,
            deterministic=config.debug.deterministic,
        )
    except ValueError as error:
        keys = "dmuon.ns_backend, ns_coefficients, ns_steps, ns_restart_iterations, ns_kernel"
        raise ConfigError(keys, None, str(error)) from None


def clip_gradients(optimizer: torch.optim.Optimizer, config: JobConfig, meshes: Meshes) -> torch.Tensor:
    """Bound the 2-norm of all gradients, or of the matrices' and of the others' (``dmuon.clip``), by
    ``training.max_norm``. Collective over all ranks. Returns the norm of all of them before clipping, the same on every
    rank."""
    max_norm = config.training.max_norm
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not isinstance(optimizer, dmuon.Muon):
        # FSDP2's gradients lie on other meshes than those of tensor parallelism: torch's clip_grad_norm_ refuses that.
        return dmuon.clip_gradients_(gradients, max_norm, meshes.groups, meshes.device, plain="replicated")
    if config.dmuon.clip == "joint":
        return dmuon.clip_total_grad_norm_(optimizer, max_norm)
    norms = dmuon.try_clip_optimizer_grad_norm_buckets_(
        optimizer, adamw_grads=gradients, max_norm=max_norm, plain="replicated"
    )
    return torch.linalg.vector_norm(torch.stack([norms["muon"], norms["adamw"]]))


def guarded_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """``optimizer.step()`` that changes nothing where ``found_inf`` (0-D float, on the device) is not zero. The host
    does not wait; the AdamW kernels must be fused."""
    if isinstance(optimizer, dmuon.Muon):
        optimizer.step(found_inf=found_inf)
    else:
        # The protocol of torch.amp.GradScaler, which fused AdamW implements; it skips at exactly one.
        optimizer.found_inf, optimizer.grad_scale = (found_inf != 0).float(), None
        optimizer.step()
        optimizer.zero_grad()
