"""Runs of the real ``train.py`` for tests: a tiny corpus, a tiny model's worth of steps, and what the log said."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from models.llama3 import Llama3Args, flavors
from tests.support.pool import Job, free_port, run_in_new_processes
from torchtitan_dmuon.trainer import Trainer

# What ``tiny`` trains: the debug model with matrices of an eighth and half of its blocks. Only ``train`` knows it.
TINY = Llama3Args(dim=128, n_layers=3, n_heads=4, n_kv_heads=2, ffn_hidden_dim=320, max_seq_len=2048)

ROOT = Path(__file__).resolve().parents[2]

_LINE = re.compile(r"step:\s+(\d+)  loss: ([\d.naif]+)  grad_norm: ([\d.naif]+)  lr: ([\d.e+-]+)")


@dataclass
class Run:
    """The end of a run: exit codes by rank and what each rank wrote."""

    codes: list[int]
    outputs: list[str]
    steps: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # loss, grad norm, lr of rank 0

    @property
    def output(self) -> str:
        return self.outputs[0]


def write_corpus(folder: Path, documents: int = 40) -> str:
    """A few small text files with learnable content. Returns the glob."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        text = "".join(f"item {i} of list {index} is {(i * 7 + index) % 11};\n" for i in range(60))
        (folder / f"{index:03d}.txt").write_text(text)
    return str(folder / "*.txt")


def _main(rank: int, world: int, arguments: list[str], port: int, folder: str, trainer: type[Trainer]) -> None:
    """In a pool worker: ``train.py``'s main with the environment torchrun would give it."""
    import train

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    known = mock.patch.dict(flavors, tiny=TINY)
    with open(f"{folder}/{rank}.log", "w") as log, contextlib.redirect_stderr(log), known:
        try:
            code = train.main([argument.replace("%RANK%", str(rank)) for argument in arguments], trainer)
        except BaseException:
            traceback.print_exc()
            code = -1
    Path(folder, f"{rank}.code").write_text(str(code))


def train(world: int, *arguments: str, timeout: float = 120, trainer: type[Trainer] = Trainer) -> Run:
    """``train.py`` on ``world`` ranks, in processes of its own; ``%RANK%`` in an argument is the rank's number.
    ``trainer`` takes the Trainer's place."""
    with tempfile.TemporaryDirectory() as folder:
        kwargs = {"arguments": list(arguments), "port": free_port(), "folder": folder, "trainer": trainer}
        run_in_new_processes(world, Job("tests.support.training", "_main", kwargs, timeout, grouped=False))
        outputs = [Path(folder, f"{rank}.log").read_text() for rank in range(world)]
        run = Run([int(Path(folder, f"{rank}.code").read_text()) for rank in range(world)], outputs)
    for match in _LINE.finditer(outputs[0]):
        run.steps[int(match[1])] = (float(match[2]), float(match[3]), float(match[4]))
    return run


def start_torchrun(
    world: int, *arguments: str, launcher: str = "torchtitan_dmuon.launch", **environment: str
) -> subprocess.Popen:
    """``train.py`` under our launcher, as ``run_train.sh`` starts it, or under plain ``torch.distributed.run``."""
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(world)]
    return subprocess.Popen(
        [*command, "train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def tiny(folder: Path, **overrides: object) -> list[str]:
    """Arguments of a small fp32 run in ``folder``; keyword ``a__b`` is the key ``a.b``. Runs that are not started by
    ``train`` need another ``model__flavor``."""
    keys = {
        "job.config_file": "train_configs/debug_model.toml",
        "model.flavor": "tiny",
        "dmuon.min_matrix_dim": "64",
        "job.dump_folder": str(folder / "out"),
        "training.dataset": "text",
        "training.dataset_path": str(folder / "corpus" / "*.txt"),
        "training.seq_len": "32",
        "training.local_batch_size": "2",
        "training.steps": "4",
        "lr_scheduler.warmup_steps": "2",
        "metrics.log_freq": "1",
        "checkpoint.interval": "2",
    }
    keys |= {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return [part for key, value in keys.items() for part in (f"--{key}", value)]
