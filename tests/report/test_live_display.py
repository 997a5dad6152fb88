"""What a real run shows while it goes, and its page afterwards."""

from __future__ import annotations

import dataclasses
import io
import signal
from functools import partial
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.live import Live

from builders import make_job
from launching import prepare, start
from stretto.cli.explain import story_text
from stretto.cli.live import Display, Outlook, PlainLines, stoppable
from stretto.core.allocation import NOTHING, BatchChoice, on_nodes
from stretto.core.decision import Reason, ReasonCode
from stretto.core.errors import last_line
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeLost,
    NodeReleased,
    RunResumed,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Tier
from stretto.core.observations import Result
from stretto.driving.request import TuneRequest, check_request
from stretto.driving.stop import Stop
from stretto.launch.tune import PreparedStudy
from stretto.report.run_page import write_run_page
from stretto.runs.explain import explain
from stretto.runs.folder import RunFolder
from stretto.runs.live_state import JobPhase, LiveState
from stretto.runs.metrics_files import metrics_after
from study_command import without_libraries
from tune_world import STUDY, simulated, write_study

PRICED = STUDY.replace("slots = 2", "slots = 2\nusd_per_slot_hour = 3600")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedStudy:
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path, PRICED)
    request = TuneRequest(study=study, work="train.py:train", policy="asha", deadline_s=400.0)
    return prepare(check_request(request), make=simulated)


@pytest.fixture
def events(prepared: PreparedStudy) -> list[Event]:
    start(prepared, make=simulated)
    return list(prepared.checked.folder.events())


def terminal(height: int = 40, width: int = 160) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def drawn(display: Display, console: Console) -> str:
    with console.capture() as capture:
        console.print(display.render())
    return capture.get()


def shown(
    prepared: PreparedStudy, events: list[Event], until_s: float, height: int = 40, width: int = 160
) -> str:
    console = terminal(height, width)
    outlook = Outlook(
        tuning=prepared.tuning,
        finish_s=prepared.expectation.finish_s,
        usd_per_slot_hour=prepared.checked.outline.machine.usd_per_slot_hour,
    )
    display = Display(console, "a run", prepared.tuning.study, outlook, Stop())
    for event in events:
        if event.t_s <= until_s:
            display.observe(event)
    display.tick(until_s)
    return drawn(display, console)


def test_the_display_tells_where_the_run_stands(prepared: PreparedStudy, events: list[Event]) -> None:
    text = shown(prepared, events, 60.0)
    assert "1m 00s of 6m " in text
    assert "spent $120.00" in text
    assert "done after 2m" in text
    assert "best accuracy 0." in text
    assert "running" in text
    assert "No slot is free for a new trial." in text


def test_where_there_is_little_room_reasons_are_cut_and_nothing_else(
    prepared: PreparedStudy, events: list[Event]
) -> None:
    text = shown(prepared, events, 60.0, width=90)
    assert "trial-000" in text
    assert "waiting" in text
    assert "done after" in text
    assert "No slot is free" in text
    assert "No slot is free for a new trial." not in text
    assert all(len(line) <= 90 for line in text.splitlines())


def test_it_says_that_it_stops() -> None:
    out, stop = io.StringIO(), Stop()
    lines = PlainLines(Console(file=out, width=200), None, stop)
    display = Display(terminal(), "jobs", None, None, stop)
    lines.tick(1.0)
    assert "stopping" not in drawn(display, terminal())
    stop.ask()
    for _ in range(2):
        lines.tick(2.0)
    assert out.getvalue().count("stopping: running jobs are asked to save") == 1
    assert "stopping: running jobs are asked to save" in drawn(display, terminal())


def test_every_moment_can_be_drawn(prepared: PreparedStudy, events: list[Event]) -> None:
    for now_s in range(0, 160, 10):
        assert len(shown(prepared, events, float(now_s), height=12).splitlines()) <= 12


