"""Checkpoint folders as files: when one is complete, how it appears at once, and what its bytes must be.

A checkpoint is written as ``step-N.incomplete`` and renamed to ``step-N`` when every file of it is on disk. Its last
file, ``checksums.json``, lists the size and CRC-32 of all others: a folder without it, or with a file that does not fit
it, is no checkpoint. Nothing here communicates.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path

from torchtitan_dmuon.logging import logger

CHECKSUMS_FILE = "checksums.json"
METADATA_FILE = ".metadata"
STATE_FILE = "trainer.json"

_NAME = re.compile(r"step-(0|[1-9]\d*)")
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"
_BLOCK = 1 << 22

Checksums = dict[str, tuple[int, int]]  # file name: (bytes, CRC-32)


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: one line that says which and what to do."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def temporary_folder(final: Path) -> Path:
    """Where ``final`` is written until it is complete."""
    return final.with_name(final.name + _INCOMPLETE)


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file. Raises OSError."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def write_durably(path: Path, text: str) -> None:
    """Write a small file and bring it to disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring the entries of a folder to disk: files in it can be lost in a power cut although their bytes are safe."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path, checksums: Checksums) -> None:
    """Make ``temporary``, whose files are on disk, the checkpoint ``final`` at once. One process does this. Raises
    OSError."""
    write_durably(temporary / CHECKSUMS_FILE, json.dumps(checksums, indent=1))
    sync_folder(temporary)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():  # written by a run that was resumed from an earlier step; kept until the new one is there
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    remove_tree(replaced)


def recover(folder: Path) -> None:
    """Finish a replacement that a killed run had begun: put the replaced checkpoint back, or remove it where the new
    one is complete. One process does this, before it lists the folder."""
    for path in folder.glob(f"step-*{_REPLACED}"):
        original = path.with_name(path.name.removesuffix(_REPLACED))
        if incomplete_because(original) is None:
            remove_tree(path)
        else:
            remove_tree(original)
            path.rename(original)


def remove_tree(path: Path, strict: bool = False) -> None:
    """Remove a folder, or the symbolic link to one, if it is there. Raises OSError if ``strict``."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=not strict)


def clean(folder: Path) -> None:
    """Remove the half-written folders of killed runs. One process does this, before it writes."""
    for path in folder.glob(f"step-*{_INCOMPLETE}"):
        remove_tree(path)


def remove(path: Path) -> None:
    """Remove a checkpoint so that it is complete or not there at every moment. Raises OSError."""
    doomed = temporary_folder(path)
    path.rename(doomed)
    remove_tree(doomed, strict=True)


def move_aside(folder: Path, step: int) -> Path:
    """Move the checkpoints of later steps than ``step`` to a folder of their own inside ``folder``, which is returned.
    One process does this. Raises OSError."""
    number = 1
    while (aside := folder / f"after-step-{step}-{number}").exists():
        number += 1
    aside.mkdir()
    for later in complete_steps(folder):
        if later > step:
            step_folder(folder, later).rename(step_folder(aside, later))
    sync_folder(folder)
    return aside


def complete_steps(folder: Path, warn: bool = False) -> list[int]:
    """Steps of the complete checkpoints, ascending; with ``warn`` the others are named in the log."""
    steps = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match is None:
            if warn and path.name.endswith((_INCOMPLETE, _REPLACED)):
                logger.warning("Skipping %s: a run was stopped while it wrote or removed it", path)
            continue
        problem = incomplete_because(path)
        if problem is None:
            steps.append(int(match[1]))
        elif warn:
            logger.warning("Skipping checkpoint %s: %s", path, problem)
    return sorted(steps)


def read_checksums(path: Path) -> Checksums:
    """What ``checksums.json`` of a checkpoint lists. Raises CheckpointError when it is missing or unreadable."""
    try:
        files = json.loads((path / CHECKSUMS_FILE).read_text())
        return {str(name): (int(size), int(crc)) for name, (size, crc) in files.items()}
    except OSError:
        raise CheckpointError(f"half-written, {CHECKSUMS_FILE} is missing") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{CHECKSUMS_FILE} is unreadable ({error})") from None


def incomplete_because(path: Path) -> str | None:
    """Why ``path`` is not a complete checkpoint; ``None`` when it is. Reads sizes only."""
    try:
        checksums = read_checksums(path)
    except CheckpointError as error:
        return str(error)
    for name, (size, _) in checksums.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"half-written, {name} should have {size} bytes"
    return None


def corrupted_because(path: Path, names: list[str], checksums: Checksums) -> str | None:
    """Which of the files ``names`` differs from what was written; ``None`` when none does. Reads all of them."""
    for name in names:
        try:
            found = checksum(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != checksums[name]:
            return f"{name} is corrupted: its CRC-32 is {found[1]:08x}, written was {checksums[name][1]:08x}"
    return None
