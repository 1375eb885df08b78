"""Which rank owns which matrix: longest-processing-time-first over all slots. Pure and the same on every process.

The load that matters is the owner's Newton-Schulz work, so FLOPs come first; among equally loaded slots the
matrices of one unit are spread over different owners, so that a unit's broadcasts and reductions start everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MatrixCost:
    """What owning one parameter costs: ``flops`` per optimizer step and ``bytes`` of master weight; ``unit`` is the
    name of its hook boundary."""

    fqn: str
    unit: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Assignment:
    """The result: parameter name -> owner slot, with the loads it makes.

    Attributes:
        owner: canonical name -> slot (the rank in the flattened replicate x shard x tp order).
        flops: optimizer FLOPs per step of each slot.
        bytes: master-weight bytes of each slot.
        counts: number of parameters of each slot.
    """

    owner: dict[str, int]
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    counts: tuple[int, ...] = field(default=())

    @property
    def loads(self) -> tuple[float, ...]:
        """Share of the whole optimizer work on each slot; the bytes count where there is no work at all."""
        values = self.flops if any(self.flops) else self.bytes
        total = sum(values) or 1
        return tuple(value / total for value in values)

    @property
    def imbalance(self) -> float:
        """max / mean - 1 of the loads; 0.0 is perfect."""
        loads = self.loads
        return max(loads) * len(loads) - 1.0 if any(loads) else 0.0


def assign(costs: Sequence[MatrixCost], num_slots: int) -> Assignment:
    """Give every parameter one owner among ``num_slots``.

    Raises:
        ValueError: ``num_slots`` < 1 or a name given twice.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    flops, size, counts = [0] * num_slots, [0] * num_slots, [0] * num_slots
    unit_bytes: dict[str, list[int]] = defaultdict(lambda: [0] * num_slots)
    owner: dict[str, int] = {}
    # Python's sort is stable: equal costs keep the model's order, so every process gets the same result.
    for cost in sorted(costs, key=lambda cost: (-cost.flops, -cost.bytes)):
        if cost.fqn in owner:
            raise ValueError(f"{cost.fqn} is listed twice")
        in_unit = unit_bytes[cost.unit]
        if cost.flops:
            slot = min(range(num_slots), key=lambda s: (flops[s], in_unit[s], size[s], s))
        else:  # frozen: it costs its owner memory only
            slot = min(range(num_slots), key=lambda s: (size[s], in_unit[s], s))
        owner[cost.fqn] = slot
        flops[slot] += cost.flops
        size[slot] += cost.bytes
        in_unit[slot] += cost.bytes
        counts[slot] += 1
    return Assignment({cost.fqn: owner[cost.fqn] for cost in costs}, tuple(flops), tuple(size), tuple(counts))
