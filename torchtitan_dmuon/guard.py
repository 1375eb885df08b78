"""Steps whose update is left out: their loss or gradient norm is not finite, or far above the usual.

Everything is computed on the device; the host looks when it waits anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan_dmuon.config.job_config import Training
from torchtitan_dmuon.distributed import all_reduce
from torchtitan_dmuon.logging import logger


class NonFiniteError(ArithmeticError):
    """Too many steps without an update: one line that names the step."""


@dataclass(frozen=True)
class _Counts:
    """As the device has counted: ``failed`` is the step at which the run is to end, or 0."""

    failed: int
    skipped: int
    last: int


class StepGuard:
    """Judges every step, and counts those that it skips. After one more than ``skip_max_steps`` in a row all later
    steps stand still, until the host looks and raises.

    Args:
        config: the ``[training]`` section.
        groups: they span all ranks together, one after the other.
        device: of losses and norms.
    """

    def __init__(self, config: Training, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._config = config
        self._groups = groups
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)  # failed, skipped, last
        # (loss, gradient norm) of the last steps that were not skipped: column ``_kept % skip_window`` is the oldest.
        self._window = torch.zeros(2, config.skip_window, dtype=torch.float64, device=device)
        self._kept = torch.zeros(1, dtype=torch.int64, device=device)
        self._told = 0

    @torch.no_grad()
    def judge(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Whether ``step`` is to change nothing: 0-D float32, 1 or 0, the same on every rank. Collective if
        ``skip_sigma`` is set. The host does not wait.

        Args:
            loss, grad_norm: 0-D, of all ranks.
        """
        values = torch.stack([loss, grad_norm]).double()
        bad = ~values.isfinite().all()
        if self._config.skip_sigma is not None:
            spread, mean = torch.std_mean(self._window, dim=1, correction=0)
            spike = (values > mean + self._config.skip_sigma * spread).any()
            bad = bad | (spike & (self._kept >= self._config.skip_window).squeeze())
            # Ranks may differ in the last digit of a norm, but have to agree.
            bad = all_reduce(bad.float(), self._groups) > 0
            column = self._kept % self._config.skip_window
            kept = torch.where(bad, self._window.index_select(1, column), values[:, None])
            self._window.index_copy_(1, column, kept)
            self._kept += ~bad
        self._in_a_row = torch.where(bad, self._in_a_row + 1, 0)
        failed, skipped, last = self._counts.unbind()
        failed = torch.where((failed == 0) & (self._in_a_row > self._config.skip_max_steps), step, failed)
        self._counts = torch.stack([failed, skipped + bad, torch.where(bad, step, last)])
        return (bad | (failed > 0)).float()

    def check(self) -> int:
        """Waits for the device. Logs the steps that were skipped since the last call, and returns how many were skipped
        so far. Raises NonFiniteError, on every rank, when the run is to end."""
        counts = _Counts(*self._counts.tolist())
        most = self._config.skip_max_steps
        if counts.failed and most == 0:
            raise NonFiniteError(
                f"step {counts.failed}: the loss or the gradient norm is not finite; no weight has moved since step "
                f"{counts.failed - 1}. Resume from the last checkpoint with a lower optimizer.lr or other data "
                "(training.skip_samples_on_resume), or let training.skip_max_steps pass over such steps"
            )
        if counts.failed:
            raise NonFiniteError(
                f"step {counts.failed}: the update of {most + 1} steps in a row was to be skipped, and "
                f"training.skip_max_steps is {most}; no weight has moved since step {counts.failed - most - 1}. Resume "
                "from the last checkpoint with a lower optimizer.lr or other data (training.skip_samples_on_resume)"
            )
        if counts.skipped > self._told:
            logger.warning(
                "Skipped %d update(s), the last of them in step %d (%d since the start): the loss or the gradient "
                "norm was not finite%s",
                *(counts.skipped - self._told, counts.last, counts.skipped),
                "" if self._config.skip_sigma is None else ", or far above the steps before (training.skip_sigma)",
            )
            self._told = counts.skipped
        return counts.skipped
