"""Writing one checkpoint: every rank writes its tensors, then rank 0 the folder's last file, and gives it its name."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from torchtitan_dmuon.checkpoint.directory import (
    STATE_FILE,
    CheckpointError,
    Checksums,
    checksum,
    clean,
    publish,
    remove_tree,
    temporary_folder,
    write_durably,
)
from torchtitan_dmuon.checkpoint.state import Tensors, TrainState
from torchtitan_dmuon.config import ConfigError
from torchtitan_dmuon.distributed import agree, first_problem
from torchtitan_dmuon.dmuon.state.pieces import PartialTensor, parts_of

# A DefaultStager of torch 2.11 or 2.12 stages only once: there every save makes (and page-locks) memory of its own.
_STAGER_IS_REUSABLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)

_MUST_BE_SHARED = "job.dump_folder must be on a file system that all ranks share"
_PROBE_SECONDS = 5.0  # a network file system may show a new file late


class LogicalStager(AsyncStager):
    """Copies this rank's tensors to host memory through DCP's ``DefaultStager``. That one knows plain tensors only, so
    the parts of a larger tensor that a rank holds go through it one by one.

    Args:
        behind: copy in a thread, into memory that is kept for the next time (page-locked with a GPU). ``stage`` then
            returns a future at once, and the tensors must not change before it is done.
    """

    def __init__(self, behind: bool) -> None:
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=behind and on_gpu,
            use_shared_memory=False,
            use_async_staging=behind,
            use_non_blocking_copy=behind and on_gpu,
        )
        self._inner = DefaultStager(options)

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: Tensors) -> Tensors | Future[Tensors]:
        wholes, offsets, parts = {}, {}, {}
        for name, tensor in state_dict.items():
            whole, held = parts_of(tensor)
            wholes[name], offsets[name] = whole, [offset for _, offset in held]
            parts[name] = [part.detach() for part, _ in held]

        def rebuild(staged: dict[str, list[torch.Tensor]]) -> Tensors:
            tensors = {}
            for name, copies in staged.items():
                if not isinstance(state_dict[name], (PartialTensor, DTensor)):
                    (tensors[name],) = copies
                elif copies:
                    tensors[name] = PartialTensor.of(wholes[name], list(zip(copies, offsets[name], strict=True)))
            return tensors

        if torch.cuda.is_available():
            # DCP copies on a stream of its own, which knows nothing of kernels that still write the tensors.
            torch.cuda.synchronize()
        staged = self._inner.stage(parts)
        if not isinstance(staged, Future):
            return rebuild(staged)
        rebuilt: Future[Tensors] = Future()

        def forward(done: Future) -> None:
            if (error := done.exception()) is not None:
                rebuilt.set_exception(error)
            else:
                rebuilt.set_result(rebuild(done.result()))

        staged.add_done_callback(forward)
        return rebuilt

    def close(self) -> None:
        """Free the host memory and end the thread."""
        self._inner.close()


class _Writer(dcp.FileSystemWriter):
    """Raises the OSError of a failed write (say, a full disk), which ``torch.save`` hides behind one of its own."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


