"""Sources and stages of the training data: what is resolved, and what contradicts."""

import pytest

from torchtitan_dmuon.config import ConfigError, config_to_toml, load_config
from torchtitan_dmuon.config.source_tables import Source
from torchtitan_dmuon.config.sources import PlannedStage, plan_sources

SOURCES = """
[training]
text_key = "body"
[[training.sources]]
dataset = "bin"
dataset_path = "~/web/*.bin"
name = "web"
weight = 3
[[training.sources]]
dataset = "jsonl"
dataset_path = "books"
weight = 1.5
"""
STAGES = """
[[training.stages]]
first_step = 100
[[training.stages.sources]]
name = "web"
epochs = 2
[[training.stages.sources]]
dataset = "stdlib"
epochs = 1
"""


def test_sources_and_stages(toml, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(toml(SOURCES + STAGES))
    plan = plan_sources(config.training)
    assert plan.sources == {
        "web": Source("web", "bin", "/home/me/web/*.bin", "body"),
        "books": Source("books", "jsonl", "books", "body"),
        "stdlib": Source("stdlib", "stdlib", None, "body"),
    }
    assert plan.stages == [
        PlannedStage(1, {"web": 3.0, "books": 1.5}, False),
        PlannedStage(100, {"web": 2.0, "stdlib": 1.0}, True),
    ]
    assert load_config(toml(config_to_toml(config))) == config


def test_the_one_dataset_is_a_source():
    plan = plan_sources(load_config(["--training.dataset", "text", "--training.dataset_path", "d"]).training)
    assert plan.sources == {"training.dataset": Source("training.dataset", "text", "d", "text")}
    assert plan.stages == [PlannedStage(1, {"training.dataset": 1.0}, False)]


WEB, STDLIB = "{dataset = 'text', dataset_path = 'web', weight = 1}", "{dataset = 'stdlib', weight = 1}"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("sources", "[{dataset = 'stdlib'}]", "table 0: stdlib: found neither, expected weight or epochs"),
        (
            *("sources", "[{dataset = 'stdlib', weight = 1, epochs = 1}]"),
            "table 0: stdlib: found both, expected weight or epochs",
        ),
        (
            *("sources", f"[{WEB}, {{dataset = 'stdlib', epochs = 1}}]"),
            "found weight and epochs, expected the same for all of its sources",
        ),
        (
            *("sources", "[{dataset = 'stdlib', weight = 0}]"),
            "found weights of zero only, expected one above 0",
        ),
        ("sources", "[{dataset = 'stdlib', weight = -1}]", "table 0: weight: found -1.0, expected float >= 0, or none"),
        (
            *("sources", "[{dataset = 'stdlib', epochs = 0}]"),
            "table 0: epochs: found 0.0, expected float > 0, or none",
        ),
        ("sources", "[{weight = 1}]", "table 0: dataset is missing"),
        ("sources", "[{name = 'a', weight = 1}]", "table 0: a: dataset is missing"),
        ("sources", f"[{WEB}, {WEB}]", "table 1: found a second source 'web', expected another name"),
        (
            *("sources", "[{dataset = 'text', weight = 1}]"),
            "table 0: text: dataset_path: found none, expected a glob or folder because dataset is 'text'",
        ),
        ("sources", "[{dataset = 'csv', weight = 1}]", "table 0: dataset: found 'csv', expected one of "),
        ("sources", "[{datasets = 'text'}]", "table 0: unknown key 'datasets', nearest is dataset"),
        (
            *("stages", f"[{{first_step = 5, sources = [{STDLIB}]}}]"),
            "found stages, expected training.sources with them",
        ),
        ("stages", "[{first_step = 1, sources = [{}]}]", "table 0: first_step: found 1, expected int >= 2"),
        ("stages", "[{first_step = 5}]", "table 0: sources is missing, expected list of tables, at least 1 of them"),
        ("stages", "[{first_step = 5, sources = []}]", "table 0: sources: found [], expected list of tables, at least"),
    ],
)
def test_one_problem(key, value, problem):
    with pytest.raises(ConfigError) as info:
        load_config([f"--training.{key}", value])
    [line] = info.value.lines
    assert line.startswith(f"training.{key} (command line): {problem}")


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        (
            f"[{{first_step = 5, sources = [{WEB}]}}, {{first_step = 5, sources = [{WEB}]}}]",
            "table 1: first_step: found 5, expected more than that of the stage before",
        ),
        (
            "[{first_step = 5, sources = [{name = 'web', dataset_path = 'other', weight = 1}]}]",
            "table 0: sources: table 0: web: found other data than its first table, expected another name",
        ),
        (
            "[{first_step = 5, sources = [{name = 'wbe', weight = 1}]}]",
            "table 0: sources: table 0: wbe: dataset is missing",
        ),
    ],
)
def test_stages_that_contradict_the_sources(stages, problem):
    with pytest.raises(ConfigError) as info:
        load_config(["--training.sources", f"[{WEB}]", "--training.stages", stages])
    assert info.value.lines == [f"training.stages (command line): {problem}"]


def test_dataset_beside_sources():
    with pytest.raises(ConfigError) as info:
        load_config(["--training.sources", f"[{WEB}]", "--training.dataset", "text", "--training.dataset_path", "d"])
    assert info.value.lines == ["training.dataset (command line): found 'text', expected none beside training.sources"]