def test_troubles_are_told_above_the_display(events: list[Event]) -> None:
    console, out = terminal(), io.StringIO()
    console.file = out
    display = Display(console, "a run", None, None, Stop())
    trial = next(event.job_id for event in events if isinstance(event, JobReported))
    with Live(console=console, auto_refresh=False, get_renderable=display.render) as live:
        display.live = live
        display.observe(JobFailed(t_s=1.0, job_id=trial, error="OSError: long ago"))
        display.tick(2.0)
        display.observe(JobFailed(t_s=3.0, job_id=trial, error="Traceback\nValueError: oh\n", log="x"))
    assert "3s  trial-000 failed: ValueError: oh" in out.getvalue()
    assert "long ago" not in out.getvalue()


def test_jobs_without_a_study_are_drawn_too(events: list[Event]) -> None:
    console = terminal()
    display = Display(console, "jobs", None, None, Stop())
    for event in events:
        display.observe(event)
    assert "finished" in drawn(display, console)


def test_plain_lines_leave_out_what_had_happened_before(prepared: PreparedStudy, events: list[Event]) -> None:
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=80), prepared.tuning.study, Stop())
    half = len(events) // 2
    for event in events[:half]:
        lines.observe(event)
    assert out.getvalue() == ""
    lines.tick(0.0)
    for event in events[half:]:
        lines.observe(event)
    trial = next(event.job_id for event in events if isinstance(event, JobReported))
    lines.observe(JobRetried(t_s=149.0, job_id=trial, attempt=1, error="Traceback\nOSError: gone", log="x"))
    lines.observe(JobFailed(t_s=150.0, job_id=trial, error="ValueError: [red]oh"))
    text = out.getvalue()
    assert "is retried (1): OSError: gone" in text
    assert "failed: ValueError: [red]oh" in text
    assert len(text.splitlines()) < len(events)


def test_improvements_are_told_every_few_seconds_and_the_last_always(
    prepared: PreparedStudy, events: list[Event]
) -> None:
    job = next(event.job for event in events if isinstance(event, JobSubmitted))
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=80), prepared.tuning.study, Stop())
    lines.observe(JobSubmitted(t_s=0.0, job=job))
    lines.tick(0.0)
    for epoch in range(1, 101):  # one improvement in a tenth of a second
        result = Result(epoch, epoch / 1000.0, None, 1, 1)
        lines.observe(
            JobReported(t_s=epoch / 10, job_id=job.id, work_done=epoch, epoch=epoch, results=(result,))
        )
    told = [line for line in out.getvalue().splitlines() if "has the best" in line]
    assert len(told) == 2, "one at once, one after five seconds"
    lines.tick(13.0)
    lines.close()
    assert "has the best accuracy: 0.1 after epoch 100" in out.getvalue()
    assert out.getvalue().count("has the best") == 3
    lines.tick(30.0)
    assert out.getvalue().count("has the best") == 3


def test_what_is_held_back_of_a_trial_comes_before_its_end(
    prepared: PreparedStudy, events: list[Event]
) -> None:
    job = next(event.job for event in events if isinstance(event, JobSubmitted))
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=80), prepared.tuning.study, Stop())
    lines.observe(JobSubmitted(t_s=0.0, job=job))
    lines.tick(0.0)
    for t_s in (1.0, 2.0):
        result = Result(int(t_s), t_s / 10, None, 1, 1)
        lines.observe(JobReported(t_s=t_s, job_id=job.id, work_done=t_s, epoch=int(t_s), results=(result,)))
    lines.observe(JobFinished(t_s=3.0, job_id=job.id))
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "1s  trial-000 has the best accuracy: 0.1 after epoch 1",
        "3s  trial-000 has the best accuracy: 0.2 after epoch 2",
        "3s  trial-000 finished",
    ]


def told(t_s: float, action: Action, slots: int, code: ReasonCode) -> Decided:
    given = on_nodes({"local": slots}) if slots else NOTHING
    one = Instruction(1, action, "trial-000", given, BatchChoice(1))
    reasons = {"trial-000": Reason(code, "so it is.")}
    return Decided(t_s=t_s, policy="p", instructions=(one,), reasons=reasons, memory=None)


