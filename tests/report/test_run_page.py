"""The page and the summary of a real run: what was expected, who drove it when, its nodes and trials."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from builders import make_job
from launching import prepare, start
from report_pages import STUDY as SEARCHED
from report_pages import figures, result_of
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobRetried,
    JobSubmitted,
    NodeAdded,
    NodeLaunched,
    NodeReleased,
    RunPaused,
    RunResumed,
    RunStarted,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Tier
from stretto.core.resources import Resources
from stretto.core.units import format_duration
from stretto.driving.drive import RealSubstrate
from stretto.driving.request import TuneRequest, check_request
from stretto.driving.substrate import TrainingSpec
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.journal.folds.history import Gap, History, history_of
from stretto.journal.sqlite import SqliteJournal
from stretto.launch.expect import Expectation
from stretto.planning.profile import Estimate
from stretto.report.figures.gantt import IDLE, STARTING, UNDRIVEN, Groups, gpus_over_time, rows_of, stays_of
from stretto.report.plotting import time_unit
from stretto.report.run_page import write_run_page
from stretto.report.run_text import job_table, jobs_text, ranked, tune_text
from stretto.runs.begin import begin
from stretto.runs.deadline import Deadline, EndedBy, deadline_of
from stretto.runs.explain import explain
from stretto.runs.folder import PastLimits, RunFolder, RunSpec, find_run
from stretto.runs.job_results import run_result
from stretto.runs.live_state import NOT_STARTED, LiveState
from stretto.runs.results import TuneResult, plan_tables, tune_result
from study_command import StudyCommand
from tune_world import STUDY, SimulatedWorkers, simulated, write_study

KILLED_S = 35.0
DOWN_S = 20.0
MANY = STUDY.replace("trials = 6", "trials = 60")
BOX = Node("box-1", Resources(gpu=2), "box")
ALL_ALIKE = Groups(["all"], lambda _: "all", lambda *_: "#123456")


def killed(training: TrainingSpec, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
    del folder, clock
    return SimulatedWorkers(training, until_s=KILLED_S, break_off=True)


def resumed_run(here: Path) -> RunFolder:
    """A run that was killed once, under another name than its study's."""
    request = TuneRequest(study=write_study(here), work="train.py:train", policy="asha", name="mine")
    checked = check_request(request)
    with pytest.raises(SystemExit):
        start(prepare(checked, make=simulated), make=killed)
    with closing(SqliteJournal(checked.folder.journal, run="mine")) as journal:
        last_s = max(event.t_s for event in journal.events())
        journal.append([RunResumed(t_s=last_s + DOWN_S, down_s=DOWN_S)])
    start(prepare(checked, make=simulated), make=simulated)
    return checked.folder


def page_of(folder: RunFolder) -> str:
    write_run_page("run.html", folder)
    return Path("run.html").read_text(encoding="utf-8")


def told(page: str, what: str) -> str:
    """A fact of the summary."""
    found = re.search(f"<td>{what}</td><td>(.*?)</td>", page)
    assert found is not None, what
    return found[1]


def test_a_page_has_the_name_that_commands_call_the_run_by(here: Path) -> None:
    page = page_of(resumed_run(here))
    assert "<title>mine: asha</title>" in page
    assert told(page, "study") == "tiny"


def test_what_came_stands_beside_what_was_expected(here: Path) -> None:
    folder = resumed_run(here)
    folder.write(
        "plan",
        plan_tables(
            Expectation(finish_s=Estimate(500.0, 400.0, 600.0), cost_usd=Estimate(7.0, 6.0, 8.0), epochs=None)
        ),
    )
    page = page_of(folder)
    assert told(page, "finish").endswith("(expected 8m 20s, 6m 40s to 10m 00s)")
    assert told(page, "cost") == "$0.00 (expected $7.00, $6.00 to $8.00)"
    for figure in figures(page):
        names = [trace.get("name") for trace in figure["data"]]
        assert "expected end, 8m 20s" in names
        assert figure["layout"]["xaxis"]["range"][1] >= 500.0 / 60.0, "the time it was to take is shown"


def test_the_time_in_which_nobody_drove_a_run_is_told_and_drawn(here: Path) -> None:
    folder = resumed_run(here)
    (gap,) = tune_result(folder, EndedBy.JOBS).gaps
    assert gap.end_s - gap.start_s == DOWN_S
    assert not gap.stopped
    page = page_of(folder)
    assert told(page, "no controller").endswith("after it was interrupted")
    for figure in figures(page):
        assert UNDRIVEN[0] in [trace.get("name") for trace in figure["data"]]
        (band,) = [shape for shape in figure["layout"]["shapes"] if shape["type"] == "rect"]
        assert (band["x0"] * 60.0, band["x1"] * 60.0) == pytest.approx((gap.start_s, gap.end_s))


