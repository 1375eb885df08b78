"""The sources of the training data and their weights by stage, from `[training]`, `[[training.sources]]` and
`[[training.stages]]`. What is read of a source is in `data/mixture.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from torchtitan_dmuon.config.job_config import KEYS, Training
from torchtitan_dmuon.config.source_tables import Source


class SourcesError(ValueError):
    """Sources or stages that contradict each other. ``key`` is the one to be named."""

    def __init__(self, key: str, problem: str):
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True)
class PlannedStage:
    """Weights that hold from a step on.

    Attributes:
        first_step: its first optimizer step.
        weights: by source name; a source that is left out is not read.
        by_epochs: the weights are passes over each source, not samples of it.
    """

    first_step: int
    weights: dict[str, float]
    by_epochs: bool


@dataclass(frozen=True)
class SourcePlan:
    """All sources of a run, by name, with dataset and text_key filled in; and its stages by their first step."""

    sources: dict[str, Source]
    stages: list[PlannedStage]


def path_problem(dataset: str, path: str | None) -> str | None:
    """What is wrong between the keys `dataset` and `dataset_path`."""
    if (dataset == "stdlib") == (path is None):
        return None
    found = "none" if path is None else repr(path)
    expected = "none" if dataset == "stdlib" else "a glob or folder"
    return f"found {found}, expected {expected} because dataset is {dataset!r}"


def plan_sources(training: Training) -> SourcePlan:
    """Resolve names and weights. Without sources, `training.dataset` is the one source, of that name.

    Raises:
        SourcesError: a source is unnamed twice, lacks a dataset or a weight; a stage has no weight above 0; or keys
            exclude each other.
    """
    if not training.sources:
        if training.stages:
            raise SourcesError("training.stages", "found stages, expected training.sources with them")
        only = Source("training.dataset", training.dataset, training.dataset_path, training.text_key)
        return SourcePlan({only.name: only}, [PlannedStage(1, {only.name: 1.0}, False)])
    for name in ("dataset", "dataset_path"):
        if (value := vars(training)[name]) != KEYS[f"training.{name}"].default:
            raise SourcesError(f"training.{name}", f"found {value!r}, expected none beside training.sources")
    known: dict[str, Source] = {}
    stages = [_plan_stage("training.sources", 1, training.sources, known, training.text_key)]
    for position, table in enumerate(training.stages):
        where = f"table {position}: "
        if table["first_step"] <= stages[-1].first_step:
            problem = f"first_step: found {table['first_step']}, expected more than that of the stage before"
            raise SourcesError("training.stages", where + problem)
        try:
            stages.append(
                _plan_stage("training.stages", table["first_step"], table["sources"], known, training.text_key)
            )
        except SourcesError as error:
            raise SourcesError(error.key, where + f"sources: {error}") from None
    return SourcePlan(known, stages)


def _plan_stage(
    key: str, first_step: int, tables: list[dict[str, Any]], known: dict[str, Source], text_key: str
) -> PlannedStage:
    """One stage; its new sources are added to `known`."""
    weights: dict[str, float] = {}
    kinds = set()
    for position, table in enumerate(tables):
        where = f"table {position}: "
        name = table.get("name") or table.get("dataset_path") or table.get("dataset")
        if name is None:
            raise SourcesError(key, f"{where}dataset is missing")
        if name in weights:
            raise SourcesError(key, f"{where}found a second source {name!r}, expected another name")
        given = [kind for kind in ("weight", "epochs") if kind in table]
        if len(given) != 1:
            found = "both" if given else "neither"
            raise SourcesError(key, f"{where}{name}: found {found}, expected weight or epochs")
        kinds.add(given[0])
        weights[name] = table[given[0]]
        rest = {field: value for field, value in table.items() if field not in ("name", "weight", "epochs")}
        if name not in known:
            known[name] = _new_source(key, where, name, {"text_key": text_key, **rest})
        elif replace(known[name], **rest) != known[name]:
            raise SourcesError(key, f"{where}{name}: found other data than its first table, expected another name")
    if len(kinds) > 1:
        raise SourcesError(key, "found weight and epochs, expected the same for all of its sources")
    if not any(weights.values()):
        raise SourcesError(key, "found weights of zero only, expected one above 0")
    return PlannedStage(first_step, weights, kinds == {"epochs"})


def _new_source(key: str, where: str, name: str, fields: dict[str, Any]) -> Source:
    if "dataset" not in fields:
        raise SourcesError(key, f"{where}{name}: dataset is missing")
    source = Source(name, **fields)
    if problem := path_problem(source.dataset, source.dataset_path):
        raise SourcesError(key, f"{where}{name}: dataset_path: {problem}")
    return source
