"""Damaged journals: what is told is what was written, up to the damage, and the damage is named."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from builders import make_job
from stretto.cli.explain import explain
from stretto.cli.report import report
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.decision import Reason, ReasonCode
from stretto.core.errors import InputError, JournalError
from stretto.core.events import Decided, Event, JobFinished, JobReported, JobSubmitted
from stretto.core.instructions import Action, Instruction
from stretto.core.observations import Result
from stretto.journal import rows, sqlite
from stretto.journal.codec import encode
from stretto.journal.rows import Damage, EndMark, find_damage, read_events
from stretto.journal.sqlite import SqliteJournal, cut
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.mend import mend, mend_after_restart

Bytes = bytearray
DAMAGES_OF_A_KIND = 30


def story(jobs: int = 40) -> list[Event]:
    """Of jobs that are submitted, started, report and finish."""
    events: list[Event] = []
    memory: dict[str, object] = {"begun": 0, "rungs": [], "passed": {}}
    for number in range(jobs):
        job_id, t_s = f"trial-{number:03d}", float(number)
        value = 0.5 + number / 1000
        memory = {
            "begun": number + 1,
            "rungs": [*memory["rungs"], job_id],  # type: ignore[misc]
            "passed": {**memory["passed"], job_id: 0},  # type: ignore[dict-item]
        }
        start = Instruction(number + 1, Action.START, job_id, on_nodes({"0": 1}), BatchChoice(32))
        events += [
            JobSubmitted(t_s=t_s, job=make_job(job_id)),
            Decided(
                t_s=t_s,
                policy="asha",
                instructions=(start,),
                reasons={job_id: Reason(ReasonCode.STARTED, f"Trial {number} of {jobs}.")},
                memory=memory,
            ),
            JobReported(
                t_s=t_s + 0.4,
                job_id=job_id,
                work_done=1.0,
                epoch=1,
                results=(Result(1, value, 0.4, 1, 1),),
            ),
            JobFinished(t_s=t_s + 0.5, job_id=job_id),
        ]
    return events


STORY = story()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "journal.sqlite"
    with closing(SqliteJournal(path, run="r")) as journal:
        for start in range(0, len(STORY), 4):
            journal.append(STORY[start : start + 4])
    return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a kill leaves it: the last events are in the write-ahead log."""
    folder = tmp_path_factory.mktemp("killed")
    with closing(SqliteJournal(folder / "going" / "journal.sqlite", run="r")) as journal:
        journal.append(STORY[:80])
        for start in range(80, len(STORY), 4):
            journal.append(STORY[start : start + 4])
        shutil.copytree(folder / "going", folder / "left")
    return folder / "left" / "journal.sqlite"


def copied(journal: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(journal.parent, to)
    return to / journal.name


def told(path: Path) -> tuple[list[Event], bool]:
    """The events that are told, without memory, and whether anything is said to be wrong."""
    try:
        events = list(read_events(path))
        damage = find_damage(path)
    except JournalError:
        return [], True
    if damage is not None:
        assert damage.events == len(events)
        assert not events or damage.until_s == events[-1].t_s
    return events, damage is not None


def check(path: Path, what: str) -> None:
    """What is told is what was written, up to where damage is told; and a run goes on from there."""
    events, damaged = told(path)
    expected = list(without_memory(STORY[: len(events)]))
    assert events == expected, what
    assert damaged or len(events) == len(STORY), what
    try:
        with closing(SqliteJournal(path, run="r")) as journal:
            assert list(journal.events()) == STORY, what
    except JournalError:
        before = len(events)
        try:
            cut(path, "r")
        except JournalError:  # it is, or says that it is, the journal of something else
            return
        with closing(SqliteJournal(path, run="r")) as journal:
            kept = list(journal.events())
            assert kept == STORY[: len(kept)], what
            assert len(kept) == before, what
            journal.append([JobFinished(t_s=1e6, job_id="trial-000")])
        assert find_damage(path) is None, what


def without_memory(events: list[Event]) -> Iterator[Event]:
    for event in events:
        yield dataclasses.replace(event, memory=None) if isinstance(event, Decided) else event


def one_byte(content: Bytes, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)


def header_byte(content: Bytes, rng: random.Random) -> None:
    content[rng.randrange(100)] ^= rng.randrange(1, 256)


def page_header_byte(content: Bytes, rng: random.Random) -> None:
    page = rng.randrange(len(content) // 4096)
    content[page * 4096 + (100 if not page else 0) + rng.randrange(16)] ^= rng.randrange(1, 256)


def first_page_byte(content: Bytes, rng: random.Random) -> None:
    content[rng.randrange(100, 4096)] ^= rng.randrange(1, 256)


def last_page_byte(content: Bytes, rng: random.Random) -> None:
    content[rng.randrange(len(content) - 4096, len(content))] ^= rng.randrange(1, 256)


def digit(content: Bytes, rng: random.Random) -> None:
    places = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    content[rng.choice(places)] = rng.choice(b"0123456789")


def block_of_zeros(content: Bytes, rng: random.Random) -> None:
    start = rng.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))


