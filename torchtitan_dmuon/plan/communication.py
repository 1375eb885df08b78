"""What dedicated parameters communicate in one step, by lane, as ``dmuon.summarize_comm_plan`` counts it in a run."""

from __future__ import annotations

from typing import Any

from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.dmuon.extras.reports import transfers
from torchtitan_dmuon.dmuon.transport.lane import LANES
from torchtitan_dmuon.parallel.parallelize import reshards_matrices
from torchtitan_dmuon.plan.layout import Layout


def plan_communication(layout: Layout, config: JobConfig, micro_batches: int, slot: int) -> dict[str, dict[str, Any]]:
    """Of each lane, for the rank at ``slot``: ``ranks``, ``collectives``, ``payload_bytes`` and
    ``sent_bytes_per_rank`` of a step of ``micro_batches``."""
    replicas, shards, columns = layout.grid_shape
    sizes = dict(zip(LANES, (shards, shards, replicas, columns, replicas, columns), strict=True))
    plan: dict[str, dict[str, Any]] = {
        name: {"ranks": ranks, "collectives": 0, "payload_bytes": 0, "sent_bytes_per_rank": 0.0}
        for name, ranks in sizes.items()
    }
    cyclic = [name for name in layout.boundaries if not layout.pinned(name)]
    for name, pack in layout.packs(slot).items():
        stays = layout.pinned(name) or name == cyclic[-1]  # from forward to backward
        for lane, payload, sent in transfers(pack):
            times = 1
            if lane == "reduce":
                times = micro_batches
            elif lane == "unshard" and reshards_matrices(config):
                times = micro_batches if stays else 2 * micro_batches
            plan[lane]["collectives"] += times
            plan[lane]["payload_bytes"] += times * payload
            plan[lane]["sent_bytes_per_rank"] += times * sent
    return plan
