"""Runs of the real ``train.py`` for tests: a tiny corpus, a tiny model's worth of steps, and what the log said."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models import get_model_spec
from models.llama3 import Llama3Args
from models.qwen3 import Qwen3Args
from tests.support.pool import Job, free_port, run_in_new_processes, warm_context
from torchtitan_dmuon.trainer import Trainer

# What ``tiny`` trains in each family: its debug model with matrices of an eighth and half of its blocks. Known to this
# file's runs.
_SHAPE = {"dim": 128, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden_dim": 320, "max_seq_len": 2048}
TINY = Llama3Args(**_SHAPE)
_FAMILIES = {"llama3": TINY, "qwen3": Qwen3Args(**_SHAPE, head_dim=64)}

ROOT = Path(__file__).resolve().parents[2]

_LINE = re.compile(r"step: (\d+)/\d+  loss: ([\d.naif]+)  grad_norm: ([\d.naif]+)  lr: ([\d.e+-]+)")


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


def add_tiny_flavors() -> None:
    """In a process that runs nothing but ``train.py``: the flavor ``tiny`` of every family."""
    for name, args in _FAMILIES.items():
        get_model_spec(name).flavors["tiny"] = args


def _main(rank: int, world: int, arguments: list[str], port: int, folder: str, trainer: type[Trainer]) -> None:
    """In a pool worker: ``train.py``'s main with the environment torchrun would give it."""
    import train

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    add_tiny_flavors()
    with open(f"{folder}/{rank}.log", "w") as log, contextlib.redirect_stderr(log):
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


def assert_refused(run: Run, message: str) -> None:
    """Exit code 1 and one error line on every rank, no traceback."""
    for code, output in zip(run.codes, run.outputs, strict=True):
        assert code == 1, output
        assert "Traceback" not in output, output
        errors = [line for line in output.splitlines() if "error:" in line]
        assert len(errors) == 1 and message in errors[0], output


def _launch(launcher: str, arguments: list[str], output: str, trainer: type[Trainer]) -> None:
    """In a process that has imported everything: the launcher, whose ranks are forks of it and run ``train.py``."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    add_tiny_flavors()
    importlib.import_module("torchtitan_dmuon.trainer").Trainer = trainer
    sys.exit(importlib.import_module(launcher).main(["--start-method", "fork", "--run-path", *arguments]))


class Torchrun:
    """``train.py`` under our launcher, as ``run_train.sh`` starts it, or under plain ``torch.distributed.run``. All of
    its processes end with the ``with`` block.

    Unless it is ``fresh``, its processes are forks of one that has imported everything. Such ranks do not end by
    themselves after plain torchrun got SIGTERM: it kills them 30 s later. Fresh processes have no flavor ``tiny``.
    ``options`` are the launcher's; ``trainer`` takes the Trainer's place in forks."""

    def __init__(
        self,
        folder: Path,
        world: int,
        *arguments: str,
        launcher: str = "torchtitan_dmuon.launch",
        fresh: bool = False,
        options: Sequence[str] = (),
        trainer: type[Trainer] = Trainer,
    ) -> None:
        self._file = folder / "torchrun.log"
        self._file.touch()
        self._read = 0
        command = ["--standalone", "--nproc-per-node", str(world), *options, str(ROOT / "train.py"), *arguments]
        if fresh:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            with self._file.open("a") as file:
                command = [sys.executable, "-m", launcher, *command]
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
            self._code: Callable[[], int | None] = process.poll
        else:
            process = warm_context().Process(target=_launch, args=(launcher, command, str(self._file), trainer))
            process.start()
            self._code = lambda: process.exitcode
        self.pid: int = process.pid

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code() is None:
            for pid in self.tree():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.end()

    @property
    def output(self) -> str:
        return self._file.read_text()

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Waits until a line after the one that was found last has ``pattern``."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self._code() is not None
            for line in re.finditer(r".*\n", self.output[self._read :]):
                if match := re.search(pattern, line[0]):
                    self._read += line.end()
                    return match
            assert not ended and time.monotonic() < deadline, f"no {pattern}:\n{self.output}"
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """The processes that train, by number."""
        return children(self.pid)

    def tree(self) -> list[int]:
        """The launcher and all processes below it."""
        return tree(self.pid)

    def end(self, timeout: float = 60) -> tuple[int, float]:
        """Waits for the end. Returns the launcher's exit code and the seconds waited."""
        begin = time.monotonic()
        while (code := self._code()) is None:
            assert time.monotonic() - begin < timeout, self.output
            time.sleep(0.02)
        return code, time.monotonic() - begin


def children(pid: int) -> list[int]:
    """The processes that process ``pid`` has started."""
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


def tree(pid: int) -> list[int]:
    """Process ``pid`` and all processes below it."""
    found = [pid]
    for number in found:
        found += children(number)
    return found


def tiny(folder: Path, **overrides: object) -> list[str]:
    """Arguments of a small fp32 run in ``folder``; keyword ``a__b`` is the key ``a.b``."""
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