def cut_off(content: Bytes, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


def longer(content: Bytes, rng: random.Random) -> None:
    content += rng.randbytes(rng.randrange(1, 5000))


def two_pages_swapped(content: Bytes, rng: random.Random) -> None:
    one, other = (4096 * rng.randrange(len(content) // 4096) for _ in range(2))
    content[one : one + 4096], content[other : other + 4096] = (
        content[other : other + 4096],
        content[one : one + 4096],
    )


KINDS = (
    one_byte,
    header_byte,
    page_header_byte,
    first_page_byte,
    last_page_byte,
    digit,
    block_of_zeros,
    cut_off,
    longer,
    two_pages_swapped,
)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_and_what_is_before_it_is_right(
    kind: Callable[[Bytes, random.Random], None], whole: Path, tmp_path: Path
) -> None:
    rng = random.Random(kind.__name__)
    content = whole.read_bytes()
    for number in range(DAMAGES_OF_A_KIND):
        path = copied(whole, tmp_path / "case")
        damaged = bytearray(content)
        kind(damaged, rng)
        path.write_bytes(damaged)
        check(path, f"{kind.__name__} {number}")


@pytest.mark.parametrize("kind", [one_byte, block_of_zeros, cut_off])
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", ".end"])
def test_damage_after_a_kill_is_told(
    kind: Callable[[Bytes, random.Random], None], suffix: str, killed: Path, tmp_path: Path
) -> None:
    rng = random.Random(kind.__name__ + suffix)
    for number in range(DAMAGES_OF_A_KIND // 6):
        path = copied(killed, tmp_path / "case")
        part = path.with_name(path.name + suffix)
        damaged = bytearray(part.read_bytes())
        kind(damaged, rng)
        part.write_bytes(damaged)
        check(path, f"{kind.__name__} of {suffix} {number}")


def test_a_whole_journal_is_whole(whole: Path, killed: Path, tmp_path: Path) -> None:
    for number, journal in enumerate((whole, killed)):
        path = copied(journal, tmp_path / str(number))
        assert told(path) == (list(without_memory(STORY)), False)
        with closing(SqliteJournal(path, run="r")) as opened:
            assert list(opened.events()) == STORY


@pytest.mark.parametrize(
    ("statement", "events"),
    [
        ("DELETE FROM event WHERE seq = 7", 6),
        ("DELETE FROM event WHERE seq > 150", 150),
        ("DELETE FROM event", 0),
        ("UPDATE event SET t_s = t_s + 1 WHERE seq = 7", 6),
        ("UPDATE event SET kind = 'job-failed' WHERE seq = 8", 7),
        ("UPDATE event SET subject = 'trial-999' WHERE seq = 7", 6),
        ("UPDATE event SET schema = 1 WHERE seq = 7", 6),
        ("UPDATE event SET crc = crc + 1 WHERE seq = 7", 6),
        ("UPDATE event SET payload = replace(payload, '0.5', '0.9') WHERE seq = 7", 6),
        ("UPDATE event SET seq = -seq WHERE seq = 7", 0),
        ("UPDATE event SET payload = (SELECT payload FROM event WHERE seq = 3) WHERE seq = 7", 6),
        ("DROP TABLE event", 0),
        ("DROP TABLE run", 160),
    ],
)
def test_rows_that_somebody_changed_are_told(
    statement: str, events: int, whole: Path, tmp_path: Path
) -> None:
    path = copied(whole, tmp_path / "case")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)
    found, damaged = told(path)
    assert (len(found), damaged) == (events, events < len(STORY))
    check(path, statement)


def test_nothing_in_place_of_a_journal_is_told(whole: Path, tmp_path: Path) -> None:
    def damage_of(change: Callable[[Path], object]) -> Damage | None:
        path = copied(whole, tmp_path / "case")
        path.unlink()
        change(path)
        assert list(read_events(path)) == []
        check(path, "nothing in its place")
        path = copied(whole, tmp_path / "case")
        path.unlink()
        change(path)
        return find_damage(path)

    assert damage_of(lambda path: path.mkdir()) == Damage(0, 0.0, "it is a folder, not a file")
    assert damage_of(lambda path: path.touch()) == Damage(0, 0.0, "it is empty")
    gone = "it is gone, with the 160 events that were written to it"
    assert damage_of(lambda _: None) == Damage(0, 0.0, gone)
    text = damage_of(lambda path: path.write_bytes(b"hello\n" * 1000))
    assert text is not None
    assert "not a database" in text.problem


def test_events_lost_with_the_machine_are_told_and_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(whole, tmp_path / "case")
    EndMark.path(path).write_bytes(EndMark(170, rows.boot_id(), rows.host_id()).text())
    assert find_damage(path) == Damage(160, STORY[-1].t_s, "the last 10 of 170 events are missing")
    with pytest.raises(JournalError, match="the last 10 of 170 events are missing"):
        SqliteJournal(path, run="r")
    for module in (rows, sqlite):
        monkeypatch.setattr(module, "boot_id", lambda: "another start of the machine")
    lost = find_damage(path)
    assert lost is not None
    assert lost.machine_went_down
    content = path.read_bytes()
    with closing(SqliteJournal(path, run="r")) as journal:
        assert len(list(journal.events())) == 160
    assert find_damage(path) is None
    assert path.with_name("journal.sqlite.damaged-1").read_bytes() == content


@pytest.mark.parametrize(("host", "events"), [("same", 160), ("another", 160), ("same", 0)])
def test_only_the_machine_that_wrote_the_end_of_a_journal_may_have_lost_it(
    host: str, events: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(copied(whole, tmp_path / "runs" / "r").parent)
    folder.write("spec", dataclasses.asdict(SPEC))
    if not events:
        with closing(sqlite3.connect(folder.journal, isolation_level=None)) as connection:
            connection.execute("DELETE FROM event")
    EndMark.path(folder.journal).write_bytes(EndMark(170, rows.boot_id(), rows.host_id()).text())
    monkeypatch.setattr(rows, "boot_id", lambda: "another start of the machine")
    if host == "another":
        monkeypatch.setattr(rows, "host_id", lambda: "another machine")
    content = folder.journal.read_bytes()
    if host == "another" or not events:
        assert not mend_after_restart(folder)
        with pytest.raises(JournalError, match="of 170 events are missing"):
            SqliteJournal(folder.journal, run="r")
        with pytest.raises(InputError, match=r"of 170 events are missing.* --yes"):
            mend(folder, yes=False)
        assert folder.journal.read_bytes() == content
    else:
        done = mend_after_restart(folder)
        assert "10 of 170 events are missing, as the machine went down. It is kept as journal.sq" in done
        assert "the run continues after event 160" in done
        assert folder.path.joinpath("journal.sqlite.damaged-1").read_bytes() == content
        assert folder.path.joinpath("journal.sqlite.damaged-1.end").exists()
        assert len(list(folder.events())) == 160


OLD_TABLES = """
PRAGMA application_id = 0x53545254;
PRAGMA user_version = 1;
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


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A journal as 0.1 wrote it."""
    path = tmp_path / "old" / "journal.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(OLD_TABLES)
        connection.execute("INSERT INTO run (name) VALUES ('r')")
        connection.executemany(
            "INSERT INTO event (t_s, kind, subject, schema, payload) VALUES (?, ?, ?, 1, ?)",
            [(event.t_s, event.kind, event.subject, encode(event)) for event in STORY],
        )
    return path


def test_a_journal_of_an_earlier_version_is_read_and_continued(old: Path) -> None:
    assert told(old) == (list(without_memory(STORY)), False)
    assert list(read_events(old, with_memory=True)) == STORY
    with closing(SqliteJournal(old, run="r")) as journal:
        assert list(journal.events()) == STORY
        journal.append(STORY[:1])
    assert list(read_events(old, with_memory=True)) == [*STORY, STORY[0]]
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute("UPDATE event SET t_s = 0.125 WHERE seq = 9")
    assert find_damage(old) == Damage(8, STORY[7].t_s, "event 9 is not as it was written")


@pytest.mark.parametrize(
    ("statement", "events"),
    [
        ("DELETE FROM event WHERE seq = 7", 6),
        ("UPDATE event SET payload = '{' WHERE seq = 7", 6),
        ("UPDATE event SET t_s = t_s + 1 WHERE seq = 7", 6),
        ("UPDATE event SET payload = replace(payload, 'trial-001', 'trial-0x1') WHERE seq = 6", 5),
        ("UPDATE event SET payload = replace(payload, 'trial-001', 'trial-0x1') WHERE seq = 8", 7),
    ],
)
def test_what_can_be_told_of_damage_in_an_earlier_version_is_told(
    statement: str, events: int, old: Path
) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as connection:
        connection.execute(statement)
    found, damaged = told(old)
    assert (len(found), damaged) == (events, True)
    check(old, statement)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> RunFolder:
    """Of a run that was killed, with a metric changed in its journal."""
    folder = RunFolder(copied(whole, tmp_path / "runs" / "r").parent)
    folder.write("spec", dataclasses.asdict(SPEC))
    with closing(sqlite3.connect(folder.journal, isolation_level=None)) as connection:
        connection.execute("UPDATE event SET payload = replace(payload, '0.51', '0.99') WHERE seq = 43")
    return folder


SPEC = RunSpec(
    kind="run", started_at_s=0.0, asked={"policy": "fifo", "seed": 0, "jobs": {}, "works": {}}, slots=1
)


def test_reports_tell_what_is_before_the_damage_and_say_so(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (report, explain):
        command(str(folder.path), as_json=True)
        said = capsys.readouterr()
        assert "event 43 is not as it was written" in said.err
        assert "the events until 10s" in said.err
        found = json.loads(said.out)
        assert found["damage"] == said.err.strip()
        assert len(found["jobs"]) == 11
        assert found.get("known_until_s", 10.0) == 10.0
    explain(str(folder.path), "trial-003")
    assert "event 43 is not as it was written" in capsys.readouterr().err


@pytest.mark.processes
def test_the_summary_of_a_run_that_is_over_says_until_when_it_is_known(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write("result", {"ended_by": "jobs"})
    report(str(folder.path))
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "r under fifo: every job ended; its journal is damaged, and what follows is known only until 10s."
    )
    explain(str(folder.path))
    out = capsys.readouterr().out
    assert "10.0s  run known until here: its journal is damaged, and what follows is not known" in out
    assert "run ended" not in out


def test_a_run_goes_on_from_before_the_damage_if_somebody_agrees(folder: RunFolder) -> None:
    damaged = folder.journal.read_bytes()
    with pytest.raises(InputError, match=r"event 43 is not as it was written.* --yes .* at 10s"):
        mend(folder, yes=False)
    with pytest.raises(InputError, match="--yes"):
        mend(folder, yes=False, ask=lambda _: False)
    assert folder.journal.read_bytes() == damaged
    asked: list[str] = []

    def agree(said: str) -> bool:
        asked.append(said)
        return True

    done = mend(folder, yes=False, ask=agree)
    assert "continues after event 42, at 10s" in asked[0]
    assert "It is kept as journal.sqlite.damaged-1; the run continues after event 42, at 10s" in done
    assert folder.path.joinpath("journal.sqlite.damaged-1").read_bytes() == damaged
    assert not folder.damage()
    with closing(SqliteJournal(folder.journal, run="r")) as journal:
        assert list(journal.events()) == STORY[:42]
    assert not mend(folder, yes=False)


@pytest.mark.parametrize("begin_again", ["mend", "open"])
@pytest.mark.parametrize("renames", range(6))
def test_a_kill_while_a_damaged_journal_is_put_aside_loses_nothing(
    renames: int, begin_again: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal = folder.journal.with_name("journal.sqlite-wal")
    wal.write_bytes(b"")
    damaged, left = folder.journal.read_bytes(), iter(range(renames))
    rename = Path.rename

    def killed_at_last(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_at_last)
        with pytest.raises(KeyboardInterrupt):
            mend(folder, yes=True)
    assert folder.damage()
    if begin_again == "mend" or folder.journal.exists():
        assert "It is kept as journal.sqlite.damaged-1; the run continues" in mend(folder, yes=True)
    with closing(SqliteJournal(folder.journal, run="r")) as journal:
        assert list(journal.events()) == STORY[:42]
    assert not folder.damage()
    assert folder.path.joinpath("journal.sqlite.damaged-1").read_bytes() == damaged
    assert folder.path.joinpath("journal.sqlite.damaged-1.end").exists()
    assert not list(folder.path.glob("*.kept"))
    assert not list(folder.path.glob("*damaged-2*"))


def test_a_kept_part_that_is_not_needed_any_more_never_comes_back(folder: RunFolder) -> None:
    cut(folder.journal, "r")
    shutil.copy(folder.journal, folder.path / "journal.sqlite.kept")
    with closing(SqliteJournal(folder.journal, run="r")) as journal:
        journal.append(STORY[42:44])
    folder.journal.unlink()
    assert "it is gone, with the 44 events" in folder.damage()


def test_a_run_of_which_nothing_can_be_read_begins_anew_if_somebody_agrees(folder: RunFolder) -> None:
    folder.journal.write_bytes(b"")
    assert "no event can be read" in folder.damage()
    assert "the run starts anew" in mend(folder, yes=True)
    assert not folder.damage()
    assert list(folder.events()) == []


def test_the_journal_of_a_run_that_goes_on_is_left_alone(folder: RunFolder) -> None:
    cut(folder.journal, "r")
    with (
        closing(SqliteJournal(folder.journal, run="r")),
        pytest.raises(InputError, match="another process is working"),
    ):
        mend(folder, yes=True)
