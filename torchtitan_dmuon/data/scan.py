"""What a token file holds that does not say it of itself: the SHA-256 of its tokens and the range of its ids.

A shard of today's version has both in its header. Other files are read once, by one process of a node; the result is
kept in the token cache.
"""

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchtitan_dmuon.data.errors import DataError
from torchtitan_dmuon.data.headers import read_header
from torchtitan_dmuon.data.shards import read_shard

logger = logging.getLogger(__name__)

_RUN = 1 << 24


class Scan(NamedTuple):
    """Of one file: SHA-256 of its tokens, in hexadecimal; its smallest id, or 0 if none is
    negative; its largest id, or -1 without tokens."""

    digest: str
    smallest: int
    largest: int


def make_once(file: Path, make: Callable[[], None]) -> None:
    """Call `make`, which writes `file` atomically, unless the file is there. Any number of processes may call this at
    once: one makes the file under an exclusive lock, the others wait for it.

    Raises:
        DataError: the folder of the file cannot be written or locked; and whatever `make` raises.
    """
    if file.exists():
        return
    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock if this process dies
            if not file.exists():
                make()
    except OSError as error:
        raise DataError(
            f"cannot write the token cache {file.absolute()}: {error.strerror or error}; make {folder.absolute()} "
            "writable, or a symbolic link to a folder that is"
        ) from error


def scan_once(path: Path, cache_folder: str | Path, raw_itemsize: int | None = None) -> Scan:
    """The scan of the token file `path`, from the cache if its name, size and time are those of an earlier one.

    Raises:
        DataError: the file is broken, or the cache folder cannot be written.
    """
    stat = path.stat()
    key = json.dumps([str(path.resolve()), raw_itemsize, stat.st_size, stat.st_mtime_ns])
    digest = hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()
    file = Path(cache_folder).expanduser() / f"scan-{digest[:16]}.json"

    def make() -> None:
        logger.info("reading %s once, for its fingerprint and its largest token", path)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(_scan(read_shard(path, raw_itemsize))))
        temporary.replace(file)

    make_once(file, make)
    return Scan(*json.loads(file.read_text()))


def _scan(tokens: np.ndarray) -> Scan:
    content = hashlib.sha256()
    smallest, largest = 0, -1
    for start in range(0, len(tokens), _RUN):
        run = tokens[start : start + _RUN]
        content.update(run)
        smallest, largest = min(smallest, int(run.min())), max(largest, int(run.max()))
    return Scan(content.hexdigest(), smallest, largest)


def fingerprint_of(paths: Sequence[Path], cache_folder: str | Path, raw_itemsize: int | None = None) -> str:
    """16 hexadecimal digits of the content of token files, in their order; of no name, size or time of them.

    Raises:
        DataError: as `scan_once`.
    """
    content = hashlib.sha256()
    for path in paths:
        digest = read_header(path, raw_itemsize).digest
        if digest is None:
            digest = bytes.fromhex(scan_once(path, cache_folder, raw_itemsize).digest)
        content.update(digest)
    return content.hexdigest()[:16]
