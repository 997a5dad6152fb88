"""One run, one process: the lock comes before anything is written, and says who holds it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_status import BreaksOff

from launching import prepare, start, start_run
from stretto.core.errors import InputError, JournalError
from stretto.core.events import RunStarted
from stretto.driving.drive import LOOK_S
from stretto.driving.request import TuneRequest, check_request
from stretto.journal.sqlite import SqliteJournal
from stretto.launch.jobs import RunRequest, check_run
from stretto.runs.begin import begin
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.status import LiveRun, holding, is_going_on, live_runs, neighbour_notes
from stretto.system.locks import FileLock, Holder, LockedError, holder_of, is_held
from tune_world import simulated, write_study

HOLDER = Holder(pid=4711, since_s=1000.0, command="stretto tune study.toml", host="box")
ROUNDS, STARTERS = 12, 5
CHILD = """
import sys
from pathlib import Path
from stretto.runs.status import holding
from stretto.runs.folder import RunFolder
with holding(RunFolder(Path(sys.argv[1])), devices=("", "")):
    print("held", flush=True)
    sys.stdin.read()
"""


def spec_of(seed: int) -> RunSpec:
    return RunSpec(kind="run", started_at_s=0.0, asked={"policy": "fifo", "seed": seed}, slots=1)


def start_as(folder: RunFolder, seed: int) -> None:
    """What every start does, in its order."""
    with holding(folder) as lock:
        begin(folder, spec_of(seed))
        with closing(SqliteJournal(folder.journal, run=folder.name, lock=lock)) as journal:
            if not list(journal.events()):
                journal.append(
                    [RunStarted(t_s=0.0, identity={"policy": "fifo", "seed": str(seed)}, nodes=())]
                )


@contextmanager
def held_by_another(folder: Path) -> Iterator[int]:
    command = [sys.executable, "-c", CHILD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "held\n"
        yield child.pid
        child.stdin.close()


def test_starts_at_once_never_mix_two_runs(tmp_path: Path) -> None:
    barrier = threading.Barrier(STARTERS)
    refused: list[str] = []
    broken: list[Exception] = []

    def starter(seed: int) -> None:
        for number in range(ROUNDS):
            barrier.wait(60.0)
            try:
                start_as(RunFolder(tmp_path / "runs" / str(number)), seed)
            except InputError as error:
                refused.append(str(error))
            except (JournalError, OSError) as error:
                broken.append(error)

    threads = [threading.Thread(target=starter, args=(seed,)) for seed in range(STARTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert broken == []
    assert len(refused) == ROUNDS * (STARTERS - 1)
    assert all(
        "another process is working on" in text or "was begun with other settings" in text for text in refused
    )
    for number in range(ROUNDS):
        folder = RunFolder(tmp_path / "runs" / str(number))
        (first,) = folder.events()
        assert isinstance(first, RunStarted)
        assert first.identity["seed"] == str(folder.begun_spec().seed)


@pytest.mark.processes
def test_two_real_starts_under_one_name(tmp_path: Path) -> None:
    script = "from stretto.cli.start import main; main()"
    starts = []
    for which in ("first", "second"):
        jobs = tmp_path / f"{which}.toml"
        jobs.write_text(f'[[job]]\nname = "{which}"\ncommand = ["sleep", "0.1"]\nepochs = 1\n')
        command = [sys.executable, "-c", script, "run", str(jobs), "--name", "shared", "--slots", "1"]
        starts.append(
            subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    told = [start.communicate(timeout=100.0)[1] for start in starts]
    assert sorted(start.returncode for start in starts) == [0, 2], told
    loser = told[[start.returncode for start in starts].index(2)]
    assert "working on this run" in loser or "was begun with other settings" in loser
    winner = ("first", "second")[[start.returncode for start in starts].index(0)]
    folder = RunFolder(tmp_path / "runs" / "shared")
    assert folder.begun_spec().asked["works"] == {winner: "sleep 0.1"}
    assert [path.name for path in (folder.path / "jobs").iterdir()] == [winner]


def test_a_thread_may_hold_it_several_times_and_leaves_nothing_of_a_run_that_did_not_begin(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    with holding(folder):
        with holding(folder):
            assert is_going_on(folder)
        assert is_going_on(folder)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    with holding(RunFolder(tmp_path / "a")):
        (tmp_path / "a" / "profile.json").write_text("{}")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["profile.json"]


@pytest.mark.processes
def test_who_holds_it_is_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    with held_by_another(folder.path) as pid:
        with pytest.raises(InputError, match=rf"process {pid} on .* \(`-c .*`, for .*, since ") as refused:
            start_as(folder, 1)
        assert "`stretto stop a`" in refused.value.remedy
        found = [run for run in live_runs() if run.holder.pid == pid]
        assert [run.folder.path for run in found] == [folder.path]
        assert found[0].holder.devices == ("", "")
    assert [run for run in live_runs() if run.holder.pid == pid] == []


def test_a_dead_process_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite.lock"
    FileLock(path).release()
    assert holder_of(path) is not None, "what is written there is no lock"
    assert not is_held(path)
    FileLock(path).release()


def test_a_lock_whose_file_was_removed_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock(path)
    assert first.is_in_place
    path.unlink()
    assert not first.is_in_place
    second = FileLock(path)
    with pytest.raises(LockedError):
        FileLock(path)
    first.release(remove=True)
    assert second.is_in_place, "only its own file is removed"
    second.release(remove=True)
    assert not path.exists()


def test_a_renamed_folder_is_locked_under_its_new_name(tmp_path: Path) -> None:
    with holding(RunFolder(tmp_path / "a")):
        (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(InputError, match="another process is working on this run"):
            start_as(RunFolder(tmp_path / "b"), 1)
        FileLock(tmp_path / "b" / "other").release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": "x"}', b"[" * 10000, b"\xff" * 100_000])
def test_what_a_lock_says_may_be_damaged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lock"
    path.write_bytes(content)
    assert holder_of(path) is None
    FileLock(path).release()
    found = holder_of(path)
    assert found is not None
    assert found.pid == os.getpid()


def test_a_folder_that_is_gone_ends_the_run_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked = check_request(TuneRequest(study=write_study(tmp_path), work="train.py:train", policy="asha"))

    class Takes(BreaksOff):
        def tick(self, now_s: float) -> None:
            if now_s > 10 * LOOK_S and checked.folder.path.exists():
                checked.folder.path.rename(tmp_path / "away")

    observer = Takes(SystemExit(), 0.0)
    with pytest.raises(JournalError, match="runs/tiny was moved or removed while the run was live"):
        start(prepare(checked, make=simulated), observer=observer, make=simulated)
    assert not checked.folder.path.exists(), "nothing is written at the old place"


class TestNeighbours:
    def told(self, theirs: tuple[str, ...], mine: tuple[str, ...]) -> tuple[str, ...]:
        holder = dataclasses.replace(HOLDER, devices=theirs)
        run = LiveRun(folder=RunFolder(Path("/data/runs/a")), holder=holder)
        return neighbour_notes([run], mine, cores=4, now_s=1090.0)

    @pytest.mark.parametrize(
        ("theirs", "mine"),
        [
            (("0", "1"), ("2", "3")),
            (("", ""), ("", "")),
            (("0",), ("", "", "", "")),
            ((), ("", "", "", "")),
            ((), ("0",)),
        ],
        ids=["other GPUs", "cores enough", "a GPU and cores", "on a cluster", "measuring on none"],
    )
    def test_nothing_is_said_of_runs_that_are_in_no_ones_way(
        self, theirs: tuple[str, ...], mine: tuple[str, ...]
    ) -> None:
        assert self.told(theirs, mine) == ()

    @pytest.mark.parametrize(
        ("theirs", "mine", "shared"),
        [
            (("0", "1"), ("1", "2"), "GPU 1"),
            (("", "", ""), ("", ""), "4 cores, with 5 slots together"),
        ],
    )
    def test_those_on_the_same_slots_are_named(
        self, theirs: tuple[str, ...], mine: tuple[str, ...], shared: str
    ) -> None:
        (note,) = self.told(theirs, mine)
        since = time.strftime("%H:%M:%S", time.localtime(1000.0))
        assert f"on the same slots ({shared}): /data/runs/a, process 4711 on box" in note
        assert f"(`stretto tune study.toml`, for 1m 30s, since {since})" in note
        assert "`stretto stop /data/runs/a`" in note

    def test_of_many_two_are_named_and_the_rest_is_counted_with_how_to_see_it(self) -> None:
        holder = dataclasses.replace(HOLDER, devices=("0",))
        runs = [
            LiveRun(folder=RunFolder(Path(f"/data/{at % 2}/runs/{at}")), holder=holder) for at in range(7)
        ]
        first, second, rest = neighbour_notes(runs, ("0",), cores=4, now_s=1090.0)
        assert "/data/0/runs/0" in first
        assert "/data/1/runs/1" in second
        assert rest == (
            "And 5 more runs on the same slots, listed by `stretto runs /data/0/runs`, "
            "`stretto runs /data/1/runs`."
        )
        assert "1 more run on" in neighbour_notes(runs[:3], ("0",), cores=4, now_s=1090.0)[-1]


def test_what_it_trains_on_is_told_later_and_since_when_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    with holding(folder):
        before = holder_of(folder.lock)
        with holding(folder, devices=("0", "1")):
            after = holder_of(folder.lock)
    assert before is not None
    assert after == dataclasses.replace(before, devices=("0", "1"))


def test_a_lock_that_was_removed_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    flock = fcntl.flock
    removed: list[Path] = []

    def after_its_last_holder_removed_it(fd: int, operation: int) -> None:
        if not removed:
            removed.append(path)
            path.unlink()
        flock(fd, operation)

    monkeypatch.setattr("stretto.system.locks.fcntl.flock", after_its_last_holder_removed_it)
    lock = FileLock(path)
    assert removed
    assert lock.is_in_place
    lock.release()


def test_nothing_of_a_run_is_written_by_whoever_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write = RunFolder.write
    written: list[tuple[str, bool]] = []

    def seen(folder: RunFolder, name: str, tables: dict[str, Any]) -> None:
        written.append((name, is_going_on(folder)))
        write(folder, name, tables)

    monkeypatch.setattr(RunFolder, "write", seen)
    checked = check_request(TuneRequest(study=write_study(tmp_path), work="train.py:train", policy="asha"))
    start(prepare(checked, make=simulated), make=simulated)
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nname = "a"\ncommand = ["true"]\nepochs = 1\n')
    start_run(check_run(RunRequest(jobs=jobs, slots=1)), make=simulated)
    assert {name for name, _ in written} == {"spec", "plan", "result", "described"}
    assert all(held for _, held in written)