def test_every_change_has_a_line_and_so_has_going_on_after_a_stop(events: list[Event]) -> None:
    job = next(event.job for event in events if isinstance(event, JobSubmitted))
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=80), None, Stop())
    lines.observe(JobSubmitted(t_s=0.0, job=job))
    lines.tick(0.0)
    for event in (
        told(1.0, Action.START, 1, ReasonCode.STARTED),
        told(2.0, Action.PARK, 0, ReasonCode.PREEMPTED),
        told(3.0, Action.START, 1, ReasonCode.STARTED),
        told(4.0, Action.RESIZE, 2, ReasonCode.GREW),
        told(5.0, Action.SET_BATCH, 2, ReasonCode.KEPT),
        RunResumed(t_s=6.0, down_s=1.0),
        told(7.0, Action.STOP, 0, ReasonCode.STOPPED),
    ):
        lines.observe(event)
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "1s  trial-000 started: so it is.",
        "2s  trial-000 paused: so it is.",
        "3s  trial-000 resumed: so it is.",
        "4s  trial-000 grew: so it is.",
        "6s  trial-000 resumed: the run continues.",
        "7s  trial-000 stopped: so it is.",
    ]


def test_a_batch_that_changes_has_a_line() -> None:
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=80), None, Stop())
    lines.observe(JobSubmitted(t_s=0.0, job=make_job("a", least=1, most=2, tier=Tier.ADAPTIVE)))
    lines.tick(0.0)
    reasons = {"a": Reason(ReasonCode.KEPT, "so it is.")}
    for t_s, action, batch in (
        (1.0, Action.START, BatchChoice(64)),
        (2.0, Action.SET_BATCH, BatchChoice(356)),
        (3.0, Action.SET_BATCH, BatchChoice(178, 1)),
    ):
        one = Instruction(1, action, "a", on_nodes({"local": 1}), batch)
        lines.observe(Decided(t_s=t_s, policy="p", instructions=(one,), reasons=reasons, memory=None))
    assert [line.strip() for line in out.getvalue().splitlines()] == [
        "1s  a started: so it is.",
        "2s  a went from batch 64 to 356: so it is.",
    ], "one that is only split otherwise is no news"


def test_of_equal_trials_the_one_that_the_summary_names_is_told(
    prepared: PreparedStudy, events: list[Event]
) -> None:
    first, second = [event.job for event in events if isinstance(event, JobSubmitted)][:2]
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=80), prepared.tuning.study, Stop())
    for job in (first, second):
        lines.observe(JobSubmitted(t_s=0.0, job=job))
    lines.tick(0.0)
    for t_s, job in ((10.0, second), (20.0, first), (30.0, second)):
        result = Result(1, 0.5, None, 1, 1)
        lines.observe(JobReported(t_s=t_s, job_id=job.id, work_done=1, epoch=1, results=(result,)))
    told = [line.strip() for line in out.getvalue().splitlines()]
    assert told == [
        "10s  trial-001 has the best accuracy: 0.5 after epoch 1",
        "20s  trial-000 has the same accuracy as trial-001: 0.5 after epoch 1",
    ]


def test_a_best_value_has_the_epoch_that_showed_it(prepared: PreparedStudy, events: list[Event]) -> None:
    job = next(event.job for event in events if isinstance(event, JobSubmitted))
    study, out, console = prepared.tuning.study, io.StringIO(), terminal()
    outlook = Outlook(tuning=prepared.tuning, finish_s=None, usd_per_slot_hour=0.0)
    lines = PlainLines(Console(file=out, width=80), study, Stop())
    display = Display(console, "a run", study, outlook, Stop())
    values = tuple(Result(epoch, value, None, 1, 1) for epoch, value in ((1, 0.2), (2, 0.5), (3, 0.4)))
    for observer in (lines, display):
        observer.observe(JobSubmitted(t_s=0.0, job=job))
        observer.tick(0.0)
        observer.observe(JobReported(t_s=3.0, job_id=job.id, work_done=3, epoch=3, results=values))
    assert "trial-000 has the best accuracy: 0.5 after epoch 2" in out.getvalue()
    assert "best accuracy 0.5 (trial-000, epoch 2)" in drawn(display, console)


