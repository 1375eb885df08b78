"""The resumable loader: which rank gets which sample, and when.

The order is global. With GB samples in an optimizer step over dp ranks and LB samples in a micro-batch of one rank:

- step t consumes the global samples [t * GB, (t + 1) * GB);
- micro-batch m of step t on rank r holds the samples t * GB + m * dp * LB + r * LB + b for b < LB;
- GB is a multiple of dp * LB, so that the k-th micro-batch of a run on rank r holds k * dp * LB + r * LB + b;
- `mixture.py` tells which sample of which source the global sample g is.

The whole state of a loader is the number of samples consumed of each source, which means the same on any number of
ranks.

`dataset.py` reads samples; the trainer moves batches to a device.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_dmuon.config.job_config import DataLoader
from torchtitan_dmuon.data.dataset import PackedDataset
from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.identity import BEGIN_ANEW, describe, resume_sources
from torchtitan_dmuon.data.mixture import FILLER, Mixture, Position

_STATE_KEYS = ("consumed_samples", "steps", "seed", "sources", "skips")


@dataclass(frozen=True)
class LoaderConfig:
    """How ranks read a dataset; the same on every rank.

    Attributes:
        local_batch_size: samples of one micro-batch on one rank (LB).
        global_batch_size: samples of one optimizer step over all ranks (GB), a multiple of LB * ranks; -1 is one
            micro-batch on each rank.
        seed: of the order.
        infinite: True for epochs without end, each in an order of its own; False for one pass in natural order.
        accept_changed_data: whether `load_state_dict` takes the state of other data.
        dataloader: the section ``[training.dataloader]``, whose keys are arguments of ``torch.utils.data.DataLoader``.
    """

    local_batch_size: int
    global_batch_size: int = -1
    seed: int = 0
    infinite: bool = True
    accept_changed_data: bool = False
    dataloader: DataLoader = field(default_factory=DataLoader)

    def check(self, dp_size: int) -> None:
        """Raises DataError when the sizes do not fit ``dp_size`` ranks, or worker settings contradict each other."""
        if self.local_batch_size < 1:
            raise DataError(f"training.local_batch_size = {self.local_batch_size} must be at least 1")
        unit = self.local_batch_size * dp_size
        size = self.global_batch_size
        if size != -1 and (size < 1 or size % unit):
            above = max(1, -(-size // unit)) * unit
            nearest = f"{above - unit} or {above}" if above > unit else f"{above}"
            raise DataError(
                f"training.global_batch_size = {size} is not a multiple of local_batch_size x data-parallel ranks = "
                f"{self.local_batch_size} x {dp_size} = {unit}: use {nearest}"
            )
        workers = self.dataloader
        if workers.num_workers == 0 and (workers.persistent_workers or workers.prefetch_factor is not None):
            raise DataError(
                "training.dataloader.persistent_workers and prefetch_factor need num_workers of at least 1: "
                "raise num_workers or leave both out"
            )


class _RankBatches(Sampler[list[int]]):
    """The mixture's indices of one rank's micro-batches, from `position` and optimizer step `steps` + 1 on."""

    def __init__(self, mixture: Mixture, config: LoaderConfig, dp_rank: int, dp_size: int):
        self.position = mixture.start()
        self.steps = 0
        self.stride = config.local_batch_size * dp_size
        size = config.global_batch_size
        self.per_step = 1 if size == -1 else size // self.stride
        self._mixture = mixture
        self._part = slice(dp_rank * config.local_batch_size, (dp_rank + 1) * config.local_batch_size)
        self._seed = config.seed
        self._infinite = config.infinite

    def __len__(self) -> int:
        return -(-len(self._mixture) // self.stride)

    def __iter__(self) -> Iterator[list[int]]:
        return self._endless() if self._infinite else self._one_pass()

    def _endless(self) -> Iterator[list[int]]:
        position = self.position
        for micro_batch in count(self.per_step * self.steps):
            place = (self._seed, position, self.stride, micro_batch // self.per_step + 1)
            yield self._mixture.indices(*place, self._part).tolist()
            position = self._mixture.advance(*place)

    def _one_pass(self) -> Iterator[list[int]]:
        samples = len(self._mixture)
        for first in range(0, samples, self.stride):
            ids = np.arange(first, first + self.stride)[self._part]
            yield np.where(ids < samples, ids, FILLER).tolist()


class TokenLoader:
    """The micro-batches of one data-parallel rank, each {"input", "labels"}: int64 [LB, seq_len].

    An infinite loader never ends: `iter()` goes on after the last batch of the iterator before. With a finite loader
    each `iter()` is one pass, in which every rank gets the same number of batches; the last batches of some ranks are
    filled up with samples whose labels are all -100.

    Only one iterator is live at a time: `iter()` and `load_state_dict` end the iterators made before.

    Args:
        dataset: the samples, the same on every rank; a single dataset is a mixture of one source, "data".
        config: how ranks read the samples.
        dp_rank, dp_size: place of this rank among the ranks that read different data.

    Raises:
        DataError: as `LoaderConfig.check`; or `dp_rank` is not below `dp_size`.
    """

    def __init__(self, dataset: PackedDataset | Mixture, config: LoaderConfig, dp_rank: int = 0, dp_size: int = 1):
        if not 0 <= dp_rank < dp_size:
            raise DataError(f"data-parallel rank {dp_rank} of {dp_size} ranks does not exist")
        config.check(dp_size)
        self._mixture = dataset if isinstance(dataset, Mixture) else Mixture({"data": dataset})
        self._seed = config.seed
        self._infinite = config.infinite
        self._accept_changed_data = config.accept_changed_data
        self._position = self._mixture.start()
        self._micro_batches = 0  # handed out, those before a restart in steps of today's size
        self._skips: list[int] = []  # samples of each skip, all counted in `_position`
        self._generation = 0
        self._batches = _RankBatches(self._mixture, config, dp_rank, dp_size)
        self.micro_batches_per_step = self._batches.per_step
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates; no user can act on the warning.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                self._mixture,
                batch_sampler=self._batches,
                **vars(config.dataloader),
                # The loader's own generator: an iterator that starts must not draw from the trainer's random numbers.
                generator=torch.Generator(),
            )

    def __len__(self) -> int:
        """Batches of one pass of a finite loader. Raises TypeError for an infinite one."""
        if self._infinite:
            raise TypeError("an infinite loader has no length")
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._generation += 1
        return self._iterate(self._generation)

    def _iterate(self, generation: int) -> Iterator[dict[str, torch.Tensor]]:
        self._batches.position, self._batches.steps = self._position, self.steps
        batches = iter(self._loader)
        while generation == self._generation:
            batch = next(batches, None)
            if batch is None:
                return
            # Counted here, not in the sampler, which runs ahead of the caller by the batches that workers prefetch.
            if self._infinite:
                place = (self._position, self._batches.stride, self.steps + 1)
                self._position = self._mixture.advance(self._seed, *place)
            self._micro_batches += 1
            yield batch
        # Checked before the next read: persistent workers would hand the next iterator's batch to this iterator.
        raise RuntimeError("this iterator ended when the loader was iterated or loaded again")

    @property
    def read_samples(self) -> int:
        """Samples handed out over all ranks, those that were skipped not among them."""
        return self._position.samples - sum(self._skips)

    def skip(self, samples: int) -> bool:
        """Leave out the next `samples` global samples. After `load_state_dict` and before the first batch, with the
        same number on every rank. Returns False and does nothing when the last skip was of as many: the state is then
        one of the run that was told to skip them, which has been started again with the same settings."""
        if self._skips[-1:] == [samples]:
            return False
        self._position = self._mixture.advance(self._seed, self._position, samples, self.steps + 1)
        self._skips.append(samples)
        return True

    @property
    def steps(self) -> int:
        """Optimizer steps whose samples are handed out. Setting it ends running iterators and chooses the stage of the
        mixture that comes next."""
        return self._micro_batches // self.micro_batches_per_step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._micro_batches = steps * self.micro_batches_per_step
        self._generation += 1

    def consumed(self) -> dict[str, tuple[int, float]]:
        """By source: tokens handed out or skipped over all ranks, and passes over the source."""
        read = zip(self._mixture.sources.items(), self._position.read, strict=True)
        return {name: (samples * data.seq_len, samples / len(data)) for (name, data), samples in read}

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank: samples handed out or skipped over all ranks, those of each source
        beside what the source is, optimizer steps, and the seed."""
        read = zip(self._mixture.sources.items(), self._position.read, strict=True)
        sources = {name: describe(samples, data) for (name, data), samples in read}
        return {
            "consumed_samples": self._position.samples,
            "steps": self.steps,
            "seed": self._seed,
            "sources": sources,
            "skips": list(self._skips),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that `state` counts, whatever ranks and batch sizes the saving run had.

        Raises:
            DataError: the state is incomplete, of another seed, or of other data (`identity.resume_sources`).
            TypeError: the loader is finite. A finite loader always starts from the beginning.
        """
        if not self._infinite:
            raise TypeError("a finite loader has no position to restore")
        missing = [key for key in _STATE_KEYS if key not in state]
        if missing:
            raise DataError(
                f"the saved loader state lacks {', '.join(missing)}: it is not of this loader; {BEGIN_ANEW}"
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the checkpoint was made with the data seed {state['seed']} but this run has {self._seed}: use the "
                f"same debug.seed, or the data order would change in the middle of an epoch; or {BEGIN_ANEW}"
            )
        read = resume_sources(state["sources"], self._mixture.sources, self._accept_changed_data)
        self._position = Position(state["consumed_samples"], tuple(read))
        self._skips = list(state["skips"])
        self.steps = state["steps"]
