"""The process group, the device and the random state of a run."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dmuon.config.job_config import Comm, Debug


def world_from_env() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun sets them; one process without torchrun."""
    env = os.environ
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_distributed(config: Comm, folder: Path | None = None) -> torch.device:
    """Collective. Choose this process's device and start the default group: NCCL on CUDA, gloo on CPU. With ``folder``,
    that of the run, NCCL's flight recorder is on as ``config`` says."""
    rank, local_rank, world_size = world_from_env()
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if use_cuda and folder is not None and config.trace_buf_size > 0:
        os.environ |= flight_recorder(config, folder)
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(
        # gloo beside NCCL carries the Python objects of checkpoints without touching the device.
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        timeout=timedelta(seconds=config.init_timeout_seconds),
        **({} if store is None else {"store": store, "rank": rank, "world_size": world_size}),
    )
    return device


def flight_recorder(config: Comm, folder: Path) -> dict[str, str]:
    """The environment by which PyTorch records NCCL's collectives and writes them when one times out, a file a rank.
    NCCL reads it when the first group is made."""
    traces = folder / config.save_traces_folder
    traces.mkdir(parents=True, exist_ok=True)
    return {
        "TORCH_FR_BUFFER_SIZE": str(config.trace_buf_size),
        "TORCH_FR_DUMP_TEMP_FILE": str(traces / config.save_traces_file_prefix),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def set_determinism(config: Debug) -> None:
    """Seed this process, and ask PyTorch for deterministic algorithms if the config does. Before any CUDA work."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True, warn_only=config.deterministic_warn_only)
        torch.backends.cudnn.benchmark = False
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)


def all_reduce(tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Collective. Sum ``tensor`` in place over the ranks that ``groups`` span together, one group after the other."""
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(tensor, group=group)
    return tensor


def agree(value: object, group: dist.ProcessGroup | None = None) -> object:
    """Collective over ``group`` (default: all ranks). Returns on every rank the ``value`` that rank 0 passes."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def first_problem(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Collective over ``group``. Returns on every rank the problem of the first rank that has one, as
    ``rank 2: its problem``; ``None`` when no rank has one."""
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return next((f"rank {rank}: {found}" for rank, found in enumerate(problems) if found), None)


def checkpoint_group() -> dist.ProcessGroup:
    """Collective. A gloo group of all ranks that only checkpoints use, so that saves can go on behind the training.
    Its timeout allows for a slow disk; when a rank dies, the collectives of the others end at once all the same."""
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=30), group_desc="checkpoint")