def test_what_jobs_reported_last_is_shown(tmp_path: Path, events: list[Event]) -> None:
    folder, out, console = RunFolder(tmp_path / "run"), io.StringIO(), terminal()
    job = next(event.job for event in events if isinstance(event, JobSubmitted))
    job = dataclasses.replace(job, id="mine", study=None)
    folder.metrics("mine").parent.mkdir(parents=True)
    folder.metrics("mine").write_text(
        "".join(f'{{"epoch": {epoch}, "loss": {1 / epoch}, "note": "x"}}\n' for epoch in range(1, 1001))
    )
    reported = partial(metrics_after, folder)
    lines = PlainLines(Console(file=out, width=80), None, Stop(), reported)
    display = Display(console, "jobs", None, None, Stop(), reported)
    for observer in (lines, display):
        observer.observe(JobSubmitted(t_s=0.0, job=job))
        observer.tick(0.0)
        observer.observe(JobReported(t_s=1.0, job_id="mine", work_done=1000, epoch=1000))
    assert "loss 0.001" in drawn(display, console)
    lines.observe(JobFinished(t_s=2.0, job_id="mine"))
    assert out.getvalue().strip() == "2s  mine finished: loss 0.001"
    assert metrics_after(folder, "mine", 1) == {}, "the file is read at its end only"
    assert metrics_after(folder, "another", 1) == {}


@pytest.mark.parametrize("event", [NodeLost(t_s=3.0, node_id="b"), NodeReleased(t_s=3.0, node_id="b")])
def test_a_job_whose_node_is_gone_waits(events: list[Event], event: Event) -> None:
    job = next(event.job for event in events if isinstance(event, JobSubmitted))
    one = Instruction(1, Action.START, job.id, on_nodes({"a": 1, "b": 1}), BatchChoice(1))
    board = LiveState()
    board.observe(JobSubmitted(t_s=0.0, job=job))
    board.observe(Decided(t_s=1.0, policy="p", instructions=(one,), reasons={}, memory=None))
    board.observe(JobReported(t_s=2.0, job_id=job.id, work_done=1, epoch=1))
    board.observe(NodeLost(t_s=2.0, node_id="another"))
    assert board.jobs[job.id].phase is JobPhase.RUNNING
    board.observe(event)
    assert (board.jobs[job.id].phase, board.jobs[job.id].allocation) == (JobPhase.WAITING, NOTHING)


def test_the_last_line_of_a_traceback() -> None:
    assert last_line("Traceback:\n  File x\nValueError: no\n\n") == "ValueError: no"
    assert last_line("") == ""


@pytest.mark.usefixtures("events")
def test_the_page_and_the_story(prepared: PreparedStudy, tmp_path: Path) -> None:
    folder = prepared.checked.folder
    write_run_page(tmp_path / "run.html", folder)
    page = without_libraries(tmp_path / "run.html")
    assert "A real run on one machine by Stretto" in page
    assert "time (minutes)" in page
    assert "trial-005" in page
    told = story_text(explain(folder, "trial-000"))
    assert "submitted: lr = " in told
    assert "start with 1 worker (local: 1): Trial 1 of 6: a slot is free for it." in told
    assert "| trial-000 " in story_text(explain(folder))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_between_two_phases_ends_a_command_with_a_sentence(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as left, stoppable(RunFolder(tmp_path / "none")):
        signal.raise_signal(number)
    assert left.value.exit_code == 1
    assert capsys.readouterr().err == "stopped before training began; nothing was begun.\n"
    assert signal.getsignal(signal.SIGTERM) is before
