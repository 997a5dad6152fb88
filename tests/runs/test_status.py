"""A run that is not over: in use, stopped or killed, and the words for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from launching import prepare, start
from stretto.core.errors import InputError
from stretto.core.events import Event, JobNoted, NodeRefused, NoteKind, RunPaused, RunResumed, RunStarted
from stretto.driving.drive import NoObserver, RealSubstrate
from stretto.driving.request import CheckedStudy, TuneRequest, check_request
from stretto.driving.stop import Stop
from stretto.driving.substrate import TrainingSpec
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.journal.sqlite import SqliteJournal
from stretto.runs.begin import begin
from stretto.runs.deadline import EndedBy
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.live_state import JobPhase, LiveState
from stretto.runs.results import tune_result
from stretto.runs.status import RunStatus, check_free, is_going_on, shown_state
from study_command import StudyCommand
from tune_world import STUDY, SimulatedWorkers, endless, simulated, write_study

KILLED_S = 35.0


@pytest.fixture
def stretto(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> StudyCommand:
    del here
    return StudyCommand(monkeypatch, capsys)


@pytest.fixture
def checked(here: Path) -> CheckedStudy:
    return check_request(TuneRequest(study=write_study(here), work="train.py:train", policy="asha"))


class StopsAt(NoObserver):
    """Asks to stop at a time, and looks at the run meanwhile."""

    def __init__(self, folder: RunFolder, at_s: float) -> None:
        self._folder = folder
        self._at_s = at_s
        self.stop = Stop()
        self.seen: set[str] = set()
        self.refused = 0

    def tick(self, now_s: float) -> None:
        if now_s < self._at_s:
            return
        self.seen.add(tune_result(self._folder, None).ended_by)
        try:
            check_free(self._folder)
        except InputError:
            self.refused += 1
        self.stop.ask()


def stopped(checked: CheckedStudy) -> StopsAt:
    observer = StopsAt(checked.folder, KILLED_S)
    start(prepare(checked, make=simulated), stop=observer.stop, observer=observer, make=simulated)
    return observer


def killed(checked: CheckedStudy) -> None:
    def make(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        del folder, clock
        return SimulatedWorkers(training, until_s=KILLED_S, break_off=True)

    with pytest.raises(SystemExit):
        start(prepare(checked, make=simulated), make=make)


class BreaksOff(NoObserver):
    """Raises at a time."""

    def __init__(self, error: BaseException, at_s: float) -> None:
        self._error = error
        self._at_s = at_s

    def tick(self, now_s: float) -> None:
        if now_s >= self._at_s:
            raise self._error


BREAKS = pytest.mark.parametrize(
    "error", [InputError("wrong."), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)


def folded(events: list[Event]) -> LiveState:
    board = LiveState()
    for event in events:
        board.observe(event)
    return board


def test_while_it_goes_on_nobody_else_may_touch_it(checked: CheckedStudy) -> None:
    observer = stopped(checked)
    assert observer.seen == {RunStatus.UNFINISHED}
    assert observer.refused
    assert not is_going_on(checked.folder)
    check_free(checked.folder)


def test_trials_of_a_stopped_run_are_paused(checked: CheckedStudy) -> None:
    stopped(checked)
    found = tune_result(checked.folder, None)
    assert found.ended_by == RunStatus.STOPPED
    assert found.trials_by_state["paused"] >= 2
    assert not {"running", "starting", "interrupted"} & found.trials_by_state.keys()


def test_they_start_again_when_it_is_resumed(checked: CheckedStudy) -> None:
    stopped(checked)
    events = list(checked.folder.events())
    assert isinstance(events[-1], RunPaused)
    held = {name for name, line in folded(events).jobs.items() if line.allocation}
    again = folded([*events, RunResumed(t_s=100.0, down_s=10.0)])
    assert held
    assert {name for name, line in again.jobs.items() if line.phase is JobPhase.STARTING} == held


@BREAKS
def test_a_run_that_was_broken_off_holds_nothing_from_then_on(
    checked: CheckedStudy, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        start(prepare(checked, make=simulated), observer=BreaksOff(error, KILLED_S), make=simulated)
    *_, before, last = checked.folder.events()
    assert isinstance(last, RunPaused)
    assert last.t_s >= before.t_s
    assert tune_result(checked.folder, None).ended_by == RunStatus.STOPPED
    assert start(prepare(checked, make=simulated), make=simulated).ended_by == "jobs"


@BREAKS
def test_one_that_was_broken_off_before_it_began_has_nothing_to_pause(
    checked: CheckedStudy, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        start(prepare(checked, make=simulated), observer=BreaksOff(error, 0.0), make=simulated)
    assert list(checked.folder.events()) == []


def test_those_of_a_killed_run_were_interrupted(checked: CheckedStudy, stretto: StudyCommand) -> None:
    killed(checked)
    found = stretto.json("report", "tiny")
    assert found["ended_by"] == RunStatus.INTERRUPTED
    assert found["trials_by_state"]["interrupted"] == 2
    assert "it was interrupted, and can be resumed, after" in stretto("report", "tiny")[1]
    story = stretto.json("explain", "tiny")
    assert [job["state"] for job in story["jobs"]].count("interrupted") == 2
    assert story["lines"][-1]["what"] == "interrupted"
    for words in (found, story):
        assert "running" not in str(words)


def test_once_resumed_it_is_not_interrupted_any_more(checked: CheckedStudy, stretto: StudyCommand) -> None:
    killed(checked)
    assert start(prepare(checked, make=simulated), make=simulated).ended_by == "jobs"
    assert "interrupted" not in str(stretto.json("explain", "tiny"))


def test_a_deadline_that_passed_while_it_was_dead_has_ended_it(here: Path, stretto: StudyCommand) -> None:
    request = TuneRequest(study=write_study(here), work="train.py:train", policy="asha", deadline_s=400.0)
    checked = check_request(request)
    killed(checked)
    spec = checked.folder.read("spec")
    assert spec is not None
    checked.folder.write("spec", {**spec, "started_at_s": time.time() - 401.0})
    found = stretto.json("report", "tiny")
    assert found["ended_by"] == "deadline"
    assert found["trials_by_state"]["cut off"] == 2
    assert "cut off" in stretto("explain", "tiny")[1]


@pytest.mark.parametrize(
    ("standing", "state"),
    [("unfinished", "running"), ("deadline", "cut off"), ("interrupted", "interrupted")],
)
def test_what_a_running_job_is_called(standing: str, state: str) -> None:
    assert shown_state(JobPhase.RUNNING, standing) == state
    assert shown_state(JobPhase.FINISHED, standing) == "finished"


def test_a_run_in_use_is_refused_in_words(checked: CheckedStudy, stretto: StudyCommand) -> None:
    stopped(checked)
    with closing(SqliteJournal(checked.folder.journal, run="tiny")):
        told = stretto.refused("tune", "study.toml", "train.py:train", "--policy", "asha")
    assert f"runs/tiny: another process is working on this run: process {os.getpid()} on" in told
    assert "for 0s, since" in told
    assert "`stretto stop tiny`" in told
    assert "stretto report tiny" in told


def test_a_run_that_is_being_measured_is_in_use(here: Path) -> None:
    unknown = STUDY[: STUDY.index("[profile]")]
    checked = check_request(TuneRequest(study=write_study(here, unknown), work="train.py:train"))
    told: list[InputError] = []

    def make(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        with ThreadPoolExecutor() as others:
            for touch in (lambda: check_free(checked.folder), lambda: prepare(checked, make=endless)):
                refused = others.submit(touch).exception()
                assert isinstance(refused, InputError)
                assert "another process is working on this run" in str(refused)
                told.append(refused)
        return endless(training, folder, clock)

    prepared = prepare(checked, make=make)
    assert len(told) == 2
    assert "stretto report" not in str(told[0]), "there is nothing to report yet"
    check_free(checked.folder)
    assert not prepared.resumes


def test_a_probe_that_fails_leaves_no_run(here: Path) -> None:
    unknown = STUDY[: STUDY.index("[profile]")]
    checked = check_request(TuneRequest(study=write_study(here, unknown), work="train.py:train"))

    def make(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
        del training, folder, clock
        raise InputError("it fails.")

    with pytest.raises(InputError, match="it fails"):
        prepare(checked, make=make)
    assert not checked.folder.path.exists()


def test_a_damaged_file_is_named(checked: CheckedStudy, stretto: StudyCommand) -> None:
    stopped(checked)
    for text in ("{}", '{"finish_s": 3}'):
        (checked.folder.path / "plan.json").write_text(text)
        assert "runs/tiny/plan.json: is not as it was written" in stretto("report", "tiny")[1]
    (checked.folder.path / "result.json").write_text('{"ended_by": "x"}')
    told = stretto.refused("report", "tiny")
    assert "runs/tiny/result.json: is not as it was written. Remove it: the command of the run" in told


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (NodeRefused(t_s=2.0, instance="box", count=1, why="no quota"), "no box came (no quota)"),
        (
            JobNoted(t_s=2.0, job_id="trial-000", text="it was importing", about=NoteKind.NOT_BEGUN),
            "it was importing",
        ),
    ],
)
def test_a_run_without_an_epoch_says_why(checked: CheckedStudy, event: Event, why: str) -> None:
    folder = checked.folder
    offer = slots_offer(2, MachineSpec())
    begin(folder, RunSpec(kind="tune", started_at_s=time.time(), asked=checked.asked, slots=2, offer=offer))
    with closing(SqliteJournal(folder.journal, run=folder.name)) as journal:
        journal.append([RunStarted(t_s=0.0, identity={"policy": "asha"}, nodes=()), event])
    problem = tune_result(folder, EndedBy.DEADLINE).problem
    assert problem == f"no trial completed an epoch: {why}."


def test_a_command_that_printed_no_epoch_is_told_so(checked: CheckedStudy) -> None:
    folder, asked = checked.folder, {**checked.asked, "command": ["python", "train.py"]}
    offer = slots_offer(2, MachineSpec())
    begin(folder, RunSpec(kind="tune", started_at_s=time.time(), asked=asked, slots=2, offer=offer))
    with closing(SqliteJournal(folder.journal, run=folder.name)) as journal:
        journal.append([RunStarted(t_s=0.0, identity={"policy": "asha"}, nodes=())])
    problem = tune_result(folder, EndedBy.DEADLINE).problem
    assert problem == "no trial completed an epoch: the command has printed no epoch."
