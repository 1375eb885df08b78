"""One pool of worker processes per world size, reused by every distributed test.

``@distributed(world=4)`` turns ``def test_x(rank, world, ...)`` into a test that runs the body on every worker, in a
gloo process group that all tests of the pool share: the groups that a test makes end with it, those of the meshes of
``tests.support.meshes`` stay, and with them what DTensor has found out about them. The first failure is reported with
the rank's traceback; a test that outlives its timeout has its workers' stacks dumped. After either the pool is killed,
so nothing hangs and the next test gets a fresh one.

Workers are forked from one warm process that has imported torch, the runtime and the trainer (tests/support/warm.py),
so that a fresh pool costs some hundredths of a second.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing as mp
import os
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.meshes import groups_of_meshes

_GRACE_SECONDS = 15.0  # for the other ranks, once one has failed
_JOBS_PER_PROCESS = 100
_GROUP_TIMEOUT = timedelta(minutes=10)  # longer than any test's own


@dataclass(frozen=True)
class Job:
    """``module.name(rank, world, **kwargs)``, within ``timeout`` seconds."""

    module: str
    name: str
    kwargs: dict[str, object]
    timeout: float
    grouped: bool  # a function under ``distributed``, run in a process group; else it makes its own

    def run(self, rank: int, world: int, store: dist.Store) -> None:
        torch.manual_seed(1234 + rank)
        function = vars(importlib.import_module(self.module))[self.name]
        if not self.grouped:
            return function(rank, world, **self.kwargs)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_GROUP_TIMEOUT)
        # The groups of this test meet by keys of their own: those of an earlier test had the same names.
        distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", store)
        function.body(rank, world, **self.kwargs)
        gc.collect()
        # A rank must not end a group while another still communicates.
        dist.barrier()
        kept = {dist.group.WORLD, *groups_of_meshes()}
        for group in [group for group in distributed_c10d._world.pg_map if group not in kept]:
            dist.destroy_process_group(group)


def _worker(rank: int, world: int, pipe: Connection, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # scripts/gpu_check.sh: the same tests with every rank on one GPU, gloo carrying CUDA tensors.
    if "DMUON_TEST_DEVICE" in os.environ:
        torch.set_default_device(os.environ["DMUON_TEST_DEVICE"])
    server = dist.TCPStore("127.0.0.1", port, is_master=False)
    number = 0
    while (job := pipe.recv()) is not None:
        number += 1
        try:
            job.run(rank, world, dist.PrefixStore(f"job {number}", server))
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


@functools.cache
def warm_context() -> mp.context.BaseContext:
    """Starts processes as this file's docstring says."""
    if torch.cuda.is_available():  # a fork must not inherit the driver's state
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm"])
    return context


class WorkerPool:
    """``world`` processes waiting for jobs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[tuple[mp.Process, Connection]] = []
        self._jobs = 0

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = warm_context().Pipe()
            arguments = (rank, self.world, theirs, self._store.port)
            process = warm_context().Process(target=_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._jobs = 0

    def stop(self, kill: bool = False) -> None:
        for process, pipe in self._workers:
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def run(self, job: Job) -> None:
        """Fails the test that calls it if ``job`` fails on a rank or does not end in time."""
        if self._jobs >= _JOBS_PER_PROCESS:
            self.stop()
        if not self._workers:
            self._start()
        self._jobs += 1
        for _, pipe in self._workers:
            pipe.send(job)
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        failures, running = {}, set(ranks)
        deadline = time.monotonic() + job.timeout
        while running and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(running), left):
                running.remove(pipe)
                try:
                    error = pipe.recv()
                except EOFError:
                    process = self._workers[ranks[pipe]][0]
                    process.join(timeout=5)
                    error = f"the worker process died with exit code {process.exitcode}"
                if error:
                    failures[ranks[pipe]] = error
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        late = sorted(ranks[pipe] for pipe in running)
        if late:
            for rank in late:  # their stacks go to stderr, which pytest shows
                if self._workers[rank][0].is_alive():
                    os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
            time.sleep(0.5)
        if late or failures:  # no telling what its groups are in the middle of
            self.stop(kill=True)
        if failures:
            told = "\n".join(f"--- rank {rank}\n{error}" for rank, error in sorted(failures.items()))
            pytest.fail(f"{job.name} failed on {len(failures)} of {self.world} ranks\n{told}", pytrace=False)
        if late:
            pytest.fail(f"{job.name}: ranks {late} were still running after {job.timeout} s", pytrace=False)


_POOLS: dict[int, WorkerPool] = {}


def run_in_pool(world: int, job: Job) -> None:
    """In the processes that the jobs before it have used."""
    _POOLS.setdefault(world, WorkerPool(world)).run(job)


def run_in_new_processes(world: int, job: Job) -> None:
    """In processes that end with it."""
    pool = WorkerPool(world)
    try:
        pool.run(job)
    finally:
        pool.stop()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def stop_all() -> None:
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()


def distributed(world: int, timeout: float = 90.0, new_processes: bool = False):
    """Run the decorated ``test(rank, world, **fixtures)`` on ``world`` worker processes.

    ``new_processes`` is for a test that makes meshes itself (DTensor's caches outlive the groups of a mesh and take the
    next one of the same names and shape for it) and for one whose ranks make different numbers of groups."""
    run = run_in_new_processes if new_processes else run_in_pool

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())[2:]

        @functools.wraps(body)
        def test(**kwargs):
            run(world, Job(body.__module__, body.__name__, kwargs, timeout, grouped=True))

        test.__signature__ = inspect.Signature(parameters)
        test.body = body
        return pytest.mark.dist(pytest.mark.timeout(timeout + 60)(test))

    return decorate