class Saver:
    """Writes checkpoints, one at a time. Every method is collective unless it says otherwise.

    Args:
        folder: of all checkpoints.
        mode: ``disabled``, ``async`` or ``async_with_pinned_mem``.
        group: gloo group of all ranks that nothing else uses: saves run behind the training.
    """

    def __init__(self, folder: Path, mode: str, group: dist.ProcessGroup) -> None:
        self.folder = folder
        self._mode = mode
        self._group = group
        self._thread = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint") if mode != "disabled" else None
        )
        self._stager: LogicalStager | None = None
        self._staging: Future | None = None
        self._pending: Future | None = None
        self._is_clean = False

    # ---------------------------------------------------------------- what is going on

    @property
    def has_failed(self) -> bool:
        """Whether a save behind the training has failed on this rank; ``wait`` raises why. Not collective."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def wait_staged(self) -> None:
        """Return when tensors may change again. Not collective."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def wait(self) -> None:
        """Return when the last save is durable. Raises CheckpointError, on every rank, when it failed."""
        pending, self._pending, self._staging = self._pending, None, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and let go of threads and memory. Raises CheckpointError."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._stager is not None:
                self._stager.close()

    # ---------------------------------------------------------------- saving

    def save(
        self,
        final: Path,
        tensors: Tensors,
        state: TrainState,
        config_toml: str,
        done: Callable[[], None],
        behind: bool,
        convert: Callable[[Path], None] | None = None,
    ) -> None:
        """Write ``final``; it appears under its name when all of it is on disk.

        Args:
            tensors: this rank's, live; with ``behind`` they may change after :meth:`wait_staged`.
            done: called on rank 0 when the checkpoint is durable, maybe in another thread.
            behind: return before it is written, if the mode is asynchronous.
            convert: called on rank 0 with the folder of the written tensors, to replace its content.

        Raises:
            CheckpointError: on every rank, when any rank could not write; or, from :meth:`wait`, of the save before.
        """
        self.wait()
        temporary = temporary_folder(final)
        self._prepare(final, temporary, state, config_toml)
        writer = _Writer(temporary)  # fsyncs every file

        def finish(upload: Callable[[], object]) -> None:
            self._upload(upload, final)
            self._finish(temporary, final, done, convert)

        if self._mode == "disabled" or not behind:
            finish(lambda: dcp.save(tensors, storage_writer=writer, process_group=self._group))
            return
        behind_next_step = self._mode == "async_with_pinned_mem"
        stager = self._stager or LogicalStager(behind=behind_next_step)
        if behind_next_step and _STAGER_IS_REUSABLE:
            self._stager = stager
        try:
            response = dcp.async_save(tensors, storage_writer=writer, process_group=self._group, async_stager=stager)
        except (RuntimeError, MemoryError) as error:
            problem = f"rank {dist.get_rank()}: the tensors cannot be copied to host memory ({_reason(error)})"
            raise CheckpointError(_message(final, problem)) from error
        upload: Future = response if isinstance(response, Future) else response.upload_completion
        self._staging = None if isinstance(response, Future) else response.staging_completion
        if stager is not self._stager:
            upload.add_done_callback(lambda _: stager.close())  # the stager would keep the copy
        self._pending = self._thread.submit(finish, upload.result)

    def _prepare(self, final: Path, temporary: Path, state: TrainState, config_toml: str) -> None:
        problem = None
        if dist.get_rank() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if not self._is_clean:
                    clean(self.folder)
                    self._is_clean = True
                remove_tree(temporary)
                temporary.mkdir()
                write_durably(temporary / STATE_FILE, state.to_json())
                write_durably(temporary / "config.toml", config_toml)
            except OSError as error:
                problem = _reason(error)
        problem = agree(problem, group=self._group)
        if problem:
            raise CheckpointError(_message(final, problem))

    def _upload(self, upload: Callable[[], object], final: Path) -> None:
        """Run DCP's part and turn its failures into one line. DCP raises them on every rank."""
        try:
            upload()
        except CheckpointException as error:
            rank, (exception, _) = sorted(error.failures.items())[0]
            others = f" (and {len(error.failures) - 1} other ranks)" if len(error.failures) > 1 else ""
            if dist.get_rank() == 0:  # the next try needs the space
                remove_tree(temporary_folder(final))
            raise CheckpointError(_message(final, f"rank {rank}{others}: {_reason(exception)}")) from error
        except (RuntimeError, OSError) as error:
            problem = f"this rank lost the others in the middle of it, one of them may have died ({_reason(error)})"
            raise CheckpointError(_message(final, problem)) from error

    def _finish(
        self, temporary: Path, final: Path, done: Callable[[], None], convert: Callable[[Path], None] | None
    ) -> None:
        """Checksums of every rank's own files, then the rename."""
        rank = dist.get_rank()
        problem, checksums = None, {}
        try:
            if convert is not None and rank == 0:
                convert(temporary)
            checksums = _own_checksums(temporary, rank, everything=convert is not None)
        except Exception as error:  # any: the other ranks wait in the collective below
            problem = f"rank {rank}: {_reason(error)}"
        everyone: list[tuple[str | None, Checksums]] = [(None, {})] * dist.get_world_size()
        dist.all_gather_object(everyone, (problem, checksums), group=self._group)
        problem = next((found for found, _ in everyone if found), None)
        if rank == 0:
            try:
                files = {name: entry for _, part in everyone for name, entry in part.items()}
                problem = problem or _missing_because(temporary, files)
                if problem is None:
                    publish(temporary, final, dict(sorted(files.items())))
                    done()
                else:
                    remove_tree(temporary)
            except OSError as error:
                problem = _reason(error)
        problem = agree(problem, group=self._group)
        if problem:
            raise CheckpointError(_message(final, problem))


