"""torch.profiler traces and CUDA memory snapshots, written every `profile_freq` steps.

Both are context managers around the training loop, which calls `step()` of the `Recorder` they yield, if any,
after each optimizer step. Throughput and memory figures of every step are in `metrics`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from torchtitan_dmuon.config.job_config import Profiling
from torchtitan_dmuon.logging import logger

_SNAPSHOT_MAX_ENTRIES = 100_000


class Recorder(Protocol):
    """Of a run: a `torch.profiler.profile` or `MemorySnapshots`."""

    def step(self) -> None:
        """Called after each optimizer step."""


@contextmanager
def maybe_enable_profiling(
    config: Profiling, dump_folder: str | Path, global_step: int = 0
) -> Iterator[profile | None]:
    """Profile the last `profiler_active` of every `profile_freq` steps, or yield None when profiling is off.

    Each trace is `<dump_folder>/<save_traces_folder>/iteration_N/rankR_trace.json`, N being its last step. A
    cycle that the end of the loop cuts short writes nothing.

    Args:
        global_step: optimizer steps done so far, so that a resumed run profiles the same steps.
    """
    if not config.enable_profiling:
        yield None
        return

    root = Path(dump_folder, config.save_traces_folder)
    loop_running = True

    def save_trace(profiler: profile) -> None:
        if loop_running:
            file = _rank_file(root / f"iteration_{global_step + profiler.step_num}", "trace.json")
            profiler.export_chrome_trace(str(file))
            logger.info("Saved profiler trace %s", file)

    wait = config.profile_freq - config.profiler_warmup - config.profiler_active
    cycle = schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active)

    def resumed_cycle(step: int) -> ProfilerAction:
        return cycle(global_step + step)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    logger.info("Profiling every %d steps into %s", config.profile_freq, root)
    with profile(
        activities=activities, schedule=resumed_cycle, on_trace_ready=save_trace, record_shapes=True
    ) as profiler:
        try:
            yield profiler
        finally:
            loop_running = False


class MemorySnapshots:
    """Counts steps and dumps the CUDA allocator's history every `profile_freq` of them."""

    def __init__(self, root: Path, freq: int, global_step: int):
        self.root = root
        self.freq = freq
        self.global_step = global_step

    def step(self) -> None:
        """Called after each optimizer step."""
        self.global_step += 1
        if self.global_step % self.freq == 0:
            self.dump(f"iteration_{self.global_step}")

    def dump(self, folder: str) -> None:
        """Write this rank's snapshot into `folder` below the snapshot root."""
        file = _rank_file(self.root / folder, "memory_snapshot.pickle")
        torch.cuda.memory._dump_snapshot(str(file))
        logger.info("Saved memory snapshot %s", file)


@contextmanager
def maybe_enable_memory_snapshot(
    config: Profiling, dump_folder: str | Path, global_step: int = 0
) -> Iterator[MemorySnapshots | None]:
    """Record the CUDA allocator's history, or yield None when snapshots are off or there is no CUDA.

    Each is `<dump_folder>/<save_memory_snapshot_folder>/iteration_N/rankR_memory_snapshot.pickle`. Running
    out of memory writes one more, `iteration_N_out_of_memory`, N being the step that failed.
    """
    if not config.enable_memory_snapshot:
        yield None
        return
    if not torch.cuda.is_available():
        logger.info("profiling.enable_memory_snapshot is ignored: memory snapshots need CUDA")
        yield None
        return

    # PyTorch documents these two functions for users under their underscored names; there are no others.
    torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_MAX_ENTRIES)
    snapshots = MemorySnapshots(Path(dump_folder, config.save_memory_snapshot_folder), config.profile_freq, global_step)
    try:
        yield snapshots
    except torch.OutOfMemoryError:
        snapshots.dump(f"iteration_{snapshots.global_step + 1}_out_of_memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _rank_file(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return folder / f"rank{rank}_{name}"
