"""The whole plan of a run as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.parallel import ParallelDims
from torchtitan_dmuon.plan.activations import plan_activations
from torchtitan_dmuon.plan.communication import plan_communication
from torchtitan_dmuon.plan.duration import Assumptions, plan_duration, plan_newton_schulz
from torchtitan_dmuon.plan.layout import Layout, build_layout, summarize_owners
from torchtitan_dmuon.plan.memory import MOMENTS, plan_memory
from torchtitan_dmuon.plan.warnings import Facts, find_warnings


def make_plan(config: JobConfig, model_args: Any, dims: ParallelDims, assumed: Assumptions) -> dict[str, Any]:
    """The plan, JSON-able. Sizes are bytes, times seconds.

    Args:
        config, model_args, dims: those of ``preflight.examine``.

    Raises:
        ConfigError: as ``parallelize``.
    """
    layout = build_layout(config, model_args, dims)
    training = config.training
    sequences = training.local_batch_size * dims.dp_size
    micro_batches = 1 if training.global_batch_size == -1 else training.global_batch_size // sequences
    tokens_per_step = micro_batches * sequences * training.seq_len
    memory = plan_memory(layout, config, plan_activations(layout.parts, config), micro_batches)
    owners = newton_schulz = None
    lanes: dict[str, Any] = {}
    if layout.params:
        owners = _owners(layout)
        newton_schulz = plan_newton_schulz(layout, owners, assumed)
        lanes = plan_communication(layout, config, micro_batches, memory.slot)
    ns_seconds = newton_schulz["predicted_seconds"] if newton_schulz else 0.0
    plan = {
        "run": {
            "model": f"{config.model.name} {config.model.flavor}",
            "parameters": sum(param.numel() for param in layout.model.parameters()),
            "optimizer": config.optimizer.name,
            "ranks": layout.ranks,
            "mesh": dict(zip(("replicate", "shard", "tp"), layout.grid_shape, strict=True)),
            "micro_batches": micro_batches,
            "tokens_per_step": tokens_per_step,
        },
        "assumed": asdict(assumed),
        "owners": owners,
        "memory": {
            "rank": memory.slot,
            "moments": list(MOMENTS),
            "kinds": {name: list(moments) for name, moments in memory.kinds.items()},
            "totals": list(memory.totals),
            "peak": memory.peak,
        },
        "lanes": lanes,
        "newton_schulz": newton_schulz,
        "duration": plan_duration(layout, config, model_args, tokens_per_step, ns_seconds, assumed),
    }
    return plan | {"warnings": find_warnings(Facts(config, dims, owners, memory.peak, assumed.gpu_gib))}


def _owners(layout: Layout) -> dict[str, Any]:
    """Of each owner, by rank: what it owns; and of each figure the largest over the mean."""
    columns = summarize_owners(layout)
    total = sum(columns["newton_schulz_flops"]) or 1
    means = {name: sum(values) / len(values) for name, values in columns.items()}
    share = [flops / total for flops in columns["newton_schulz_flops"]]
    return {
        **columns,
        "newton_schulz_share": share,
        "max_over_mean": {name: max(values) / (means[name] or 1) for name, values in columns.items()},
        "idle": columns["matrices"].count(0),
    }
