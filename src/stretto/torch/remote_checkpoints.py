"""Checkpoints in a store that every node can read: copied to an fsspec URL during training.

    URL/00000003.250000-9f86d081884c7d65/state.pt     as on the local disk
    URL/00000003.250000-9f86d081884c7d65/meta.json    written last

A checkpoint exists once its meta.json is readable. We do not rename into place, because an object store would
copy all the data again; its files appear in one piece anyway, and elsewhere a truncated meta.json cannot be
read. A name is the progress in epochs plus part of the checksum. So the newest name is the largest, and two
workers that both believe to be rank 0 never mix their files.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stretto.core.errors import InputError
from stretto.torch.checkpoint import FileDigest, RemoteCheckpoint, measured, mismatch
from stretto.wire.checkpoints import (
    META_FILE,
    STATE_FILE,
    UNCOPIED,
    CheckpointMeta,
    CorruptError,
    check_store,
    parse_meta,
    read_meta,
)
from stretto.wire.messages import Saved


class StoreError(Exception):
    """The store failed; a later attempt may succeed."""


class RemoteStore:
    """Files under one URL; names have `/` between their parts.

    All errors of the file system become StoreError, except FileNotFoundError in `get` and `read`.
    """

    def __init__(self, url: str) -> None:
        check_store(url)  # fails now if it can never work
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._files: Any = None
        self._root = ""

    def where(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.url}/{name}"

    def put(self, name: str, source: Path, content: FileDigest) -> None:
        """Upload a file and read it back: the only check that works in every store."""
        with _as_store_error():
            files, path = self._at(name)
            try:
                files.put_file(str(source), path)
            except FileNotFoundError:  # stores with folders need the folder first
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
                files.put_file(str(source), path)
        if problem := self._problem(name, content):
            raise StoreError(f"{self.where(name)} {problem}")

    def has(self, name: str, content: FileDigest) -> bool:
        """Whether the store has this file with this content."""
        return not self._problem(name, content)

    def get(self, name: str, target: Path) -> None:
        with _as_store_error(missing=True):
            files, path = self._at(name)
            files.get_file(path, str(target))

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        with _as_store_error(missing=True):
            files, path = self._at(name)
            return bytes(files.cat_file(path))

    def names(self) -> list[str]:
        """The first parts of all names, sorted."""
        with _as_store_error():
            files, path = self._at("")
            files.invalidate_cache()  # another process may have written
            try:
                found = files.ls(path, detail=False)
            except FileNotFoundError:  # nothing was written yet
                return []
            return sorted({one.rstrip("/").rpartition("/")[2] for one in found})

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all its files, if it exists."""
        with _as_store_error():
            files, path = self._at(name)
            with contextlib.suppress(FileNotFoundError):
                files.rm(path, recursive=True)

    def _problem(self, name: str, content: FileDigest) -> str:
        with _as_store_error():
            files, path = self._at(name)
            files.invalidate_cache()
            try:
                with files.open(path, "rb") as file:
                    return mismatch(measured(file), content)
            except FileNotFoundError:
                return "is missing"

    def _at(self, name: str) -> tuple[Any, str]:
        """The fsspec file system, opened on first use, and the path of a file in it."""
        if self._files is None:
            import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

            self._files, root = fsspec.core.url_to_fs(self.url)
            self._root = root.rstrip("/")
        return self._files, f"{self._root}/{name}".rstrip("/")


@contextlib.contextmanager
def _as_store_error(*, missing: bool = False) -> Iterator[None]:
    """Turn errors into StoreError; with `missing`, FileNotFoundError is kept."""
    try:
        yield
    except Exception as error:
        if missing and isinstance(error, FileNotFoundError):
            raise
        first_line = str(error).partition("\n")[0]
        raise StoreError(": ".join(filter(None, (type(error).__name__, first_line)))) from error


_NAME = re.compile(r"\d{8}\.\d{6}-[0-9a-f]{16}")
_PAUSES_S = (1.0, 3.0)
"""Pauses between attempts while training waits for the store."""
_COPY_ERRORS = (StoreError, CorruptError, InputError, OSError)
"""Errors that a failed copy may raise."""
T = TypeVar("T")