def test_a_run_that_was_driven_all_the_time_says_nothing_of_it(here: Path) -> None:
    checked = check_request(TuneRequest(study=write_study(here), work="train.py:train", policy="asha"))
    result = start(prepare(checked, make=simulated), make=simulated)
    assert result.gaps == ()
    assert "no controller" not in page_of(checked.folder)


def test_a_deadline_that_passed_while_nobody_drove_the_run(here: Path) -> None:
    request = TuneRequest(study=write_study(here), work="train.py:train", policy="asha", deadline_s=400.0)
    checked = check_request(request)
    with pytest.raises(SystemExit):
        start(prepare(checked, make=simulated), make=killed)
    spec = checked.folder.read("spec")
    assert spec is not None
    checked.folder.write("spec", {**spec, "started_at_s": time.time() - 401.0})
    found = tune_result(checked.folder, EndedBy.DEADLINE)
    (gap,) = found.gaps
    assert gap.end_s == found.finished_s
    assert gap.start_s == pytest.approx(KILLED_S, abs=10.0)


@pytest.mark.parametrize("deadline_s", [1.0, None])
def test_a_run_of_which_nothing_is_known_can_be_told_of(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, deadline_s: float | None
) -> None:
    """Killed before its first event, or not that far yet; a renting one has no node at first either."""
    request = TuneRequest(
        study=write_study(here), work="train.py:train", policy="asha", deadline_s=deadline_s
    )
    checked = check_request(dataclasses.replace(request, deadline_as=None if deadline_s is None else "1s"))
    spec = RunSpec(
        kind="tune",
        started_at_s=time.time() - 10.0,
        asked=checked.asked,
        slots=2,
        offer=slots_offer(2, MachineSpec()),
        deadline_s=deadline_s,
        file=str(checked.outline.path),
    )
    begin(checked.folder, spec)
    stretto = StudyCommand(monkeypatch, capsys)
    ended_by = "interrupted" if deadline_s is None else "deadline"
    assert stretto.json("report", "tiny")["ended_by"] == ended_by
    assert told(page_of(checked.folder), "ended by") == ended_by
    assert stretto("explain", "tiny")[0] == 0


def test_gaps_end_when_the_run_was_over() -> None:
    events: list[Event] = [
        RunStarted(t_s=0.0, identity={}, nodes=()),
        RunPaused(t_s=10.0),
        RunResumed(t_s=25.0, down_s=15.0),
        RunResumed(t_s=90.0, down_s=40.0),
    ]
    history = history_of(events)
    assert history.gaps == (Gap(10.0, 25.0, stopped=True), Gap(50.0, 90.0, stopped=False))
    assert history.gaps_until(60.0, dead=True) == (history.gaps[0], Gap(50.0, 60.0, stopped=False))
    assert history.gaps_until(40.0, dead=False) == history.gaps[:1]
    assert history.gaps_until(99.0, dead=True)[-1] == Gap(90.0, 99.0, stopped=False)


def rented() -> History:
    """Two trials on a node that was launched, came, and was given back; another never came."""
    never = Node("box-2", Resources(gpu=2), "box")
    jobs = [make_job("a"), make_job("b")]
    starts = tuple(
        Instruction(1, Action.START, job.id, on_nodes({BOX.id: 1}), BatchChoice(1)) for job in jobs
    )
    return history_of(
        [
            RunStarted(t_s=0.0, identity={}, nodes=()),
            *(JobSubmitted(t_s=0.0, job=job) for job in jobs),
            NodeLaunched(t_s=1.0, node=BOX),
            NodeLaunched(t_s=1.0, node=never),
            NodeAdded(t_s=8.0, node=BOX, init_s=7.0),
            Decided(t_s=10.0, policy="p", instructions=starts, reasons={}, memory=None),
            NodeReleased(t_s=15.0, node_id=never.id, never_came=True),
            RunResumed(t_s=30.0, down_s=10.0),
            JobFinished(t_s=40.0, job_id="a"),
            JobFinished(t_s=41.0, job_id="b"),
            NodeReleased(t_s=44.0, node_id=BOX.id),
        ]
    )


