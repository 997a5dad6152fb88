"""Commands that print without end: what is read of them, and that nobody else waits."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process_bench import Bench, all_events, eventually, job_of, start, trial_of
from stretto.core.events import Event, JobFinished, JobNoted, JobReported
from stretto.core.instructions import Action, Instruction
from stretto.core.observations import Result
from stretto.substrate.elastic.command_gang import FLOOD as PRINTS_FAST
from stretto.substrate.elastic.guard import Allowance, Log, MetricsFile, Reports, Sieve
from stretto.substrate.elastic.loop import EventQueue

KEYS = ["epoch", "loss", "accuracy"]


def sieved(lines: Sequence[bytes], *, metric: str | None = None, every_s: float = 0.0) -> list[bytes]:
    sieve, passed = Sieve(KEYS, metric, 0.0), []
    for at, line in enumerate(lines):
        passed += [*sieve.pass_on(line, at * every_s), *sieve.due(at * every_s)]
    return [line for line, _ in [*passed, *sieve.rest()]]


def test_lines_as_people_print_them_all_go_on() -> None:
    lines = [b'{"step": %d, "loss": 1}' % step for step in range(3000)]
    assert sieved(lines, every_s=0.06) == lines


def test_of_a_flood_the_last_line_goes_on_and_little_else() -> None:
    lines = [b'{"step": %d, "loss": 1}' % step for step in range(100_000)]
    passed = sieved(lines, every_s=1e-5)
    assert passed[-1] == lines[-1]
    assert len(passed) < 310


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=600))
def test_of_every_epoch_the_first_line_goes_on_in_order(shown: list[tuple[int, bool]]) -> None:
    lines = [
        json.dumps({"epoch": epoch, "loss": at, **({"accuracy": 1} if shows else {})}).encode()
        for at, (epoch, shows) in enumerate(shown)
    ]
    passed = sieved(lines, metric="accuracy")
    assert passed == [line for line in lines if line in passed]
    firsts: dict[tuple[int, bool], bytes] = {}
    for line, (epoch, shows) in zip(lines, shown, strict=True):
        firsts.setdefault((epoch, shows), line)
    assert set(firsts.values()) <= set(passed)


def test_lines_with_a_metric_and_no_epoch_each_count_and_none_is_left_out() -> None:
    lines = [b'{"accuracy": 0.%d}' % at for at in range(1000)]
    assert sieved(lines, metric="accuracy") == lines


def test_epochs_without_end_are_not_left_out_but_the_command_waits() -> None:
    sieve = Sieve(KEYS, None, 0.0)
    passed = [line for at in range(5000) for line in sieve.pass_on(b'{"epoch": %d}' % at, 0.0)]
    assert len(passed) == 5000
    assert sieve.wait_s(0.0) > 10
    assert sieve.wait_s(60.0) == 0


FLOOD = [b'{"step": %d, "loss": 1}' % step for step in range(400)]


def reports_of(path: Path, told: list[bytes]) -> Reports:
    return Reports(MetricsFile(str(path), KEYS), Sieve(KEYS, None, 0.0), told.append, clock=lambda: 0.0)


def test_a_held_line_of_the_metrics_file_is_told_and_not_written_again(tmp_path: Path) -> None:
    path, told = tmp_path / "metrics.jsonl", list[bytes]()
    reports = reports_of(path, told)
    path.write_bytes(b"".join(line + b"\n" for line in FLOOD))
    reports.look()
    assert told[-1] != FLOOD[-1], "it is held back"
    reports.end()
    assert told[-1] == FLOOD[-1]
    assert path.read_bytes().splitlines() == FLOOD


def test_a_held_line_of_the_metrics_file_is_not_written_again_when_something_is_printed(
    tmp_path: Path,
) -> None:
    path, told, printed = tmp_path / "metrics.jsonl", list[bytes](), b'{"epoch": 1}'
    reports = reports_of(path, told)
    path.write_bytes(b"".join(line + b"\n" for line in FLOOD))
    reports.look()
    reports.printed(printed)
    reports.end()
    assert told[-2:] == [FLOOD[-1], printed]
    assert path.read_bytes().splitlines() == [*FLOOD, printed]


def test_a_held_line_that_was_printed_is_written_when_one_of_the_metrics_file_comes(tmp_path: Path) -> None:
    path, told, added = tmp_path / "metrics.jsonl", list[bytes](), [b'{"epoch": 1}', b'{"epoch": 2}']
    reports = reports_of(path, told)
    for line in FLOOD:
        reports.printed(line)
    assert told == FLOOD[:256]
    with path.open("ab") as file:
        file.write(b"\n".join([*added, b""]))
    reports.look()
    reports.end()
    assert told[256:] == [FLOOD[-1], *added]
    assert path.read_bytes().splitlines() == [*FLOOD[:256], *added, FLOOD[-1]]


def test_an_allowance_comes_back_with_time() -> None:
    allowance = Allowance(10, 2, 0.0)
    allowance.take(12)
    assert allowance.wait_s(0.0) == pytest.approx(1.5)
    assert allowance.wait_s(1.5) == 0
    assert Allowance(10, 2, 5.0).wait_s(0.0) == 0, "a clock that goes back gives nothing and takes nothing"


def test_a_log_is_bounded_and_says_where_the_rest_is(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    log, other = Log(str(path), most_bytes=1000), Log(str(path), most_bytes=1000)
    for at in range(100):
        log.write(b"%099d\n" % at)
        other.write(b"%099d\n" % at)
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 5000
    assert {one.name for one in tmp_path.iterdir()} == {"stdout.log", "stdout.log.1"}
    text = path.read_text()
    assert "what comes before is in stdout.log.1" in text
    assert (tmp_path / "stdout.log.1").read_text().endswith("99\n")


def test_a_log_that_was_removed_is_no_matter(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "stdout.log"), most_bytes=10)
    (tmp_path / "stdout.log").unlink()
    log.write(b"x" * 20)
    log.write(b"y" * 20)


def test_a_metrics_file_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(str(path), KEYS)
    line = b'{"epoch": 1, "note": "' + b"x" * 1000 + b'"}\n'
    path.write_bytes(line * 3000)
    first = len(list(metrics.added()))
    assert 0 < first < 1100
    while more := len(list(metrics.added())):
        first += more
    assert first == 3000


def reported(epoch: int, t_s: float = 0.0, job_id: str = "a") -> JobReported:
    result = Result(epoch, 0.5, None, 1, 1)
    return JobReported(t_s=t_s, job_id=job_id, work_done=epoch, epoch=epoch, results=(result,))


def grown(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 20_000


def taken(queue: EventQueue) -> list[Event]:
    events = []
    while (event := queue.take(1e9)) is not None:
        events.append(event)
    return events


def test_reports_that_nobody_takes_are_merged_and_no_result_is_lost() -> None:
    queue = EventQueue()
    for epoch in range(1, 1001):
        queue.put(reported(epoch, t_s=epoch))
    queue.put(reported(1, t_s=1001, job_id="b"))
    queue.put(JobFinished(t_s=1002, job_id="a"))
    events = taken(queue)
    of_a = [event for event in events if isinstance(event, JobReported) and event.job_id == "a"]
    assert len(events) < 50
    assert [one.epoch for event in of_a for one in event.results] == list(range(1, 1001))
    assert of_a[-1].epoch == 1000
    assert events[-1] == JobFinished(t_s=1002, job_id="a")
    assert [event.t_s for event in events] == sorted(event.t_s for event in events)


def test_few_reports_stay_as_they_are() -> None:
    queue = EventQueue()
    events: list[Event] = [reported(epoch) for epoch in range(1, 20)]
    for event in events:
        queue.put(event)
    assert taken(queue) == events
    assert not queue


@pytest.mark.parametrize(
    "prints",
    [
        """print('{"work_done": 1, "step": %d}' % i)""",
        """print('{"epoch": %d}' % i)""",
        """print("x" * 10000, end="")""",
        """print("warning " * 1000, file=sys.stderr)""",
        """open(os.environ["STRETTO_METRICS_FILE"], "a").write('{"epoch": 1}\\n' * 1000); time.sleep(0.01)""",
    ],
)
def test_a_command_that_prints_without_end_can_be_stopped_and_costs_little(
    tmp_path: Path, prints: str
) -> None:
    with Bench(tmp_path) as bench:
        flood = f"i = 0\nprint('{{\"work_done\": 1}}', flush=True)\nwhile True:\n    i += 1\n    {prints}\n"
        substrate = bench.started(bench.code(flood), job=job_of("a"))
        eventually(lambda: grown(bench.log) or grown(bench.metrics))
        seen = []
        until_s = substrate.now_s() + 0.5
        while (event := substrate.next_event(until_s)) is not None:
            seen.append(event)
        assert any(isinstance(event, JobReported) for event in seen)
        assert len(seen) < 3000
        substrate.apply([Instruction(2, Action.STOP, "a", start().allocation, start().batch)])
        eventually(lambda: bench.left() == [])


def test_that_a_study_prints_fast_is_said_once(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        code = 'for i in range(20000):\n    print(\'{"epoch": 0, "step": %d, "loss": 1}\' % i)\n'
        substrate = bench.substrate(bench.code(code, metric="accuracy"), "s")
        for number, job_id in enumerate(("a", "b"), start=1):
            substrate.admit(trial_of(job_id, epochs=None))
            substrate.apply([start(job_id, number=number)])
            notes = [event.text for event in all_events(substrate) if isinstance(event, JobNoted)]
            assert (PRINTS_FAST in notes) == (job_id == "a")


def test_a_trial_that_floods_loses_no_epoch(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        code = (
            "for epoch in range(1, 4):\n"
            "    for step in range(20000):\n"
            '        print(\'{"epoch": %d, "step": %d, "loss": 1}\' % (epoch - 1, step))\n'
            '    print(\'{"epoch": %d, "accuracy": 0.%d}\' % (epoch, epoch), flush=True)\n'
        )
        substrate = bench.substrate(bench.code(code, metric="accuracy"), "s")
        substrate.admit(trial_of("a"))
        substrate.apply([start("a")])
        begun_s = time.monotonic()
        seen: list[Event] = []
        while not any(isinstance(event, JobFinished) for event in seen):
            assert time.monotonic() - begun_s < 60
            if (event := substrate.next_event(substrate.now_s() + 1.0)) is not None:
                seen.append(event)
        results = [one for event in seen if isinstance(event, JobReported) for one in event.results]
        assert [(one.epoch, one.value) for one in results] == [(1, 0.1), (2, 0.2), (3, 0.3)]
