"""Reads the rows of a journal's file, up to where it is damaged (changed, truncated or half-written).

Every event has a checksum over its columns and all events before it. A small file beside the journal
(`<path>.end`) says which event was written last, so that events missing at the end are noticed.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from stretto.core.errors import JournalError
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    WorkerLost,
)
from stretto.journal.codec import READ, SCHEMA, UNKNOWN, WHOLE_MEMORY, Before, decode

APPLICATION_ID = 0x53545254
"""Marks an SQLite file as a journal of Stretto ("STRT")."""
ANOTHER_FILE = "Name another file, or move this one away."

Columns = tuple[int, float, bytes, bytes, int, bytes]
"""Number, time, kind, subject, schema and payload of an event."""

UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
"""The errors of a damaged file; the second comes from damaged text in its schema."""

_SELECT = "SELECT seq, t_s, kind, subject, schema, payload, crc FROM event ORDER BY seq"
_SELECT_WITHOUT_CHECKSUM = "SELECT seq, t_s, kind, subject, schema, payload, 0 FROM event ORDER BY seq"

_NO_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
    }
)
"""SQLite's codes for a file that cannot be read now but need not be damaged."""


@dataclass(frozen=True, slots=True)
class Row:
    """One event as it is in the file."""

    seq: int
    t_s: float
    kind: bytes
    subject: bytes
    schema: int
    payload: bytes
    crc: int
    """The stored checksum; 0 in a file without checksums."""

    @property
    def columns(self) -> Columns:
        return self.seq, self.t_s, self.kind, self.subject, self.schema, self.payload

    def event(self, before: Before = UNKNOWN, *, with_memory: bool = True) -> Event:
        return decode(self.kind.decode(), self.payload, before, with_memory=with_memory)


@dataclass(frozen=True, slots=True)
class Damage:
    """Where and how a journal's file is damaged."""

    events: int
    """The number of whole events before the damage."""
    until_s: float
    """The time of the last of them."""
    problem: str
    """What is wrong, as a clause."""
    machine_went_down: bool = False
    """Only the last events are missing, as the machine went down before they were on the disk."""


class DamagedError(Exception):
    """Raised where the damage begins: everything read so far is whole."""

    def __init__(self, damage: Damage) -> None:
        self.damage = damage
        super().__init__(damage.problem)


def checksum(before: int, columns: Columns) -> int:
    """The checksum of an event; `before` is that of the previous event, or 0."""
    seq, t_s, kind, subject, schema, payload = columns
    head = f"{seq} {float(t_s)!r} {len(kind)} {len(subject)} {schema} {len(payload)} ".encode()
    return zlib.crc32(payload, zlib.crc32(head + kind + subject, before))


@dataclass(frozen=True, slots=True)
class EndMark:
    """Which event was written last, on which machine and in which boot of it."""

    seq: int
    boot: str
    host: str

    @classmethod
    def path(cls, journal: Path) -> Path:
        return journal.with_name(journal.name + ".end")

    @classmethod
    def read(cls, journal: Path) -> EndMark | None:
        """None if there is none, or it is damaged."""
        try:
            text = cls.path(journal).read_bytes()
        except OSError:
            return None
        said, _, crc = text.rstrip().rpartition(b" ")
        seq, _, where = said.partition(b" ")
        if not seq.isdigit() or crc != b"%08x" % zlib.crc32(said):
            return None
        boot, _, host = where.decode(errors="replace").partition(" ")
        return cls(int(seq), boot, host)

    def text(self) -> bytes:
        """Text of a fixed length, so that it can be overwritten in place."""
        said = f"{self.seq:019d} {self.boot} {self.host}".encode()
        return said + b" %08x\n" % zlib.crc32(said)

    def tells_of_a_restart(self) -> bool:
        """Whether this machine wrote it and has restarted since."""
        return self.host == host_id() and self.boot != boot_id()


def boot_id() -> str:
    """An id that changes at every start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "0" * 36  # the same length


def host_id() -> str:
    """An id of the machine that survives restarts."""
    try:
        installed = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        installed = ""
    return hashlib.sha256(f"{socket.gethostname()} {installed}".encode()).hexdigest()[:16]


def kept_part(journal: Path) -> Path:
    """The undamaged part of a journal, until it replaces the journal."""
    return journal.with_name(journal.name + ".kept")


def read_events(path: Path, *, with_memory: bool = False) -> Iterator[Event]:
    """All events, or those before the damage; also of a live run."""
    try:
        yield from events_of(read_rows(path), with_memory=with_memory)
    except DamagedError:
        return


def find_damage(path: Path, *, thoroughly: bool = False) -> Damage | None:
    """The damage of a journal's file; `thoroughly` also finds damage that does not affect reading."""
    rows = read_rows(path, thoroughly=thoroughly)
    try:
        for row in rows:
            if row.schema == WHOLE_MEMORY:  # without a checksum we can only try to read it
                for _ in events_of(chain([row], rows), with_memory=False):
                    pass
    except DamagedError as found:
        return found.damage
    return None


def events_of(rows: Iterator[Row], *, with_memory: bool) -> Iterator[Event]:
    """The events of rows; DamagedError where one cannot be decoded."""
    memory: Before = UNKNOWN
    until_s, jobs = 0.0, set[str]()
    for row in rows:
        try:
            event = row.event(memory, with_memory=with_memory)
            if row.schema == WHOLE_MEMORY:
                _check_by_itself(row, event, jobs)
        except (JournalError, UnicodeDecodeError) as error:
            raise DamagedError(
                Damage(row.seq - 1, until_s, f"event {row.seq}: {error}".rstrip("."))
            ) from error
        if isinstance(event, Decided):
            memory = event.memory
        until_s = row.t_s
        yield event


