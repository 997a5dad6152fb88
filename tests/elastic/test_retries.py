"""Commands that fail and are started again, and the time of a run that was interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process_bench import BATCH, ONE, Bench, all_events, eventually, job_of, start
from stretto.core.allocation import on_nodes
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeLost,
    NodeReleased,
)
from stretto.core.instructions import Action, Instruction
from stretto.substrate.elastic.command_output import Progress
from stretto.substrate.elastic.recovery import Failures, fold

COUNTED = """
count = os.path.join(os.path.dirname(sys.argv[0]), "count")
starts = 1 + (int(open(count).read()) if os.path.exists(count) else 0)
open(f"{count}.new", "w").write(str(starts))
os.rename(f"{count}.new", count)  # at once, as the next line may be a SIGTERM
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, retries=2) as made:
        yield made


def starts(bench: Bench) -> int:
    return int((bench.folder / "count").read_text())


def kinds(events: Sequence[Event]) -> list[str]:
    return [event.kind for event in events]


def attempts(events: Sequence[Event]) -> list[int]:
    return [event.attempt for event in events if isinstance(event, JobRetried)]


def test_a_failure_is_tried_again_and_may_go_well(bench: Bench) -> None:
    code = COUNTED + "print('restarts', os.environ['STRETTO_RESTARTS']); sys.exit(7 if starts < 3 else 0)"
    events = all_events(bench.started(bench.code(code)))
    assert kinds(events) == ["job-retried", "job-retried", "job-finished"]
    assert attempts(events) == [1, 2]
    assert isinstance(events[0], JobRetried)
    assert events[0].error.startswith("exit code 7; its log ends:\nrestarts 0")
    assert bench.log.read_text().splitlines() == ["restarts 0", "restarts 1", "restarts 2"]


def test_after_so_many_failures_without_progress_the_job_has_failed(bench: Bench) -> None:
    code = COUNTED + "print('attempt', starts, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    events = all_events(bench.started(bench.code(code)))
    assert attempts(events) == [1, 2]
    assert isinstance(events[-1], JobFailed)
    assert events[-1].error.startswith("killed by SIGSEGV; its log ends:\nattempt 1")
    assert starts(bench) == 3


def test_progress_makes_failures_count_anew(bench: Bench) -> None:
    code = (
        COUNTED
        + """
print(json.dumps({"work_done": starts}), flush=True)
sys.exit(1 if starts < 6 else 0)
"""
    )
    events = all_events(bench.started(bench.code(code)))
    assert attempts(events) == [1] * 5
    assert events[-1].kind == "job-finished"
    assert all(event.resize_s is not None for event in events if isinstance(event, JobReported))


def test_falling_back_and_coming_as_far_again_is_no_progress(bench: Bench) -> None:
    code = COUNTED + "print(json.dumps({'work_done': [9, 3, 5][starts - 1]}), flush=True); sys.exit(1)"
    events = all_events(bench.started(bench.code(code)))
    assert attempts(events) == [1, 2]
    assert events[-1].kind == "job-failed"


