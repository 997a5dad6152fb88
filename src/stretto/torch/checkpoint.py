"""Checkpoints that survive whatever happens while they are written.

    folder/00000012/state.pt     torch.save of the state; torch.load(.., weights_only=True) reads it
    folder/00000012/meta.json    its size and SHA-256, the progress it stands for, whether it is a best one
    folder/00000011.corrupt/     did not pass its check, and was left aside
    folder/.new-00000013/        being written; renamed when everything of it is on the disk

A name is a serial number, so that the newest is the largest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from stretto.core.errors import InputError
from stretto.torch.pack import put_together, take_apart

FORMAT = 1
STATE_FILE = "state.pt"
_META_FILE = "meta.json"
_KEPT_CORRUPT = 2
_CHUNK = 1 << 20

OnSaved = Callable[[Path, bool], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that passed its checks; tensors are on the CPU."""

    state: dict[str, Any]
    progress: float
    path: Path


@dataclass(frozen=True, slots=True)
class Best:
    """Where the best checkpoint is, and the progress it stands for."""

    path: Path
    progress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meta:
    format: int
    progress: float
    best: bool
    size_bytes: int
    sha256: str


class _CorruptError(Exception):
    """What is wrong with a checkpoint."""


class CheckpointStore:
    """The checkpoints of one job: the newest `keep`, and the newest one that was saved as the best.

    Writing happens in a thread of its own and never raises: what went wrong is given to `note`, once per
    cause until a write succeeds again, and the checkpoints from before stay.
    """

    def __init__(self, folder: Path, *, keep: int, note: Callable[[str], None]) -> None:
        if keep < 1:
            raise InputError(f"{keep} checkpoints are to be kept.", remedy="Keep at least 1.")
        self._folder = folder
        self._keep = keep
        self._note = note
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
        """Copy `state` now and write it in the background; `on_saved(path, best)` is called when it is safe.

        False if it is left out because an earlier one is still being written; a best one then waits its
        turn (and replaces a best one that waits). With `wait` it is always written, and the answer says
        whether it is on the disk.
        """
        if self._busy and not wait:
            if not best:
                return False
            assert self._last is not None
            self._last.cancel()  # does nothing to one that is being written
        copied = self._copied(state)
        if copied is None:
            return False
        meta = _Meta(format=FORMAT, progress=progress, best=best, size_bytes=0, sha256="")
        self._last = self._writer.submit(self._write, *copied, meta, on_saved)
        return self._last.result() if wait else True

    def load(self) -> Loaded | None:
        """The newest checkpoint that passes its checks; those that do not are noted and left aside.

        Raises what says nothing about the checkpoint, such as a lack of memory: it may be good tomorrow.
        """
        problems: list[str] = []
        found: Loaded | None = None
        for path in self._whole():
            try:
                found = _read(path)
                break
            except _CorruptError as error:
                problems.append(f"Checkpoint {path} cannot be used: {error}.")
                self._set_aside(path)
        instead = f"{found.path.parent} is used instead." if found else "There is no earlier one."
        for problem in problems:
            self._note(f"{problem} {instead}")
        return found

    def best(self) -> Best | None:
        """The newest checkpoint that was saved as the best."""
        for path in self._whole():
            with contextlib.suppress(_CorruptError):
                meta = _read_meta(path)
                if meta.best:
                    return Best(path / STATE_FILE, meta.progress)
        return None

    def close(self) -> None:
        """Wait until everything is written."""
        self._writer.shutdown()

    @property
    def _busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def _copied(self, state: dict[str, Any]) -> tuple[Any, list[Tensor]] | None:
        tree, tensors = take_apart(state)
        try:
            return tree, _to_cpu(tensors)
        except (RuntimeError, MemoryError) as error:
            self._say_failed(error)
            return None

    def _write(self, tree: Any, tensors: list[Tensor], meta: _Meta, on_saved: OnSaved | None) -> bool:
        self._serial += 1
        final = self._folder / f"{self._serial:08d}"
        new = self._folder / f".new-{final.name}"
        try:
            new.mkdir(parents=True)
            _write_files(new, put_together(tree, tensors), meta)
            new.rename(final)
            _sync_folder(self._folder)
        except (OSError, RuntimeError, MemoryError) as error:
            shutil.rmtree(new, ignore_errors=True)
            self._say_failed(error)
            return False
        self._failing.clear()
        self._remove_old()
        if on_saved is not None:
            on_saved(final / STATE_FILE, meta.best)
        return True

    def _say_failed(self, error: BaseException) -> None:
        cause = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if cause not in self._failing:
            self._failing.add(cause)
            first_line = str(error).partition("\n")[0]
            self._note(f"A checkpoint could not be saved in {self._folder}: {first_line}. Training goes on.")

    def _remove_old(self) -> None:
        whole = self._whole()
        try:
            best = self.best()
        except (OSError, InputError):  # one of them may be the best: all are kept until it can be told
            return
        kept = {*whole[: self._keep], *([best.path.parent] if best else [])}
        for path in whole:
            if path not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Under another name, so that nobody takes what is half removed for a checkpoint."""
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

    def _whole(self) -> list[Path]:
        """Newest first."""
        return self._entries(lambda name: _is_numbered(name) and len(name) == 8)

    def _entries(self, wanted: Callable[[str], bool]) -> list[Path]:
        try:
            names = sorted(filter(wanted, os.listdir(self._folder)), reverse=True)  # noqa: PTH208
        except OSError:  # not there yet
            return []
        return [self._folder / name for name in names]


def _is_numbered(name: str) -> bool:
    return name[:8].isdecimal() and len(name) >= 8


def _to_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in main memory; those from a GPU are all on their way before anything waits for them."""
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


