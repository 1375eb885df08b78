"""One pool of worker processes per world size, reused by every distributed test.

``@distributed(world=4)`` turns ``def test_x(rank, world, ...)`` into a test that runs the body on every worker with a
fresh gloo process group. The first failure is reported with the rank's traceback; a test that outlives its timeout
has its workers' stacks dumped and the pool killed, so nothing hangs.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta

import pytest

_GRACE_SECONDS = 15.0  # for the other ranks, once one has failed
# DTensor's caches keep the meshes of finished tests, and their groups' threads: fresh processes every so many tests.
_JOBS_PER_PROCESS = 60


def _worker(rank: int, world: int, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # scripts/gpu_check.sh: the same tests with every rank on one GPU, gloo carrying CUDA tensors.
    if "DMUON_TEST_DEVICE" in os.environ:
        torch.set_default_device(os.environ["DMUON_TEST_DEVICE"])
    while (job := pipe.recv()) is not None:
        module, name, kwargs, store, timeout = job
        function = vars(importlib.import_module(module))[name]
        try:
            torch.manual_seed(1234 + rank)
            if not hasattr(function, "body"):  # it starts its own process group
                function(rank, world, **kwargs)
                pipe.send(None)
                continue
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            try:
                function.body(rank, world, **kwargs)
                # A rank must not tear the group down while another still communicates.
                dist.barrier()
            finally:
                dist.destroy_process_group()
                importlib.import_module("gc").collect()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


class WorkerPool:
    """``world`` processes waiting for jobs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[tuple[mp.Process, object]] = []
        self._jobs = 0

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, self.world, theirs), daemon=True)
            process.start()
            self._workers.append((process, ours))

    def stop(self, kill: bool = False) -> None:
        for process, pipe in self._workers:
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def run(self, module: str, name: str, kwargs: dict, timeout: float) -> None:
        if self._jobs >= _JOBS_PER_PROCESS:
            self.stop()
        if not self._workers:
            self._start()
            self._jobs = 0
        self._jobs += 1
        with tempfile.TemporaryDirectory() as folder:
            for _, pipe in self._workers:
                pipe.send((module, name, kwargs, os.path.join(folder, "store"), timeout))
            failures, waiting = {}, dict(enumerate(pipe for _, pipe in self._workers))
            deadline = time.monotonic() + timeout
            while waiting and time.monotonic() < deadline:
                for rank in [rank for rank, pipe in waiting.items() if pipe.poll(0.01)]:
                    try:
                        error = waiting.pop(rank).recv()
                    except EOFError:
                        process = self._workers[rank][0]
                        process.join(timeout=5)
                        error = f"the worker process died with exit code {process.exitcode}"
                    if error:
                        failures[rank] = error
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if waiting:
                for rank in waiting:  # their stacks go to stderr, which pytest shows
                    if self._workers[rank][0].is_alive():
                        os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
                time.sleep(0.5)
            if waiting or any("worker process died" in error for error in failures.values()):
                self.stop(kill=True)
        if failures:
            told = "\n".join(f"--- rank {rank}\n{error}" for rank, error in sorted(failures.items()))
            pytest.fail(f"{name} failed on {len(failures)} of {self.world} ranks\n{told}", pytrace=False)
        if waiting:
            pytest.fail(f"{name}: ranks {sorted(waiting)} were still running after {timeout} s", pytrace=False)


_POOLS: dict[int, WorkerPool] = {}


def pool_of(world: int) -> WorkerPool:
    return _POOLS.setdefault(world, WorkerPool(world))


def stop_all() -> None:
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()


def distributed(world: int, timeout: float = 90.0):
    """Run the decorated ``test(rank, world, **fixtures)`` on ``world`` worker processes."""

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())[2:]

        @functools.wraps(body)
        def test(**kwargs):
            pool_of(world).run(body.__module__, body.__name__, kwargs, timeout)

        test.__signature__ = inspect.Signature(parameters)
        test.body = body
        return pytest.mark.dist(pytest.mark.timeout(timeout + 60)(test))

    return decorate
