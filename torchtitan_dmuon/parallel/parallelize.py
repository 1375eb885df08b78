"""One function for every model family, reading top to bottom in the order things are applied."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import ConfigError, JobConfig, Problems
from torchtitan_dmuon.config.job_config import Compile, DMuon, Parallelism, Training
from torchtitan_dmuon.families import ModelSpec, Parts
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_dmuon.parallel.dims import Meshes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parallelize(model: nn.Module, meshes: Meshes, spec: ModelSpec, config: JobConfig) -> nn.Module:
    """Prepare ``model`` (on meta, built by ``spec``) for training. Collective.

    Afterwards the parameters are allocated by :func:`torchtitan_dmuon.dmuon.state.materialize`.

    Raises:
        ConfigError: a ``dmuon.include`` or ``dmuon.exclude`` pattern matches nothing or no matrix, or ``[dmuon]``
            does not fit the model.
    """
    uses_dmuon = config.optimizer.name == "DMuon"
    plan = plan_dedication(model, config.dmuon) if uses_dmuon else {}
    if meshes.tp is not None:
        apply_tensor_parallelism(model, meshes.tp, spec, loss_parallel=uses_loss_parallel(config))
    parts = spec.parts(model)
    apply_activation_checkpointing(parts.blocks, config.activation_checkpoint)
    apply_compile(parts.blocks, config.compile)
    if uses_dmuon:
        apply_dedication(model, meshes, plan, spec, config)
    if not (uses_dmuon and config.dmuon.others == "dedicated"):
        ignored = dmuon.ignored_params(model) if uses_dmuon else set()
        apply_fsdp(model, parts, meshes.fsdp, config.parallelism, config.training, ignored)
    return model


def uses_loss_parallel(config: JobConfig) -> bool:
    """Whether the logits stay split along the vocabulary."""
    return config.parallelism.tensor_parallel_degree > 1 and not config.parallelism.disable_loss_parallel


def apply_tensor_parallelism(model: nn.Module, mesh: DeviceMesh, spec: ModelSpec, loss_parallel: bool) -> None:
    """Split every layer over ``mesh``, with sequence parallelism between them."""
    outside, in_blocks = spec.tensor_parallel_plan(model.args, loss_parallel)
    parallelize_module(model, mesh, outside)
    for block, plan in zip(spec.parts(model).blocks, in_blocks, strict=True):
        parallelize_module(block, mesh, plan)
    model.tie_weights()  # embedding and head were distributed one by one
    logger.info(
        "Applied tensor parallelism over %d ranks, with sequence%s parallelism",
        *(mesh.size(), " and loss" if loss_parallel else ""),
    )


def plan_dedication(model: nn.Module, config: DMuon) -> dict[str, dmuon.Decision]:
    """Whether each parameter goes to Muon, and why, by name. ``model`` is the plain one.

    Raises:
        ConfigError: a pattern that matches nothing, a parameter included that is no matrix, or nothing left for Muon.
    """
    decisions = dmuon.classify(model, config.min_matrix_dim)
    problems = Problems()
    for key, patterns in (("include", config.include), ("exclude", config.exclude)):
        for pattern in patterns:
            hits = fnmatch.filter(decisions, pattern)
            if not hits:
                problems.add(ConfigError(f"dmuon.{key}", None, f"{pattern!r} matches no parameter of the model"))
            decision = dmuon.Decision(key == "include", f"dmuon.{key} {pattern!r}")
            decisions |= dict.fromkeys(hits, decision)
    # Checked last: an exclusion may take back a parameter that an inclusion matched.
    wrong = {name: p for name, p in model.named_parameters() if decisions[name].muon and p.ndim not in (2, 3)}
    for name, param in wrong.items() if problems.sound("dmuon.exclude") else ():
        problem = (
            f"{name} is no matrix (shape {list(param.shape)}) and Muon takes only matrices: narrow the pattern or name "
            "it in dmuon.exclude"
        )
        problems.add(ConfigError("dmuon.include", None, problem))
        break  # a wide pattern has one in every layer
    if not any(decision.muon for decision in decisions.values()) and problems.sound("dmuon.include"):
        key = "dmuon.exclude" if config.exclude else "dmuon.min_matrix_dim"
        problem = "no parameter of the model is left for Muon: loosen it, or set optimizer.name to AdamW"
        problems.add(ConfigError(key, None, problem))
    problems.raise_if_any()
    return decisions


def apply_compile(blocks: nn.ModuleList, config: Compile) -> None:
    """Compile each block by itself: one graph serves all of them, and hooks stay outside it."""
    if not config.enable or "model" not in config.components:
        return
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, backend=config.backend, fullgraph=True)
    logger.info("Compiled each block with torch.compile (%s)", config.backend)


def dedication(model: nn.Module, plan: dict[str, dmuon.Decision], spec: ModelSpec, config: JobConfig) -> dict[str, Any]:
    """The arguments of ``dmuon.dedicate_params`` that say which parameters get an owner, and on which route."""
    everything = config.dmuon.others == "dedicated"
    parts = spec.parts(model)
    shared = {id(param) for module in (*parts.embeddings, parts.head) for param in module.parameters()}

    def route(name: str, param: nn.Parameter) -> str:
        if plan[name].muon:
            return "muon"
        return "sharded_adamw" if id(param) in shared else "adamw"

    return {
        "predicate": lambda name, param: everything or plan[name].muon,
        "route_hint_fn": route,
        "reasons": {name: decision.reason for name, decision in plan.items()},
        "param_policy": {
            "defaults": {
                "param_dtype": DTYPES[config.training.mixed_precision_param],
                "grad_dtype": DTYPES[config.training.mixed_precision_reduce],
                "cast_forward_inputs": False,  # blocks also get the rotary table, which stays float32
            },
            "overrides": spec.matrices(model.args)
            + (head_splits(model, plan, spec) if config.dmuon.split_heads else []),
        },
    }


def apply_dedication(
    model: nn.Module, meshes: Meshes, plan: dict[str, dmuon.Decision], spec: ModelSpec, config: JobConfig
) -> None:
    """Give every planned matrix its owner. Before FSDP2, which then manages only the rest (if there is any)."""
    try:
        assignment = dmuon.dedicate_params(
            model,
            meshes.dp_shard,
            replicate_mesh=meshes.dp_replicate,
            tp_mesh=meshes.tp,
            reshard_after_forward=reshards_matrices(config),
            prefetch=config.dmuon.prefetch,
            process_group_policy=config.dmuon.process_group_policy,
            **dedication(model, plan, spec, config),
        )
    except ValueError as error:  # found on every rank, before the first collective
        raise ConfigError("[dmuon]", None, str(error)) from None
    # The trainer divides the loss by the global number of valid tokens: gradients are sums.
    dmuon.set_gradient_divide_factor(model, 1.0)
    logger.info(
        "Dedicated %d parameters to %d owners (%s, %s groups), owner load max/mean %.3f",
        *(len(dmuon.get_dedicated_params(model)), meshes.grid.size()),
        *(
            "Z3" if reshards_matrices(config) else "Z2",
            config.dmuon.process_group_policy,
            1 + assignment.imbalance,
        ),
    )


def reshards_matrices(config: JobConfig) -> bool:
    """Whether unsharded matrices are freed after the forward (Z3): as FSDP2 does with the rest, unless ``[dmuon]`` has
    a value of its own."""
    if config.dmuon.reshard_after_forward is not None:
        return config.dmuon.reshard_after_forward
    return config.parallelism.fsdp_reshard_after_forward != "never"


def head_splits(model: nn.Module, plan: dict[str, dmuon.Decision], spec: ModelSpec) -> list[dict[str, Any]]:
    """Policy rules (of ``dmuon.dedicate_params``) that cut query, key and value into a matrix for each head."""
    names = {module: dmuon.canonical_fqn(name) for name, module in model.named_modules()}
    rules = []
    for heads in spec.qk_heads(model):
        for weight, rows in heads.split.items():
            fqn = f"{names[heads.attention]}.{weight}"
            if plan[fqn].muon:
                rules.append({"name": f"re:^{re.escape(fqn)}$", "set": {"blocks": dmuon.split_heads(rows)}})
    return rules


def apply_fsdp(
    model: nn.Module,
    parts: Parts,
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
    for block in parts.blocks:
        fully_shard(block, **options)
    if not parts.is_tied:  # a tied weight has to stay in one group
        for embedding in parts.embeddings:
            fully_shard(embedding, **options)
        # Backward needs the head first: freeing it after forward saves nothing.
        reshard_head = parallelism.fsdp_reshard_after_forward == "always"
        fully_shard([parts.norm, parts.head], **{**options, "reshard_after_forward": reshard_head})
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)  # gloo has no pre-multiplied sum
    logger.info("Applied FSDP2 over %d ranks", mesh.size())
