"""The files of ``scripts/``, run as python or torchrun would run them, in processes that have imported torch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.support.pool import Job, free_port, run_in_new_processes

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def _main(rank: int, world: int, script: str, arguments: list[str], folder: str, port: int, outputs: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{outputs}/{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if world > 1 else {}
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(SCRIPTS))
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    Path(outputs, f"{rank}.code").write_text(str(code))


def run_script(
    name: str, *arguments: object, folder: Path, world: int = 1, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Run a file of ``scripts/`` in ``folder``, as torchrun starts it if ``world`` is more than 1. Returns the largest
    exit code, and the output of rank 0."""
    command: Sequence[str] = [str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as outputs:
        kwargs = {"script": command[0], "arguments": command[1:], "folder": str(folder), "port": free_port()}
        job = Job("tests.support.scripts", "_main", {**kwargs, "outputs": outputs}, timeout, grouped=False)
        run_in_new_processes(world, job)
        codes = [int(Path(outputs, f"{rank}.code").read_text()) for rank in range(world)]
        written = [Path(outputs, f"0.{name}").read_text() for name in ("out", "err")]
    return subprocess.CompletedProcess(command, max(codes), *written)
