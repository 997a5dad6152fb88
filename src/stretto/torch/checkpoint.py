"""Checkpoints on the local disk that survive a crash or a full disk at any moment.

    folder/00000012/state.pt     torch.save of the state; torch.load(.., weights_only=True) reads it
    folder/00000012/meta.json    size and SHA-256 of state.pt, the progress, whether it was the best one,
                                 and a checksum of all this
    folder/00000011.corrupt/     failed its check and was set aside
    folder/.new-00000013/        being written

Names are serial numbers: the largest is the newest. state.pt is written first and meta.json last, here and
in a store (remote_checkpoints.py). Here the folder is then renamed, so a missing file means damage, never an
unfinished write. A store cannot rename; there, a checkpoint without meta.json is unfinished.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pickle
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from stretto.core.errors import InputError
from stretto.system.private_files import make_private_folder, open_private, write_private
from stretto.torch.pack import put_together, take_apart
from stretto.wire.checkpoints import (
    FORMAT,
    META_FILE,
    STATE_FILE,
    BestCheckpoint,
    CheckpointMeta,
    CorruptError,
    meta_text,
    newest_best,
    read_meta,
    whole_checkpoints,
)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that passed its checks. Its tensors are on the CPU."""

    state: dict[str, Any]
    progress: float
    path: Path


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size and the hash of a file."""

    size_bytes: int
    sha256: str


def write_files(folder: Path, state: Any, *, progress: float, best: bool) -> None:
    """Write state.pt, then meta.json; both are on the disk when this returns."""
    with os.fdopen(open_private(folder / STATE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        out = _HashingFile(file)
        try:
            torch.save(state, out)  # type: ignore[arg-type]  # it writes and flushes, nothing else
        except RuntimeError:
            if out.error is not None:
                raise out.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    meta = CheckpointMeta(
        format=FORMAT,
        progress=progress,
        best=best,
        size_bytes=out.size_bytes,
        sha256=out.hash.hexdigest(),
    )
    write_private(folder / META_FILE, meta_text(meta).encode())
    sync_folder(folder)


def read_state(folder: Path) -> LoadedCheckpoint:
    """Load the checkpoint in `folder`. CorruptError if it is not what was written."""
    meta = read_meta(folder)
    path = folder / STATE_FILE
    try:
        with path.open("rb") as file:
            found = measured(file)
    except FileNotFoundError as error:
        raise CorruptError(f"{STATE_FILE} is missing") from error
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise CorruptError(f"{STATE_FILE} cannot be read, {error.strerror}") from error
    if problem := mismatch(found, FileDigest(meta.size_bytes, meta.sha256)):
        raise CorruptError(f"{STATE_FILE} {problem}")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, RecursionError) as error:
        first_line = str(error).partition("\n")[0]
        raise CorruptError(f"{STATE_FILE} cannot be read, {first_line}") from error
    if not isinstance(state, dict):
        raise CorruptError(f"{STATE_FILE} cannot be read, it holds no state")
    return LoadedCheckpoint(state, meta.progress, path)


def mismatch(found: FileDigest, wanted: FileDigest) -> str:
    """What is wrong with a file; empty if nothing is."""
    if found.size_bytes != wanted.size_bytes:
        return f"has {found.size_bytes} bytes instead of {wanted.size_bytes}"
    return "" if found.sha256 == wanted.sha256 else "does not match its checksum"


def measured(file: IO[bytes]) -> FileDigest:
    """Size and hash of the rest of a file."""
    digest = hashlib.sha256()
    size_bytes = 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size_bytes += len(chunk)
    return FileDigest(size_bytes, digest.hexdigest())


def sync_files(folder: Path) -> None:
    """Flush both files, written by other code, to the disk."""
    for name in (STATE_FILE, META_FILE):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, such as that of a file just renamed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _HashingFile:
    """A file for writing that hashes its content on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None
        """The original error: torch raises a RuntimeError instead."""

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.size_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()


_KEPT_CORRUPT = 2

