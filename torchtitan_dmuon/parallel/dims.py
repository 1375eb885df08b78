"""How many ranks each kind of parallelism gets, and the device mesh made from that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_dmuon.config import ConfigError
from torchtitan_dmuon.config.job_config import Parallelism


@dataclass(frozen=True)
class ParallelDims:
    """Degrees that multiply to the world size.

    Attributes:
        dp_replicate: replicas of the sharded model (HSDP).
        dp_shard: ranks over which weights are sharded.
        tp: ranks that split each layer.
    """

    dp_replicate: int
    dp_shard: int
    tp: int

    @classmethod
    def from_config(cls, config: Parallelism, world_size: int) -> ParallelDims:
        """Resolve -1. Raises ConfigError when the degrees do not multiply to ``world_size``."""
        replicate, tp = config.data_parallel_replicate_degree, config.tensor_parallel_degree
        shard = config.data_parallel_shard_degree
        if shard == -1:
            shard = max(1, world_size // (replicate * tp))
        if replicate * shard * tp != world_size:
            raise ConfigError(
                "parallelism",
                None,
                f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} x "
                f"tensor_parallel_degree {tp} is {replicate * shard * tp}, but there are {world_size} ranks",
            )
        return cls(replicate, shard, tp)

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def build(self, device: torch.device) -> Meshes:
        """Collective. The meshes of the dimensions that exist."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "dp_shard")
        grid = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        return Meshes(grid, device, *(grid[name] if name in names else None for name in sizes))


@dataclass(frozen=True)
class Meshes:
    """One mesh per dimension; ``None`` where a dimension does not exist.

    Attributes:
        grid: all dimensions.
        device: of this rank.
    """

    grid: DeviceMesh
    device: torch.device
    dp_replicate: DeviceMesh | None
    dp_shard: DeviceMesh
    tp: DeviceMesh | None

    @property
    def fsdp(self) -> DeviceMesh:
        """What FSDP2 shards (and replicates) over."""
        return self.grid["dp_replicate", "dp_shard"] if self.dp_replicate is not None else self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Place among the ranks that read different data."""
        replica = self.dp_replicate.get_local_rank() if self.dp_replicate is not None else 0
        return replica * self.dp_shard.size() + self.dp_shard.get_local_rank()

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that split each layer; 0 without tensor parallelism."""
        return 0 if self.tp is None else self.tp.get_local_rank()

    @property
    def dp_groups(self) -> list[dist.ProcessGroup]:
        """All-reduces over these, one after the other, sum over the ranks that read different data."""
        return [mesh.get_group() for mesh in (self.dp_shard, self.dp_replicate) if mesh is not None]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """As ``dp_groups``, for all ranks."""
        return self.dp_groups if self.tp is None else [*self.dp_groups, self.tp.get_group()]
