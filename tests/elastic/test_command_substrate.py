"""Jobs as real commands: what only processes can get wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_processes import SUPPORT, running_with
from process_bench import (
    BATCH,
    ONE,
    PYTHON,
    TWO,
    Bench,
    CommandWorkers,
    all_events,
    eventually,
    job_of,
)
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.errors import InputError, with_log
from stretto.core.events import Decided, Event, JobFailed, JobFinished, JobNoted, JobReported, JobSubmitted
from stretto.core.instructions import Action, Instruction
from stretto.core.observations import LossPoint, NoiseSample, SpeedSample
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.command_output import CommandSetup, Progress, read_report
from stretto.substrate.elastic.effects import Rules

TRAINER = """
import json, os, sys, time
from pathlib import Path
checkpoint, epochs, fails = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
epoch = int(checkpoint.read_text()) if checkpoint.exists() else 0
while epoch < epochs:
    if fails and epoch == 3:
        sys.exit(3)
    time.sleep(0.05)
    epoch += 1
    new = checkpoint.with_suffix(".new")
    new.write_text(str(epoch))
    new.rename(checkpoint)
    report = {"work_done": 10.0 * epoch, "epoch": epoch, "step_s": 0.005, "sync_s": 0.001}
    print(json.dumps(report), flush=True)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as made:
        yield made


def failure(substrate: CommandWorkers) -> str:
    (event,) = all_events(substrate)
    assert isinstance(event, JobFailed)
    return with_log(event.error, event.log)


def test_a_command_learns_its_part_from_environment_and_arguments(bench: Bench) -> None:
    code = (
        "if os.environ['RANK'] == '0':\n"
        "    json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open(sys.argv[1], 'w'))"
    )
    told = bench.folder / "told.json"
    plain = bench.code(code, str(told), "--gpus={workers}", "{batch}", '{"a": {}}')
    substrate = bench.started(Command(plain.argv, {"OWN": "yes"}, bench.folder), on_nodes({"0": 2, "1": 1}))
    assert [event.kind for event in all_events(substrate)] == ["job-finished"]
    argv, env, cwd = json.loads(told.read_text())
    assert argv[1:] == ["--gpus=3", "48", '{"a": {}}']
    assert cwd == str(bench.folder)
    assert env["OWN"] == "yes"
    assert env["PATH"] == os.environ["PATH"]
    assert {
        key: value
        for key, value in env.items()
        if key.startswith("STRETTO_") and key not in {"STRETTO_DATA", "STRETTO_TOKEN", "STRETTO_START"}
    } == {
        "STRETTO_JOB": "a",
        "STRETTO_RESTARTS": "0",
        "STRETTO_WORKERS": "3",
        "STRETTO_SERVERS": "0",
        "STRETTO_NODES": "1",
        "STRETTO_BATCH_ATOMIC": "16",
        "STRETTO_BATCH_ACCUMULATION": "0",
        "STRETTO_METRICS_FILE": str(bench.log.with_name("metrics.jsonl")),
        "STRETTO_FOLDER": str(bench.log.with_name("files")),
    }


def test_a_report_line_becomes_an_event_with_the_configuration_it_ran_under(bench: Bench) -> None:
    line = {
        "work_done": 12.5,
        "epoch": 1,
        "step_s": 0.11,
        "sync_s": 0.02,
        "loss": 0.5,
        "grad_sqr": 1,
        "grad_var": 9,
    }
    code = f"time.sleep(0.2); print({json.dumps(json.dumps(line))}, flush=True); print('{{\"epoch\": 2}}')"
    first, second, end = all_events(bench.started(bench.code(code), TWO))
    assert isinstance(first, JobReported)
    assert (first.work_done, first.epoch) == (12.5, 1)
    assert first.speeds == (SpeedSample(1, 2, 0, 16, 0.11, 0.02),)
    assert first.losses == (LossPoint(1, 0.5),)
    assert first.noise == NoiseSample(1.0, 9.0)
    assert first.resize_s is not None
    assert 0.2 <= first.resize_s < 2.0
    assert isinstance(second, JobReported)
    assert (second.work_done, second.epoch, second.speeds, second.resize_s) == (12.5, 2, (), None)
    assert isinstance(end, JobFinished)


