"""The journal: what goes in comes out, and what cannot be continued is refused."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.errors import JournalError
from stretto.core.events import (
    EVENT_TYPES,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    NodeLost,
    NoteKind,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.observations import LossPoint, NoiseSample
from stretto.journal.base import Journal, MemoryJournal
from stretto.journal.codec import decode, encode
from stretto.journal.rows import checksum
from stretto.journal.sqlite import SqliteJournal

FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON_DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def finite_floats() -> Iterator[None]:
    """Let hypothesis fill float fields with what events may hold, in these tests only."""
    st.register_type_strategy(float, FINITE)
    yield
    st.register_type_strategy(float, st.floats())


def events_of(event_type: type[Event]) -> st.SearchStrategy[Event]:
    known: dict[str, st.SearchStrategy[Any]] = {"memory": JSON_DATA} if event_type is Decided else {}
    return st.builds(event_type, **known)


def finished(t_s: float, job_id: str = "a") -> JobFinished:
    return JobFinished(t_s=t_s, job_id=job_id)


@pytest.mark.usefixtures("finite_floats")
@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_every_kind_of_event_survives_the_round_trip(event_type: type[Event]) -> None:
    @settings(max_examples=30, deadline=None)
    @given(events_of(event_type))
    def check(event: Event) -> None:
        assert decode(event.kind, encode(event)) == event

    check()


def test_numbers_come_back_to_the_last_bit_and_numpy_floats_count_as_floats() -> None:
    event = finished(np.float64(0.1) + np.float64(0.2))
    back = decode(event.kind, encode(event))
    assert back.t_s == 0.1 + 0.2
    assert type(back.t_s) is float


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_its_place(odd: float) -> None:
    report = JobReported(t_s=1.0, job_id="a", work_done=2.0, epoch=1, noise=NoiseSample(1.0, odd))
    with pytest.raises(JournalError, match=r"job-reported of 'a' .* noise\.var is -?(nan|inf)"):
        encode(report)
    with pytest.raises(JournalError, match=r"memory\.timers\[1\]"):
        encode(Decided(t_s=0.0, policy="p", instructions=(), reasons={}, memory={"timers": [1.0, odd]}))


def test_a_loss_that_was_not_a_number_is_none_and_survives() -> None:
    report = JobReported(t_s=1.0, job_id="a", work_done=2.0, epoch=1, losses=(LossPoint(1, None),))
    assert decode(report.kind, encode(report)) == report


@pytest.mark.parametrize("memory", [(1, 2), {1: "a"}, {"rung": (1,)}, LossPoint(1, 0.5)])
def test_memory_that_would_come_back_changed_is_refused(memory: object) -> None:
    with pytest.raises(JournalError, match="plain JSON data"):
        encode(Decided(t_s=0.0, policy="p", instructions=(), reasons={}, memory=memory))


def test_values_that_are_no_data_are_refused() -> None:
    with pytest.raises(JournalError, match="int64"):
        encode(Decided(t_s=0.0, policy="p", instructions=(), reasons={}, memory=[np.int64(3)]))


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        ("job-eaten", "{}", "not a kind of event"),
        ("job-finished", "{}", "missing required field"),
        ("job-finished", '{"t_s":1,', "does not read"),
        ("job-finished", '{"t_s":"soon","job_id":"a"}', "does not read"),
    ],
)
def test_what_does_not_read_as_an_event_is_refused(kind: str, payload: str, message: str) -> None:
    with pytest.raises(JournalError, match=message):
        decode(kind, payload)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.sqlite"


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, path: Path) -> Iterator[Journal]:
    made: Journal = MemoryJournal() if request.param == "memory" else SqliteJournal(path, run="r")
    yield made
    made.close()


def test_events_come_back_in_the_order_they_were_appended(journal: Journal) -> None:
    start = Instruction(1, Action.START, "a", on_nodes({"0": 2}), BatchChoice(32, 1))
    decided = Decided(t_s=2.0, policy="fifo", instructions=(start,), reasons={}, memory={"k": [1, None]})
    journal.append([finished(3.0), decided])
    journal.append([])
    journal.append([NodeLost(t_s=1.0, node_id="0")])
    assert list(journal.events()) == [finished(3.0), decided, NodeLost(t_s=1.0, node_id="0")]


def test_opening_a_journal_again_continues_it(path: Path) -> None:
    first = SqliteJournal(path, run="r")
    first.append([finished(1.0)])
    started = first.started_utc
    first.close()
    second = SqliteJournal(path, run="r")
    second.append([finished(2.0)])
    assert [event.t_s for event in second.events()] == [1.0, 2.0]
    assert second.started_utc == started
    second.close()
    second.close()


def test_one_bad_event_keeps_the_others_of_its_turn_out(path: Path) -> None:
    journal = SqliteJournal(path, run="r")
    with pytest.raises(JournalError, match="t_s is nan"):
        journal.append([finished(1.0), finished(math.nan)])
    assert list(journal.events()) == []
    journal.close()


def test_the_table_is_what_the_design_says(path: Path) -> None:
    journal = SqliteJournal(path, run="r")
    journal.append([finished(1.5)])
    with sqlite3.connect(path) as reader:  # reading along is allowed
        rows = reader.execute("SELECT seq, t_s, kind, subject, schema, payload, crc FROM event").fetchall()
        mode = reader.execute("PRAGMA journal_mode").fetchone()
    reader.close()
    journal.close()
    payload = '{"t_s":1.5,"job_id":"a"}'
    crc = checksum(0, (1, 1.5, b"job-finished", b"a", 2, payload.encode()))
    assert rows == [(1, 1.5, "job-finished", "a", 2, payload, crc)]
    assert mode == ("wal",)


def test_a_closed_journal_takes_nothing_more(path: Path) -> None:
    journal = SqliteJournal(path, run="r")
    journal.close()
    with pytest.raises(JournalError, match="could not be written"):
        journal.append([finished(1.0)])


def written(path: Path, events: int = 200) -> Path:
    journal = SqliteJournal(path, run="r")
    journal.append([finished(float(i)) for i in range(events)])
    journal.close()
    return path


def change(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


def refused(path: Path, message: str, run: str = "r") -> None:
    with pytest.raises(JournalError, match=message) as caught:
        list(SqliteJournal(path, run=run).events())
    assert path.name in str(caught.value)


def test_the_journal_of_another_run_is_refused(path: Path) -> None:
    refused(written(path), "run 'r', not of 'other'", run="other")
    assert len(list(SqliteJournal(path, run="r").events())) == 200, "the refusal let go of the lock"


def test_another_schema_is_refused(path: Path) -> None:
    change(written(path), "PRAGMA user_version = 99")
    refused(path, "schema 99; this version of Stretto reads schema 1 to 2")


def test_an_event_of_another_schema_is_refused(path: Path) -> None:
    change(written(path), "UPDATE event SET schema = 7 WHERE seq = 3")
    refused(path, "event 3 is not as it was written")


def test_a_changed_event_is_refused(path: Path) -> None:
    change(written(path), "UPDATE event SET payload = '{' WHERE seq = 3")
    refused(path, "event 3 is not as it was written")


def test_another_database_is_refused(path: Path) -> None:
    path.parent.mkdir()
    change(path, "CREATE TABLE things (name TEXT)")
    refused(path, "some other database")


def test_a_journal_without_its_run_is_refused(path: Path) -> None:
    change(written(path), "DELETE FROM run")
    refused(path, "cannot be read as a journal")


@pytest.mark.parametrize("content", [b"", b"hello\n" * 1000])
def test_a_file_that_is_no_database_is_refused(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    refused(path, "is empty" if not content else "not a database")


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.01])
def test_a_truncated_file_is_refused(path: Path, kept: float) -> None:
    content = written(path).read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    refused(path, "cannot be read as a journal|event 142 is missing")


def test_a_corrupt_file_is_refused(path: Path) -> None:
    content = bytearray(written(path).read_bytes())
    content[8192:12288] = os.urandom(4096)
    path.write_bytes(content)
    refused(path, "cannot be read as a journal")


def test_a_folder_or_an_unwritable_place_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    refused(path, "not a file")
    (path / "file").touch()
    with pytest.raises(JournalError, match="cannot be opened"):
        SqliteJournal(path / "file" / "journal", run="r")


def test_leftovers_of_a_deleted_journal_are_not_taken_in(path: Path) -> None:
    path.parent.mkdir()
    path.with_name(path.name + "-wal").write_bytes(b"old")
    refused(path, "is there without journal.sqlite")


def test_a_half_made_file_of_a_killed_start_is_no_obstacle(path: Path) -> None:
    path.parent.mkdir()
    path.with_name(path.name + ".new").write_bytes(b"half")
    assert len(list(SqliteJournal(written(path), run="r").events())) == 200


APPENDER = """
import sys
from collections.abc import Iterator
from pathlib import Path
from stretto.core.events import JobFinished
from stretto.journal.sqlite import SqliteJournal
journal = SqliteJournal(Path(sys.argv[1]), run="r")
turn = 0
while True:
    journal.append([JobFinished(t_s=float(turn), job_id=str(i)) for i in range(50)])
    print(turn, flush=True)
    turn += 1
