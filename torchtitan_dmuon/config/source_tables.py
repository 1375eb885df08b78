"""The keys of `[[training.sources]]` and `[[training.stages]]`, declared as those of `job_config`."""
# ruff: noqa: RUF009  (`key` is dataclasses.field with the rules of a configuration key)

from dataclasses import dataclass
from typing import Any

from torchtitan_dmuon.config.key import key

DATASETS = ("stdlib", "text", "jsonl", "parquet", "arrow", "bin", "bin_uint16", "bin_uint32")


@dataclass(frozen=True)
class Source:
    """One `[[training.sources]]`: a corpus that is read in proportion to its weight. In a stage, a source with the name
    of an earlier one stands for that source: only its weight is given anew."""

    name: str | None = key(None, "name in the log and in checkpoints; none is dataset_path, or else dataset")
    dataset: str | None = key(None, "kind of data, as training.dataset", choices=DATASETS)
    dataset_path: str | None = key(None, "glob or folder of the data; none for stdlib", path=True)
    text_key: str | None = key(None, "as training.text_key, which none stands for")
    weight: float | None = key(None, "samples read of it, relative to the other weights; 0 is none", minimum=0)
    epochs: float | None = key(
        None, "in place of weight: passes over it in the time of as many passes over the others as they say", above=0
    )


@dataclass(frozen=True)
class Stage:
    """One `[[training.stages]]`: sources and weights that hold from a step on, until the next stage."""

    first_step: int = key(None, "first optimizer step of the stage", minimum=2)
    sources: list[dict[str, Any]] = key(
        None, "all sources of the stage, each a [[training.stages.sources]]", item=dict, table=Source, min_items=1
    )