def test_garbage_is_only_logged(bench: Bench) -> None:
    code = """
sys.stdout.buffer.write(b'\\xff\\xfe garbage\\n[1, 2]\\n{"other": 1}\\n{broken\\n' + b'{"a":' * 5000 + b'\\n')
sys.stdout.buffer.write(b'{"work_done": ' + b' ' * 200_000 + b'1}\\n{"work_done": "much", "epoch": 1}\\n')
sys.stdout.flush()
print("50%|###  ", end="", file=sys.stderr, flush=True)
print('{"work_done": 2}')
print("no newline at the end", end="")
"""
    events = all_events(bench.started(bench.code(code)))
    reports = [event for event in events if isinstance(event, JobReported)]
    assert [(report.work_done, report.epoch) for report in reports] == [(0.0, 1), (2.0, 1)]
    assert isinstance(events[-1], JobFinished)
    log = bench.log.read_bytes()
    assert b"garbage" in log
    assert b"50%" in log
    assert b"no newline at the end" in log
    assert b"left out of a report: work_done is 'much'; it must be a number from 0 to 1e+15" in log


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"work_done": -1}', "work_done is '-1'"),
        ('{"work_done": NaN}', "work_done is 'nan'"),
        ('{"work_done": true}', "work_done is 'True'"),
        ('{"work_done": 1' + "0" * 400 + "}", "it must be a number from 0 to 1e+15"),
        ('{"epoch": 1.5}', "epoch is '1.5'"),
        ('{"step_s": 0}', "step_s is '0'"),
        ('{"step_s": 0.1}', "sync_s is missing; with 2 workers"),
        ('{"step_s": 0.1, "sync_s": 0.2}', "sync_s is '0.2'; it must be a number from 0 to step_s"),
        ('{"grad_sqr": 1}', "they must come together"),
        ('{"grad_sqr": 1, "grad_var": Infinity}', "grad_var is 'inf'"),
        ('{"epoch": 5, "loss": "low"}', "loss is 'low'"),
    ],
)
def test_what_is_wrong_with_a_report_is_left_out_and_said(line: str, problem: str) -> None:
    reading = read_report(line.encode(), CommandSetup("a", TWO, BATCH), Progress(7.0, 4, 4), t_s=1.0)
    assert any(problem in said for said in reading.problems), reading.problems
    assert reading.report is not None
    assert reading.report.work_done == 7.0
    assert (reading.report.speeds, reading.report.noise, reading.report.losses) == ((), None, ())


def test_the_first_loss_of_an_epoch_counts_and_nan_is_none() -> None:
    progress = Progress()
    points: list[LossPoint] = []
    for line in (
        '{"loss": 9}',
        '{"epoch": 1, "loss": NaN}',
        '{"epoch": 1, "loss": 3}',
        '{"epoch": 2, "loss": 2}',
    ):
        report = read_report(line.encode(), CommandSetup("a", ONE, BATCH), progress, t_s=0.0).report
        assert report is not None
        progress = progress.after(report)
        points += report.losses
    assert points == [LossPoint(1, None), LossPoint(2, 2.0)]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('the end'); sys.exit(3)", "exit code 3"),
        ("print('the end', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise RuntimeError('the end')", "exit code 1"),
    ],
)
def test_a_failure_names_its_cause_and_the_end_of_the_log(bench: Bench, code: str, reason: str) -> None:
    error = failure(bench.started(bench.code(code)))
    assert error.startswith(f"{reason}; its log ends:\n")
    assert "the end" in error
    assert error.endswith(f"\nlog: {bench.log}")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Command(("no-such-program",)), "cannot be started: .*No such file"),
        (Command(("/",)), "cannot be started: .*Permission denied"),
        (Command((*PYTHON, "-c", "pass"), cwd=Path("/no/such/folder")), "cannot be started: .*No such file"),
        (Command((*PYTHON, "a\0b")), "cannot be started: .*null byte"),
    ],
)
def test_a_command_that_cannot_be_started_is_a_failed_job(
    bench: Bench, command: Command, reason: str
) -> None:
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(failure(bench.started(command)))