"""


@pytest.mark.processes
def test_a_kill_loses_at_most_the_unfinished_turn_and_lets_go_of_the_lock(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", APPENDER, str(path)], stdout=subprocess.PIPE, text=True
    ) as appender:
        assert appender.stdout is not None
        for _ in range(20):
            appender.stdout.readline()
        refused(path, "in use by another process")
        appender.send_signal(signal.SIGKILL)
        said = 19 + len(appender.stdout.readlines())
    journal = SqliteJournal(path, run="r")
    turns = [event.t_s for event in journal.events()]
    journal.append([finished(-1.0)])
    journal.close()
    assert len(turns) % 50 == 0, "a turn was written in part"
    assert turns == [float(turn) for turn in range(len(turns) // 50) for _ in range(50)]
    assert said + 1 <= len(turns) // 50 <= said + 2, "a turn that was acknowledged is lost"


def test_whoever_only_looks_for_an_instant_keeps_nobody_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking_fd = os.open(written(path).with_name(path.name + ".lock"), os.O_RDONLY)
    fcntl.flock(looking_fd, fcntl.LOCK_SH)
    monkeypatch.setattr("stretto.system.locks.time.sleep", lambda _: fcntl.flock(looking_fd, fcntl.LOCK_UN))
    try:
        SqliteJournal(path, run="r").close()
    finally:
        os.close(looking_fd)


def test_a_second_journal_on_the_same_file_is_refused(path: Path) -> None:
    journal = SqliteJournal(path, run="r")
    refused(path, "One process at a time")
    journal.close()


@pytest.mark.parametrize(
    ("kind", "payload", "event"),
    [
        (
            "job-failed",
            {"job_id": "a", "error": "exit code 3\nlog: /runs/x/stdout.log"},
            JobFailed(t_s=1.0, job_id="a", error="exit code 3", log="/runs/x/stdout.log"),
        ),
        (
            "job-noted",
            {"job_id": "a", "text": "while it left: no space\nlog: /x"},
            JobNoted(t_s=1.0, job_id="a", text="while it left: no space", about=NoteKind.NOT_SAVED, log="/x"),
        ),
        (
            "job-noted",
            {"job_id": "a", "text": "the training code was still being imported 30s after it was started"},
            JobNoted(
                t_s=1.0,
                job_id="a",
                text="the training code was still being imported 30s after it was started",
                about=NoteKind.NOT_BEGUN,
            ),
        ),
        ("job-noted", {"job_id": "a", "text": "hello"}, JobNoted(t_s=1.0, job_id="a", text="hello")),
    ],
)
def test_logs_and_kinds_of_notes_in_older_texts_are_read(
    kind: str, payload: dict[str, object], event: Event
) -> None:
    assert decode(kind, json.dumps({"t_s": 1.0, **payload})) == event
    assert decode(kind, encode(event)) == event
