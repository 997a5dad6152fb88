"""Trials as unchanged scripts: results from their output or from a file, each epoch once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from live_processes import SUPPORT
from process_bench import BATCH, ONE, TWO, Bench, all_events, job_of, start, trial_of
from stretto.core.allocation import on_nodes
from stretto.core.events import Decided, Event, JobNoted, JobReported, JobSubmitted
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Tier
from stretto.core.observations import Result
from stretto.substrate.elastic.command_output import CommandSetup, EpochMark, Progress, Trial, read_report

SHOW = """
def show(**values):
    print(json.dumps(values), flush=True)
"""
WRITE = """
def show(**values):
    with open(os.environ["STRETTO_METRICS_FILE"], "a") as file:
        file.write(json.dumps(values) + "\\n")
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


def results(events: Sequence[Event]) -> list[Result]:
    return [result for event in events if isinstance(event, JobReported) for result in event.results]


def shown(events: Sequence[Event]) -> list[tuple[int, float | None]]:
    return [(result.epoch, result.value) for result in results(events)]


def notes(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, JobNoted)]


@pytest.mark.parametrize("show", [SHOW, WRITE], ids=["printed", "written"])
def test_each_epoch_shows_its_result_and_how_long_it_took(bench: Bench, show: str) -> None:
    code = (
        show
        + """
if os.environ["RANK"] != "0":
    sys.exit()
for epoch in (1, 2, 3):
    time.sleep(0.1)
    show(epoch=epoch, accuracy=epoch / 10)
"""
    )
    events = all_events(bench.started(bench.code(code, metric="accuracy"), TWO, trial_of("a")))
    assert [event.kind for event in events] == ["job-reported"] * 3 + ["job-finished"]
    assert shown(events) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [(event.epoch, event.work_done) for event in events if isinstance(event, JobReported)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    first, *others = results(events)
    assert first.epoch_s is None, "nobody knows when it began"
    assert all(other.epoch_s is not None and other.epoch_s > 0 for other in others)
    assert {(result.workers, result.nodes) for result in results(events)} == {(2, 1)}
    assert len(bench.metrics.read_text().splitlines()) == 3, "every report is kept once"


def test_what_is_not_a_number_is_none_and_other_lines_are_no_results(bench: Bench) -> None:
    code = (
        SHOW
        + """
show(epoch=1, loss=0.5)
show(epoch=1, accuracy=float("nan"))
show(epoch=2, accuracy=None)
show(epoch=3, accuracy="high")
show(epoch=3, accuracy=float("inf"))
"""
    )
    events = all_events(bench.started(bench.code(code, metric="accuracy"), job=trial_of("a")))
    assert shown(events) == [(1, None), (2, None), (3, None)]
    assert "accuracy is 'high'; it must be a number or null" in bench.log.read_text()
    (note,) = notes(events)
    assert "accuracy was shown as 'high', which is not a number" in note


def test_lines_without_an_epoch_are_counted(bench: Bench) -> None:
    code = SHOW + "for value in (3, 2, 1): show(loss=value)"
    events = all_events(bench.started(bench.code(code, metric="loss"), job=trial_of("a")))
    assert shown(events) == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_study_has_one_command_for_all_its_trials(bench: Bench) -> None:
    code = SHOW + "show(epoch=1, accuracy=float(sys.argv[1]))"
    command = bench.code(code, "{lr}", metric="accuracy")
    substrate = bench.substrate(command, name="s")
    for number, name in enumerate("ab", start=1):
        substrate.admit(trial_of(name, lr=number / 4))
        substrate.apply([start(name, ONE, number)])
    events = all_events(substrate)
    values = {e.job_id: e.results[0].value for e in events if isinstance(e, JobReported)}
    assert values == {"a": 0.25, "b": 0.5}


def test_a_trial_is_done_after_its_last_epoch_whatever_its_command_does(bench: Bench) -> None:
    bench.grace_s = 0.2
    code = (
        SHOW
        + """
lines = [json.dumps({"epoch": epoch, "accuracy": 1}) for epoch in range(1, 6)]
os.write(1, "".join(line + "\\n" for line in lines).encode())
time.sleep(60)
"""
    )
    events = all_events(bench.started(bench.code(code, metric="accuracy"), job=trial_of("a")))
    assert shown(events) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert events[-1].kind == "job-finished"
    assert "accuracy of epochs after 3, the last" in bench.log.read_text()


def test_a_trial_may_save_its_model_after_its_last_epoch_and_what_it_exits_with_is_no_matter(
    bench: Bench,
) -> None:
    bench.grace_s = 20.0
    code = (
        SHOW
        + """
for epoch in (1, 2, 3): show(epoch=epoch, accuracy=1)
time.sleep(0.3)
open(sys.argv[0] + ".model", "w").close()
sys.exit(5)
"""
    )
    events = all_events(bench.started(bench.code(code, metric="accuracy"), job=trial_of("a")))
    assert events[-1].kind == "job-finished"
    assert (bench.folder / "code.py.model").exists()


@pytest.mark.parametrize("metric", [None, "accuracy"], ids=["job", "trial"])
def test_one_that_trains_on_after_its_last_epoch_is_ended_at_once(bench: Bench, metric: str | None) -> None:
    """Though it would have time to end by itself: SIGTERM comes while an epoch that does not count runs."""
    bench.grace_s = 60.0
    code = (
        SHOW
        + """
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), sys.exit(0)))
for epoch in range(1, 5): show(epoch=epoch, accuracy=1)
time.sleep(20)
"""
    )
    job = job_of("a", epochs=3) if metric is None else trial_of("a", epochs=3)
    events = all_events(bench.started(bench.code(code, metric=metric), job=job))
    assert [event.epoch for event in events if isinstance(event, JobReported)] == [1, 2, 3]
    assert notes(events) == ["its command was ended: it has shown 3 epochs, all that were asked for"]
    assert events[-1].kind == "job-finished"
    assert "asked to stop" in bench.log.read_text()


@pytest.mark.parametrize("metric", [None, "accuracy"], ids=["job", "trial"])
def test_one_that_ends_with_fewer_epochs_has_finished_and_that_is_said(
    bench: Bench, metric: str | None
) -> None:
    job = job_of("a", epochs=3) if metric is None else trial_of("a", epochs=3)
    events = all_events(bench.started(bench.code(SHOW + "show(epoch=1, accuracy=1)", metric=metric), job=job))
    assert [event.kind for event in events] == ["job-reported", "job-noted", "job-finished"]
    assert "has shown 1 of 3 epochs" in notes(events)[0]


def test_a_failure_after_the_last_epoch_is_told_of(bench: Bench) -> None:
    code = SHOW + "show(epoch=3)\nsys.exit('no room for the model')"
    events = all_events(bench.started(bench.code(code), job=job_of("a", epochs=3)))
    assert [event.kind for event in events] == ["job-reported", "job-noted", "job-finished"]
    assert "no room for the model" in notes(events)[0]
    assert [event.log for event in events if isinstance(event, JobNoted)] == [str(bench.log)]


def test_what_a_command_keeps_in_its_folder_is_there_when_it_is_started_again(bench: Bench) -> None:
    code = (
        SHOW
        + """
kept = os.path.join(os.environ["STRETTO_FOLDER"], "epoch")
assert os.path.join(sys.argv[1], "epoch") == kept
epoch = int(open(kept).read()) if os.path.exists(kept) else 0
open(kept, "w").write(str(epoch + 1))
show(epoch=epoch + 1, accuracy=1)
if epoch == 0: time.sleep(60)
"""
    )
    job = trial_of("a", epochs=2)
    substrate = bench.started(bench.code(code, "{folder}", metric="accuracy"), job=job)
    assert substrate.next_event(30.0) is not None
    substrate.apply([Instruction(2, Action.PARK, "a", on_nodes({}), BATCH), start("a", ONE, 3)])
    assert [epoch for epoch, _ in shown(all_events(substrate))] == [2]
    assert (bench.folder / "jobs" / "a" / "files" / "epoch").read_text() == "2"


AGAIN = """
for epoch in range(1, 100):
    show(epoch=epoch, accuracy=epoch + 10 * int(os.environ["STRETTO_RESTARTS"]))
    time.sleep(0.02)
    if epoch == 2 and os.environ["STRETTO_RESTARTS"] == "0": time.sleep(60)
"""


def test_a_command_that_begins_again_shows_no_epoch_twice(bench: Bench) -> None:
    job = trial_of("a", epochs=4)
    substrate = bench.started(bench.code(SHOW + AGAIN, metric="accuracy"), job=job)
    before = [substrate.next_event(10.0), substrate.next_event(10.0)]
    substrate.apply([Instruction(2, Action.RESIZE, "a", TWO, BATCH)])
    after = all_events(substrate)
    assert shown([event for event in before if event]) == [(1, 1.0), (2, 2.0)]
    assert shown(after) == [(3, 13.0), (4, 14.0)]
    assert all(result.epoch_s is not None for result in results(after)), "its start saw them begin"
    reports = [event for event in after if isinstance(event, JobReported)]
    assert [report.epoch for report in reports] == [2, 2, 3, 4], "what was reached is not lost"
    assert [report.resize_s is None for report in reports] == [False, True, True, True]
    assert bench.log.read_text().count("accuracy of epochs that were reported before") == 1


@pytest.mark.parametrize("tier", [Tier.RIGID, Tier.ELASTIC])
def test_counted_lines_begin_anew_only_for_a_job_without_checkpoints(bench: Bench, tier: Tier) -> None:
    """Both come to epochs 3 and 4: the rigid one after going through 1 and 2 again."""
    code = (
        SHOW
        + """
restarts = int(os.environ["STRETTO_RESTARTS"])
for number in range(1, 100):
    show(accuracy=number + 10 * restarts)
    if number == 2 and not restarts: time.sleep(60)
"""
    )
    job = trial_of("a", epochs=4, tier=tier)
    substrate = bench.started(bench.code(code, metric="accuracy"), job=job)
    assert [substrate.next_event(10.0) is not None for _ in range(2)] == [True, True]
    substrate.apply(
        [Instruction(2, Action.PARK, "a", on_nodes({}), BATCH), start("a", ONE, 3)],
    )
    after = all_events(substrate)
    assert [epoch for epoch, _ in shown(after)] == [3, 4]
    assert shown(after)[0][1] == (13.0 if tier is Tier.RIGID else 11.0)


def test_a_file_and_the_output_may_both_be_used(bench: Bench) -> None:
    code = (
        WRITE
        + """
for epoch in range(1, 21):
    show(epoch=epoch, accuracy=epoch)
    print(json.dumps({"epoch": epoch, "step_s": 0.5, "padding": "x" * epoch}), flush=True)
"""
    )
    job = trial_of("a", epochs=None)
    events = all_events(bench.started(bench.code(code, metric="accuracy"), job=job))
    assert sorted(shown(events)) == [(epoch, float(epoch)) for epoch in range(1, 21)]
    speeds = [sample for event in events if isinstance(event, JobReported) for sample in event.speeds]
    assert len(speeds) == 20
    kept = [json.loads(line) for line in bench.metrics.read_text().splitlines()]
    assert len(kept) == 40


CONTROLLER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from process_bench import Bench, trial_of
bench = Bench(Path(sys.argv[2]), grace_s=20.0)
substrate = bench.started(bench.code(sys.argv[3], metric="accuracy"), job=trial_of("a", epochs=4))
for _ in range(2):
    substrate.next_event(20.0)
print("ready", flush=True)
substrate.next_event(60.0)
"""
PATIENT = """
checkpoint = sys.argv[0] + ".checkpoint"
epoch = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
if epoch == 0:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    for epoch in (1, 2):
        show(epoch=epoch, accuracy=epoch)
    while not asked:
        time.sleep(0.01)
    show(epoch=3, accuracy=3)
    open(checkpoint, "w").write("3")
    sys.exit(0)
show(epoch=epoch + 1, accuracy=epoch + 1)
"""


@pytest.mark.parametrize("show", [SHOW, WRITE], ids=["printed", "written"])
def test_what_a_trial_showed_while_no_controller_was_there_is_not_lost(bench: Bench, show: str) -> None:
    """The killed controller saw epochs 1 and 2; the command then ends epoch 3 and saves it."""
    code = show + PATIENT
    here = str(SUPPORT)
    arguments = [sys.executable, "-c", CONTROLLER, here, str(bench.folder), code]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"ready\n"
        controller.kill()
    job = trial_of("a", epochs=4)
    seen = JobReported(
        t_s=2.0,
        job_id="a",
        work_done=2.0,
        epoch=2,
        results=(Result(1, 1, None, 1, 1), Result(2, 2, None, 1, 1)),
    )
    decided = Decided(t_s=1.0, policy="p", instructions=(start(),), reasons={}, memory=None)
    substrate = bench.substrate(bench.code(code, metric="accuracy"))
    substrate.recover([JobSubmitted(t_s=0.0, job=job), decided, seen])
    events = all_events(substrate)
    assert shown(events) == [(3, 3.0), (4, 4.0)]
    assert events[-1].kind == "job-finished"


def test_a_trial_whose_last_epoch_was_recorded_is_finished_on_recovery(bench: Bench) -> None:
    seen = JobReported(t_s=2.0, job_id="a", work_done=3.0, epoch=3, results=(Result(3, 0.5, None, 1, 1),))
    decided = Decided(t_s=1.0, policy="p", instructions=(start(),), reasons={}, memory=None)
    substrate = bench.substrate(bench.code("time.sleep(60)", metric="accuracy"))
    substrate.recover([JobSubmitted(t_s=0.0, job=trial_of("a")), decided, seen])
    assert [event.kind for event in all_events(substrate)] == ["job-finished"]


SETUP = CommandSetup("a", ONE, BATCH, Trial("m", 20))


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "epoch": st.none() | st.integers(-1, 25) | st.floats() | st.text(max_size=3),
                "m": st.none() | st.floats() | st.booleans() | st.integers() | st.text(max_size=3),
                "loss": st.none() | st.floats(),
            },
        ),
        max_size=30,
    ),
    st.sampled_from([EpochMark(), EpochMark(4), EpochMark(counts=False)]),
)
def test_results_only_go_forward_whatever_is_printed(lines: list[dict[str, object]], mark: EpochMark) -> None:
    progress, epochs = Progress(), [0]
    for t_s, line in enumerate(lines):
        reading = read_report(json.dumps(line).encode(), SETUP, progress, t_s=float(t_s), mark=mark)
        mark = reading.mark
        if reading.report is None:
            continue
        progress = progress.after(reading.report)
        for result in reading.report.results:
            assert epochs[-1] < result.epoch <= 20
            assert result.value is None or math.isfinite(result.value)
            assert result.epoch_s is None or result.epoch_s > 0
            epochs.append(result.epoch)
        assert (progress.epoch, progress.work_done, progress.result_epoch) == (epochs[-1],) * 3


def test_an_epoch_between_two_lines_takes_its_share_of_the_time() -> None:
    mark, progress, took = EpochMark(), Progress(), []
    for t_s, epoch in ((10.0, 1), (16.0, 3), (17.0, 3), (20.0, 4)):
        line = json.dumps({"epoch": epoch, "m": 0}).encode()
        reading = read_report(line, SETUP, progress, t_s=t_s, mark=mark)
        assert reading.report is not None
        mark, progress = reading.mark, progress.after(reading.report)
        took += [result.epoch_s for result in reading.report.results]
    assert took == [None, 3.0, 4.0]


def test_epoch_zero_is_no_result_and_that_is_said() -> None:
    reading = read_report(b'{"epoch": 0, "m": 1}', SETUP, Progress(), t_s=1.0)
    assert reading.report is not None
    assert reading.report.results == ()
    assert any("counted from 1" in problem for problem in reading.problems)


def test_lines_of_single_steps_are_no_epochs_once_an_epoch_was_told() -> None:
    mark, progress, epochs = EpochMark(), Progress(), []
    for t_s, line in enumerate(({"epoch": 1, "m": 0.9}, {"step": 7, "m": 0.5}, {"epoch": 2, "m": 0.8})):
        reading = read_report(json.dumps(line).encode(), SETUP, progress, t_s=float(t_s), mark=mark)
        mark = reading.mark
        if reading.report is not None:
            progress = progress.after(reading.report)
            epochs += [(result.epoch, result.value) for result in reading.report.results]
        assert ("without an epoch" in " ".join(reading.problems)) == ("step" in line)
    assert epochs == [(1, 0.9), (2, 0.8)]