def test_nodes_are_followed_from_launch_to_release() -> None:
    stays = [(one.node.id, one.start_s, one.ready_s, one.end_s, one.came) for one in rented().nodes]
    assert stays == [("box-1", 1.0, 8.0, 44.0, True), ("box-2", 1.0, math.inf, 15.0, True)]


def test_a_rented_node_has_a_row_for_each_of_its_slots() -> None:
    history = rented()
    rows = rows_of((), history)
    assert (rows.nodes, rows.count) == (("box-1",), 2)
    taken = [(stay.first_row, stay.start_s, stay.end_s) for stay in stays_of(history, rows)]
    for row in range(2):
        times = sorted((start_s, end_s) for first, start_s, end_s in taken if first == row)
        assert all(before[1] <= after[0] for before, after in pairwise(times))
    assert {first for first, _, _ in taken} == {0, 1}


def bars(figure: Any, name: str) -> list[tuple[float, float]]:
    """From when to when the rectangles of a trace are."""
    (trace,) = [one for one in figure.data if one.name == name]
    return [(base, base + x) for base, x in zip(trace.base, trace.x, strict=True)]


def test_nodes_are_drawn_while_they_start_and_while_they_are_there() -> None:
    figure = gpus_over_time(rented(), (), ALL_ALIKE, 50.0, slot="slot")
    assert bars(figure, STARTING[0]) == [(1.0, 8.0)]
    assert bars(figure, IDLE[0]) == [(8.0, 20.0), (30.0, 44.0)], "not while nobody drove the run"
    hover = [one.customdata[0][1] for one in figure.data if one.customdata is not None]
    assert hover[-1] == "1 slot, batch 1"


def test_nodes_that_nobody_gave_back_are_drawn_to_the_end_of_the_run() -> None:
    history = rented()
    nodes = tuple(dataclasses.replace(one, end_s=math.inf) for one in history.nodes)
    unreleased = dataclasses.replace(history, nodes=nodes)
    figure = gpus_over_time(unreleased, (), ALL_ALIKE, 500.0, slot="slot")
    assert bars(figure, IDLE[0])[-1][1] * time_unit(500.0).seconds == pytest.approx(history.end_s, abs=0.01)


def test_bars_of_trials_have_the_colours_of_the_legend(here: Path) -> None:
    figure = figures(page_of(resumed_run(here)))[-1]
    swatches, drawn = set(), set()
    for trace in figure["data"]:
        if trace["type"] == "bar":
            assert trace.get("opacity", 1) == trace["marker"].get("opacity", 1) == 1
            colour = trace["marker"]["color"]
            if trace.get("showlegend", True):
                swatches.add(colour)
            else:
                drawn.update(colour)
    assert drawn
    assert drawn <= swatches


def test_a_page_of_jobs_tells_how_they_ended_and_when_nobody_drove_them(here: Path) -> None:
    folder = RunFolder(here / "shared")
    begin(folder, RunSpec(kind="run", started_at_s=0.0, asked={"policy": "fifo", "seed": 0}, slots=2))
    start = Instruction(1, Action.START, "a", on_nodes({"local": 2}), BatchChoice(1))
    with closing(SqliteJournal(folder.journal, run="shared")) as journal:
        journal.append(
            [
                RunStarted(t_s=0.0, identity={"policy": "fifo"}, nodes=(Node("local", Resources(gpu=2)),)),
                JobSubmitted(t_s=0.0, job=make_job("a", 2)),
                Decided(t_s=1.0, policy="fifo", instructions=(start,), reasons={}, memory=None),
                RunResumed(t_s=30.0, down_s=20.0),
                JobFinished(t_s=40.0, job_id="a"),
            ]
        )
    folder.write("result", {"ended_by": "jobs"})
    page = page_of(folder)
    assert (told(page, "ended by"), told(page, "finish")) == ("jobs", "40s")
    assert told(page, "no controller") == "10.0s to 30.0s, after it was interrupted"
    (figure,) = figures(page)
    assert UNDRIVEN[0] in [trace.get("name") for trace in figure["data"]]
    assert "2 slots, batch 2" in str(figure)
    assert "GPU" not in str(figure)


