"""The two files of a checkpoint: its state, and what tells a good one from a spoilt one."""

from __future__ import annotations

import hashlib
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from stretto.core.private_files import open_private
from stretto.wire.checkpoint_meta import (
    FORMAT,
    META_FILE,
    STATE_FILE,
    CorruptError,
    Meta,
    meta_text,
    read_meta,
)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that passed its checks; tensors are on the CPU."""

    state: dict[str, Any]
    progress: float
    path: Path


@dataclass(frozen=True, slots=True)
class Content:
    """What a file must have in it."""

    size_bytes: int
    sha256: str


def write_files(folder: Path, state: Any, *, progress: float, best: bool) -> None:
    """Both files, on the disk when this returns."""
    with _new(folder / STATE_FILE) as file:
        out = _HashingFile(file)
        try:
            torch.save(state, out)  # type: ignore[arg-type]  # it writes and flushes, nothing else
        except RuntimeError:
            if out.error is not None:
                raise out.error from None
            raise
        _sync(file)
    meta = Meta(format=FORMAT, progress=progress, best=best, size_bytes=out.size_bytes, sha256=out.sha256)
    with _new(folder / META_FILE) as file:
        file.write(meta_text(meta).encode())
        _sync(file)
    sync_folder(folder)


def read_state(folder: Path) -> Loaded:
    """CorruptError if it is not what was written."""
    meta = read_meta(folder)
    path = folder / STATE_FILE
    try:
        with path.open("rb") as file:
            found = measured(file)
    except FileNotFoundError as error:
        raise CorruptError(f"{STATE_FILE} is missing") from error
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise CorruptError(f"{STATE_FILE} cannot be read, {error.strerror}") from error
    if problem := difference(found, Content(meta.size_bytes, meta.sha256)):
        raise CorruptError(f"{STATE_FILE} {problem}")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, RecursionError) as error:
        first_line = str(error).partition("\n")[0]
        raise CorruptError(f"{STATE_FILE} cannot be read, {first_line}") from error
    if not isinstance(state, dict):
        raise CorruptError(f"{STATE_FILE} cannot be read, it holds no state")
    return Loaded(state, meta.progress, path)


def difference(found: Content, wanted: Content) -> str:
    """What is wrong with a file; nothing, if it is as it should be."""
    if found.size_bytes != wanted.size_bytes:
        return f"has {found.size_bytes} bytes instead of {wanted.size_bytes}"
    return "" if found.sha256 == wanted.sha256 else "does not match its checksum"


def measured(file: IO[bytes]) -> Content:
    """What is left to read in a file."""
    digest = hashlib.sha256()
    size_bytes = 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        size_bytes += len(chunk)
    return Content(size_bytes, digest.hexdigest())


def sync_files(folder: Path) -> None:
    """What somebody else wrote there is on the disk when this returns."""
    for name in (STATE_FILE, META_FILE):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Names are on the disk only when the folder that holds them is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _new(path: Path) -> IO[bytes]:
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


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
