"""Memory of a process, as numbers of bytes beside what there is."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MemoryUse:
    """Bytes.

    Attributes:
        reserved: on CUDA the most that PyTorch's allocator held in the window; on the CPU as ``peak``.
        peak: on CUDA the most that tensors took in the window; on the CPU the largest resident set since the start.
        total: of the device, or of the machine.
        retries: how often the allocator, since the start, freed what it held in order to find memory. Each costs time.
    """

    reserved: int
    peak: int
    total: int
    retries: int

    def figures(self) -> dict[str, float]:
        """By name, in GiB and as shares of the total."""
        return {
            "reserved_gib": self.reserved / 2**30,
            "reserved_share": self.reserved / self.total,
            "peak_gib": self.peak / 2**30,
            "peak_share": self.peak / self.total,
            "allocator_retries": self.retries,
        }

    def __str__(self) -> str:
        peak, reserved = self.peak / self.total, self.reserved / self.total
        return f"{peak:.0%}" if self.peak == self.reserved else f"{reserved:.0%} (peak {peak:.0%})"


def begin_window(device: torch.device) -> None:
    """What :func:`take_window` tells begins here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def take_window(device: torch.device) -> MemoryUse:
    """The memory of this process since the last :func:`begin_window`."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return MemoryUse(
            stats["reserved_bytes.all.peak"],
            stats["allocated_bytes.all.peak"],
            torch.cuda.get_device_properties(device).total_memory,
            stats["num_alloc_retries"],
        )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse(resident, resident, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0)