def test_a_job_with_a_name_that_is_a_path_is_refused(bench: Bench) -> None:
    substrate = bench.substrate(bench.code("pass"), "../b")
    with pytest.raises(InputError, match="cannot name a folder"):
        substrate.admit(job_of("../b"))


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"work_done": 1}', flush=True)
time.sleep(60)
"""


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(bench: Bench) -> None:
    bench.grace_s = 0.3
    substrate = bench.started(bench.code(STUBBORN))
    assert substrate.next_event(10.0) is not None
    before_s = substrate.now_s()
    substrate.apply([Instruction(2, Action.PARK, "a", Allocation(), BATCH)])
    (event,) = all_events(substrate)
    assert 0.3 <= substrate.now_s() - before_s < 1.0
    assert bench.left() == []
    assert isinstance(event, JobNoted), "a job that was told to stop has not failed"
    assert event.text == "it did not save and leave in time and was killed, 0.3 s after SIGTERM"


def test_a_command_has_the_grace_to_save_its_state(bench: Bench) -> None:
    code = """
def save(*_):
    time.sleep(0.1)
    os.write(1, b'{"work_done": 5}\\n')  # print may be at work just now, and is not reentrant
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print('{"work_done": 1}', flush=True)
time.sleep(60)
"""
    substrate = bench.started(bench.code(code))
    assert substrate.next_event(10.0) is not None
    substrate.apply([Instruction(2, Action.PARK, "a", Allocation(), BATCH)])
    assert all_events(substrate) == [], "exit code 0 after SIGTERM is not the end of the job"
    substrate.close()
    (event,) = all_events(substrate)
    assert isinstance(event, JobReported)
    assert event.work_done == 5.0


def test_a_command_that_never_falls_silent_can_be_stopped(bench: Bench) -> None:
    bench.grace_s = 30.0
    substrate = bench.started(
        bench.code("print('{\"epoch\": 1}', flush=True)\nwhile True: os.write(1, b'.' * 4000)")
    )
    assert substrate.next_event(10.0) is not None
    substrate.apply([Instruction(2, Action.PARK, "a", Allocation(), BATCH)])
    all_events(substrate)
    assert substrate.now_s() < 10.0


def test_a_stop_right_after_the_start_is_not_lost(bench: Bench) -> None:
    bench.grace_s = 30.0
    substrate = bench.started(bench.code("time.sleep(60)"))
    substrate.apply([Instruction(2, Action.PARK, "a", Allocation(), BATCH)])
    all_events(substrate)
    assert substrate.now_s() < 10.0


FAMILY = """
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = [sys.executable, "-I", "-S", "-c", stubborn, sys.argv[0]]
subprocess.Popen(child)
subprocess.Popen(child, start_new_session=True)
time.sleep(0.2)
print('{"work_done": 1}', flush=True)
"""


def test_whatever_a_command_started_ends_with_it(bench: Bench) -> None:
    substrate = bench.started(bench.code(FAMILY + "time.sleep(0.2)"))
    assert substrate.next_event(10.0) is not None
    assert len(bench.left()) == 4, "the guard, the command and its two children"
    assert [event.kind for event in all_events(substrate)] == ["job-finished"]
    assert bench.left() == []


def test_a_killed_guard_takes_the_command_with_it(bench: Bench) -> None:
    substrate = bench.started(bench.code(STUBBORN))
    assert substrate.next_event(10.0) is not None
    (guard,) = [line for line in bench.left() if "elastic/guard.py" in line]
    os.kill(int(guard.split()[0]), signal.SIGKILL)
    assert "its guard process ended unexpectedly" in failure(substrate)
    assert eventually(lambda: bench.left() == [])


def test_an_instruction_for_a_job_that_just_ended_does_not_start_it_again(bench: Bench) -> None:
    substrate = bench.started(bench.code("print('{\"epoch\": 1}')"))
    assert eventually(lambda: bench.left() == [])
    substrate.apply([Instruction(2, Action.RESIZE, "a", TWO, BATCH)])
    assert bench.left() == []
    assert [event.kind for event in all_events(substrate)] == ["job-reported", "job-finished"]


def test_stops_share_the_grace(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text("import signal, time\n" + STUBBORN)
    names = ("a", "b", "c")
    commands = {name: Command((*PYTHON, str(script))) for name in names}
    substrate = CommandWorkers(commands, tmp_path, rules=Rules(retries=0, command_s=0.4))
    for name in names:
        substrate.admit(job_of(name))
    substrate.apply([Instruction(i, Action.START, name, ONE, BATCH) for i, name in enumerate(names)])
    for _ in names:
        assert substrate.next_event(10.0) is not None
    before_s = substrate.now_s()
    substrate.close()
    assert 0.4 <= substrate.now_s() - before_s < 1.0
    assert running_with(str(tmp_path)) == []


def test_waiting_is_precise_and_costs_no_cpu(bench: Bench) -> None:
    substrate = bench.started(bench.code("time.sleep(60)"))
    until_s = substrate.now_s() + 0.5
    cpu_s = time.process_time()
    assert substrate.next_event(until_s) is None
    assert 0 <= substrate.now_s() - until_s < 0.1
    assert time.process_time() - cpu_s < 0.1


def test_events_after_the_time_asked_for_are_kept_for_later(bench: Bench) -> None:
    substrate = bench.started(bench.code("print('{\"epoch\": 1}')"))
    early_s = substrate.now_s()
    assert eventually(lambda: bench.left() == [])
    assert substrate.next_event(early_s) is None
    assert [event.kind for event in all_events(substrate)] == ["job-reported", "job-finished"]


CONTROLLER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from process_bench import Bench
from stretto.core.instructions import Action, Instruction
bench = Bench(Path(sys.argv[2]), grace_s=0.5)
substrate = bench.started(bench.code(sys.argv[3]))
substrate.next_event(10.0)
print("ready", flush=True)
substrate.next_event(60.0)
"""