def of_jobs(here: Path, *more: Event) -> RunFolder:
    """A run of two jobs, of which `a` adapts its batch."""
    folder = RunFolder(here / "shared")
    begin(folder, RunSpec(kind="run", started_at_s=0.0, asked={"policy": "fifo", "seed": 0}, slots=2))
    one = on_nodes({"local": 1})
    starts = [
        Instruction(1, Action.START, "a", one, BatchChoice(64)),
        Instruction(2, Action.START, "b", one, BatchChoice(1)),
    ]
    larger = Instruction(3, Action.SET_BATCH, "a", one, BatchChoice(128, 1))
    with closing(SqliteJournal(folder.journal, run="shared")) as journal:
        journal.append(
            [
                RunStarted(t_s=0.0, identity={"policy": "fifo"}, nodes=(Node("local", Resources(gpu=2)),)),
                JobSubmitted(t_s=0.0, job=make_job("a", least=1, most=2, tier=Tier.ADAPTIVE)),
                JobSubmitted(t_s=0.0, job=make_job("b")),
                Decided(t_s=1.0, policy="fifo", instructions=tuple(starts), reasons={}, memory=None),
                Decided(t_s=2.0, policy="fifo", instructions=(larger,), reasons={}, memory=None),
                *more,
            ]
        )
    folder.write("result", {"ended_by": "jobs"})
    return folder


def test_a_job_that_failed_is_counted_where_all_came_to_their_end(here: Path) -> None:
    finished = JobFinished(t_s=40.0, job_id="b")
    failed = of_jobs(here, finished, JobFailed(t_s=40.0, job_id="a", error="no"))
    text = jobs_text(run_result(failed, EndedBy.JOBS))
    assert "every job ended, 1 failed, after 40s." in text
    well = of_jobs(here / "well", finished, JobFinished(t_s=40.0, job_id="a"))
    assert "every job ended after 40s." in jobs_text(run_result(well, EndedBy.JOBS))


def test_there_is_a_column_of_batches_where_one_is_adapted(here: Path) -> None:
    result = run_result(of_jobs(here), EndedBy.JOBS)
    assert {job.id: job.batch for job in result.jobs} == {"a": 256, "b": None}
    heading, rows = job_table(result.jobs)
    column = heading.index("batch")
    assert [row[column] for row in rows] == ["256", "-"]
    assert "batch" not in job_table(result.jobs[1:])[0]
    assert "batch" in page_of(find_run(str(here / "shared")))


def test_report_and_explain_count_the_same_restarts(here: Path) -> None:
    retried = JobRetried(t_s=31.0, job_id="a", attempt=1, error="")
    folder = of_jobs(here, RunResumed(t_s=30.0, down_s=20.0), retried)
    reported = {job.id: (job.restarts, job.retries) for job in run_result(folder, EndedBy.JOBS).jobs}
    explained = {job.id: (job.restarts, job.retries) for job in explain(folder).jobs}
    assert reported == explained == {"a": (1, 1), "b": (1, 0)}


