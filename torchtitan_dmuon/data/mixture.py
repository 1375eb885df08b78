"""Mixtures: several sources in one order, each in proportion to its weight.

Every optimizer step has a stage, and every stage a share of each source. Global sample g falls on a point of a circle,
`(g * stride + start) mod 2**62`, with a stride near the golden ratio of the circle and a start from the seed. Each
source owns an arc as long as its share. Points of such a sequence are spread evenly: after any number of samples each
source is within a few samples of its share. The n-th sample that falls to a source is its n-th in
`dataset.sample_order`.

So the order is a formula of seed and step, and the state is how often each source was read (`Position`).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from torchtitan_dmuon.data.dataset import IGNORE_INDEX, PackedDataset, sample_order

FILLER = -1

_CIRCLE = 1 << 62
_STRIDE = 0x9E3779B97F4A7C15 >> 2 | 1  # odd, so that no point is met twice
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Stage:
    """Weights from an optimizer step on.

    Attributes:
        first_step: its first optimizer step; 1 for the first stage.
        weights: samples read of each source by its name, relative to each other. A source left out is not read.
    """

    first_step: int
    weights: Mapping[str, float | Fraction]


class Position(NamedTuple):
    """What all ranks together have read.

    Attributes:
        samples: over all sources; equal to the sum of `read` in a run that never changed its sources.
        read: samples of each source, in the order of the mixture's sources.
    """

    samples: int
    read: tuple[int, ...]


class Mixture(Dataset):
    """The samples of several sources, numbered one source after the other. Sample `FILLER` has no valid label.

    Args:
        sources: by name, all of one `seq_len`.
        stages: by their first step, the first from step 1 on; none is one source of weight 1.
    """

    def __init__(self, sources: Mapping[str, PackedDataset], stages: Sequence[Stage] = ()):
        self.sources = dict(sources)
        self._datasets = list(self.sources.values())
        self.seq_len = self._datasets[0].seq_len
        self._ends = list(accumulate(len(dataset) for dataset in self._datasets))
        stages = stages or [Stage(1, dict.fromkeys(self.sources, 1))]
        self._first_steps = [stage.first_step for stage in stages]
        self._arcs = [self._arcs_of(stage) for stage in stages]

    def _arcs_of(self, stage: Stage) -> np.ndarray:
        """Where the arc of each source but the last ends: int64 [sources - 1]. Exact on every platform."""
        ends = list(accumulate(Fraction(stage.weights.get(name, 0)) for name in self.sources))
        return np.array([int(_CIRCLE * end / ends[-1]) for end in ends[:-1]], dtype=np.int64)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index` as `PackedDataset` gives it."""
        if index == FILLER:
            return {
                "input": torch.zeros(self.seq_len, dtype=torch.int64),
                "labels": torch.full((self.seq_len,), IGNORE_INDEX, dtype=torch.int64),
            }
        number = bisect_right(self._ends, index)
        return self._datasets[number][index - (self._ends[number - 1] if number else 0)]

    def start(self) -> Position:
        """Nothing read."""
        return Position(0, (0,) * len(self._datasets))

    def _sources_of(self, seed: int, first: int, count: int, step: int) -> np.ndarray:
        """The number of the source of each of the global samples from `first` on, all of optimizer step `step`."""
        arcs = self._arcs[bisect_right(self._first_steps, step) - 1]
        begin = (first * _STRIDE + seed * 0xD1342543DE82EF95) & _WORD
        points = np.arange(count, dtype=np.uint64) * np.uint64(_STRIDE) + np.uint64(begin)  # wraps at 64 bits
        return np.searchsorted(arcs, (points & np.uint64(_CIRCLE - 1)).astype(np.int64), side="right")

    def advance(self, seed: int, position: Position, count: int, step: int) -> Position:
        """The position after `count` more samples, all of optimizer step `step`."""
        found = np.bincount(self._sources_of(seed, position.samples, count, step), minlength=len(self._datasets))
        return Position(position.samples + count, tuple(a + int(b) for a, b in zip(position.read, found, strict=True)))

    def indices(self, seed: int, position: Position, count: int, step: int, part: slice) -> np.ndarray:
        """Which samples the next `count` global samples are, of which only `part` is returned: int64."""
        sources = self._sources_of(seed, position.samples, count, step)
        result = np.empty(len(sources[part]), dtype=np.int64)
        for number, dataset in enumerate(self._datasets):
            before = np.cumsum(sources == number) - 1 + position.read[number]
            mine = sources[part] == number
            nth, size = before[part][mine], len(dataset)
            result[mine] = sample_order(seed, nth // size, nth % size, size) + self._ends[number] - size
        return result