class RemoteCheckpoints:
    """The checkpoints of one job in a store: the newest `keep`, and the newest one saved as the best.

    A background thread copies them. It never raises: the first failure of an outage is reported to `note`,
    and the checkpoint waits for the next attempt, unless a newer one replaces it.
    """

    def __init__(
        self,
        store: RemoteStore,
        *,
        keep: int,
        note: Callable[[str], None],
        on_saved: Callable[[Saved], None],
        pauses_s: Sequence[float] = _PAUSES_S,
    ) -> None:
        self._store = store
        self._keep = keep
        self._note = note
        self._on_saved = on_saved
        self._pauses_s = pauses_s
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirror")
        self._lock = threading.Lock()
        self._newest: Path | None = None
        self._best: Path | None = None
        """Checkpoints that wait to be copied. The best one is copied first; it is never the newer one."""
        self._copying: Path | None = None
        self._noted: set[str] = set()

    def offer(self, folder: Path, *, best: bool) -> None:
        """Queue the checkpoint in this folder; it replaces one that still waits (but not a best one)."""
        with self._lock:
            self._newest = folder
            self._best = folder if best else self._best
        self._copier.submit(self._copy)

    def in_use(self) -> set[Path]:
        """Folders that must not be deleted yet."""
        with self._lock:
            return {one for one in (self._copying, self._best, self._newest) if one is not None}

    def flush(self) -> bool:
        """Copy everything that waits, with retries; False if that failed."""
        return self._copier.submit(self._copy, *self._pauses_s).result()

    def close(self) -> None:
        """Wait until each offered checkpoint is copied or has failed."""
        self._copier.shutdown()

    def found(self) -> list[RemoteCheckpoint]:
        """The checkpoints in the store, newest first. InputError if the store cannot be read."""
        found: list[RemoteCheckpoint] = []
        for name in reversed(self._retried(self._names)):
            try:
                meta = self._retried(partial(self._meta, name))
            except CorruptError as error:
                self._note(f"Checkpoint {self._store.where(name)} cannot be used: {error}. It is ignored.")
                continue
            if meta is not None:
                where, fetch = self._store.where(name), partial(self._fetch, name)
                found.append(
                    RemoteCheckpoint(where=where, progress=meta.progress, best=meta.best, fetch=fetch)
                )
        return found

    def _names(self) -> list[str]:
        return [name for name in self._store.names() if _NAME.fullmatch(name)]

    def _meta(self, name: str) -> CheckpointMeta | None:
        """The content of its meta.json; None if the copy is incomplete."""
        file = f"{name}/{META_FILE}"
        try:
            return parse_meta(self._store.read(file), self._store.where(file))
        except FileNotFoundError:
            return None

    def _fetch(self, name: str, folder: Path) -> None:
        for file in (META_FILE, STATE_FILE):
            try:
                self._retried(partial(self._store.get, f"{name}/{file}", folder / file))
            except FileNotFoundError as error:
                raise CorruptError(f"{file} is missing") from error

    def _retried(self, ask: Callable[[], T]) -> T:
        try:
            return _with_retries(ask, self._pauses_s)
        except StoreError as error:
            raise InputError(
                f"the checkpoints there cannot be read: {error}.",
                where=self._store.url,
                remedy="Make it readable and start again; training resumes from the newest checkpoint.",
            ) from error

    def _copy(self, *pauses_s: float) -> bool:
        try:
            _with_retries(self._copy_waiting, pauses_s)
        except _COPY_ERRORS as error:
            self._mark_uncopied()
            self._note_once(
                "copy",
                f"A checkpoint could not be copied to {self._store.url}: {error}. It stays on its node; the "
                "next checkpoint is the next attempt.",
            )
            return False
        return True

    def _mark_uncopied(self) -> None:
        """Leave a file that tells cleanup to keep the job's checkpoints on this node."""
        if self._copying is not None:
            with contextlib.suppress(OSError):
                (self._copying.parent / UNCOPIED).touch()

    def _copy_waiting(self) -> None:
        while (folder := self._next()) is not None:
            self._copy_one(folder)

    def _next(self) -> Path | None:
        with self._lock:
            self._copying = self._best or self._newest
            return self._copying

    def _copy_one(self, folder: Path) -> None:
        try:
            meta = read_meta(folder)
            name = f"{meta.progress:015.6f}-{meta.sha256[:16]}"
            self._put(name, meta, folder)
        except _COPY_ERRORS:
            if folder.exists():
                raise
            self._forget(folder)  # a new rank 0 has deleted it
            return
        self._forget(folder)
        (folder.parent / UNCOPIED).unlink(missing_ok=True)
        self._noted.discard("copy")
        where = self._store.where(f"{name}/{STATE_FILE}")
        self._on_saved(Saved(progress=meta.progress, path=where, best=meta.best))
        self._remove_old(name)

    def _forget(self, folder: Path) -> None:
        with self._lock:
            self._newest = None if self._newest == folder else self._newest
            self._best = None if self._best == folder else self._best

    def _put(self, name: str, meta: CheckpointMeta, folder: Path) -> None:
        there = self._readable(name)
        state = FileDigest(meta.size_bytes, meta.sha256)
        if there is None or not self._store.has(f"{name}/{STATE_FILE}", state):
            self._store.put(f"{name}/{STATE_FILE}", folder / STATE_FILE, state)
        if there is None or (meta.best and not there.best):
            with (folder / META_FILE).open("rb") as file:
                content = measured(file)
            self._store.put(f"{name}/{META_FILE}", folder / META_FILE, content)

    def _readable(self, name: str) -> CheckpointMeta | None:
        try:
            return self._meta(name)
        except CorruptError:
            return None

    def _remove_old(self, just_copied: str) -> None:
        """Delete old checkpoints, and older incomplete copies of workers that were killed.

        The one just copied stays even if it is not the newest, as newer ones may be damaged.
        """
        try:
            names = self._names()
            whole = [(name, meta) for name in reversed(names) if (meta := self._readable(name)) is not None]
            best = next((name for name, meta in whole if meta.best), None)
            oldest = min((name for name, _ in whole[: self._keep]), default="")
            for name in names:
                if name < oldest and name not in {best, just_copied}:
                    self._store.delete(f"{name}/{META_FILE}")  # from now on it is not a checkpoint
                    self._store.delete(name)
        except InputError:  # another version wrote one, and it may be the best: keep all
            return
        except StoreError as error:
            self._note_once("remove", f"Old checkpoints stay in {self._store.url}: {error}.")
        else:
            self._noted.discard("remove")

    def _note_once(self, what: str, text: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._note(text)


def _with_retries(ask: Callable[[], T], pauses_s: Sequence[float]) -> T:
    for pause_s in pauses_s:
        try:
            return ask()
        except StoreError:
            time.sleep(pause_s)
    return ask()
