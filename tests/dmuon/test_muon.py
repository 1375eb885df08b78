"""The optimizer over ownership, against one process on the concatenated batch."""

import pytest
import torch

from tests.dmuon.harness import assert_same, build, full_weights, train, weights_of
from tests.oracle import OracleMuon, ToyModel, is_proj, train_one_process
from tests.pool import distributed


@pytest.mark.parametrize("mode", ["z2", "z3"])
@distributed(world=4)
def test_five_steps_equal_one_process(rank, world, mode):
    model, optimizer = build(world, mode=mode, muon={"weight_decay": 0.1})
    losses = train(model, optimizer, 5, rank)

    oracle = ToyModel()
    expected = train_one_process(oracle, OracleMuon(oracle, is_proj, weight_decay=0.1), 5, world)
    total = torch.tensor(losses)
    torch.distributed.all_reduce(total)
    assert_same({"losses": total / world}, {"losses": torch.tensor(expected)})
    assert_same(full_weights(model), weights_of(oracle))
