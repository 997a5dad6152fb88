"""A journal in one SQLite file, from which a killed run resumes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count, takewhile
from pathlib import Path

from stretto.core.errors import JournalError
from stretto.core.events import Decided, Event
from stretto.journal.codec import SCHEMA, UNKNOWN, encode
from stretto.journal.rows import (
    ANOTHER_FILE,
    APPLICATION_ID,
    UNREADABLE,
    DamagedError,
    EndMark,
    Row,
    boot_id,
    check_header,
    checksum,
    events_of,
    find_damage,
    host_id,
    kept_part,
    read_rows,
    whole_rows,
)
from stretto.system.locks import FileLock, LockedError
from stretto.system.private_files import make_private_folder, open_private

_CREATE = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA};
CREATE TABLE run (name TEXT NOT NULL, started_utc TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,
    t_s REAL NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    schema INTEGER NOT NULL,
    payload TEXT NOT NULL,
    crc INTEGER NOT NULL
);
"""
_PARTS = ("", "-wal", "-shm", ".end")
"""The endings of the names of a journal's files."""
_INSERT = "INSERT INTO event (seq, t_s, kind, subject, schema, payload, crc) VALUES (?, ?, ?, ?, ?, ?, ?)"


class SqliteJournal:
    """The journal of one run in a file; opening an existing file continues it.

    One process at a time may write: it holds a lock beside the file (`<path>.lock`), which is released
    however the process ends. SQLite tools may read at the same time.

    Every event survives the end of the process. If the machine goes down, its last events may be missing:
    the file is whole up to some event, a copy is set aside, and the run continues from there. A damaged file
    is not continued; `cut` makes a new one of the events before the damage.
    """

    def __init__(self, path: Path, *, run: str, lock: FileLock | None = None) -> None:
        """`lock` is the lock of the file, if the caller holds it already; the caller keeps it."""
        self._path = path
        self._lock = _lock(path) if lock is None else None
        self._end_fd = -1
        self._boot, self._host = boot_id(), host_id()
        self._memory: object = UNKNOWN
        """The memory of the last decision that this process wrote."""
        try:
            finish_cut(path)
            if not path.exists():
                _create(path, run)
            self._connection = _connect(path)
        except BaseException:
            self._release()
            raise
        try:
            end = self._check(run)
            while end is None:
                self._connection.close()
                cut(path, run, lock=lock or self._lock)
                self._connection = _connect(path)
                end = self._check(run)
            self._seq, self._crc = end
            self._end_fd = open_private(EndMark.path(path), os.O_WRONLY | os.O_CREAT)
            self._mark()
            kept_part(path).unlink(missing_ok=True)  # left by an earlier cut
        except BaseException:
            self.close()
            raise

    @property
    def started_utc(self) -> str:
        """The wall clock time of the first start: `2025-01-31 18:00:00`."""
        with _reading(self._path):
            (started,) = self._connection.execute("SELECT started_utc FROM run").fetchone()
        return bytes(started).decode()

    def append(self, events: Sequence[Event]) -> None:
        if not events:
            return
        seq, crc, memory = self._seq, self._crc, self._memory
        rows = []
        for event in events:
            seq += 1
            payload, t_s = encode(event, memory), float(event.t_s)
            columns = (seq, t_s, event.kind.encode(), event.subject.encode(), SCHEMA, payload.encode())
            crc = checksum(crc, columns)
            rows.append((seq, t_s, event.kind, event.subject, SCHEMA, payload, crc))
            memory = event.memory if isinstance(event, Decided) else memory
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany(_INSERT, rows)
        except sqlite3.Error as error:
            raise JournalError(
                f"{self._path}: {len(rows)} events could not be written ({error}). A run needs "
                "its journal to continue. Check that the disk is writable and not full, then start it again."
            ) from error
        self._seq, self._crc, self._memory = seq, crc, memory
        self._mark()

    def events(self) -> Iterator[Event]:
        with _reading(self._path):
            yield from events_of(whole_rows(self._connection, self._path, None), with_memory=True)

    def close(self) -> None:
        self._connection.close()
        if self._end_fd >= 0:
            os.close(self._end_fd)
            self._end_fd = -1
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _mark(self) -> None:
        """Write down which event is the last."""
        try:
            os.pwrite(self._end_fd, EndMark(self._seq, self._boot, self._host).text(), 0)
        except OSError as error:
            raise JournalError(
                f"{EndMark.path(self._path)} cannot be written ({error.strerror}). It says where the journal "
                "ends. Check that the disk is writable and not full, then start it again."
            ) from error

    def _check(self, run: str) -> tuple[int, int] | None:
        """Check that this is the whole, readable journal of this run.

        Returns the number and checksum of the last event; None if later events were lost with the machine.
        """
        with _reading(self._path):
            self._connection.text_factory = bytes
            with_checksums = check_header(self._connection, self._path)
            found = self._connection.execute("SELECT name FROM run").fetchone()
            if found is None or not isinstance(found[0], bytes):
                raise sqlite3.DatabaseError("the name of its run is missing")
            if found[0] != run.encode():
                name = found[0].decode(errors="replace")
                raise JournalError(
                    f"{self._path} is the journal of the run {name!r}, not of {run!r}. A journal belongs to "
                    "one run. Resume under that name, or name another file."
                )
            if not with_checksums:
                self._add_checksums()
            seq, crc = 0, 0
            try:
                mark = EndMark.read(self._path)
                for row in whole_rows(self._connection, self._path, mark, thoroughly=True):
                    seq, crc = row.seq, row.crc
            except DamagedError as found_damage:
                if not found_damage.damage.machine_went_down:
                    raise
                return None
            if (mode := self._pragma("journal_mode = WAL")) != b"wal":
                raise JournalError(
                    f"{self._path}: the file system allows journal mode {mode!r} only, where WAL is needed. "
                    "Put the run's folder on a local disk."
                )
            # NORMAL: a commit is with the kernel before the loop acts on it, and on the disk a little later.
            # FULL would add a wait for the disk to every event: half of the time of a study of short trials.
            self._connection.execute("PRAGMA synchronous = NORMAL")
        return seq, crc

    def _add_checksums(self) -> None:
        """Add checksums to the events of an earlier version: to all or to none."""
        for _ in events_of(whole_rows(self._connection, self._path, None), with_memory=False):
            pass
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            crc, sums = 0, []
            for row in whole_rows(self._connection, self._path, None):
                crc = checksum(crc, row.columns)
                sums.append((crc, row.seq))
            self._connection.execute("ALTER TABLE event ADD COLUMN crc INTEGER NOT NULL DEFAULT 0")
            self._connection.executemany("UPDATE event SET crc = ? WHERE seq = ?", sums)
            self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _pragma(self, text: str) -> object:
        (value,) = self._connection.execute(f"PRAGMA {text}").fetchone()
        return value


