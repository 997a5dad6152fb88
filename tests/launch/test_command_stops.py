"""Commands that are stopped: nobody waits for them but who takes their slots, and what is said is so."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Protocol

import pytest

from process_bench import BATCH, ONE, PYTHON, Bench, CommandWorkers, all_events, job_of, start, trial_of
from report_pages import STUDY as SEARCHED
from report_pages import result_of
from stretto.cli.run import how_it_stopped
from stretto.cli.tune import how_to_go_on
from stretto.core.allocation import NOTHING, BatchChoice, on_nodes
from stretto.core.decision import Reason, ReasonCode
from stretto.core.errors import InputError
from stretto.core.events import (
    Decided,
    Event,
    JobFinished,
    JobNoted,
    JobReported,
    JobSubmitted,
    NoteKind,
    RunResumed,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.observations import Result
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.inputs.work import check_command
from stretto.launch.progress import ProgressLines
from stretto.planning.profile import Estimate
from stretto.profiling.probe import probe
from stretto.report.run_text import tune_text
from stretto.runs.begin import begin
from stretto.runs.deadline import Deadline, when_to_resume
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.manage import unsaved_jobs
from stretto.runs.results import command_files
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.effects import Rules
from stretto.substrate.local.slots import Slots

SAVING_S = 1.5
SLOW_TO_SAVE = f"""
import os, signal, sys, time
saved = os.path.join(os.environ["STRETTO_FOLDER"], "saved")
def save(*_):
    time.sleep({SAVING_S})
    open(saved, "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print('{{"epoch": %d}}' % (2 if os.path.exists(saved) else 1), flush=True)
time.sleep(60)
"""
QUICK = """
import time
for epoch in range(1, 40):
    print('{"epoch": %d}' % epoch, flush=True)
    time.sleep(0.05)
time.sleep(60)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", sys.argv[0]])
print('{"epoch": 1}', flush=True)
time.sleep(60)
"""
ZERO_BASED = "for epoch in range(3): print(json.dumps({'epoch': epoch, 'loss': 1.0}), flush=True)"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


class Open(Protocol):
    """Starts the first of some jobs, given by their code."""

    def __call__(self, codes: Mapping[str, str], *, slots: int) -> CommandWorkers: ...


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Open]:
    made: list[CommandWorkers] = []

    def make(codes: Mapping[str, str], *, slots: int) -> CommandWorkers:
        commands = {name: Command((*PYTHON, "-c", code)) for name, code in codes.items()}
        substrate = CommandWorkers(commands, tmp_path, slots=Slots(("",) * slots), rules=Rules(command_s=5.0))
        made.append(substrate)
        for name in codes:
            substrate.admit(job_of(name))
        substrate.apply([start(next(iter(codes)))])
        assert isinstance(substrate.next_event(10.0), JobReported)
        return substrate

    yield make
    for substrate in made:
        substrate.stop_now()


def park(job_id: str, number: int, action: Action = Action.PARK) -> Instruction:
    return Instruction(number, action, job_id, NOTHING, BATCH)


def test_a_command_that_takes_long_to_save_keeps_nobody_waiting(running: Open) -> None:
    substrate = running({"slow": SLOW_TO_SAVE, "quick": QUICK}, slots=2)
    asked_s = substrate.now_s()
    substrate.apply([park("slow", 2), start("quick", on_nodes({"1": 1}), 3)])
    for _ in range(3):
        event = substrate.next_event(asked_s + 10.0)
        assert event is not None
        assert event.subject == "quick"
        assert event.t_s < asked_s + SAVING_S, "it was told while the other one saved"


def test_slots_are_given_to_others_when_they_were_left(running: Open) -> None:
    substrate = running({"slow": SLOW_TO_SAVE, "next": QUICK}, slots=1)
    asked_s = substrate.now_s()
    substrate.apply([start("next", number=2), park("slow", 3)])
    assert substrate.next_event(asked_s + SAVING_S) is None
    event = substrate.next_event(asked_s + 10.0)
    assert isinstance(event, JobReported)
    assert event.job_id == "next"
    assert event.resize_s is not None
    assert event.resize_s > SAVING_S


def test_a_command_that_is_wanted_again_while_it_saves_goes_on_from_what_it_saved(running: Open) -> None:
    substrate = running({"slow": SLOW_TO_SAVE}, slots=1)
    substrate.apply([park("slow", 2)])
    substrate.apply([start("slow", number=3)])
    event = substrate.next_event(substrate.now_s() + 10.0)
    assert isinstance(event, JobReported)
    assert event.epoch == 2


def test_a_start_that_waits_can_be_taken_back(running: Open) -> None:
    substrate = running({"slow": SLOW_TO_SAVE, "next": QUICK}, slots=1)
    substrate.apply([start("next", number=2), park("slow", 3)])
    substrate.apply([park("next", 4)])
    assert all_events(substrate) == []


def test_a_job_that_was_stopped_does_not_finish_as_well(bench: Bench) -> None:
    code = "print(json.dumps({'epoch': 3, 'loss': 1.0}), flush=True)\ntime.sleep(60)"
    substrate = bench.started(bench.code(code, metric="loss"), job=trial_of("a"))
    assert isinstance(substrate.next_event(10.0), JobReported), "of its last epoch"
    substrate.apply([park("a", 2, Action.STOP)])
    assert all_events(substrate) == []


def test_at_once_is_at_once_and_leaves_nothing(bench: Bench) -> None:
    bench.grace_s = 30.0
    substrate = bench.started(bench.code(STUBBORN))
    assert isinstance(substrate.next_event(substrate.now_s() + 10.0), JobReported)
    substrate.apply([park("a", 2)])
    before_s = time.monotonic()
    substrate.stop_now()
    assert time.monotonic() - before_s < 3.0
    assert bench.left() == []
    assert substrate.next_event(substrate.now_s()) is None, "nobody was slow to leave"


def lines_of(job: Job, events: list[Event], ticks: Mapping[int, float]) -> list[tuple[float, str]]:
    """What is told of events; `ticks` has the time at which some of them are heard of."""
    told: list[tuple[float, str]] = []
    lines = ProgressLines(lambda t_s, text: told.append((t_s, text)), SEARCHED)
    lines.observe(JobSubmitted(t_s=0.0, job=job))
    lines.tick(0.0)
    for position, event in enumerate(events):
        if position in ticks:
            lines.tick(ticks[position])
        lines.observe(event)
    return told


def decided(t_s: float, action: Action, job_id: str = "a") -> Decided:
    given = ONE if action is Action.START else NOTHING
    one = Instruction(1, action, job_id, given, BatchChoice(1))
    reasons = {job_id: Reason(ReasonCode.KEPT, "so it is.")}
    return Decided(t_s=t_s, policy="p", instructions=(one,), reasons=reasons, memory=None)


def test_lines_are_in_order_of_time_though_something_is_heard_of_late() -> None:
    report = JobReported(t_s=3.0, job_id="a", work_done=1.0, epoch=1, results=(Result(1, 0.5, None, 1, 1),))
    better = dataclasses.replace(report, epoch=2, results=(Result(2, 0.9, None, 1, 1),))
    events: list[Event] = [decided(1.0, Action.START), report, better, decided(4.0, Action.PARK)]
    told = lines_of(trial_of("a"), events, {3: 12.0})
    assert [text for _, text in told][-2:] == [
        f"a has the best {SEARCHED.metric}: 0.9 after epoch 2",
        "a paused: so it is.",
    ]
    assert [t_s for t_s, _ in told] == sorted(t_s for t_s, _ in told)


def test_a_job_that_was_stopped_is_not_told_to_have_finished() -> None:
    end = JobFinished(t_s=3.0, job_id="a")
    events: list[Event] = [decided(1.0, Action.START), decided(2.0, Action.STOP), end]
    assert [text for _, text in lines_of(trial_of("a"), events, {})] == [
        "a started: so it is.",
        "a stopped: so it is.",
    ]


def test_an_epoch_zero_that_is_passed_over_is_told_of_once(bench: Bench) -> None:
    events = all_events(bench.started(bench.code(ZERO_BASED, metric="loss"), job=trial_of("a")))
    notes = [event.text for event in events if isinstance(event, JobNoted)]
    assert notes == [
        (
            "epochs count from 1, when they are completed: loss of epoch 0 was passed over. "
            "Print epoch + 1; this is said once."
        ),
        "its command ended by itself and has shown 2 of 3 epochs with loss",
    ]


def test_a_job_that_shows_one_epoch_too_few_is_told_how_they_count(bench: Bench) -> None:
    events = all_events(bench.started(bench.code(ZERO_BASED), job=job_of("a", epochs=3)))
    (note,) = [event.text for event in events if isinstance(event, JobNoted)]
    assert note.endswith("has shown 2 of 3 epochs; epochs count from 1, when they are completed")


def test_a_probe_that_sees_no_epoch_says_why_in_sentences() -> None:
    script = 'print(\'{"epoch": 0, "loss": 1}\')'
    command = check_command((sys.executable, "-I", "-S", "-c", script), ())
    study = dataclasses.replace(SEARCHED, metric="loss")
    with pytest.raises(InputError) as error:
        probe(command, [()], slots=1, time_s=1.0, study=study)
    assert "was passed over. Print epoch + 1; this is said once. Its command ended by itself" in str(
        error.value
    )
    assert "epochs with loss. " in str(error.value)


@pytest.mark.parametrize(
    ("finished_s", "first", "finish"),
    [
        (40.2, "the deadline came after 40s, and 10s of measuring and planning.", "40s (the deadline)"),
        (
            51.0,
            "the deadline came after 40s, and 10s of measuring and planning; what ran took 11s more to end.",
            "51s (the deadline, and 11s until what ran had ended)",
        ),
    ],
    ids=["in time", "late"],
)
def test_when_the_deadline_came_and_how_long_the_end_took(finished_s: float, first: str, finish: str) -> None:
    result = dataclasses.replace(
        result_of(["trial-000"], SEARCHED),
        ended_by="deadline",
        finished_s=finished_s,
        deadline=Deadline(given_s=50.0, measuring_s=10.0),
        predicted_finish_s=Estimate(40.0, 40.0, 40.0),
    )
    text = tune_text(result, SEARCHED)
    assert first in text
    assert f"finish          {finish}\n" in text


def noted(job_id: str, text: str, about: NoteKind | None = None) -> JobNoted:
    return JobNoted(t_s=1.0, job_id=job_id, text=text, about=about)


@pytest.mark.parametrize(
    ("after", "unsaved"),
    [
        ([], ["a", "b"]),
        ([decided(2.0, Action.START)], ["b"]),
        ([JobFinished(t_s=2.0, job_id="b")], ["a"]),
        ([RunResumed(t_s=2.0, down_s=1.0)], []),
    ],
    ids=["stopped", "started again", "finished", "resumed"],
)
def test_who_did_not_save_is_known(after: list[Event], unsaved: list[str]) -> None:
    notes = [
        noted("a", "it was killed", NoteKind.NOT_SAVED),
        noted("b", "no space", NoteKind.NOT_SAVED),
        noted("c", "hello"),
    ]
    assert unsaved_jobs([*notes, *after]) == unsaved


@pytest.mark.parametrize(
    ("events", "saves", "said"),
    [
        ([], True, "stopped, with checkpoints saved"),
        ([], False, "stopped"),
        ([noted(one, "killed", NoteKind.NOT_SAVED) for one in "ab"], True, "stopped; a, b did not save"),
    ],
)
def test_checkpoints_count_as_saved_only_if_all_are(
    events: list[Event], saves: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RunFolder, "events", lambda _: iter(events))
    assert how_it_stopped(RunFolder(tmp_path), saves=saves) == said


@pytest.mark.parametrize(
    ("deadline_s", "said"),
    [(1.0, "its deadline has passed"), (1e12, "resume with: stretto"), (None, "resume")],
)
def test_after_its_deadline_nobody_is_told_to_resume_a_run(
    deadline_s: float | None, said: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    assert "resume with: " in how_to_go_on(folder), "it was not begun"
    asked = {"policy": "asha", "seed": 0, "study": {}}
    offer = slots_offer(1, MachineSpec())
    spec = RunSpec(
        kind="tune", started_at_s=0.0, asked=asked, slots=1, offer=offer, deadline_s=deadline_s, file=""
    )
    begin(folder, spec)
    assert said in how_to_go_on(folder)


@pytest.mark.parametrize(
    ("left_s", "said"),
    [
        (90.6, "Resume before 12:01:30, or with a later --deadline."),
        (90000.0, "Resume before 2026-01-02 13:00:00, or with a later --deadline."),
        (0.0, ""),
        (1e17, ""),
    ],
)
def test_whoever_resumes_is_told_until_when_that_goes_on(left_s: float, said: str) -> None:
    noon_s = datetime(2026, 1, 1, 12).timestamp()  # noqa: DTZ001
    spec = RunSpec(
        kind="tune",
        started_at_s=noon_s - 10.0,
        asked={"policy": "asha", "seed": 0, "study": {}},
        slots=1,
        offer=slots_offer(1, MachineSpec()),
        deadline_s=10.0 + left_s,
        file="",
    )
    assert when_to_resume(spec, noon_s) == said
    assert when_to_resume(dataclasses.replace(spec, deadline_s=None), noon_s) == ""


def test_the_hint_to_resume_names_the_deadline(tmp_path: Path) -> None:
    folder, now_s = RunFolder(tmp_path), time.time()
    asked = {"policy": "asha", "seed": 0, "study": {}}
    offer = slots_offer(1, MachineSpec())
    begin(
        folder,
        RunSpec(
            kind="tune", started_at_s=now_s, asked=asked, slots=1, offer=offer, deadline_s=3600.0, file=""
        ),
    )
    assert re.search(
        r"^resume with: .*\nResume before \d\d:\d\d:\d\d, or with a later --deadline\.$", how_to_go_on(folder)
    )


def test_what_a_command_keeps_in_its_folder_is_named(tmp_path: Path) -> None:
    files = tmp_path / "jobs" / "trial-000" / "files"
    folder = RunFolder(tmp_path)
    assert command_files(folder, "trial-000") is None
    files.mkdir(parents=True)
    assert command_files(folder, "trial-000") is None, "it is empty"
    (files / "last.pt").touch()
    assert command_files(folder, "trial-000") == files
    result = dataclasses.replace(result_of(["trial-000"], SEARCHED), files=files, file_names=("last.pt",))
    assert f"checkpoint      what its command saved is in {files}: last.pt\n" in tune_text(result, SEARCHED)
