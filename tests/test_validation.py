"""The validation loss against its definition, over samples that fill the last batches only in part."""

import pytest
import torch

from tests.support.oracle import ToyModel
from tests.support.pool import distributed
from torchtitan_dmuon.config.job_config import Compile, Parallelism, Validation
from torchtitan_dmuon.data import LoaderConfig, PackedDataset, TokenLoader
from torchtitan_dmuon.loss import build_loss
from torchtitan_dmuon.parallel import ParallelDims
from torchtitan_dmuon.validation import validate

LENGTH, VOCAB, LOCAL = 7, 29, 2


def expected(model, tokens, samples):
    """The mean of -log p over every label of the first ``samples`` samples, one by one."""
    values = []
    for index in range(samples):
        span = tokens[index * LENGTH : index * LENGTH + LENGTH + 1]
        values.append(-model(span[None, :-1])[0].log_softmax(-1)[torch.arange(LENGTH), span[1:]])
    return torch.cat(values).mean().item()


# Of 4 samples in a batch of both ranks: one is missing on rank 1, rank 1 has none, all are there.
@pytest.mark.parametrize("samples", [11, 9, 8])
@pytest.mark.parametrize("steps", [-1, 2])
@distributed(world=2)
def test_every_label_counts_once(rank, world, samples, steps):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (samples * LENGTH + 1,), generator=generator, device="cpu")
    dataset = PackedDataset(tokens.numpy(), LENGTH)
    loader = TokenLoader(dataset, LoaderConfig(LOCAL, infinite=False), rank, world)
    model = ToyModel(vocab=VOCAB)
    # A model that is another one in training.
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.lm_head)
    meshes = ParallelDims.from_config(Parallelism(), world).build(torch.device("cpu"))
    config = Validation(enable=True, steps=steps)
    seen = samples if steps == -1 else min(samples, steps * LOCAL * world)
    with torch.no_grad():
        wanted = expected(model.eval(), tokens, seen)
    model.train()
    for _ in range(2):  # every time from the beginning
        found = validate(model, loader, build_loss(Compile()), config, meshes, torch.no_grad)
        assert found == pytest.approx(wanted, rel=1e-6)
        assert model.training
