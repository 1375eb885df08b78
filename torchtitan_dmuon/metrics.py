"""Figures of a run: what they are computed from, the log line and TensorBoard.

Wall-clock time is counted in windows between two log lines; time spent in checkpoints and validation is taken out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torchtitan_dmuon import memory, progress
from torchtitan_dmuon.clock import Clock, RankTimes, Stopwatch
from torchtitan_dmuon.config.job_config import Metrics
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.peak_flops import peak_of


@dataclass(frozen=True)
class RunFacts:
    """What figures are computed from.

    Attributes:
        rank, world_size: place of this process, and number of places.
        device: of this process.
        first, steps: optimizer steps done before, and at the end of the run.
        flops_per_token: model FLOPs of one token's forward and backward.
        newton_schulz_flops: FLOPs of this rank's Newton-Schulz per optimizer step; 0 without Muon.
        tensor_parallel_degree: ranks that read the same tokens.
    """

    rank: int
    world_size: int
    device: torch.device
    first: int
    steps: int
    flops_per_token: int
    newton_schulz_flops: int
    tensor_parallel_degree: int = 1


class MetricsLogger:
    """Collects and writes the figures.

    Args:
        config: the ``[metrics]`` section.
        dump_folder: where TensorBoard files go.
        facts: of the run.
        blocks: of the model, whose times tell the slowest rank.
    """

    def __init__(self, config: Metrics, dump_folder: Path, facts: RunFacts, blocks: Sequence[nn.Module] = ()) -> None:
        self._facts = facts
        self._device = facts.device
        self.data = Stopwatch(Clock(on_device=False))
        self.optimizer = Stopwatch(Clock(facts.device.type == "cuda"))
        self.ranks = RankTimes(blocks, facts.rank, facts.world_size, facts.device)
        self.progress = progress.Progress(facts.first, facts.steps, config.enable_progress_bar and facts.rank == 0)
        self._writer = None
        if config.enable_tensorboard and (facts.rank == 0 or config.save_for_all_ranks):
            from torch.utils.tensorboard import SummaryWriter

            folder = dump_folder / config.save_tb_folder
            folder = folder / f"rank_{facts.rank}" if config.save_for_all_ranks else folder
            self._writer = SummaryWriter(str(folder))
            logger.info("TensorBoard files in %s", folder)
        self._peak = peak_of(facts.device, config.peak_tflops)
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the time and tokens so far: the next log line is about what follows."""
        self._begin = time.perf_counter()
        self._paused = 0.0
        self._steps = 0
        self._tokens = 0
        memory.begin_window(self._device)

    def count_step(self, tokens: int) -> None:
        """One more optimizer step, over ``tokens`` tokens that this rank read."""
        self._steps += 1
        self._tokens += tokens
        self.progress.count()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count (checkpoint, validation)."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the training work that is still queued counts
        begin = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._paused += time.perf_counter() - begin

    def log(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """End the window with a log line. ``loss`` and ``grad_norm`` are of ``step``, read from the device before."""
        facts = self._facts
        seconds, steps = time.perf_counter() - self._begin - self._paused, self._steps
        ranks = facts.world_size / facts.tensor_parallel_degree
        tokens_per_second = self._tokens * ranks / seconds
        flops = tokens_per_second * facts.flops_per_token / facts.world_size
        optimizer_ms, data_ms = self.optimizer.take_ms() / steps, self.data.take_ms() / steps
        used = memory.take_window(self._device)
        scalars = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": tokens_per_second,
            "tflops": flops / 1e12,
            "step_ms": 1000 * seconds / steps,
            "optimizer_ms": optimizer_ms,
            "data_ms": data_ms,
            "peak_memory_gib": used.peak / 2**30,
        }
        parts = [
            f"step: {step}/{facts.steps}",
            f"loss: {loss:.4f}",
            f"grad_norm: {grad_norm:.4f}",
            f"lr: {lr:.3e}",
            f"tokens/s: {tokens_per_second:,.0f}",
        ]
        if self._peak is not None:
            scalars["mfu"] = flops / self._peak
            parts.append(f"MFU: {scalars['mfu']:.1%}")
        parts += [f"memory: {used}", self.progress.times(step), f"data: {data_ms / 1000 / seconds * steps:.1%}"]
        slowest = self.ranks.take_slowest()
        if slowest is not None:
            parts.append(f"slowest: rank {slowest[0]} +{slowest[1]:.1%}")
            scalars["slowest_rank"], scalars["slowest_share"] = slowest
        parts.append(f"optimizer: {optimizer_ms:.1f} ms")
        if facts.newton_schulz_flops:
            scalars["newton_schulz_tflops"] = facts.newton_schulz_flops / (optimizer_ms * 1e9)
        logger.info("  ".join(parts))
        self.progress.show(f"loss: {loss:.4f}")
        self.write(step, scalars)
        self.begin_window()

    def write(self, step: int, scalars: dict[str, float], prefix: str = "train") -> None:
        """Scalars to TensorBoard, if it is on."""
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(f"{prefix}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
