"""The rows of a journal's file, read one after the other, up to where the file is damaged.

Every event has a checksum over all its columns and over the events before it. Beside the file, a few bytes
say which event was written last (`<path>.end`): without them, events lost from the end would not be missed.
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
"""What is raised where a file is not as SQLite wrote it; the second of texts in its table of contents."""

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
"""What SQLite says where a file cannot be read now, though nothing may be wrong with it."""


@dataclass(frozen=True, slots=True)
class Row:
    """An event as it lies in the file, whole."""

    seq: int
    t_s: float
    kind: bytes
    subject: bytes
    schema: int
    payload: bytes
    crc: int
    """As it is written; 0 in a file without checksums."""

    @property
    def columns(self) -> Columns:
        return self.seq, self.t_s, self.kind, self.subject, self.schema, self.payload

    def event(self, before: Before = UNKNOWN, *, with_memory: bool = True) -> Event:
        return decode(self.kind.decode(), self.payload, before, with_memory=with_memory)


@dataclass(frozen=True, slots=True)
class Damage:
    """Where a journal's file is damaged, and what is before that."""

    events: int
    """Whole ones before it."""
    until_s: float
    """When the last of them was."""
    problem: str
    """What is wrong, as a clause."""
    machine_went_down: bool = False
    """Nothing is wrong but that the last events did not come to the disk before the machine restarted."""


class DamagedError(Exception):
    """What was read last is the last that is whole."""

    def __init__(self, damage: Damage) -> None:
        self.damage = damage
        super().__init__(damage.problem)


def checksum(before: int, columns: Columns) -> int:
    """Of an event, `before` being that of the event before it, or 0."""
    seq, t_s, kind, subject, schema, payload = columns
    head = f"{seq} {float(t_s)!r} {len(kind)} {len(subject)} {schema} {len(payload)} ".encode()
    return zlib.crc32(payload, zlib.crc32(head + kind + subject, before))


@dataclass(frozen=True, slots=True)
class EndMark:
    """Which event was written last, on which machine and since which start of it."""

    seq: int
    boot: str
    host: str

    @classmethod
    def path(cls, journal: Path) -> Path:
        return journal.with_name(journal.name + ".end")

    @classmethod
    def read(cls, journal: Path) -> EndMark | None:
        """None if there is none, or it does not read as one."""
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
        """Always as long, so that it may be written in place."""
        said = f"{self.seq:019d} {self.boot} {self.host}".encode()
        return said + b" %08x\n" % zlib.crc32(said)

    def tells_of_a_restart(self) -> bool:
        """Whether this is the machine that wrote it, and was started again since."""
        return self.host == host_id() and self.boot != boot_id()


def boot_id() -> str:
    """Another one after every start of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "0" * 36  # as long


def host_id() -> str:
    """The same after every start of a machine, and another one on another machine."""
    try:
        installed = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        installed = ""
    return hashlib.sha256(f"{socket.gethostname()} {installed}".encode()).hexdigest()[:16]


def kept_part(journal: Path) -> Path:
    """What is kept of a damaged journal, whole, until it takes the journal's place."""
    return journal.with_name(journal.name + ".kept")


def read_events(path: Path, *, with_memory: bool = False) -> Iterator[Event]:
    """Everything before the damage, if there is any, also while a run goes on."""
    try:
        yield from events_of(read_rows(path), with_memory=with_memory)
    except DamagedError:
        return


def find_damage(path: Path, *, thoroughly: bool = False) -> Damage | None:
    """What is wrong with a journal's file; `thoroughly` also where that keeps nobody from reading it."""
    rows = read_rows(path, thoroughly=thoroughly)
    try:
        for row in rows:
            if row.schema == WHOLE_MEMORY:  # without a checksum, all that tells is whether it can be read
                for _ in events_of(chain([row], rows), with_memory=False):
                    pass
    except DamagedError as found:
        return found.damage
    return None


def events_of(rows: Iterator[Row], *, with_memory: bool) -> Iterator[Event]:
    """The events of rows; raises DamagedError where one does not read as one."""
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
    """Whole rows in order; DamagedError where the file is damaged, JournalError if it is no journal."""
    mark = EndMark.read(path)  # first: what is written meanwhile is after it
    if not _is_there(path):
        if kept_part(path).exists():
            problem = "a kill came while it was put aside, and the command of the run completes that"
            raise DamagedError(Damage(0, 0.0, problem))
        if mark is not None and mark.seq:
            raise DamagedError(
                Damage(0, 0.0, f"it is gone, with the {mark.seq} events that were written to it")
            )
        return
    # Nobody writes to a journal without a write-ahead log; reading it then leaves no files behind.
    resting = not path.with_name(path.name + "-wal").exists()
    how = "mode=ro&immutable=1" if resting else "mode=ro"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
            yield from whole_rows(connection, path, mark, thoroughly=thoroughly)
    except UNREADABLE as error:  # not even opened
        raise as_damage(path, error, 0, 0.0) from error


def whole_rows(
    connection: sqlite3.Connection, path: Path, mark: EndMark | None, *, thoroughly: bool = False
) -> Iterator[Row]:
    """The rows that a connection to the file has."""
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
    """What SQLite finds wrong with a file: damage, or a reason why it cannot be read now."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _NO_DAMAGE:
        return JournalError(f"{path} cannot be read now ({error}). See that it may be read, and try again.")
    return DamagedError(Damage(events, until_s, f"it cannot be read as a journal ({error})"))


def other_schema(what: str, schema: object) -> str:
    return (
        f"{what} is of schema {schema}; this version of Stretto reads schema {READ[0]} to {READ[-1]}. "
        "Resume with the version that wrote it, or start the run anew under another name."
    )


def _is_there(path: Path) -> bool:
    """Whether there is a file to read; DamagedError if something else is there, or nothing is in it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    except IsADirectoryError as error:
        raise DamagedError(Damage(0, 0.0, "it is a folder, not a file")) from error
    except OSError as error:
        raise JournalError(
            f"{path} cannot be read ({error.strerror}). See that it may be read, and try again."
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
    """An event without a checksum: JournalError if its columns differ from it, or nobody knows its job."""
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
