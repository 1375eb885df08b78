"""Meshes for tests: those of the worker processes, and the trainer's for one process."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.parallel.dims import Meshes, ParallelDims

DEVICE = os.environ.get("DMUON_TEST_DEVICE", "cpu")
_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


def mesh_of(**sizes: int) -> DeviceMesh:
    """The mesh with these dimensions, ``mesh_of(dp=2, tp=2)``: over all ranks, and the same one in every test.
    Collective at its first call in a process."""
    key = tuple(sizes.items())
    if key not in _MESHES:
        names = tuple(sizes)
        if len(sizes) == 1:  # init_device_mesh would add NCCL to the group on CUDA, which refuses a shared GPU
            _MESHES[key] = DeviceMesh.from_group(dist.group.WORLD, DEVICE, mesh_dim_names=names)
        else:
            _MESHES[key] = init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=names)
    return _MESHES[key]


def groups_of_meshes() -> set[dist.ProcessGroup]:
    """The groups that those meshes live on."""
    return {group for mesh in _MESHES.values() for group in mesh.get_all_groups()}


@contextlib.contextmanager
def one_rank() -> Iterator[Meshes]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            dims = ParallelDims.from_config(load_config([]).parallelism, 1)
            yield dims.build(torch.device("cpu"))
        finally:
            dist.destroy_process_group()
