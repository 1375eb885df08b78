"""Figures of a run: what they are computed from, the log line and TensorBoard.

Wall-clock time is counted in windows between two log lines; time spent in checkpoints and validation is taken out.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchtitan_dmuon.config.job_config import Metrics
from torchtitan_dmuon.flops import peak_flops
from torchtitan_dmuon.logging import logger


class Stopwatch:
    """Adds up the time of one part of the step. On CUDA it records events, so that the host never waits; a window reads
    the sum at its end, where the log line has waited for the device already."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def take_ms(self) -> float:
        """The sum since the last call, in milliseconds."""
        total = 1000 * self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events)
        self._events, self._seconds = [], 0.0
        return total


class MetricsLogger:
    """Collects and writes the figures.

    Args:
        config: the ``[metrics]`` section.
        dump_folder: where TensorBoard files go.
        rank: this process; rank 0 writes, or every rank with ``save_for_all_ranks``.
        device: of the run.
        flops_per_token: model FLOPs of one token's forward and backward.
        newton_schulz_flops: FLOPs of this rank's Newton-Schulz per optimizer step; 0 without Muon.
        tensor_parallel_degree: ranks that share the work on each token. Tokens/s, TFLOP/s and MFU are those of one
            device: multiplied by the number of devices they are the run's.
    """

    def __init__(
        self,
        config: Metrics,
        dump_folder: Path,
        rank: int,
        device: torch.device,
        flops_per_token: int,
        newton_schulz_flops: int,
        tensor_parallel_degree: int = 1,
    ) -> None:
        self._device = device
        self._sharers = tensor_parallel_degree
        self._flops_per_token = flops_per_token
        self._newton_schulz_flops = newton_schulz_flops
        on_cuda = device.type == "cuda"
        self.data = Stopwatch(on_device=False)
        self.optimizer = Stopwatch(on_device=on_cuda)
        self._writer = None
        if config.enable_tensorboard and (rank == 0 or config.save_for_all_ranks):
            from torch.utils.tensorboard import SummaryWriter

            folder = dump_folder / config.save_tb_folder
            folder = folder / f"rank_{rank}" if config.save_for_all_ranks else folder
            self._writer = SummaryWriter(str(folder))
            logger.info("TensorBoard files in %s", folder)
        self._peak = None
        if on_cuda:
            name = torch.cuda.get_device_name(device)
            self._peak = peak_flops(name)
            if self._peak is None:
                logger.info("The peak FLOP/s of %s are not known: MFU is not shown", name)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            logger.info("Running on CPU: MFU is not shown")
        self.begin_window()

    def begin_window(self) -> None:
        """Forget the time and tokens so far: the next log line is about what follows."""
        self._begin = time.perf_counter()
        self._paused = 0.0
        self._steps = 0
        self._tokens = 0

    def count_step(self, tokens: int) -> None:
        """One more optimizer step, over ``tokens`` tokens that this rank read."""
        self._steps += 1
        self._tokens += tokens

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
        seconds = time.perf_counter() - self._begin - self._paused
        steps = self._steps
        tokens_per_second = self._tokens / self._sharers / seconds
        tflops = tokens_per_second * self._flops_per_token / 1e12
        optimizer_ms = self.optimizer.take_ms() / steps
        scalars = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": tokens_per_second,
            "tflops": tflops,
            "step_ms": 1000 * seconds / steps,
            "optimizer_ms": optimizer_ms,
            "data_ms": self.data.take_ms() / steps,
            "peak_memory_gib": self._peak_memory_gib(),
        }
        line = (
            f"step: {step:4d}  loss: {loss:.4f}  grad_norm: {grad_norm:.4f}  lr: {lr:.3e}  "
            f"tokens/s: {tokens_per_second:,.0f}  TFLOP/s: {tflops:.2f}"
        )
        if self._peak is not None:
            scalars["mfu"] = tflops * 1e12 / self._peak
            line += f"  MFU: {scalars['mfu']:.1%}"
        line += (
            f"  memory: {scalars['peak_memory_gib']:.2f} GiB  step: {scalars['step_ms']:.1f} ms  "
            f"optimizer: {optimizer_ms:.1f} ms  data: {scalars['data_ms']:.1f} ms"
        )
        if self._newton_schulz_flops:
            scalars["newton_schulz_tflops"] = self._newton_schulz_flops / (optimizer_ms * 1e9)
            line += f"  NS: {scalars['newton_schulz_tflops']:.2f} TFLOP/s"
        logger.info(line)
        self.write(step, scalars)
        self.begin_window()

    def write(self, step: int, scalars: dict[str, float], prefix: str = "train") -> None:
        """Scalars to TensorBoard, if it is on."""
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(f"{prefix}/{name}", value, step)

    def _peak_memory_gib(self) -> float:
        """CUDA: most bytes allocated since the start; CPU: the process's largest resident set."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
