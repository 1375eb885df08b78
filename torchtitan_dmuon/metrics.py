"""Figures of a run: what they are computed from, the log line, and what the writers get.

Wall-clock time is counted in windows between two log lines; time spent in checkpoints and validation is taken out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_dmuon import memory, progress
from torchtitan_dmuon.clock import Clock, RankTimes, Stopwatch
from torchtitan_dmuon.config.job_config import Metrics
from torchtitan_dmuon.hang import Place
from torchtitan_dmuon.logging import logger
from torchtitan_dmuon.peak_flops import peak_of
from torchtitan_dmuon.route_figures import RouteFigures
from torchtitan_dmuon.writers import Writer


@dataclass(frozen=True)
class RunFacts:
    """What figures are computed from.

    Attributes:
        rank, world_size: place of this process, and number of places.
        device: of this process.
        first, steps: optimizer steps done before, and at the end of the run.
        flops_per_token: model FLOPs of one token's forward and backward.
        tensor_parallel_degree: ranks that read the same tokens.
        group_names: of the optimizer's groups.
        shown_group: the group whose learning rate the log line shows.
        newton_schulz_flops: of this rank per optimizer step; 0 without Muon.
        owner_load: FLOPs of the busiest owner over the mean of all; None without Muon.
    """

    rank: int
    world_size: int
    device: torch.device
    first: int
    steps: int
    flops_per_token: int
    tensor_parallel_degree: int = 1
    group_names: Sequence[str] = ("base",)
    shown_group: int = 0
    newton_schulz_flops: int = 0
    owner_load: float | None = None


class MetricsLogger:
    """Collects and writes the figures.

    Args:
        config: the ``[metrics]`` section.
        facts: of the run.
        blocks: of the model, whose times tell the slowest rank.
        writers: what takes the figures on this rank, beside the log.
        routes: the figures of routes; the same on every rank whether there are any.
        newton_schulz: runs while Newton-Schulz does; None without Muon.
    """

    def __init__(
        self,
        config: Metrics,
        facts: RunFacts,
        blocks: Sequence[nn.Module] = (),
        writers: Sequence[Writer] = (),
        routes: RouteFigures | None = None,
        newton_schulz: Stopwatch | None = None,
    ) -> None:
        self._facts = facts
        self._log_freq = config.log_freq
        self._writers = writers
        self._routes = routes
        clock = Clock(facts.device.type == "cuda")
        self.place = Place()
        self.data = Stopwatch(Clock(on_device=False), "data", self.place)
        self.forward, self.backward, self.clip, self.step = (
            Stopwatch(clock, name, self.place) for name in ("forward", "backward", "clip", "step")
        )
        self._newton_schulz = newton_schulz
        self.ranks = RankTimes(blocks, facts.rank, facts.world_size, facts.device)
        self.progress = progress.Progress(facts.first, facts.steps, config.enable_progress_bar and facts.rank == 0)
        self._peak = peak_of(facts.device, config.peak_tflops)
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the time and tokens so far: the next log line is about what follows."""
        self._begin = time.perf_counter()
        self._paused = 0.0
        self._steps = 0
        self._tokens = 0
        memory.begin_window(self._facts.device)

    def is_due(self, step: int) -> bool:
        """Whether a log line follows ``step``."""
        return step == self._facts.first + 1 or step % self._log_freq == 0

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Around ``optimizer.step``, after clipping."""
        return nullcontext() if self._routes is None or not self.is_due(step) else self._routes.around_step()

    def count_step(self, tokens: int) -> None:
        """One more optimizer step, over ``tokens`` tokens that this rank read."""
        self._steps += 1
        self._tokens += tokens
        self.progress.count()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count (checkpoint, validation)."""
        on_cuda = self._facts.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self._facts.device)  # the training work that is still queued counts
        begin = time.perf_counter()
        self.place.pause(True)
        yield
        self.place.pause(False)
        if on_cuda:
            torch.cuda.synchronize(self._facts.device)
        self._paused += time.perf_counter() - begin

    def log(
        self, step: int, tokens: int, loss: float, grad_norm: float, lrs: Sequence[float], skipped: int = 0
    ) -> None:
        """End the window with a log line. Collective if there are figures of routes.

        Args:
            tokens: of all ranks since the first step of the run.
            loss, grad_norm: of ``step``, read from the device before.
            lrs: of each group, in this step.
            skipped: steps without an update since the start.
        """
        facts, used = self._facts, memory.take_window(self._facts.device)
        figures = {"train/loss": loss, "train/grad_norm": grad_norm, "train/tokens": tokens}
        figures["train/skipped_steps"] = skipped
        figures |= self._throughput() | self._optimizer()
        figures |= {f"optimizer/lr/{name}": lr for name, lr in zip(facts.group_names, lrs, strict=True)}
        figures |= {f"memory/{name}": value for name, value in used.figures().items()}
        if self._routes is not None:
            figures |= self._routes.take()
        parts = self.progress.show(step, loss)
        parts += [f"step: {step}/{facts.steps}", f"loss: {loss:.4f}", f"grad_norm: {grad_norm:.4f}"]
        parts += [f"lr: {lrs[facts.shown_group]:.3e}", f"tokens/s: {figures['throughput/tokens_per_second']:,.0f}"]
        if self._peak is not None:
            parts.append(f"MFU: {figures['throughput/mfu']:.1%}")
        parts += [f"memory: {used}", self.progress.times(step), f"data: {figures['throughput/data_share']:.1%}"]
        slowest = self.ranks.take_slowest()
        if slowest is not None:
            parts.append(f"slowest: rank {slowest[0]} +{slowest[1]:.1%}")
            figures["throughput/slowest_rank"], figures["throughput/slowest_share"] = slowest
        parts.append(f"optimizer: {figures['optimizer/ms']:.1f} ms")
        if skipped:
            parts.append(f"skipped: {skipped}")
        logger.info("  ".join(parts))
        self.write(step, tokens, figures)
        self.begin_window()

    def _throughput(self) -> dict[str, float]:
        """Figures of the window, by tag."""
        facts, steps = self._facts, self._steps
        seconds = time.perf_counter() - self._begin - self._paused
        tokens_per_second = self._tokens * facts.world_size / facts.tensor_parallel_degree / seconds
        flops = tokens_per_second * facts.flops_per_token / facts.world_size
        figures = {
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": flops / 1e12,
            "step_ms": 1000 * seconds / steps,
            "forward_ms": self.forward.take_ms() / steps,
            "backward_ms": self.backward.take_ms() / steps,
            "data_share": self.data.take_ms() / 1000 / seconds,
        }
        if self._peak is not None:
            figures["mfu"] = flops / self._peak
        return {f"throughput/{name}": value for name, value in figures.items()}

    def _optimizer(self) -> dict[str, float]:
        """Milliseconds per step in the window, and what Muon's owners make of them, by tag."""
        clip_ms, step_ms = self.clip.take_ms() / self._steps, self.step.take_ms() / self._steps
        figures = {"ms": clip_ms + step_ms, "clip_ms": clip_ms, "step_ms": step_ms}
        if self._newton_schulz is not None:
            figures["newton_schulz_ms"] = newton_schulz_ms = self._newton_schulz.take_ms() / self._steps
            if newton_schulz_ms:  # a rank may own no matrix
                figures["newton_schulz_tflops"] = self._facts.newton_schulz_flops / (newton_schulz_ms * 1e9)
        if self._facts.owner_load is not None:
            figures["owner_load_max_over_mean"] = self._facts.owner_load
        return {f"optimizer/{name}": value for name, value in figures.items()}

    def write(self, step: int, tokens: int, figures: Mapping[str, float]) -> None:
        """``figures`` by tag to the writers."""
        for writer in self._writers:
            writer.write(figures, step, tokens)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
