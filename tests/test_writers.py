"""What TensorBoard shows of a run that went back, and what Weights & Biases is given."""

import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.writers import open_writers


def write(folder, first, steps, factor, *arguments):
    config = load_config(["--metrics.enable_tensorboard", "true", *arguments])
    (writer,) = open_writers(config, folder, 0, first, first * 100)
    for step in range(first + 1, steps + 1):
        writer.write({"train/loss": factor * step, "optimizer/ms": 1.0}, step, step * 100)
    writer.close()


def shown(folder, tag="train/loss"):
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def test_a_run_that_goes_on_from_an_earlier_step_draws_one_line(tmp_path):
    write(tmp_path, 0, 4, 1.0)
    write(tmp_path, 2, 5, 10.0, "--job.description", "again")
    expected = [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert shown(tmp_path / "tb") == expected
    assert shown(tmp_path / "tb" / "by_tokens") == [(100 * step, loss) for step, loss in expected]
    assert len(shown(tmp_path / "tb", "optimizer/ms")) == 5
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary")[-1:])
    assert '    description = "again"' in text and "    [optimizer]" in text
    by_tokens = EventAccumulator(str(tmp_path / "tb" / "by_tokens")).Reload()
    assert by_tokens.Tags()["scalars"] == ["train/loss"]


@pytest.mark.parametrize(("all_ranks", "ranks"), [("false", [0]), ("true", [0, 1])])
def test_weights_and_biases(tmp_path, monkeypatch, all_ranks, ranks):
    given = []
    run = SimpleNamespace(log=lambda figures, step: given.append((figures, step)), finish=lambda: given.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **how: given.append(how) or run))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    config = load_config(["--metrics.enable_wandb", "true", "--metrics.save_for_all_ranks", all_ranks])
    opened = [rank for rank in range(2) for writer in open_writers(config, tmp_path, rank, 0, 0) if writer]
    assert opened == ranks
    given.clear()
    (writer,) = open_writers(config, tmp_path, 0, 0, 0)
    writer.write({"train/loss": 2.0}, 3, 300)
    writer.close()
    how, logged, end = given
    assert how["project"] == "mine" and how["config"]["metrics"]["enable_wandb"] is True and how["dir"] == str(tmp_path)
    assert logged == ({"train/loss": 2.0, "train/tokens": 300}, 3) and end == "end"
