"""How many ranks each kind of parallelism gets, and the device mesh made from that."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_dmuon.config import ConfigError
from torchtitan_dmuon.config.job_config import Parallelism


@dataclass(frozen=True)
class ParallelDims:
    """Degrees that multiply to the world size.

    Attributes:
        dp_shard: ranks over which data is split and weights are sharded.
    """

    dp_shard: int

    @classmethod
    def from_config(cls, config: Parallelism, world_size: int) -> ParallelDims:
        """Resolve -1. Raises ConfigError when the degrees do not multiply to ``world_size``."""
        shard = config.data_parallel_shard_degree
        shard = world_size if shard == -1 else shard
        if shard != world_size:
            raise ConfigError(
                "parallelism.data_parallel_shard_degree",
                None,
                f"found {shard}, expected {world_size} (or -1): there are {world_size} ranks",
            )
        return cls(dp_shard=shard)

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_shard

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Collective. The mesh, with dimension ``dp_shard``."""
        return init_device_mesh(device_type, (self.dp_shard,), mesh_dim_names=("dp_shard",))
