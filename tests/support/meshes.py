"""The trainer's meshes for one process, for tests that build a whole model and optimizer in it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.parallel.dims import Meshes, ParallelDims


@contextlib.contextmanager
def one_rank() -> Iterator[Meshes]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            dims = ParallelDims.from_config(load_config([]).parallelism, 1)
            yield dims.build(torch.device("cpu"))
        finally:
            dist.destroy_process_group()