class TestTrialsThatNeverRan:
    def test_they_are_counted(self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        request = TuneRequest(
            study=write_study(here, MANY), work="train.py:train", policy="asha", deadline_s=45.0
        )
        checked = check_request(request)
        result = start(prepare(checked, make=simulated), make=simulated)
        assert result.ended_by == "deadline"
        assert result.not_drawn > 0
        assert sum(result.trials_by_state.values()) == 60, "as many as the study has"
        left = result.trials_by_state[NOT_STARTED]
        assert left == 60 - sum(bool(trial.epochs) or trial.state == "cut off" for trial in result.trials)
        said = f"{left} not started"
        assert f" {said}\n" in tune_text(result, checked.outline.study)
        assert told(page_of(checked.folder), "trials").endswith(said)
        stretto = StudyCommand(monkeypatch, capsys)
        assert stretto.json("report", "tiny")["trials_by_state"] == result.trials_by_state
        states = [job["state"] for job in stretto.json("explain", "tiny")["jobs"]]
        assert states.count(NOT_STARTED) == left - result.not_drawn

    def test_a_display_counts_them_too(self) -> None:
        board = LiveState(SEARCHED)
        assert board.counts() == {NOT_STARTED: SEARCHED.trials}
        trial = dataclasses.replace(make_job("a"), study=SEARCHED.name)
        board.observe(JobSubmitted(t_s=0.0, job=trial))
        assert board.counts() == {NOT_STARTED: SEARCHED.trials}
        start = Instruction(1, Action.START, "a", on_nodes({"0": 1}), BatchChoice(1))
        board.observe(Decided(t_s=1.0, policy="p", instructions=(start,), reasons={}, memory=None))
        assert board.counts() == {"starting": 1, NOT_STARTED: SEARCHED.trials - 1}

    def test_of_jobs_nothing_else_is_expected(self) -> None:
        board = LiveState()
        board.observe(JobSubmitted(t_s=0.0, job=make_job("a")))
        assert board.counts() == {"waiting": 1}


def test_trials_that_failed_are_counted_where_all_came_to_their_end() -> None:
    result = result_of(["trial-000", "trial-001"], SEARCHED)
    assert "every trial ended after" in tune_text(result, SEARCHED)
    first, second = result.trials
    failed = dataclasses.replace(result, trials=(first, dataclasses.replace(second, state="failed")))
    assert "every trial ended, 1 failed, after" in tune_text(failed, SEARCHED)


def test_a_study_with_a_damaged_journal_says_until_when_it_is_known() -> None:
    found = dataclasses.replace(result_of(["trial-000"], SEARCHED), finished_s=96.0, known_until_s=96.0)
    text = tune_text(found, SEARCHED)
    assert text.splitlines()[0].endswith(
        "every trial ended; its journal is damaged, and what follows is known only until 1m 36s."
    )
    assert "finish          not known: the journal is damaged after 1m 36s" in text
    assert "trials          1 finished (until 1m 36s)" in text


def test_of_equal_trials_the_first_leads_the_table_too() -> None:
    """By number, not by letters: trial-1000 comes after trial-999."""
    found = result_of(["trial-999", "trial-1000"], SEARCHED)
    assert [trial.id for trial in ranked(found, SEARCHED)] == ["trial-999", "trial-1000"]


def test_a_table_that_is_cut_says_so() -> None:
    names = [f"trial-{number:03d}" for number in range(12)]
    found = dataclasses.replace(result_of(names, SEARCHED), run=Path("runs/mine"))
    text = tune_text(found, SEARCHED)
    assert "| trial-009 |" in text
    assert "| trial-010 |" not in text
    assert text.endswith("and 2 more: `stretto explain mine`\n")
    elsewhere = dataclasses.replace(found, run=Path("/a b/mine"))
    assert tune_text(elsewhere, SEARCHED).endswith("and 2 more: `stretto explain '/a b/mine'`\n")
    assert "more:" not in tune_text(result_of(names[:10], SEARCHED), SEARCHED)


class TestDeadline:
    """What was given, and what can be learnt from a run that its deadline ended."""

    def result(self, expected_s: float) -> TuneResult:
        return dataclasses.replace(
            result_of(["trial-000"], SEARCHED),
            ended_by="deadline",
            finished_s=65.2,
            deadline=Deadline(given_s=90.0, measuring_s=25.0),
            predicted_finish_s=Estimate(65.0, expected_s, 65.0),
            predicted_epochs=Estimate(19.0, 12.0, 31.0),
        )

    def test_where_it_was_sure_to_end_the_run_epochs_are_compared(self) -> None:
        text = tune_text(self.result(65.0), SEARCHED)
        assert "finish          1m 05s (the deadline)\n" in text
        assert "epochs          1 (expected 19, 12 to 31)\n" in text

    def test_where_it_might_have_been_over_sooner_the_finish_is_compared_too(self) -> None:
        text = tune_text(self.result(40.0), SEARCHED)
        assert "finish          1m 05s (expected 1m 05s, 40s to 1m 05s)\n" in text

    def test_what_was_given_is_shown_and_what_measuring_took_of_it(self) -> None:
        text = tune_text(self.result(65.0), SEARCHED)
        assert "the deadline came after 1m 05s, and 25s of measuring and planning.\n" in text
        assert "deadline        1m 30s; measuring and planning took 25s of it\n" in text
        raised = PastLimits(until_s=10.0, deadline_s=35.0, budget_usd=None)
        moved = dataclasses.replace(self.result(65.0), past_limits=(raised,))
        assert "from a deadline of 1m 00s\n" in tune_text(moved, SEARCHED)

    @pytest.mark.parametrize(
        ("flag", "of_file", "expected"),
        [
            ("90s", None, Deadline(given_s=90.0, measuring_s=25.0)),
            (None, "1m30s", Deadline(given_s=90.0, measuring_s=25.0)),
            ("18:00", "90s", Deadline(given_s=65.0, time_of_day="18:00")),
            (None, None, Deadline(given_s=65.0)),
        ],
    )
    def test_it_is_read_off_what_was_asked(
        self, flag: str | None, of_file: str | None, expected: Deadline
    ) -> None:
        study = {} if of_file is None else {"limits": {"deadline": of_file}}
        asked = {"policy": "asha", "seed": 0, "study": study, "deadline": flag}
        offer = slots_offer(1, MachineSpec())
        spec = RunSpec(kind="tune", started_at_s=0.0, asked=asked, slots=1, offer=offer, deadline_s=65.0)
        found = deadline_of(spec)
        assert found == expected
        assert found is not None
        assert found.after_s == 65.0
        assert deadline_of(dataclasses.replace(spec, deadline_s=None)) is None

    def test_the_page_and_the_json_have_it_too(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        request = TuneRequest(
            study=write_study(here, MANY), work="train.py:train", policy="asha", deadline_s=45.0
        )
        checked = check_request(dataclasses.replace(request, deadline_as="1m"))
        result = start(prepare(checked, make=simulated), make=simulated)
        assert result.is_cut_as_foreseen
        page = page_of(checked.folder)
        assert told(page, "finish") == f"{format_duration(result.finished_s)} (the deadline)"
        assert told(page, "epochs").startswith(f"{result.epochs} (expected ")
        assert result.deadline is not None
        took = format_duration(result.deadline.measuring_s)
        assert told(page, "deadline") == f"1m 00s; measuring and planning took {took} of it"
        assert "expected end" not in page
        plain = StudyCommand(monkeypatch, capsys).json("report", "tiny")
        assert plain["epochs"] == result.epochs
        assert plain["predicted_epochs"]["p10"] <= plain["predicted_epochs"]["p90"]
        assert plain["deadline"]["given_s"] == 60.0


def test_time_after_a_deadline_that_was_moved_was_not_a_stop() -> None:
    gap = Gap(60.0, 70.0, stopped=True, at_deadline=True)
    found = dataclasses.replace(result_of(["trial-000"], SEARCHED), gaps=(gap,))
    assert "1m 00s to 1m 10s, after a deadline that was moved later on\n" in tune_text(found, SEARCHED)


def test_who_went_on_after_a_kill_was_started_once_more(here: Path) -> None:
    found = explain(resumed_run(here))
    at = next(index for index, line in enumerate(found.lines) if line.what == "resumed")
    again = [line.subject for line in found.lines[at + 1 :] if line.text == "the run continues."]
    restarts = {job.id: job.restarts for job in found.jobs}
    assert len(again) == 2, "one on each slot"
    for job_id in again:
        told = [line.what.split()[0] for line in found.lines if line.subject == job_id]
        assert restarts[job_id] + 1 == sum(what in {"start", "resume", "resize"} for what in told) >= 2


def test_the_end_of_a_run_ends_its_story(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    request = TuneRequest(study=write_study(here), work="train.py:train", policy="asha", deadline_s=45.0)
    start(prepare(check_request(request), make=simulated), make=simulated)
    stretto = StudyCommand(monkeypatch, capsys)
    story = stretto.json("explain", "tiny")
    last = story["lines"][-1]
    assert (last["subject"], last["what"], last["text"]) == ("run", "ended", "the deadline came")
    states = {job["id"]: job["state"] for job in story["jobs"]}
    for job_id, state in states.items():
        whats = [line["what"] for line in stretto.json("explain", "tiny", job_id)["lines"]]
        assert (whats[-1] == "run ended") == (state == "cut off"), "the others were over, or stood still"
    assert "cut off" in states.values()


def test_a_trial_that_the_run_did_not_come_to_was_not_started(here: Path) -> None:
    request = TuneRequest(
        study=write_study(here, MANY), work="train.py:train", policy="asha", deadline_s=45.0
    )
    checked = check_request(request)
    start(prepare(checked, make=simulated), make=simulated)
    (line,) = explain(checked.folder, "trial-059").lines
    assert line.what == NOT_STARTED
    assert "of the study's 60 trials" in line.text
    for name in ("trial-060", "trial-59", "trial-0059", "job"):
        with pytest.raises(InputError, match="has no job"):
            explain(checked.folder, name)


def test_a_summary_names_the_run_and_what_it_is_of() -> None:
    found = dataclasses.replace(result_of(["trial-000"], SEARCHED), run=Path("runs/mine"))
    assert tune_text(found, SEARCHED).startswith(f"mine, of {SEARCHED.name}, under p: ")
    same = dataclasses.replace(found, run=Path("runs") / SEARCHED.name)
    assert tune_text(same, SEARCHED).startswith(f"{SEARCHED.name} under p: ")
    assert "no controller" not in tune_text(found, SEARCHED)
    gap = dataclasses.replace(found, gaps=(Gap(5.0, 70.0, stopped=True),))
    assert f"no controller   5.0s to {format_duration(70.0)}, after it was stopped\n" in tune_text(
        gap, SEARCHED
    )