def _missing_because(folder: Path, files: Checksums) -> str | None:
    """On rank 0: which of ``files`` is not there as its rank wrote it; ``None`` when all are."""
    for name, (size, _) in files.items():
        try:
            with (folder / name).open("rb") as file:  # opened: NFS asks its server again only then
                found = f"{file.seek(0, os.SEEK_END)} bytes"
        except FileNotFoundError:
            found = "no such file"
        if found != f"{size} bytes":
            return f"rank 0 finds {found} where another rank wrote {name} of {size} bytes; {_MUST_BE_SHARED}"
    return None


def check_shared(folder: Path) -> None:
    """Collective over all ranks. Check that every rank finds a file that rank 0 writes into ``folder``.

    Raises:
        ConfigError: on every rank, when one does not.
    """
    probe, problem = agree(_write_probe(folder) if dist.get_rank() == 0 else None)
    if problem:
        raise ConfigError("checkpoint.folder", None, f"cannot write to {folder}: {problem}")
    deadline = time.monotonic() + _PROBE_SECONDS
    while not (there := (folder / probe).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    problem = first_problem(None if there else f"{folder.absolute()} lacks a file that rank 0 has just written there")
    if dist.get_rank() == 0:
        (folder / probe).unlink(missing_ok=True)
    if problem:
        raise ConfigError("checkpoint.folder", None, f"{problem}; {_MUST_BE_SHARED}")


def _write_probe(folder: Path) -> tuple[str, str | None]:
    """(name of an empty file that no other run has, ``None``), or why it cannot be written in place of ``None``."""
    name = f".shared-{uuid.uuid4().hex}"
    try:
        (folder / name).touch()
    except OSError as error:
        return name, _reason(error)
    return name, None


def _own_checksums(temporary: Path, rank: int, everything: bool) -> Checksums:
    """The checksums of the files that this rank wrote (DCP names them ``__<rank>_<n>.distcp``). Rank 0 also takes the
    files of no rank, and with ``everything`` all."""
    own = {}
    for path in temporary.iterdir():
        writer = 0 if everything or not path.name.startswith("__") else int(path.name[2:].split("_")[0])
        if writer == rank:
            own[path.name] = checksum(path)
    return own


def _reason(error: BaseException) -> str:
    """One line that a person can act on."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _message(final: Path, problem: str) -> str:
    return f"cannot write checkpoint {final}: {problem}; the checkpoints before it are untouched"


def model_only_tensors(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The tensors, those of another floating-point dtype as copies in ``dtype`` of the parts that this rank holds."""
    cast = {}
    for name, tensor in tensors.items():
        whole, parts = parts_of(tensor)
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            cast[name] = tensor
        elif not isinstance(tensor, (PartialTensor, DTensor)):
            cast[name] = tensor.to(dtype)
        elif parts:
            cast[name] = PartialTensor.of(whole, [(part.to(dtype), offset) for part, offset in parts])
    return cast
