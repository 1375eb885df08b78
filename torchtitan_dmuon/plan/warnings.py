"""What is likely to disappoint in a planned run, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_dmuon.config import JobConfig
from torchtitan_dmuon.parallel import ParallelDims
from torchtitan_dmuon.parallel.parallelize import reshards_matrices

# A ring of more ranks waits longer for its messages to go round than for the bytes in them.
_LARGEST_SHARD_GROUP = 256
# Of a GPU's memory: the context, NCCL's buffers and fragments take the rest.
_USABLE = 0.94
_UNEVEN = 1.25


@dataclass(frozen=True)
class Facts:
    """What warnings are about: ``owners`` as in the plan, ``peak`` in bytes."""

    config: JobConfig
    dims: ParallelDims
    owners: dict[str, Any] | None
    peak: int
    gpu_gib: float


def find_warnings(facts: Facts) -> list[str]:
    """A sentence or two each."""
    return [*_about_owners(facts), *_about_shards(facts), *_about_memory(facts)]


def _about_owners(facts: Facts) -> Iterator[str]:
    if facts.owners is None:
        return
    ranks, idle = len(facts.owners["matrices"]), facts.owners["idle"]
    matrices = sum(facts.owners["matrices"])
    uneven = facts.owners["max_over_mean"]["newton_schulz_flops"]
    if idle:
        yield (
            f"more ranks than matrices: {idle:,} of {ranks:,} ranks own none of the {matrices:,} matrices, and the "
            "optimizer's time is that of the largest matrix however many ranks there are. This is no error. Fewer "
            "ranks, or dmuon.split_heads, leave fewer of them idle"
        )
    elif uneven > _UNEVEN:
        yield (
            f"uneven owners: the busiest rank has {uneven:.2f} times the mean Newton-Schulz work, because {matrices:,} "
            f"matrices are few for {ranks:,} ranks. Fewer ranks, or dmuon.split_heads, even it out"
        )


def _about_shards(facts: Facts) -> Iterator[str]:
    shards = facts.dims.dp_shard
    if shards > _LARGEST_SHARD_GROUP:
        size = max(n for n in range(1, _LARGEST_SHARD_GROUP // 4 + 1) if shards % n == 0)
        yield (
            f"one shard group of {shards:,} ranks: every broadcast and reduction spans all of them. Use HSDP: "
            f"--parallelism.data_parallel_replicate_degree {facts.dims.dp_replicate * shards // size} leaves groups "
            f"of {size}, and a matrix still has one owner in the whole mesh"
        )


def _about_memory(facts: Facts) -> Iterator[str]:
    if facts.peak <= _USABLE * facts.gpu_gib * 2**30:
        return
    config = facts.config
    remedies = []
    if config.activation_checkpoint.mode != "full":
        remedies.append("--activation_checkpoint.mode full")
    if not config.compile.enable:
        remedies.append("--compile.enable true")
    if config.training.local_batch_size > 1:
        remedies.append(f"--training.local_batch_size {config.training.local_batch_size // 2}")
    if config.optimizer.name == "DMuon" and not reshards_matrices(config):
        remedies.append("--dmuon.reshard_after_forward true")
    degree = config.parallelism.tensor_parallel_degree
    remedies.append(f"--parallelism.tensor_parallel_degree {2 * degree} on as many ranks")
    remedies.append("more ranks")
    yield (
        f"does not fit: the fullest rank needs {facts.peak / 2**30:.1f} GiB of a GPU's {facts.gpu_gib:g}, of which "
        f"about {_USABLE:.0%} can be used. Try {', or '.join(remedies)}"
    )