OnSaved = Callable[[Path, bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint in a store, which may be newer than those on the disk."""

    where: str
    """Its URL, for messages."""
    progress: float
    best: bool
    fetch: Callable[[Path], None]
    """Downloads its two files into a folder; CorruptError if one is missing."""


class CheckpointStore:
    """The checkpoints of one job: the newest `keep`, the newest one saved as the best, and those `in_use`.

    A background thread writes them. It never raises: errors are reported to `note`, once per cause until a
    write succeeds again, and the earlier checkpoints stay.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        note: Callable[[str], None],
        in_use: Callable[[], Collection[Path]] = frozenset,
    ) -> None:
        if keep < 1:
            raise InputError(f"{keep} checkpoints are to be kept.", remedy="Keep at least 1.")
        self._folder = folder
        self._keep = keep
        self._note = note
        self._in_use = in_use
        self._failing: set[str] = set()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[bool] | None = None
        for leftover in self._entries(lambda name: name.startswith(".")):
            shutil.rmtree(leftover, ignore_errors=True)
        self._serial = max((int(path.name[:8]) for path in self._entries(_is_numbered)), default=0)

    def save(
        self,
        state: dict[str, Any],
        *,
        progress: float,
        best: bool = False,
        wait: bool = False,
        on_saved: OnSaved | None = None,
    ) -> bool:
        """Copy `state` now, write it in the background, then call `on_saved(path, best)`.

        While an earlier checkpoint is being written, a new one is skipped (False), but a best one is queued
        (and replaces a queued best one). With `wait` it is always written, and the result says whether it is
        on the disk.
        """
        if self._busy and not wait:
            if not best:
                return False
            assert self._last is not None
            self._last.cancel()  # no effect once it is being written
        copied = self._copied(state)
        if copied is None:
            return False
        self._last = self._writer.submit(self._write, *copied, progress, best, on_saved)
        return self._last.result() if wait else True

    def load(self, elsewhere: Sequence[RemoteCheckpoint] = ()) -> LoadedCheckpoint | None:
        """The newest checkpoint that passes its checks. Damaged ones are reported and set aside.

        A checkpoint from `elsewhere` (newest first) is copied here if it has more progress than those here.
        Errors that say nothing about the checkpoint, such as a lack of memory, are raised: it may be intact.
        """
        problems: list[str] = []
        found: LoadedCheckpoint | None = None
        instead = "There is no earlier one."
        for one in self._newest_first(elsewhere):
            where = one.where if isinstance(one, RemoteCheckpoint) else str(one)
            try:
                found = self._take_in(one) if isinstance(one, RemoteCheckpoint) else read_state(one)
                instead = f"{where} is used instead."
                break
            except CorruptError as error:
                problems.append(f"Checkpoint {where} cannot be used: {error}.")
                if isinstance(one, Path):
                    self._set_aside(one)
        for problem in problems:
            self._note(f"{problem} {instead}")
        return found

    def best(self) -> BestCheckpoint | None:
        """The newest checkpoint that was saved as the best."""
        return newest_best(self._folder)

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        self._writer.shutdown()

    @property
    def _busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def _copied(self, state: dict[str, Any]) -> tuple[Any, list[Tensor]] | None:
        tree, tensors = take_apart(state)
        try:
            return tree, _to_cpu(tensors)
        except (RuntimeError, MemoryError) as error:
            self._report_failure(error)
            return None

    def _write(
        self, tree: Any, tensors: list[Tensor], progress: float, best: bool, on_saved: OnSaved | None
    ) -> bool:
        self._remove_old()  # a process killed between writing and removing left one too many
        try:
            with self._new() as (new, final):
                write_files(new, put_together(tree, tensors), progress=progress, best=best)
        except (OSError, RuntimeError, MemoryError) as error:
            self._report_failure(error)
            return False
        self._failing.clear()
        self._remove_old()
        if on_saved is not None:
            on_saved(final / STATE_FILE, best)
        return True

    def _take_in(self, one: RemoteCheckpoint) -> LoadedCheckpoint:
        with self._new() as (new, final):
            one.fetch(new)
            loaded = read_state(new)
            sync_files(new)
        self._remove_old()
        return replace(loaded, path=final / STATE_FILE)

    @contextlib.contextmanager
    def _new(self) -> Iterator[tuple[Path, Path]]:
        """A new folder to fill, and the name that it gets if no error occurs."""
        self._serial += 1
        final = self._folder / f"{self._serial:08d}"
        new = self._folder / f".new-{final.name}"
        try:
            make_private_folder(self._folder)
            make_private_folder(new)
            yield new, final
            new.rename(final)
            sync_folder(self._folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise

    def _report_failure(self, error: BaseException) -> None:
        cause = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if cause not in self._failing:
            self._failing.add(cause)
            first_line = str(error).partition("\n")[0]
            self._note(
                f"A checkpoint could not be saved in {self._folder}: {first_line}. Training continues."
            )

    def _remove_old(self) -> None:
        whole = whole_checkpoints(self._folder)
        try:
            best = self.best()
        except (OSError, InputError):  # an unreadable one may be the best: keep all
            return
        kept = {*whole[: self._keep], *([best.path.parent] if best else []), *self._in_use()}
        for path in whole:
            if path not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename before deleting, so that a half-deleted checkpoint is never read."""
        going = path.with_name(f".old-{path.name}")
        with contextlib.suppress(OSError):
            path.rename(going)
            shutil.rmtree(going)

    def _set_aside(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.rename(path.with_name(f"{path.name}.corrupt"))
        aside = self._entries(lambda name: name.endswith(".corrupt"))
        for old in aside[_KEPT_CORRUPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def _newest_first(self, elsewhere: Sequence[RemoteCheckpoint]) -> Iterator[Path | RemoteCheckpoint]:
        """Sorted by progress, as serial numbers of two places cannot be compared."""
        here, away = deque(whole_checkpoints(self._folder)), deque(elsewhere)
        while here and away:
            yield away.popleft() if away[0].progress > _progress(here[0]) else here.popleft()
        yield from here
        yield from away

    def _entries(self, wanted: Callable[[str], bool]) -> list[Path]:
        try:
            names = sorted(filter(wanted, os.listdir(self._folder)), reverse=True)  # noqa: PTH208
        except OSError:  # the folder does not exist yet
            return []
        return [self._folder / name for name in names]


def _progress(folder: Path) -> float:
    try:
        return read_meta(folder).progress
    except CorruptError:
        return math.inf  # is tried first, and then reported as damaged


def _is_numbered(name: str) -> bool:
    return name[:8].isdecimal() and len(name) >= 8


def _to_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in main memory. All copies from a GPU are started before we wait for any."""
    devices = set()
    copies = []
    for tensor in tensors:
        if tensor.is_cuda:
            devices.add(tensor.device)
            copies.append(tensor.to("cpu", non_blocking=True))
        else:
            copies.append(tensor.clone() if tensor.device.type == "cpu" else tensor.cpu())
    for device in devices:
        torch.cuda.synchronize(device)
    return copies