def cut(path: Path, run: str, *, lock: FileLock | None = None) -> Path:
    """Set a damaged file aside and keep the events before the damage; returns where the damaged file is.

    `lock` is the lock of the file, if the caller holds it already.
    """
    taken = _lock(path) if lock is None else None
    try:
        if (aside := finish_cut(path)) is not None and find_damage(path) is None:
            return aside
        unfinished = path.with_name(path.name + ".keeping")
        for left in (unfinished, unfinished.with_name(unfinished.name + "-journal")):
            left.unlink(missing_ok=True)
        _create(unfinished, run)
        with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            try:
                _copy(read_rows(path), connection)
            finally:
                connection.execute("COMMIT")
        unfinished.rename(kept_part(path))
        return _put_in_place(path, _free_name(path))
    finally:
        if taken is not None:
            taken.release()


def finish_cut(path: Path) -> Path | None:
    """Complete a `cut` that was killed: the kept part becomes the journal.

    Returns where the damaged file is; None if there is nothing to complete. The caller holds the file's lock.
    """
    if path.exists() or not kept_part(path).exists():
        return None
    return _put_in_place(path, _last_name(path))


def _put_in_place(path: Path, aside: Path) -> Path:
    """Move the journal first: while it is missing and the kept part exists, this can be repeated."""
    for suffix in _PARTS:
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    kept_part(path).rename(path)
    _sync_folder(path.parent)
    return aside


def _copy(rows: Iterator[Row], connection: sqlite3.Connection) -> None:
    """The readable rows before the damage."""
    crc = 0
    read = list[Row]()
    try:
        for _ in events_of(_each_into(read, rows), with_memory=False):
            row = read.pop()
            kind, subject, payload = row.kind.decode(), row.subject.decode(), row.payload.decode()
            crc = checksum(crc, row.columns)
            connection.execute(_INSERT, (row.seq, row.t_s, kind, subject, row.schema, payload, crc))
    except DamagedError:
        return


def _each_into(read: list[Row], rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        read.append(row)
        yield row


def _free_name(path: Path) -> Path:
    """A free name for the parts of a damaged journal."""
    return next(aside for aside in _asides(path) if not _parts(aside))


def _last_name(path: Path) -> Path:
    """Where a damaged journal was being moved to; a free name if the remaining parts do not fit there."""
    *_, last = [_free_name(path), *takewhile(_parts, _asides(path))]
    return _free_name(path) if _parts(path) & _parts(last) else last


def _asides(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}.damaged-{number}") for number in count(1))


def _parts(path: Path) -> set[str]:
    """The files of a journal that exist."""
    return {suffix for suffix in _PARTS if path.with_name(path.name + suffix).exists()}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn damage into a JournalError."""
    try:
        yield
    except DamagedError as error:
        raise JournalError(_unreadable(path, error.damage.problem)) from error
    except UNREADABLE as error:
        raise JournalError(_unreadable(path, f"it cannot be read as a journal ({error})")) from error


def _unreadable(path: Path, problem: str) -> str:
    return (
        f"{path} is damaged: {problem}. A journal is a whole SQLite file that nothing else writes to. "
        "Restore a copy, or move the file away and start the run anew."
    )


def _lock(path: Path) -> FileLock:
    """Take the lock beside the file; JournalError if another process holds it."""
    try:
        make_private_folder(path.parent)
        return FileLock(path.with_name(path.name + ".lock"))
    except OSError as error:
        raise JournalError(
            f"{path} cannot be opened ({error}). A journal needs a folder it may write to. {ANOTHER_FILE}"
        ) from error
    except LockedError as error:
        raise JournalError(
            f"{path} is in use by another process. One process at a time may append to a journal. "
            "Wait for that run to end, or stop it."
        ) from error


def _create(path: Path, run: str) -> None:
    """Make the file under another name first, so that a kill leaves no incomplete journal."""
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
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the folder, so that renames survive if the machine goes down."""
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _connect(path: Path) -> sqlite3.Connection:
    if not path.is_file() or path.stat().st_size == 0:
        raise JournalError(
            f"{path} is {'empty' if path.is_file() else 'not a file'}. A journal holds at least "
            f"the name of its run. {ANOTHER_FILE}"
        )
    with _reading(path):
        return sqlite3.connect(path, isolation_level=None)