def kill_a_controller_of(code: str, bench: Bench) -> None:
    """Run the code under a controller in another process, and kill that when the first report is in."""
    here = str(SUPPORT)
    arguments = [sys.executable, "-c", CONTROLLER, here, str(bench.folder), code]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"ready\n"
        controller.kill()


def test_a_killed_controller_leaves_no_orphan(bench: Bench) -> None:
    kill_a_controller_of("signal.signal(15, signal.SIG_IGN)\n" + FAMILY + "time.sleep(60)", bench)
    assert len(bench.left()) == 4, "they have their grace"
    assert eventually(lambda: bench.left() == [])


def test_recovery_waits_for_what_the_killed_controller_left(bench: Bench) -> None:
    code = """
trace = open(os.path.join(os.path.dirname(sys.argv[0]), "trace"), "a", buffering=1)
def save(*_):
    time.sleep(0.3)
    trace.write("saved\\n")
    os.write(1, b"a line nobody reads")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
trace.write("start %s %s\\n" % (os.environ["STRETTO_RESTARTS"], os.environ["STRETTO_WORKERS"]))
print('{"work_done": 1, "epoch": 1}', flush=True)
time.sleep(0.2 if os.environ["STRETTO_RESTARTS"] == "1" else 60)
"""
    kill_a_controller_of(code, bench)
    start = Instruction(1, Action.START, "a", ONE, BATCH)
    history: list[Event] = [
        JobSubmitted(t_s=0.0, job=job_of("a")),
        Decided(t_s=5.0, policy="p", instructions=(start,), reasons={}, memory=None),
        JobReported(t_s=70.0, job_id="a", work_done=1.0, epoch=1),
    ]
    substrate = bench.substrate(bench.code(code))
    substrate.recover(history)
    assert 70.0 <= substrate.now_s() < 71.0
    substrate.apply([start])
    assert [event.kind for event in all_events(substrate)] == ["job-reported", "job-finished"]
    assert (bench.folder / "trace").read_text().splitlines() == ["start 0 1", "saved", "start 1 1"]
