"""The folder of a run, ``job.dump_folder``: one run writes into it at a time, with its log and its resolved config.

The lock is a file that names host and process of rank 0. A process of this host that has ended holds nothing. Nobody
can see from here whether one of another host has ended: its lock counts until somebody removes it, unless it is of
this very run. The nodes of a run share the variable RUN_ID, and after a restart rank 0 may be on another of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import torch.distributed as dist

from torchtitan_dmuon.config import ConfigError, JobConfig, config_to_toml
from torchtitan_dmuon.distributed import agree
from torchtitan_dmuon.logging import log_to_file

LOCK_FILE = "run.lock"
LOG_FILE = "train.log"
CONFIG_FILE = "config.toml"


def _started(pid: int) -> str | None:
    """When a process of this host began, in the kernel's clock ticks (Linux): another process may have its number after
    a restart of the host or the container. ``None`` when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _me() -> dict[str, str | int | None]:
    run = os.environ.get("RUN_ID")  # set by run_train.sh
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "run": run}


def held_by_another(folder: Path) -> str | None:
    """Why this process must not start a run in ``folder``; ``None`` when no run that is alive holds it."""
    lock, me = folder / LOCK_FILE, _me()
    remedy = f"choose another job.dump_folder, or remove {lock} if that run is gone"
    try:
        holder = json.loads(lock.read_text())
        host, pid, started, run = (holder[name] for name in me)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder} is in use, but {LOCK_FILE} cannot be read ({error}): {remedy}"
    if host == me["host"]:
        over = pid == me["pid"] or started is None or _started(pid) != started
    else:
        over = run is not None and run == me["run"]
    if over:
        return None
    return f"{folder} is in use by the run of process {pid} on {host}: {remedy}"


def _take(folder: Path) -> str | None:
    """Make this process the holder. Returns why it cannot."""
    if problem := held_by_another(folder):
        return problem
    (folder / LOCK_FILE).unlink(missing_ok=True)
    try:
        with (folder / LOCK_FILE).open("x") as file:
            json.dump(_me(), file)
    except FileExistsError:
        return f"{folder} has just been taken by another run: choose another job.dump_folder"
    return None


def claim(config: JobConfig) -> None:
    """Collective. Take the run's folder, and begin its log and config on rank 0.

    Raises:
        ConfigError: on every rank, when another run holds it or it cannot be written.
    """
    folder, problem = Path(config.job.dump_folder), None
    if dist.get_rank() == 0:
        try:
            problem = _take(folder)
            if problem is None:
                (folder / CONFIG_FILE).write_text(config_to_toml(config), encoding="utf-8")
                log_to_file(folder / LOG_FILE)
        except OSError as error:
            problem = f"cannot write to {folder}: {error.strerror}"
    if problem := agree(problem):
        raise ConfigError("job.dump_folder", None, problem)


def release(folder: Path) -> None:
    """Give the folder back, if this process holds it."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads((folder / LOCK_FILE).read_text()) == _me():
            (folder / LOCK_FILE).unlink()