def read_rows(path: Path, *, thoroughly: bool = False) -> Iterator[Row]:
    """The rows in order; DamagedError where the file is damaged, JournalError if it is no journal."""
    mark = EndMark.read(path)  # read first, as events may be added meanwhile
    if not _is_there(path):
        if kept_part(path).exists():
            problem = "a kill came while it was put aside, and the command of the run completes that"
            raise DamagedError(Damage(0, 0.0, problem))
        if mark is not None and mark.seq:
            raise DamagedError(
                Damage(0, 0.0, f"it is gone, with the {mark.seq} events that were written to it")
            )
        return
    # Without a write-ahead log no process writes to it; an immutable read leaves no files behind.
    resting = not path.with_name(path.name + "-wal").exists()
    how = "mode=ro&immutable=1" if resting else "mode=ro"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
            yield from whole_rows(connection, path, mark, thoroughly=thoroughly)
    except UNREADABLE as error:  # it could not be opened
        raise as_damage(path, error, 0, 0.0) from error


def whole_rows(
    connection: sqlite3.Connection, path: Path, mark: EndMark | None, *, thoroughly: bool = False
) -> Iterator[Row]:
    """The rows of an open file, checked."""
    connection.text_factory = bytes
    seq, until_s, crc = 0, 0.0, 0
    try:
        with_checksums = check_header(connection, path)
        for values in connection.execute(_SELECT if with_checksums else _SELECT_WITHOUT_CHECKSUM):
            row = _row(values, seq, until_s)
            if with_checksums:
                crc = checksum(crc, row.columns)
                if crc != row.crc:
                    raise DamagedError(Damage(seq, until_s, f"event {seq + 1} is not as it was written"))
            if row.schema not in READ:
                raise JournalError(other_schema(f"{path}: event {row.seq}", row.schema))
            seq, until_s = row.seq, row.t_s
            yield row
        if thoroughly:
            (verdict,) = connection.execute("PRAGMA quick_check").fetchone()
            if verdict != b"ok":
                raise sqlite3.DatabaseError(bytes(verdict).decode(errors="replace").splitlines()[0])
    except UNREADABLE as error:
        raise as_damage(path, error, seq, until_s) from error
    if mark is not None and mark.seq > seq:
        lost = mark.seq - seq
        problem = f"the last {lost} of {mark.seq} events are missing"
        went_down = seq > 0 and mark.tells_of_a_restart()
        raise DamagedError(Damage(seq, until_s, problem, machine_went_down=went_down))


def check_header(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether events have checksums; JournalError if the file is no journal, or one of another version."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise JournalError(f"{path} is not a journal, but some other database. {ANOTHER_FILE}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in READ:
        raise JournalError(other_schema(str(path), version))
    columns = [bytes(row[1]) for row in connection.execute("PRAGMA table_info(event)")]
    if (b"crc" in columns) != (version == SCHEMA):
        raise sqlite3.DatabaseError(f"its header says that it is of schema {version}, which it is not")
    return bool(version == SCHEMA)


def as_damage(path: Path, error: Exception, events: int, until_s: float) -> Exception:
    """The error for an exception of SQLite: damage, or a file that cannot be read now."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _NO_DAMAGE:
        return JournalError(f"{path} cannot be read now ({error}). Check its permissions, then try again.")
    return DamagedError(Damage(events, until_s, f"it cannot be read as a journal ({error})"))


def other_schema(what: str, schema: object) -> str:
    return (
        f"{what} is of schema {schema}; this version of Stretto reads schema {READ[0]} to {READ[-1]}. "
        "Resume with the version that wrote it, or start the run anew under another name."
    )


def _is_there(path: Path) -> bool:
    """Whether the file exists; DamagedError if it is empty or not a file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    except IsADirectoryError as error:
        raise DamagedError(Damage(0, 0.0, "it is a folder, not a file")) from error
    except OSError as error:
        raise JournalError(
            f"{path} cannot be read ({error.strerror}). Check its permissions, then try again."
        ) from error
    if not size:
        raise DamagedError(Damage(0, 0.0, "it is empty"))
    return True


def _row(values: tuple[object, ...], before: int, until_s: float) -> Row:
    seq, t_s, kind, subject, schema, payload, crc = values
    if not isinstance(seq, int) or seq != before + 1:
        raise DamagedError(Damage(before, until_s, f"event {before + 1} is missing"))
    if (
        isinstance(t_s, float)
        and isinstance(kind, bytes)
        and isinstance(subject, bytes)
        and isinstance(schema, int)
        and isinstance(payload, bytes)
        and isinstance(crc, int)
    ):
        return Row(seq, t_s, kind, subject, schema, payload, crc)
    raise DamagedError(Damage(before, until_s, f"event {seq} is not as it was written"))


def _check_by_itself(row: Row, event: Event, jobs: set[str]) -> None:
    """Check an event without a checksum: its columns must agree with it, and its jobs must exist."""
    if event.t_s != row.t_s or event.subject.encode() != row.subject:
        raise JournalError("its columns and its payload differ")
    named = set[str]()
    match event:
        case JobSubmitted():
            jobs.add(event.job.id)
        case Decided():
            named = {*event.reasons, *(one.job_id for one in event.instructions)}
        case JobFinished() | JobFailed() | JobReported() | JobRetried() | WorkerLost():
            named = {event.job_id}
        case _:
            pass
    if unknown := named - jobs:
        raise JournalError(f"it names {min(unknown)!r}, and there is no such job")
