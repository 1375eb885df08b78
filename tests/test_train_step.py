"""One step of the trainer against plain PyTorch on one process: micro-batches and ranks with different numbers of valid
labels, and what a step sends."""

import dataclasses
import json
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models import get_model_spec
from models.llama3 import Llama3
from tests.support.oracle import OracleMuon
from tests.support.training import TINY, tiny, train, write_corpus
from torchtitan_dmuon import trainer
from torchtitan_dmuon.initialization import seeded_init
from torchtitan_dmuon.trainer import Trainer

pytestmark = pytest.mark.dist

VOCAB, LENGTH, LOCAL, STEPS = 257, 32, 2, 3
IGNORED = -100
HYPER = {"lr": 1e-3, "weight_decay": 0.1}


def made_batch(step, dp_rank, index):
    """Between none and nearly all of the labels are valid, and their number differs from rank to rank and from
    micro-batch to micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * dp_rank + index)
    tokens = torch.randint(VOCAB, (LOCAL, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    valid = (13 * step + 29 * dp_rank + 17 * index) % (LOCAL * LENGTH) if (dp_rank, index) != (0, 1) else 0
    labels.view(-1)[torch.randperm(LOCAL * LENGTH, generator=generator)[valid:]] = IGNORED
    return {"input": tokens[:, :-1], "labels": labels}


class Fed(Trainer):
    """Reads ``made_batch`` instead of its loader, and notes what each step gave and how often it exchanged."""

    def train_step(self, batches):
        exchanges, exchange = Counter(), dist.all_to_all_single

        def counting(*args, group, **kwargs):
            exchanges[group.group_desc] += 1
            return exchange(*args, group=group, **kwargs)

        made = [
            made_batch(self.step, self.meshes.dp_rank, index) for index in range(self.loader.micro_batches_per_step)
        ]
        with mock.patch.object(dist, "all_to_all_single", counting):
            loss, grad_norm = super().train_step(iter(made))
        with (self.folder / f"steps-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"loss": loss.item(), "norm": grad_norm.item(), "exchanges": exchanges}) + "\n")
        return loss, grad_norm


def run(folder, world, micro_batches, dp_size, **options):
    """(what each rank noted of each step)."""
    write_corpus(folder / "corpus", documents=4)
    options |= {
        "training__steps": STEPS,
        "training__local_batch_size": LOCAL,
        "training__global_batch_size": LOCAL * dp_size * micro_batches,
        "training__seq_len": LENGTH,
        "checkpoint__enable": False,
        "lr_scheduler__warmup_steps": 0,
        "lr_scheduler__decay_ratio": 0,
        **{f"optimizer__{key}": value for key, value in HYPER.items()},
    }
    done = train(world, *tiny(folder, **options), trainer=Fed)
    assert done.codes == [0] * world, done.output
    files = [folder / "out" / f"steps-{rank}.jsonl" for rank in range(world)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def one_process(optimizer_name, micro_batches, dp_size):
    """[(loss, gradient norm)]: the mean over all valid labels of a step, in one batch."""
    model = Llama3(dataclasses.replace(TINY, vocab_size=VOCAB, max_seq_len=LENGTH))
    for named_parameter in model.named_parameters():
        seeded_init(model.init_parameter, 0)(*named_parameter)
    adamw = {"betas": (0.9, 0.95), "weight_decay": HYPER["weight_decay"]}
    if optimizer_name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=HYPER["lr"], **adamw)
    else:
        optimizer = OracleMuon(
            model,
            lambda name, p: p.ndim == 2 and name.startswith("layers."),
            **HYPER,
            adamw_lr=HYPER["lr"],
            **{f"adamw_{key}": value for key, value in adamw.items()},
        )
    found = []
    for step in range(1, STEPS + 1):
        parts = [made_batch(step, rank, index) for rank in range(dp_size) for index in range(micro_batches)]
        tokens, labels = (torch.cat([part[key] for part in parts]) for key in ("input", "labels"))
        counts = [int((part["labels"] != IGNORED).sum()) for part in parts]
        assert len(set(counts)) == len(counts) and 0 in counts, counts
        logits = model(tokens)
        # From the definition, label by label.
        chosen = labels != IGNORED
        loss = -logits[chosen].log_softmax(-1).gather(1, labels[chosen][:, None]).sum() / sum(counts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


RUNS = {
    "AdamW": (2, 2, {"optimizer__name": "AdamW"}),
    "DMuon": (2, 2, {}),
    "replicas": (2, 2, {"parallelism__data_parallel_replicate_degree": 2}),
    "replicas, AdamW": (2, 2, {"optimizer__name": "AdamW", "parallelism__data_parallel_replicate_degree": 2}),
    "tensor parallel": (4, 2, {"parallelism__tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_valid_label_counts_alike(tmp_path, name):
    world, dp_size, options = RUNS[name]
    noted = run(tmp_path, world, 3, dp_size, **options)
    expected = one_process(options.get("optimizer__name", "DMuon"), 3, dp_size)
    for rank, steps in enumerate(noted):
        for step, (found, (loss, norm)) in enumerate(zip(steps, expected, strict=True), start=1):
            assert found["loss"] == pytest.approx(loss, rel=2e-5), (rank, step)
            assert found["norm"] == pytest.approx(norm, rel=2e-4), (rank, step)


@pytest.mark.parametrize(("others", "units"), [("fsdp2", 3), ("dedicated", 4)])
def test_gradients_go_on_once_a_step(tmp_path, others, units):
    """Tensor parallelism without replicas, four micro-batches."""
    options = {"parallelism__tensor_parallel_degree": 2, "dmuon__others": others}
    for steps in run(tmp_path, 2, 4, 1, **options):
        assert len(steps) == STEPS
        for step in steps:
            assert step["exchanges"]["dmuon_reduce_tp"] == units, step
            assert step["exchanges"]["dmuon_publish_tp"] == units, step


class Told(Trainer):
    """The family's ``after_build`` is called with what was built."""

    def __init__(self, *args):
        told = []
        spec = dataclasses.replace(get_model_spec("llama3"), after_build=lambda *given: told.append(given))
        with mock.patch.object(trainer, "get_model_spec", lambda name: spec):
            super().__init__(*args)
        assert told == [(self.model, self.optimizer, self.meshes)]


def test_a_family_is_told_when_everything_is_built(tmp_path):
    write_corpus(tmp_path / "corpus", documents=4)
    options = {"training__steps": 1, "lr_scheduler__warmup_steps": 1, "checkpoint__enable": False}
    done = train(1, *tiny(tmp_path, **options), trainer=Told)
    assert done.codes == [0] and list(done.steps) == [1], done.output
