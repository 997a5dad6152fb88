"""`stretto runs`, `stop`, `logs` and `rm`: also on folders that are damaged, half written, old or foreign."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from test_status import killed, stopped

from launching import prepare, start
from stretto.cli.runs import age_text
from stretto.core.errors import InputError
from stretto.core.units import format_size
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.journal.sqlite import SqliteJournal
from stretto.runs.folder import RunFolder
from stretto.runs.logs import CHUNK_BYTES, FollowedLog, PrefixedLines, follow
from stretto.runs.manage import find_folder, list_runs, remove_run
from stretto.runs.status import holding
from stretto.system.locks import FileLock, Holder
from study_command import StudyCommand
from tune_world import simulated, write_study

LIMIT_S = 60.0
JOBS = """
[[job]]
name = "talker"
command = ["sh", "-c", "trap 'echo leaving; exit 0' TERM; echo hello; while :; do sleep 0.05; done"]
epochs = 1
"""


@pytest.fixture
def stretto(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> StudyCommand:
    del here
    return StudyCommand(monkeypatch, capsys)


@pytest.fixture
def checked(here: Path) -> CheckedStudy:
    return check_request(TuneRequest(study=write_study(here), work="train.py:train", policy="asha"))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over."""
    place = tmp_path_factory.mktemp("template")
    request = TuneRequest(
        study=write_study(place), work=f"{place}/train.py:train", policy="asha", runs=place / "runs"
    )
    checked = check_request(request)
    start(prepare(checked, make=simulated), make=simulated)
    return checked.folder.path


@pytest.fixture
def folder(here: Path, template: Path) -> RunFolder:
    shutil.copytree(template, here / "runs" / "tiny")
    return RunFolder(Path("runs") / "tiny")


