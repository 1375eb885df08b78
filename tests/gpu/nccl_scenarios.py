"""The runtime's scenarios over NCCL, one GPU a rank: ``torchrun --nproc-per-node 2 -m tests.gpu.nccl_scenarios``; with
arguments those whose names contain one of them.

The bodies are those of the tests on the CPU, with meshes of two ranks. Newton-Schulz runs in float16 and is held to
float16 tolerances; what must be bitwise is. Exit code 1 when a scenario fails on any rank.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

os.environ["DMUON_TEST_DEVICE"] = "cuda"  # read where the harness is imported

from tests.dmuon.optimizer import test_muon
from tests.dmuon.runtime import test_schedule
from tests.dmuon.state import test_model
from tests.dmuon.transport import test_grid, test_lane
from tests.gpu.test_delays import slow_reductions_change_nothing, train_with_delays
from tests.support.harness import assert_same

MESHES = {"shard 2": (1, 2, 1), "2x1": (2, 1, 1), "tp2": (1, 1, 2)}
DELAYED_STEPS = 200


def delays_change_nothing(rank: int, world: int, mesh: str) -> None:
    runs = [train_with_delays(rank, world, MESHES[mesh], "z3", delayed, DELAYED_STEPS) for delayed in (False, True)]
    assert_same(runs[1], runs[0], atol=0, rtol=0)


def scenarios() -> dict[str, Callable[[int, int], None]]:
    """Name -> body. Numbers are those of the behaviour the runtime must show."""
    chosen: dict[str, Callable[[int, int], None]] = {}

    def add(name: str, body: Callable[..., None], **kwargs: object) -> None:
        chosen[name] = lambda rank, world: body(rank, world, **kwargs)

    for case in test_lane.SEGMENTS:
        for in_place in (True, False):
            add(f"lanes, {case}, {'in place' if in_place else 'to buffers'}", test_lane.carries, case=case,
                in_place=in_place)  # fmt: skip
    for mode in ("z2", "z3"):
        add(f"1 five steps, {mode}", test_muon.test_five_steps_equal_one_process.body, mode=mode)
        for steps in (0, 2, 3):
            add(f"7 accumulation, no_sync {steps}, {mode}", test_schedule.test_accumulation.body, mode=mode,
                no_sync_steps=steps)  # fmt: skip
        add(f"13 zero_grad forgets, {mode}", test_schedule.test_zero_grad_forgets_the_batch.body, mode=mode)
        for precision in ("fp32", "bf16"):
            body = test_model.test_restart_is_bitwise.body
            add(f"15 restart, {precision}, {mode}", body, mode=mode, precision=precision)
    for mesh in MESHES:
        add(f"2 to 4 three steps in both modes, {mesh}", test_grid.test_three_steps_equal_one_process.body, mesh=mesh)
        add(
            f"6 asynchronous equals synchronous, {mesh}",
            test_grid.test_asynchronous_publish_is_bitwise.body,
            mesh=mesh,
        )
        add(f"slow reductions, {mesh}", slow_reductions_change_nothing, mesh=MESHES[mesh])
        add(f"{DELAYED_STEPS} steps with delays on one rank, {mesh}", delays_change_nothing, mesh=mesh)
    return chosen


def main() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    world = dist.get_world_size()
    test_grid.MESHES.clear()
    test_grid.MESHES.update(MESHES)
    failed, chosen = 0, scenarios()
    if words := sys.argv[1:]:
        chosen = {name: body for name, body in chosen.items() if any(word in name for word in words)}
    for name, body in chosen.items():
        start, error = time.monotonic(), None
        try:
            torch.manual_seed(1234 + rank)
            body(rank, world)
        except BaseException:
            error = traceback.format_exc()
        bad = torch.tensor(float(error is not None))
        dist.all_reduce(bad)  # a rank that failed in the middle of collectives ends the others by their timeout
        failed += bool(bad)
        if error is not None:
            sys.stderr.write(f"[rank {rank}] {name}\n{error}\n")
        if rank == 0:
            print(f"{'FAILED' if bad else 'passed'}  {time.monotonic() - start:6.1f} s  {name}", flush=True)
    if rank == 0:
        print(f"{len(chosen) - failed} passed, {failed} failed over NCCL on {world} GPUs", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Every scenario has made communicators of its own: ending hundreds of them takes longer than the scenarios.
    os._exit(code)
