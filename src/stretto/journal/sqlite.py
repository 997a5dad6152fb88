"""A journal in one SQLite file, which a killed run is resumed from."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stretto.core.errors import JournalError
from stretto.core.events import Event
from stretto.core.file_lock import FileLock, LockedError
from stretto.core.private_files import make_private_folder, open_private
from stretto.journal.codec import SCHEMA, decode, encode

_APPLICATION_ID = 0x53545254
"""Marks an SQLite file as a journal of Stretto ("STRT")."""

_CREATE = f"""
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA};
CREATE TABLE run (name TEXT NOT NULL, started_utc TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,
    t_s REAL NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    schema INTEGER NOT NULL,
    payload TEXT NOT NULL
);
"""

_ANOTHER_FILE = "Name another file, or move this one away."


class SqliteJournal:
    """The journal of one run in a file; opening an existing file continues it.

    One process at a time may have it open: a lock beside the file (`<path>.lock`) says so, and goes
    with the process however that ends. Whatever SQLite tool may read along.

    Every event outlives the process, however that ends. If the machine itself goes down, the events of its
    last moments may be missing: the file is whole up to some event, and the run goes on from there.
    """

    def __init__(self, path: Path, *, run: str, lock: FileLock | None = None) -> None:
        """`lock` is that of the file, where the caller has it already, and keeps it."""
        self._path = path
        self._lock = _lock(path) if lock is None else None
        try:
            if not path.exists():
                _create(path, run)
            self._connection = _connect(path)
        except BaseException:
            self._release()
            raise
        try:
            self._check(run)
        except BaseException:
            self.close()
            raise

    @property
    def started_utc(self) -> str:
        """When the run first started, on the wall clock: `2025-01-31 18:00:00`."""
        with _reading(self._path):
            (started,) = self._connection.execute("SELECT started_utc FROM run").fetchone()
        return str(started)

    def append(self, events: Sequence[Event]) -> None:
        if not events:
            return
        rows = [(event.t_s, event.kind, event.subject, SCHEMA, encode(event)) for event in events]
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany(
                    "INSERT INTO event (t_s, kind, subject, schema, payload) VALUES (?, ?, ?, ?, ?)", rows
                )
        except sqlite3.Error as error:
            raise JournalError(
                f"{self._path}: {len(rows)} events could not be written ({error}). A run goes on only with "
                "its journal. See that the disk has room and is writable, then start the run again."
            ) from error

    def events(self) -> Iterator[Event]:
        with _reading(self._path):
            rows = self._connection.execute("SELECT seq, kind, schema, payload FROM event ORDER BY seq")
            for seq, kind, schema, payload in rows:
                if schema != SCHEMA:
                    raise JournalError(_other_schema(f"{self._path}: event {seq}", schema))
                try:
                    event = decode(kind, payload)
                except JournalError as error:
                    raise JournalError(
                        f"{self._path}: event {seq}: {error} The file was changed from outside. "
                        "Restore a copy, or start the run anew under another name."
                    ) from error
                yield event

    def close(self) -> None:
        self._connection.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _check(self, run: str) -> None:
        """Refuse whatever is not the journal of this run, whole and in this version's form."""
        with _reading(self._path):
            if self._pragma("application_id") != _APPLICATION_ID:
                raise JournalError(f"{self._path} is not a journal, but some other database. {_ANOTHER_FILE}")
            if (schema := self._pragma("user_version")) != SCHEMA:
                raise JournalError(_other_schema(str(self._path), schema))
            if (verdict := self._pragma("quick_check")) != "ok":
                raise sqlite3.DatabaseError(verdict)
            (name,) = self._connection.execute("SELECT name FROM run").fetchone()
            if name != run:
                raise JournalError(
                    f"{self._path} is the journal of the run {name!r}, not of {run!r}. A journal belongs to "
                    "one run. Resume under that name, or name another file."
                )
            if (mode := self._pragma("journal_mode = WAL")) != "wal":
                raise JournalError(
                    f"{self._path}: the file system allows journal mode {mode!r} only, where WAL is needed. "
                    "Put the run's folder on a local disk."
                )
            # NORMAL: a commit is with the kernel before the loop acts on it, and on the disk a little later.
            # FULL would add a wait for the disk to every event: half of the time of a study of short trials.
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def _pragma(self, text: str) -> object:
        (value,) = self._connection.execute(f"PRAGMA {text}").fetchone()
        return value


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what SQLite finds wrong with a file into a JournalError."""
    try:
        yield
    except (sqlite3.Error, TypeError) as error:  # TypeError: a row that must be there is not
        raise JournalError(
            f"{path} cannot be read as a journal ({error}). A journal is a whole SQLite file that "
            "nothing else writes to. Restore a copy, or move the file away and start the run anew."
        ) from error


def _lock(path: Path) -> FileLock:
    """Take the lock beside the file, or say who cannot have it."""
    try:
        make_private_folder(path.parent)
        return FileLock(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise JournalError(
            f"{path} cannot be opened ({error}). A journal needs a folder it may write to. {_ANOTHER_FILE}"
        ) from error
    except LockedError as error:
        raise JournalError(
            f"{path} is in use by another process. One process at a time may append to a journal. "
            "Wait for that run to end, or stop it."
        ) from error


def _create(path: Path, run: str) -> None:
    """Make the file under another name first: a kill in between leaves no half-made journal."""
    wal = path.with_name(path.name + "-wal")
    if wal.exists():
        raise JournalError(
            f"{wal} is there without {path.name}. SQLite would add those events to a new journal. "
            f"Put {path.name} back, or move this file away."
        )
    unfinished = path.with_name(path.name + ".new")
    unfinished.unlink(missing_ok=True)
    os.close(open_private(unfinished, os.O_RDWR | os.O_CREAT))  # its write-ahead log gets the same mode
    connection = sqlite3.connect(unfinished, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.executescript(_CREATE)
        connection.execute("INSERT INTO run (name) VALUES (?)", (run,))
    finally:
        connection.close()
    unfinished.rename(path)
    folder_fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _connect(path: Path) -> sqlite3.Connection:
    if not path.is_file() or path.stat().st_size == 0:
        raise JournalError(
            f"{path} is {'empty' if path.is_file() else 'not a file'}. A journal holds at least "
            f"the name of its run. {_ANOTHER_FILE}"
        )
    with _reading(path):
        return sqlite3.connect(path, isolation_level=None)


def _other_schema(what: str, schema: object) -> str:
    return (
        f"{what} is of schema {schema}; this version of Stretto reads schema {SCHEMA}. "
        "Resume with the version that wrote it, or start the run anew under another name."
    )