def test_a_job_that_is_parked_or_stopped_is_not_started_again(bench: Bench) -> None:
    code = (
        COUNTED
        + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print('{"work_done": 1}', flush=True)
time.sleep(60)
"""
    )
    substrate = bench.started(bench.code(code))
    assert isinstance(substrate.next_event(10.0), JobReported)
    substrate.apply([Instruction(2, Action.PARK, "a", on_nodes({}), BATCH)])
    assert all_events(substrate) == []
    substrate.apply([start(number=3)])
    assert isinstance(substrate.next_event(20.0), JobReported)
    substrate.apply([Instruction(4, Action.STOP, "a", on_nodes({}), BATCH)])
    assert all_events(substrate) == []
    assert starts(bench) == 2


def test_instructions_among_failures_leave_nothing_behind(bench: Bench) -> None:
    bench.retries = 1000
    substrate = bench.started(bench.code(COUNTED + "sys.exit(1)"))
    assert eventually((bench.folder / "count").exists)
    for number in range(2, 12):
        time.sleep(0.01 * (number % 4))  # to meet it in all its moments
        substrate.apply([Instruction(number, Action.RESIZE, "a", ONE, BATCH)])
    substrate.apply([Instruction(12, Action.PARK, "a", on_nodes({}), BATCH)])
    all_events(substrate)
    assert bench.left() == []
    before = starts(bench)
    events = all_events(substrate)
    assert {event.kind for event in events} <= {"job-retried"}
    assert attempts(events) == list(range(1, len(events) + 1))
    assert not eventually(lambda: starts(bench) > before, within_s=0.3)


def past(*events: Event) -> list[Event]:
    decided = Decided(t_s=1.0, policy="p", instructions=(start(),), reasons={}, memory=None)
    return [JobSubmitted(t_s=0.0, job=job_of("a")), decided, *events]


def retried(t_s: float, attempt: int) -> JobRetried:
    return JobRetried(t_s=t_s, job_id="a", attempt=attempt, error="exit code 1")


def test_a_recovered_run_knows_the_failures_before_it(bench: Bench) -> None:
    code = COUNTED + "print(os.environ['STRETTO_RESTARTS'], flush=True); sys.exit(1)"
    substrate = bench.substrate(bench.code(code))
    substrate.recover(past(retried(2.0, 1)))
    events = all_events(substrate)
    assert attempts(events) == [2]
    assert events[-1].kind == "job-failed"
    assert bench.log.read_text().split() == ["2", "3"], "two starts were before"


@given(st.lists(st.tuples(st.sampled_from(["fail", "report"]), st.integers(0, 5)), max_size=20))
def test_a_job_that_gets_no_further_fails_at_last(course: list[tuple[str, int]]) -> None:
    """However it goes up and down, each further failure without a new height counts one more."""
    failures, progress, heights = Failures(), Progress(), [0.0]
    for what, work in course:
        if what == "report":
            progress = Progress(float(work))
            continue
        before = failures.count
        failures = failures.and_one(progress)
        assert failures.count == (1 if progress.work_done > max(heights) else before + 1)
        heights.append(progress.work_done)


def test_the_fold_counts_failures_as_they_were_counted() -> None:
    report = JobReported(t_s=3.0, job_id="a", work_done=4.0, epoch=0)
    job = fold(past(retried(1.5, 1), retried(2.0, 2), report, retried(4.0, 1))).jobs["a"]
    assert (job.failures.count, job.starts) == (1, 4)


def test_the_fold_has_nobody_on_a_node_that_is_gone() -> None:
    for gone in (NodeLost, NodeReleased):
        assert not fold(past(gone(t_s=2.0, node_id="0"))).jobs["a"].allocation
        assert fold(past(gone(t_s=2.0, node_id="1"))).jobs["a"].allocation == ONE


def test_the_clock_of_the_run_counts_the_time_it_was_down(bench: Bench) -> None:
    now_s = [500.0]
    bench.clock = lambda: now_s[0]
    command = bench.code("print('{\"epoch\": 1}')")
    substrate = bench.substrate(command)
    substrate.recover(past(retried(20.0, 1)))
    assert substrate.now_s() == 500.0
    assert {event.t_s for event in all_events(substrate)} == {500.0}
    substrate.close()
    now_s[0] = 3.0
    behind = bench.substrate(command)
    behind.recover(past(retried(20.0, 1)))
    assert behind.now_s() == 20.0, "never behind its own history"
    now_s[0] = 5.0
    assert behind.now_s() == 22.0


def test_without_a_clock_time_begins_with_the_substrate(bench: Bench) -> None:
    substrate = bench.substrate(bench.code("pass"))
    first_s = substrate.now_s()
    assert 0 <= first_s < 1000
    assert substrate.now_s() >= first_s


def test_reports_of_failed_starts_are_kept_in_the_metrics_file(bench: Bench) -> None:
    code = COUNTED + "print(json.dumps({'epoch': starts})); print('{\"other\": 1}'); sys.exit(starts < 2)"
    all_events(bench.started(bench.code(code)))
    assert [json.loads(line) for line in bench.metrics.read_text().splitlines()] == [
        {"epoch": 1},
        {"epoch": 2},
    ]
