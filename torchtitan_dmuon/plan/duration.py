"""How long a run takes: Newton-Schulz of the busiest owner, and model FLOPs at an assumed MFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.families import get_model_spec
from torchtitan_dmuon.plan.layout import Layout

_SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Assumptions:
    """What a plan cannot know. The rates of Newton-Schulz are those of an H200 with the Triton kernel.

    Attributes:
        gpu_gib: memory of a GPU in GiB; 80 is an H100's.
        peak_tflops: dense bf16 TFLOP/s of a GPU; 989 is an H100's or H200's (``torchtitan_dmuon/peak_flops.py``).
        mfu: the share of them that forward and backward reach.
        ns_tflops: of Newton-Schulz on stacks of matrices, measured (``scripts/notes/scaling.md``).
        ns_tflops_alone: the same where an owner has one or two matrices.
        ns_tflops_floor: what no kernel exceeds (``scripts/notes/newton_schulz.md``).
    """

    gpu_gib: float = 80.0
    peak_tflops: float = 989.0
    mfu: float = 0.4
    ns_tflops: float = 577.0
    ns_tflops_alone: float = 450.0
    ns_tflops_floor: float = 690.0


def plan_newton_schulz(layout: Layout, owners: dict[str, Any], assumed: Assumptions) -> dict[str, float]:
    """Of the default coefficients, with half of each symmetric product: FLOPs of ``all`` owners, of the ``busiest`` and
    of the ``largest`` matrix; ``predicted_seconds`` a step at the rate ``tflops``; and ``floor_seconds``, the least of
    any assignment of these matrices to these ranks."""
    flops, matrices = owners["newton_schulz_flops"], owners["matrices"]
    busiest = max(range(len(flops)), key=lambda rank: flops[rank])
    rate = assumed.ns_tflops if matrices[busiest] > 2 else assumed.ns_tflops_alone
    largest = max(
        cost // (planned.matrices * (stop - start if len(planned.spec.shape) == 3 else 1))
        for planned in layout.params
        for (start, stop, _), cost in zip(planned.runs, planned.flops, strict=True)
        if cost
    )
    return {
        "all": sum(flops),
        "busiest": flops[busiest],
        "largest": largest,
        "tflops": rate,
        "predicted_seconds": flops[busiest] / (rate * 1e12),
        "floor_seconds": max(sum(flops) / len(flops), largest) / (assumed.ns_tflops_floor * 1e12),
    }


def plan_duration(
    layout: Layout, config: JobConfig, model_args: Any, tokens_per_step: int, ns_seconds: float, assumed: Assumptions
) -> dict[str, float]:
    """``tokens`` and model ``flops`` of the run, ``step_seconds`` of forward and backward, and ``days`` of all steps,
    each with ``ns_seconds`` of Newton-Schulz."""
    family = get_model_spec(config.model.name)
    per_token = family.flops_per_token(layout.model, model_args, config.training.seq_len)
    steps = config.training.steps
    seconds = tokens_per_step * per_token / (layout.ranks * assumed.peak_tflops * 1e12 * assumed.mfu)
    return {
        "flops_per_token": per_token,
        "steps": steps,
        "tokens": steps * tokens_per_step,
        "flops": steps * tokens_per_step * per_token,
        "step_seconds": seconds,
        "days": steps * (seconds + ns_seconds) / _SECONDS_A_DAY,
    }
