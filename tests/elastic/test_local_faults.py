"""Everything that goes wrong on a machine, with stub workers: what is told, what is kept, what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from live_processes import SUPPORT, eventually, pids_with, running_with
from local_bench import QUICK, Bench
from stretto.core.errors import InputError, PolicyError
from stretto.core.events import (
    CheckpointSaved,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
)
from stretto.core.instructions import Action
from stretto.substrate.elastic.effects import Rules
from stretto.wire.channel import Channel
from stretto.wire.messages import Failed, Message

Open = Callable[..., Bench]


@pytest.fixture(autouse=True)
def _stubs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Open]:
    """Substrates on one folder, closed in the end; nothing of them is left."""
    made: list[Bench] = []

    def new(rules: Rules = QUICK, slots: int = 2) -> Bench:
        made.append(Bench(tmp_path, rules=rules, slots=slots))
        return made[-1]

    yield new
    for bench in made:
        bench.substrate.close()
    assert running_with(str(tmp_path)) == []


def of_kind(events: list[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def results_of(events: list[Event]) -> list[int]:
    return [result.epoch for event in events if isinstance(event, JobReported) for result in event.results]


def pids(bench: Bench) -> list[int]:
    """The nursery first, then its workers by age."""
    return pids_with(str(bench.folder))


@pytest.mark.parametrize(
    ("trouble", "rank", "said"),
    [
        ("raise", 0, "the loss went wrong"),
        ("raise", 1, "the loss went wrong"),
        ("die", 0, "ran out of memory"),
        ("die", 1, "ran out of memory"),
        ("exit", 1, "exit code 3"),
    ],
)
def test_a_lost_worker_costs_what_was_done_since_the_last_checkpoint(
    make: Open, trouble: str, rank: int, said: str
) -> None:
    bench = make()
    bench.admit(trouble=trouble, at_step=13, rank=rank, once=True)
    bench.run(workers=2)
    events = bench.rest()
    (retried,) = of_kind(events, JobRetried)
    assert isinstance(retried, JobRetried)
    assert retried.attempt == 1
    assert said in retried.error
    assert retried.log == str(bench.folder / "jobs" / "a" / "stdout.log")
    assert isinstance(events[-1], JobFinished)
    assert results_of(events) == [1, 2, 3, 4, 5, 6]
    starts = [e.resize_s for e in events if isinstance(e, JobReported) and e.resize_s is not None]
    assert len(starts) == 1, "a retry is no start that was asked for"


def test_last_words_that_come_after_the_end_are_heard(make: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = Channel.messages

    def late(channel: Channel) -> Iterator[Message]:
        for message in at_once(channel):
            if isinstance(message, Failed):
                time.sleep(0.3)  # in which its nursery says that it is gone
            yield message

    monkeypatch.setattr(Channel, "messages", late)
    bench = make()
    bench.admit(trouble="raise", at_step=13, once=True)
    bench.run()
    (retried,) = of_kind(bench.rest(), JobRetried)
    assert isinstance(retried, JobRetried)
    assert retried.error.startswith("Traceback: the loss went wrong")


def test_what_fails_again_and_again_fails_for_good(make: Open) -> None:
    bench = make()
    bench.admit(trouble="raise", at_step=13)
    bench.run()
    events = bench.rest()
    assert [e.attempt for e in events if isinstance(e, JobRetried)] == [1, 2]
    assert isinstance(events[-1], JobFailed)
    assert events[-1].error.startswith("Traceback: the loss went wrong")
    assert bench.log().count("trouble: raise") == 3


@pytest.mark.parametrize("trouble", ["stop", "mute"])
def test_a_worker_that_falls_silent_is_replaced(make: Open, trouble: str) -> None:
    bench = make(replace(QUICK, heartbeat_s=2.0, grace_s=1.0))
    bench.admit(trouble=trouble, at_step=13, rank=1, once=True)
    bench.run(workers=2)
    events = bench.rest()
    assert any("no sign of life for 2 s" in e.error for e in events if isinstance(e, JobRetried))
    assert isinstance(events[-1], JobFinished)


def test_a_group_that_takes_no_step_is_replaced(make: Open) -> None:
    bench = make(replace(QUICK, hang_s=3.0))
    bench.admit(trouble="hang", at_step=13, once=True)
    bench.run()
    events = bench.rest()
    assert any("no step was taken for 3 s" in e.error for e in events if isinstance(e, JobRetried))
    assert isinstance(events[-1], JobFinished)


def test_a_worker_that_babbles_is_replaced(make: Open) -> None:
    bench = make()
    bench.admit(trouble="babble", at_step=13, once=True)
    bench.run()
    events = bench.rest()
    assert any("makes no sense" in e.error for e in events if isinstance(e, JobRetried))
    assert isinstance(events[-1], JobFinished)


def test_a_killed_nursery_is_replaced_and_its_gangs_go_on(make: Open) -> None:
    bench = make()
    for job_id in ("a", "b"):
        bench.admit(job_id, epochs=12, step_s=0.05)
        bench.run(job_id=job_id)
    bench.wait_for(JobReported, lambda e: e.subject == "a")
    bench.wait_for(JobReported, lambda e: e.subject == "b")
    os.kill(pids(bench)[0], signal.SIGKILL)
    events = bench.rest()
    assert {e.subject for e in of_kind(events, JobRetried)} == {"a", "b"}
    assert {e.subject for e in of_kind(events, JobFinished)} == {"a", "b"}


def test_code_that_cannot_be_imported_fails_its_jobs_with_their_own_traceback(make: Open) -> None:
    bench = make()
    bench.admit("bad", entry="raise")
    bench.admit("good")
    bench.run(job_id="bad")
    bench.run(job_id="good")
    events = bench.rest()
    (failed,) = of_kind(events, JobFailed)
    assert isinstance(failed, JobFailed)
    assert failed.job_id == "bad"
    assert "this module cannot be imported" in failed.error
    assert "fork_server.py" not in failed.error
    assert [e.subject for e in of_kind(events, JobFinished)] == ["good"]


@pytest.mark.parametrize(("entry", "named"), [("threads", "prefetch"), ("unknown threads", "python")])
def test_code_that_starts_threads_is_imported_by_every_worker_and_that_is_said_once(
    make: Open, entry: str, named: str
) -> None:
    bench = make()
    for job_id in ("a", "b"):
        bench.admit(job_id, entry=entry)
    bench.run(workers=2)
    bench.rest()
    bench.run(job_id="b")
    assert [e.subject for e in of_kind(bench.rest(), JobFinished)] == ["a", "b"]
    (note,) = of_kind(bench.seen, JobNoted)
    assert isinstance(note, JobNoted)
    assert f"every worker imports {entry} itself" in note.text
    assert named in note.text


def test_code_that_hangs_while_it_is_imported_is_not_waited_for(make: Open) -> None:
    bench = make(rules=replace(QUICK, grace_s=60.0))
    bench.admit(entry="hang")
    bench.run()
    log = bench.folder / "nursery.log"
    assert eventually(lambda: log.is_file() and "importing" in log.read_text())
    begun_s = time.monotonic()
    bench.substrate.close()
    assert time.monotonic() - begun_s < 30.0
    assert bench.left() == []


def test_what_a_worker_starts_ends_with_it(make: Open) -> None:
    bench = make()
    bench.admit(trouble="child", at_step=3)
    bench.run()
    bench.wait_for(JobReported)
    assert any("time.sleep(60)" in line for line in bench.left())
    bench.tell(Action.STOP)
    assert eventually(lambda: not any("time.sleep(60)" in line for line in bench.left()))


def test_a_worker_that_cannot_be_forked_is_tried_again_and_no_other_is_affected(make: Open) -> None:
    bench = make()
    for job_id in ("a", "b"):
        bench.admit(job_id, entry="crowded")
        bench.run(job_id=job_id)
    events = bench.rest()
    (noted,) = of_kind(events, JobNoted)
    assert isinstance(noted, JobNoted)
    assert noted.job_id == "b"
    assert "a worker cannot be started: the limit of processes" in noted.text
    assert of_kind(events, JobRetried) == []
    assert {e.subject for e in of_kind(events, JobFinished)} == {"a", "b"}


def idle_process(bench: Bench) -> int:
    """Of a job that is done."""
    bench.admit("first")
    bench.run(job_id="first")
    bench.rest()
    _, pid = pids(bench)
    return pid


def process_of(bench: Bench, job_id: str) -> list[int]:
    """All it had, in turn."""
    lines = [line.split() for line in bench.log(job_id).splitlines()]
    return [int(words[1]) for words in lines if words[0] == "process"]


def test_a_process_that_ended_well_serves_the_next_job(make: Open) -> None:
    bench = make(slots=1)
    pid = idle_process(bench)
    bench.admit("second")
    bench.run(job_id="second")
    assert isinstance(bench.rest()[-1], JobFinished)
    assert process_of(bench, "second") == [pid]


def test_a_process_that_dies_while_it_waits_is_missed_by_nobody(make: Open) -> None:
    bench = make(slots=1)
    pid = idle_process(bench)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not bench.substrate._workers._idle)
    bench.admit("second")
    bench.run(job_id="second")
    events = bench.rest()
    assert isinstance(events[-1], JobFinished)
    assert not of_kind(events, JobRetried)
    assert process_of(bench, "second") != [pid]


def test_a_process_killed_right_after_it_was_given_a_task_costs_an_attempt(make: Open) -> None:
    bench = make(slots=1)
    pid = idle_process(bench)
    os.kill(pid, signal.SIGSTOP)  # so that it does not begin
    bench.admit("second")
    bench.run(job_id="second")
    assert eventually(lambda: not bench.substrate._workers._idle)
    os.kill(pid, signal.SIGKILL)
    seen = len(bench.seen)
    events = bench.rest()[seen:]
    assert [e.subject for e in of_kind(events, JobRetried)] == ["second"]
    assert isinstance(events[-1], JobFinished)
    assert results_of(events) == [1, 2, 3, 4, 5, 6]


def test_workers_wait_for_a_free_slot(make: Open) -> None:
    bench = make(slots=1)
    bench.admit("a")
    bench.admit("b")
    bench.run(job_id="a")
    bench.run(job_id="b")
    events = bench.rest()
    ends = [i for i, e in enumerate(events) if isinstance(e, JobFinished)]
    first_b = next(i for i, e in enumerate(events) if e.subject == "b")
    assert first_b > ends[0], "two workers met on one slot"
    assert len(ends) == 2


def test_a_shrunk_job_gives_its_slot_to_another(make: Open) -> None:
    bench = make()
    bench.admit("a", epochs=12, step_s=0.05)
    bench.admit("b")
    bench.run(workers=2, job_id="a")
    bench.wait_for(JobReported)
    bench.tell(Action.RESIZE, 1, "a")
    bench.run(job_id="b")
    events = bench.rest()
    assert {e.subject for e in of_kind(events, JobFinished)} == {"a", "b"}
    assert not of_kind(events, JobRetried)
    workers = [r.workers for e in events if isinstance(e, JobReported) and e.job_id == "a" for r in e.results]
    assert (workers[0], workers[-1]) == (2, 1)


def test_a_stopped_job_says_no_more_and_its_slots_are_free(make: Open) -> None:
    bench = make()
    bench.admit("a", epochs=100)
    bench.run(workers=2)
    bench.wait_for(JobReported)
    bench.tell(Action.STOP)
    seen = len(bench.seen)
    assert not of_kind(bench.rest()[seen:], JobFinished)
    bench.admit("b")
    bench.run(workers=2, job_id="b")
    assert isinstance(bench.rest()[-1], JobFinished)


def test_a_parked_job_that_does_not_leave_is_killed_and_goes_on_later(make: Open) -> None:
    bench = make(replace(QUICK, park_s=0.5))
    bench.admit(ignores_park=True, epochs=20)
    bench.run()
    bench.wait_for(JobReported)
    bench.tell(Action.PARK)
    note = bench.wait_for(JobNoted)
    assert isinstance(note, JobNoted)
    assert "did not save and leave in time" in note.text
    bench.rest()
    assert len(bench.left()) == 1, "only the nursery is left"
    bench.run()
    events = bench.rest()
    assert isinstance(events[-1], JobFinished)
    assert results_of(events) == list(range(1, 21))


def test_a_trial_goes_on_only_when_its_result_was_decided_on(make: Open) -> None:
    bench = make()
    bench.admit(waits=True, epochs=4)
    bench.run()
    bench.wait_for(JobReported)
    assert not eventually(lambda: "ack 1" in bench.log(), within_s=0.3)
    bench.tell(Action.PARK)
    bench.rest()
    assert "ack" not in bench.log(), "it was parked where it reported"
    bench.run()
    events = bench.rest()
    assert isinstance(events[-1], JobFinished)
    assert results_of(events) == [1, 2, 3, 4]
    assert "ack 3" in bench.log()


def test_jobs_can_finish_their_epoch_and_leave(make: Open) -> None:
    bench = make()
    bench.admit(epochs=100)
    bench.run(workers=2)
    bench.wait_for(JobReported)
    bench.substrate.finish_epochs()
    events = bench.rest()
    assert not of_kind(events, JobFinished)
    last = of_kind(events, CheckpointSaved)[-1]
    assert isinstance(last, CheckpointSaved)
    assert last.work_done % 10.0 == 0.0
    assert len(bench.left()) == 3, "the nursery, and two processes that wait for another task"


def test_stop_now_leaves_nothing(make: Open) -> None:
    bench = make(replace(QUICK, grace_s=60.0))
    bench.admit(ignores_park=True, epochs=1000)
    bench.run(workers=2)
    bench.wait_for(JobReported)
    bench.substrate.stop_now()
    assert bench.left() == []


def test_a_folder_serves_one_run_at_a_time(make: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.substrate.local.ground.PATIENCE_S", 0.0)
    bench = make()
    with pytest.raises(InputError, match="in use by another run of this process"):
        Bench(bench.folder, rules=replace(QUICK, grace_s=0.1))


def test_what_cannot_be_carried_out_is_refused(make: Open) -> None:
    bench = make()
    bench.admit()
    with pytest.raises(PolicyError, match="3 workers; there are 2 slots"):
        bench.run(workers=3)


CONTROLLER = """
import sys
from pathlib import Path
from local_bench import Bench
from stretto.core.events import JobReported
bench = Bench(Path(sys.argv[1]))
bench.admit(epochs=1000, trouble="child", at_step=3)
bench.run(workers=2)
for _ in range(3):
    bench.wait_for(JobReported)
print("running", flush=True)
bench.rest()
"""


def test_workers_of_a_killed_controller_save_and_leave(make: Open, tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert controller.stdout is not None
    with controller, controller.stdout:
        assert controller.stdout.readline() == b"running\n"
        controller.kill()
    bench = make()  # waits for the folder
    assert bench.left() == []
    saved = int((tmp_path / "jobs" / "a" / "checkpoints" / "step").read_text())
    assert saved >= 15
