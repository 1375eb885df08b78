"""Which rank owns which piece: the longest job first, each to the least loaded slot. Among equally loaded slots the
pieces of one unit go to different owners, so that its broadcasts and reductions start from many ranks at once. Pure:
every process gets the same result."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixCost:
    """The cost of a piece for its owner: ``flops`` of Newton-Schulz per step, 0 for a frozen piece or AdamW's, and
    ``bytes`` of master weight. ``unit`` is the name of the piece's hook boundary."""

    fqn: str
    unit: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Assignment:
    """The owner of every piece (``owner``: name -> slot, the rank in the flattened replicate x shard x tp order), and
    of each slot the optimizer ``flops`` per step and the ``bytes`` of master weights."""

    owner: dict[str, int]
    flops: tuple[int, ...]
    bytes: tuple[int, ...]

    @property
    def loads(self) -> tuple[float, ...]:
        """Each slot's share of all optimizer FLOPs; its share of the bytes where no piece has any FLOPs."""
        values = self.flops if any(self.flops) else self.bytes
        total = sum(values) or 1
        return tuple(value / total for value in values)

    @property
    def imbalance(self) -> float:
        """max / mean - 1 of the loads; 0.0 is perfect, 0.1 makes the busiest owner work 10% longer than the mean."""
        loads = self.loads
        return max(loads) * len(loads) - 1.0 if any(loads) else 0.0


def assign(costs: Sequence[MatrixCost], num_slots: int) -> Assignment:
    """Give every piece one owner among ``num_slots`` slots.

    Pieces with FLOPs come first, in falling order of FLOPs, then of bytes. Each goes to the slot of fewest FLOPs; among
    equals to the one with the fewest bytes of the piece's unit, then with the fewest bytes, then to the lowest number.
    Pieces without FLOPs follow, to the slot of fewest bytes, then with the fewest of the unit, then the lowest. Raises
    ValueError for ``num_slots`` < 1 or a name given twice.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    flops, size = [0] * num_slots, [0] * num_slots
    unit_bytes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # unit -> slot -> bytes
    owner: dict[str, int] = {}
    # Python's sort is stable: equal costs keep the model's order.
    order = sorted(costs, key=lambda cost: (-cost.flops, -cost.bytes))
    for load, pieces in ((flops, [c for c in order if c.flops]), (size, [c for c in order if not c.flops])):
        slots = _SlotQueue(load, size)
        for cost in pieces:
            if cost.fqn in owner:
                raise ValueError(f"{cost.fqn} is listed twice")
            in_unit = unit_bytes[cost.unit]
            owner[cost.fqn] = slot = slots.pop(in_unit)
            flops[slot] += cost.flops
            size[slot] += cost.bytes
            in_unit[slot] += cost.bytes
            slots.push(slot)
    return Assignment({cost.fqn: owner[cost.fqn] for cost in costs}, tuple(flops), tuple(size))


class _SlotQueue:
    """All slots in the order (load, bytes of one unit, bytes, number). Only a popped slot's ``load`` and ``size``
    change, before it is pushed back. A minimum over 1,024 slots for each of 30,000 pieces takes 5 s; two heaps take 0.2
    s, since most pieces follow one of their own unit."""

    def __init__(self, load: Sequence[int], size: Sequence[int]) -> None:
        self._load, self._size = load, size
        self._in_unit: dict[int, int] = {}
        self._inside: list[tuple[int, int, int, int]] = []  # slots that hold pieces of the last unit
        self._outside: list[tuple[int, int, int, int]] = []  # the others, and some of those as if they held none
        for slot in range(len(load)):
            self.push(slot)

    def push(self, slot: int) -> None:
        heapq.heappush(self._outside, (self._load[slot], 0, self._size[slot], slot))

    def pop(self, in_unit: dict[int, int]) -> int:
        """Take out the first slot for a piece of the unit of which the slots hold ``in_unit`` bytes."""
        if in_unit is not self._in_unit:
            for *_, slot in self._inside:
                self.push(slot)
            self._in_unit, self._inside = in_unit, []
        while self._outside and (slot := self._outside[0][-1]) in in_unit:
            heapq.heappop(self._outside)
            heapq.heappush(self._inside, (self._load[slot], in_unit[slot], self._size[slot], slot))
        heap = min(filter(None, (self._outside, self._inside)), key=lambda heap: heap[0])
        return heapq.heappop(heap)[-1]
