"""One function for every model family, reading top to bottom in the order things are applied."""

from __future__ import annotations

import fnmatch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import ConfigError, JobConfig
from torchtitan_dmuon.config.job_config import Compile, DMuon, Parallelism, Training
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.parallel.activation_checkpoint import apply_activation_checkpointing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parallelize(model: nn.Module, mesh: DeviceMesh, config: JobConfig) -> nn.Module:
    """Prepare ``model`` (on meta, with its blocks in ``model.layers``) for training on ``mesh``. Collective.

    Afterwards the parameters are allocated by :func:`torchtitan_dmuon.dmuon.materialize`.

    Raises:
        ConfigError: a ``dmuon.include`` or ``dmuon.exclude`` pattern matches nothing.
    """
    uses_dmuon = config.optimizer.name == "DMuon"
    plan = plan_dedication(model, config.dmuon) if uses_dmuon else {}
    apply_activation_checkpointing(model.layers, config.activation_checkpoint)
    apply_compile(model.layers, config.compile)
    if uses_dmuon:
        apply_dedication(model, mesh, plan, config)
    apply_fsdp(model, mesh, config.parallelism, config.training, dmuon.ignored_params(model) if uses_dmuon else set())
    return model


def plan_dedication(model: nn.Module, config: DMuon) -> dict[str, dmuon.Decision]:
    """Decision and reason for every parameter, made on the plain model."""
    decisions = dmuon.classify(model)
    for key, patterns in (("include", config.include), ("exclude", config.exclude)):
        for pattern in patterns:
            hits = fnmatch.filter(decisions, pattern)
            if not hits:
                raise ConfigError(f"dmuon.{key}", None, f"{pattern!r} matches no parameter of the model")
            decision = dmuon.Decision(key == "include", f"dmuon.{key} {pattern!r}")
            decisions |= dict.fromkeys(hits, decision)
    return decisions


def apply_compile(blocks: nn.ModuleList, config: Compile) -> None:
    """Compile each block by itself: one graph serves all of them, and hooks stay outside it."""
    if not config.enable or "model" not in config.components:
        return
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, backend=config.backend, fullgraph=True)
    logger.info("Compiled each block with torch.compile (%s)", config.backend)


def apply_dedication(model: nn.Module, mesh: DeviceMesh, plan: dict[str, dmuon.Decision], config: JobConfig) -> None:
    """Give every planned matrix its owner. Before FSDP2, which then manages only the rest."""
    assignment = dmuon.dedicate_params(
        model,
        mesh,
        predicate=lambda name, param: plan[name].muon,
        reasons={name: decision.reason for name, decision in plan.items()},
        param_policy={
            "defaults": {
                "param_dtype": DTYPES[config.training.mixed_precision_param],
                "grad_dtype": DTYPES[config.training.mixed_precision_reduce],
                "cast_forward_inputs": False,  # blocks also get the rotary table, which stays float32
            }
        },
        mode=config.dmuon.mode,
        prefetch=config.dmuon.prefetch,
        process_group_policy=config.dmuon.process_group_policy,
    )
    # The trainer divides the loss by the global number of valid tokens: gradients are sums.
    dmuon.set_gradient_divide_factor(model, 1.0)
    logger.info(
        "Dedicated %d matrices to %d owners (%s, %s groups), owner load max/mean %.3f",
        *(len(assignment.owner), mesh.size(), config.dmuon.mode.upper(), config.dmuon.process_group_policy),
        1 + assignment.imbalance,
    )


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    parallelism: Parallelism,
    training: Training,
    ignored_params: set[nn.Parameter],
) -> None:
    """FSDP2 on every block, on embedding and head if they are separate, and on the root."""
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[training.mixed_precision_param],
            reduce_dtype=DTYPES[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "reshard_after_forward": parallelism.fsdp_reshard_after_forward != "never",
        "ignored_params": ignored_params,
    }
    for block in model.layers:
        fully_shard(block, **options)
    if model.output.weight is not model.tok_embeddings.weight:  # a tied weight has to stay in one group
        fully_shard(model.tok_embeddings, **options)
        # The head is the first thing backward needs: freeing it after forward saves nothing.
        keep = parallelism.fsdp_reshard_after_forward == "always"
        fully_shard([model.norm, model.output], **{**options, "reshard_after_forward": keep})
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    logger.info("Applied FSDP2 over %d ranks", mesh.size())