def printed(folder: RunFolder, job: str, text: str) -> Path:
    folder.log(job).parent.mkdir(parents=True, exist_ok=True)
    with folder.log(job).open("a") as log:
        log.write(text)
    return folder.log(job)


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@contextmanager
def real_run(here: Path) -> Iterator[subprocess.Popen[str]]:
    (here / "jobs.toml").write_text(JOBS)
    words = ["run", "jobs.toml", "--name", "real", "--slots", "1"]
    command = [sys.executable, "-c", "from stretto.cli.start import main; main()", *words]
    with subprocess.Popen(
        command, cwd=here, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()
            run.communicate()


def other_folders(runs: Path) -> None:
    """What may lie beside runs, or be left of one."""
    (runs / "empty").mkdir(parents=True)
    (runs / "file").write_text("x")
    (runs / ".hidden").mkdir()
    (runs / ".hidden" / "spec.json").write_text("{}")
    for name, content in (("deep", "[" * 100_000), ("half", '{"kind": "tune"'), ("other", '{"name": "npm"}')):
        (runs / name).mkdir()
        (runs / name / "spec.json").write_text(content)
    (runs / "headless").mkdir()
    (runs / "headless" / "journal.sqlite").write_bytes(b"SQLite format 3\0 and then nothing")
    (runs / "measured").mkdir()
    (runs / "measured" / "profile.json").write_text('{"format": "stretto-profile", "epochs": []}')


class TestRuns:
    def test_without_any_it_says_so(self, stretto: StudyCommand) -> None:
        assert "There are no runs in runs/" in stretto("runs")[1]
        assert stretto.json("runs") == {"runs": []}
        assert stretto("report")[1] == stretto("runs")[1]

    @pytest.mark.usefixtures("folder")
    def test_a_run_is_listed_with_state_best_age_size_and_command(self, stretto: StudyCommand) -> None:
        (found,) = stretto.json("runs")["runs"]
        assert (found["name"], found["kind"], found["state"], found["pid"]) == (
            "tiny",
            "tune",
            "finished",
            None,
        )
        assert found["best_metric"] == stretto.json("report", "tiny")["best_metric"]
        assert found["size_bytes"] > 1000
        assert found["age_s"] < LIMIT_S
        assert found["command"]
        out = stretto("runs")[1]
        assert "| run  | state    | best" in out
        assert f"accuracy {found['best_metric']:.4g}" in out
        assert stretto("report")[1].splitlines()[0] == out.splitlines()[0]

    @pytest.mark.parametrize(("end", "state"), [(stopped, "stopped"), (killed, "interrupted")])
    def test_how_a_run_stands(
        self, stretto: StudyCommand, checked: CheckedStudy, end: Callable[[CheckedStudy], object], state: str
    ) -> None:
        end(checked)
        assert stretto.json("runs")["runs"][0]["state"] == state

    def test_who_works_on_it_is_named(self, stretto: StudyCommand, folder: RunFolder) -> None:
        with holding(folder), holding(RunFolder(Path("runs") / "new")):
            found = {line["name"]: (line["state"], line["pid"]) for line in stretto.json("runs")["runs"]}
        assert found["new"] == ("measuring", os.getpid())
        assert found["tiny"] == ("finished", os.getpid())

    def test_the_newest_is_first(self, here: Path, folder: RunFolder) -> None:
        for name, started_s in (("old", 100.0), ("older", 50.0)):
            shutil.copytree(folder.path, here / "runs" / name)
            copy = RunFolder(here / "runs" / name)
            copy.write("spec", {**(copy.read("spec") or {}), "started_at_s": started_s})
        assert [line.name for line in list_runs(here / "runs", now_s=200.0)] == ["tiny", "old", "older"]

    def test_damaged_and_foreign_folders_are_no_tracebacks(self, here: Path, stretto: StudyCommand) -> None:
        other_folders(here / "runs")
        found = {line["name"]: line for line in stretto.json("runs")["runs"]}
        assert {name: line["state"] for name, line in found.items()} == {
            "deep": "damaged",
            "half": "damaged",
            "other": "damaged",
            "headless": "damaged",
            "measured": "not begun",
        }
        out = stretto("runs")[1]
        assert "runs/deep/spec.json: cannot be read as JSON (it is nested too deeply)." in out
        for name in found:
            for words in (
                ("report", name),
                ("explain", name),
                ("logs", name),
                ("stop", name),
                ("logs", name, "a"),
            ):
                code, _, err = stretto(*words)
                assert (code in {0, 1, 2}, "Traceback" in err) == (True, False)
            assert stretto("logs", name, "-f")[0] == 0

    def test_a_run_of_version_0_1_has_a_command_too(self, stretto: StudyCommand, folder: RunFolder) -> None:
        spec = folder.read("spec")
        assert spec is not None
        del spec["command"]
        (folder.path / "spec.json").write_text(json.dumps(spec))
        assert stretto.json("runs")["runs"][0]["command"] == f"stretto tune {spec['file']}"

    @pytest.mark.usefixtures("folder")
    @pytest.mark.parametrize("command", ["report", "explain", "logs", "stop", "rm"])
    def test_a_typo_is_told_with_near_names(self, stretto: StudyCommand, command: str) -> None:
        for wrong in ("tinny", "runs/tinny", "nonsense", "a\nb", "x" * 300, "", "..", "/"):
            told = stretto.refused(command, wrong)
            assert "no run" in told or "not the folder of a run" in told
            assert "Did you mean tiny?" in told or wrong != "tinny"

    def test_ages_and_sizes_are_short(self) -> None:
        assert [age_text(age_s) for age_s in (5.0, 3700.0, 100_000.0, 1e300)] == [
            "5s", "1h 01m", "1d 04h", "11574d 02h",
        ]  # fmt: skip
        assert [format_size(size) for size in (0, 999, 1e6, 1.234e9, 5e12)] == [
            "0 B", "999 B", "1 MB", "1.23 GB", "5 TB",
        ]  # fmt: skip


class TestLogs:
    def test_of_a_job_and_of_all(self, stretto: StudyCommand, folder: RunFolder) -> None:
        printed(folder, "trial-000", "one\ntwo\n")
        folder.failed_log.write_text("it failed\n")
        code, out, _ = stretto("logs", "tiny", "trial-000")
        assert (code, out) == (0, "one\ntwo\n")
        listed = stretto("logs", "tiny")[1]
        assert "runs/tiny/jobs/trial-000/stdout.log" in listed
        assert "| two " in listed
        assert "| it failed" in listed
        found = stretto.json("logs", "runs/tiny")["logs"]
        assert found[0]["last_line"] == "two"
        assert "has printed nothing yet" in stretto("logs", "tiny", "trial-001")[2]

    @pytest.mark.usefixtures("folder")
    def test_a_job_that_is_not_there_is_told_with_near_names(self, stretto: StudyCommand) -> None:
        assert "there is no job 'trial-00'. Did you mean trial-00" in stretto.refused(
            "logs", "tiny", "trial-00"
        )
        assert "there is no job '../tiny'" in stretto.refused("logs", "tiny", "../tiny")
        assert "--json is for the list" in stretto.refused("logs", "tiny", "trial-000", "--json")

    def test_a_dead_run_is_followed_to_its_end(self, stretto: StudyCommand, folder: RunFolder) -> None:
        printed(folder, "trial-000", "one\nhalf")
        assert stretto("logs", "tiny", "trial-000", "-f")[1] == "one\nhalf"
        assert stretto("logs", "tiny", "-f")[1] == "trial-000 | one\ntrial-000 | half\n"

    def test_a_running_one_until_it_ends(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path)
        said: list[bytes] = []
        script = iter(["a\n", "b", "c\nd\n"])

        def sleep(_: float) -> None:
            printed(folder, "x", next(script))

        looks = iter([False, False, False, True])
        follow(folder, None, said.append, sleep=sleep, is_over=lambda _: next(looks))
        assert b"".join(said) == b"x | a\nx | bc\nx | d\n"

    def test_a_log_that_begins_anew_is_read_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        log = FollowedLog(path)
        assert log.more() == b""
        path.write_bytes(b"first\n")
        assert (log.more(), log.more()) == (b"first\n", b"")
        path.write_bytes(b"two\n")
        assert log.more() == b"two\n"

    def test_a_log_that_is_put_aside_is_read_to_its_end_first(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_bytes(b"first\n")
        log = FollowedLog(path)
        assert log.more() == b"first\n"
        long = b"x" * CHUNK_BYTES
        with path.open("ab") as file:
            file.write(long + b"last\n")
        path.rename(tmp_path / "log.1")
        assert log.more() == b""
        path.write_bytes(b"new\n")
        assert [log.more() for _ in range(4)] == [long, b"last\n", b"new\n", b""]

    def test_a_line_without_an_end_is_shown_in_parts(self) -> None:
        lines = PrefixedLines(b"a | ")
        bar = b"\r 10%" * 1000
        said = [lines.add(bar) for _ in range(100)]
        longest = max(len(one) for one in said)
        assert CHUNK_BYTES < longest < 2 * CHUNK_BYTES
        shown = b"".join([*said, lines.add(b"", last=True)])
        assert shown.replace(b"a | ", b"").replace(b"\n", b"") == bar * 100

    def test_lines_wait_for_their_end(self) -> None:
        lines = PrefixedLines(b"a | ")
        assert lines.add(b"one\ntw") == b"a | one\n"
        assert lines.add(b"o") == b""
        assert lines.add(b"", last=True) == b"a | two\n"
        assert lines.add(b"", last=True) == b""


class TestRm:
    def test_it_goes_with_everything_and_nothing_else(self, stretto: StudyCommand, folder: RunFolder) -> None:
        outside = Path("outside")
        outside.mkdir()
        (outside / "kept").write_text("x")
        printed(folder, "trial-000", "x")
        (folder.path / "jobs" / "link").symlink_to(outside.absolute())
        (folder.path / "link").symlink_to(outside.absolute() / "kept")
        code, out, _ = stretto("rm", "tiny", "--yes")
        assert code == 0
        assert out.startswith("removed runs/tiny (")
        assert not folder.path.exists()
        assert (outside / "kept").read_text() == "x"

    def test_nobody_is_there_to_agree(self, stretto: StudyCommand, folder: RunFolder) -> None:
        assert "Add --yes" in stretto.refused("rm", "tiny")
        assert folder.is_begun

    def test_on_a_terminal_it_asks(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        asked: list[str] = []

        def confirm(text: str, **_: object) -> bool:
            asked.append(text)
            return True

        monkeypatch.setattr("typer.confirm", confirm)
        assert stretto("rm", "tiny")[0] == 0
        assert "Remove runs/tiny (finished, accuracy" in asked[0]
        assert not folder.path.exists()

    def test_a_running_one_is_refused(self, stretto: StudyCommand, folder: RunFolder) -> None:
        with closing(SqliteJournal(folder.journal, run=folder.name)):
            assert "another process is working on this run" in stretto.refused("rm", "tiny", "--yes")
        assert folder.is_begun

    def test_links_foreign_folders_and_runs_with_nodes_up_are_refused(
        self, here: Path, stretto: StudyCommand, folder: RunFolder
    ) -> None:
        (here / "runs" / "link").symlink_to(folder.path.absolute())
        assert "links are not followed" in stretto.refused("rm", "link", "--yes")
        (here / "project").mkdir()
        (here / "project" / "spec.json").write_text('{"name": "npm"}')
        assert "may not be the folder of a run" in stretto.refused("rm", "./project", "--yes")
        for wrong in (".", "..", "/", str(here), "runs"):
            assert "run" in stretto.refused("rm", wrong, "--yes")
        folder.nodes.mkdir()
        (folder.nodes / "box-1.json").write_text("{}")
        assert "box-1 may still be up" in stretto.refused("rm", "tiny", "--yes")
        assert folder.is_begun
        assert (here / "project" / "spec.json").exists()

    @pytest.mark.parametrize(("lock", "whose"), [("jobs/trial-000/lock", "trial-000"), ("lock", "its jobs")])
    def test_one_whose_jobs_are_still_ending_is_refused(
        self, stretto: StudyCommand, folder: RunFolder, lock: str, whose: str
    ) -> None:
        printed(folder, "trial-000", "x")
        held = FileLock(folder.path / lock)
        before = sorted(folder.path.rglob("*"))
        assert f"processes of {whose} are still ending" in stretto.refused("rm", "tiny", "--yes")
        with pytest.raises(InputError, match="are still ending"):  # also if they begin after the question
            remove_run(folder)
        assert sorted(folder.path.rglob("*")) == before
        held.release()
        assert stretto("rm", "tiny", "--yes")[0] == 0

    def test_what_could_not_be_removed_is_still_that_run(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(path: Path) -> None:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

        printed(folder, "trial-000", "x")
        (folder.path / "id").write_text("x")
        with monkeypatch.context() as patched:
            patched.setattr("stretto.runs.manage.shutil.rmtree", full)
            told = stretto.refused("rm", "tiny", "--yes")
        assert "could not be removed completely: runs/tiny/jobs: Directory not empty." in told
        assert (folder.path / "id").exists()
        assert folder.is_begun
        assert stretto("rm", "tiny", "--yes")[0] == 0
        assert not folder.path.exists()

    @pytest.mark.parametrize(("content", "code"), [("", 0), ("4711", 2), ('{"pid": 1}', 2)])
    def test_a_lock_by_its_name_alone_is_no_run(
        self, here: Path, stretto: StudyCommand, content: str, code: int
    ) -> None:
        (here / "project").mkdir()
        (here / "project" / "journal.sqlite.lock").write_text(content)
        assert stretto("rm", "./project", "--yes")[0] == code
        assert (here / "project").exists() == bool(code)

    def test_damaged_ones_can_be_removed(self, here: Path, stretto: StudyCommand, folder: RunFolder) -> None:
        (folder.path / "spec.json").write_text("[" * 100_000)
        assert stretto("rm", str(folder.path), "--yes")[0] == 0
        other_folders(here / "runs")
        assert stretto("rm", "measured", "--yes")[0] == 0
        assert sorted(path.name for path in (here / "runs").iterdir()) == [
            ".hidden", "deep", "empty", "file", "half", "headless", "other",
        ]  # fmt: skip


class TestStop:
    @pytest.mark.usefixtures("folder")
    def test_one_that_does_not_run(self, stretto: StudyCommand) -> None:
        assert stretto("stop", "tiny") == (0, "runs/tiny is not running: finished.\n", "")

    def test_one_on_another_machine(self, stretto: StudyCommand, folder: RunFolder) -> None:
        with holding(folder) as lock:
            lock.say(Holder(pid=1, since_s=1.0, command="stretto tune", host="far-away"))
            assert "Run `stretto stop` on far-away." in stretto.refused("stop", "tiny")

    @pytest.mark.processes
    def test_a_real_one_is_stopped_followed_and_removed(self, here: Path, stretto: StudyCommand) -> None:
        with real_run(here) as run:
            folder = RunFolder(Path("runs") / "real")
            until(lambda: folder.log("talker").is_file() and "hello" in folder.log("talker").read_text())
            (line,) = stretto.json("runs")["runs"]
            assert (line["state"], line["pid"]) == ("running", run.pid)
            assert "is working on this run" in stretto.refused("rm", "real", "--yes")
            code, out, err = stretto("stop", "real")
            assert code == 0
            assert f"asked process {run.pid} to stop once its jobs have saved." in err
            assert out.startswith("runs/real: stopped; ")
            assert "talker" in out
            assert "resume with: -c run jobs.toml --name real --slots 1" in out
            assert run.wait(LIMIT_S) == 1
        assert stretto("logs", "real", "talker", "-f")[1].startswith("hello\n")
        assert not folder.stop_asked.exists()
        assert stretto("stop", "real")[1] == "runs/real is not running: stopped.\n"
        assert stretto("rm", "real", "--yes")[0] == 0

    def test_asked_twice_is_asked_once_and_now_is_a_second_time(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[tuple[int, int]] = []
        pid = os.getpid()
        monkeypatch.setattr("stretto.runs.manage.os.kill", lambda *sending: sent.append(sending))
        monkeypatch.setattr("stretto.runs.manage._with_open", lambda _: [pid])
        monkeypatch.setattr("stretto.cli.runs.wait_until_stopped", lambda _: None)
        with holding(folder):
            stretto("stop", "tiny")
            stretto("stop", "tiny")
            assert sent == [(pid, signal.SIGTERM)]
            stretto("stop", "tiny", "--now")
            assert sent == [(pid, signal.SIGTERM)] * 2

    def test_one_that_ends_before_the_signal_comes_is_not_running(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gone(*_: int) -> None:
            raise ProcessLookupError

        monkeypatch.setattr("stretto.runs.manage.os.kill", gone)
        monkeypatch.setattr("stretto.runs.manage._with_open", lambda _: [os.getpid()])
        with holding(folder):
            assert stretto("stop", "tiny") == (0, "runs/tiny is not running: finished.\n", "")
        assert not folder.stop_asked.exists()

    def test_one_that_ends_while_its_process_is_looked_for_is_not_running(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with holding(folder):
            pass
        monkeypatch.setattr("stretto.cli.runs.is_going_on", lambda _: True)
        assert stretto("stop", "tiny") == (0, "runs/tiny is not running: finished.\n", "")

    @pytest.mark.parametrize("is_named", [True, False])
    def test_another_process_that_has_the_lock_open_is_asked_only_if_no_holder_is_named(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, is_named: bool
    ) -> None:
        sent: list[int] = []
        monkeypatch.setattr("stretto.runs.manage.os.kill", lambda pid, _: sent.append(pid))
        monkeypatch.setattr("stretto.runs.manage._with_open", lambda _: [7])
        monkeypatch.setattr("stretto.cli.runs.wait_until_stopped", lambda _: None)
        with holding(folder) as lock:
            if is_named:
                assert "is not visible here" in stretto.refused("stop", "tiny")
            else:
                os.ftruncate(lock.fd, 0)
                assert stretto("stop", "tiny")[0] == 0
        assert sent == ([] if is_named else [7])

    @pytest.mark.usefixtures("here")
    def test_one_that_had_not_begun_says_what_is_kept(
        self, stretto: StudyCommand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = RunFolder(Path("runs") / "early")
        asked = Holder(pid=7, since_s=0.0, command="", host="")
        monkeypatch.setattr("stretto.cli.runs.ask_to_stop", lambda *_, **__: asked)
        monkeypatch.setattr("stretto.cli.runs.wait_until_stopped", lambda _: None)
        with holding(folder):
            assert stretto("stop", "early")[1] == (
                "runs/early: stopped before its first job started; there is nothing to resume.\n"
            )
            folder.profile.touch()
            assert stretto("stop", "early")[1] == (
                "runs/early: stopped before its first job started; "
                "the measured speeds are kept in runs/early/profile.json.\n"
            )

    def test_ctrl_c_ends_only_the_waiting(
        self, stretto: StudyCommand, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:

        def interrupted(_: RunFolder) -> None:
            raise KeyboardInterrupt

        asked = Holder(pid=7, since_s=0.0, command="", host="")
        monkeypatch.setattr("stretto.cli.runs.ask_to_stop", lambda *_, **__: asked)
        monkeypatch.setattr("stretto.cli.runs.wait_until_stopped", interrupted)
        with holding(folder):
            code, _, err = stretto("stop", "tiny")
        assert code == 1
        assert "is still stopping; `stretto stop tiny --now` ends it at once." in err


def test_a_name_or_a_path_is_found(here: Path, folder: RunFolder) -> None:
    for words in ("tiny", "runs/tiny", "./runs/tiny/", str(here / "runs" / "tiny")):
        assert find_folder(words).path.resolve() == folder.path.resolve()
    with pytest.raises(InputError, match="is not the folder of a run"):
        find_folder("./runs")


@pytest.mark.parametrize("command", ["runs", "stop", "logs", "rm", "report"])
def test_help_is_a_screen_with_an_example(stretto: StudyCommand, command: str) -> None:
    code, out, _ = stretto(command, "--help")
    assert code == 0
    assert f"Example: stretto {command}" in out
    assert len(out.splitlines()) <= 40
