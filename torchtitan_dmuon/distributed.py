"""The process group, the device and the random state of a run."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_dmuon.config.job_config import Comm, Debug


def world_from_env() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun sets them; one process without torchrun."""
    env = os.environ
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_distributed(config: Comm) -> torch.device:
    """Collective. Choose this process's device and start the default group: NCCL on CUDA, gloo on CPU."""
    rank, local_rank, world_size = world_from_env()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(
        # gloo beside NCCL carries the Python objects of checkpoints without touching the device.
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        timeout=timedelta(seconds=config.init_timeout_seconds),
        **({} if store is None else {"store": store, "rank": rank, "world_size": world_size}),
    )
    return device


def set_determinism(config: Debug) -> None:
    """Seed this process, and ask PyTorch for deterministic algorithms if the config does. Before any CUDA work."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.deterministic_warn_only)
        torch.backends.cudnn.benchmark = False
    torch.manual_seed(config.seed)


def agree(value: object, source: int = 0) -> object:
    """Collective. What rank ``source`` passes, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
    return box[0]
