"""What a user sees of the runtime from outside: ranges in the profiler, and a line of the log at every hook."""

import logging

from torch.profiler import ProfilerActivity, profile

from tests.support.harness import build
from tests.support.oracle import ToyModel, batch, loss_of
from tests.support.pool import distributed

UNITS = ("layers.0", "layers.1")


@distributed(world=2)
def test_every_collective_of_a_unit_is_a_range_of_the_profiler(rank, world):
    model, optimizer = build(world, ToyModel(layers=2), mesh=(2, 1, 1), shard=False)
    tokens, labels = batch(0, rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss_of(model(tokens), labels).backward()
        optimizer.step()
    names = {event.key for event in profiled.key_averages()}
    for unit in UNITS:
        for verb in ("unshard", "reduce", "reduce to replica", "publish"):
            assert f"dmuon/{verb} {unit}" in names, verb


@distributed(world=2)
def test_every_hook_is_a_line_of_the_debug_log(rank, world):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torchtitan_dmuon.dmuon.runtime.schedule")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        model, _ = build(world, ToyModel(layers=2), shard=False)
        tokens, labels = batch(0, rank)
        loss_of(model(tokens), labels).backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    forward = [f"{when} {unit}" for unit in UNITS for when in ("pre_forward", "post_forward")]
    first, last = UNITS
    backward = [f"pre_backward {last}", f"pre_backward {first}", f"reduce {last}", f"reduce {first}"]
    assert [line for line in lines if line in forward] == forward
    assert [line for line in lines if line.startswith("pre_b")] == backward[:2]
    assert [line for line in lines if line.startswith("reduce")] == backward[2:]
    assert {"forward begins", "forward ends", "backward begins", "backward ends"} <= set(lines)