class _HashingFile:
    """Passes on what is written and adds up its checksum, so that it need not be read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self.error: OSError | None = None
        """Kept here, as torch reports it under another name."""

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(data)
        self._size_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _write_files(folder: Path, state: Any, meta: _Meta) -> None:
    with (folder / STATE_FILE).open("wb") as file:
        out = _HashingFile(file)
        try:
            torch.save(state, out)  # type: ignore[arg-type]  # it writes and flushes, nothing else
        except RuntimeError:
            if out.error is not None:
                raise out.error from None
            raise
        _sync(file)
    whole = replace(meta, size_bytes=out.size_bytes, sha256=out.sha256)
    with (folder / _META_FILE).open("w", encoding="utf-8") as file:
        json.dump(asdict(whole), file)
        _sync(file)
    _sync_folder(folder)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Names are on the disk only when the folder that holds them is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(folder: Path) -> Loaded:
    meta = _read_meta(folder)
    path = folder / STATE_FILE
    try:
        size_bytes, sha256 = _measured(path)
    except FileNotFoundError as error:
        raise _CorruptError(f"{STATE_FILE} is missing") from error
    if size_bytes != meta.size_bytes:
        raise _CorruptError(f"{STATE_FILE} has {size_bytes} bytes instead of {meta.size_bytes}")
    if sha256 != meta.sha256:
        raise _CorruptError(f"{STATE_FILE} does not match its checksum")
    return Loaded(torch.load(path, weights_only=True, map_location="cpu"), meta.progress, path)


def _read_meta(folder: Path) -> _Meta:
    path = folder / _META_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values["format"]
        if found == FORMAT:
            meta = _Meta(**values)
            return replace(meta, progress=float(meta.progress))
    except FileNotFoundError as error:
        raise _CorruptError(f"{_META_FILE} is missing") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _CorruptError(f"{_META_FILE} cannot be read, {error}") from error
    raise InputError(
        f"this checkpoint has format {found}, and only {FORMAT} is known here.",
        where=str(path),
        remedy="Go on with the version of Stretto that wrote it, or give this run another name.",
    )


def _measured(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    size_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size_bytes += len(chunk)
    return size_bytes, digest.hexdigest()
