"""Commands run by workers that come and go: the conformance suite, and the events of many little programs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from test_command_substrate import TRAINER
from test_trials_of_commands import SHOW, shown

import local_bench
from live_processes import SUPPORT, eventually, running_with
from process_bench import BATCH, EPOCHS, ONE, PYTHON, TWO, Bench, CommandWorkers, job_of, start, trial_of
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.errors import with_log
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    JobSubmitted,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job, Tier
from stretto.core.substrate import Substrate
from stretto.substrate.elastic.command import Command
from stretto.substrate.elastic.command_worker import Spot
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import NO_ENTRY
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import Slots
from stretto.testing.substrates import Sketch, SubstrateCase, SubstrateConformance

THREE = on_nodes({"0": 2, "1": 1})


class TestConformance(SubstrateConformance):
    def open(self, sketches: tuple[Sketch, ...], folder: Path) -> SubstrateCase:
        script = folder / "trainer.py"
        script.write_text("import os\nif os.environ['RANK'] != '0': raise SystemExit\n" + TRAINER)
        commands = {
            sketch.id: Command(
                (*PYTHON, str(script), str(folder / f"{sketch.id}.epoch"), str(EPOCHS), str(sketch.fails))
            )
            for sketch in sketches
        }
        return SubstrateCase(
            substrate=CommandWorkers(commands, folder, rules=Rules(retries=0, command_s=1.0)),
            jobs={sketch.id: job_of(sketch.id, epochs=EPOCHS) for sketch in sketches},
            small=ONE,
            large=TWO,
            batch=BATCH,
            other_batch=BatchChoice(32),
            tick_s=0.3,
            patience_s=90.0,
        )

    def leftovers(self, folder: Path) -> list[str]:
        return running_with(str(folder))


def every(substrate: Substrate) -> list[Event]:
    """Until nothing runs any more."""
    seen = []
    while (event := substrate.next_event(float("inf"))) is not None:
        seen.append(event)
    return seen


@dataclass(frozen=True, slots=True)
class Case:
    """A little program, as a job or a trial."""

    code: str
    job: Job
    allocation: Allocation = ONE
    retries: int = 0


WHOLE = """
show(work_done=1, epoch=0)
show(work_done=15, epoch=1, loss=0.5, step_s=0.1, sync_s=0.01, grad_sqr=1.0, grad_var=2.0)
show(epoch=1, loss=0.7)
print("{not a report"); print([1]); show(other=1)
show(epoch=1.5, step_s=-1)
show(epoch=1.5, grad_sqr=1)
show(epoch=2, loss=float("nan"), step_s=0.1)
"""
ON_AND_ON = """
lines = [json.dumps({"epoch": epoch, "accuracy": epoch}) + "\\n" for epoch in range(1, 9)]
os.write(1, "".join(lines).encode())
time.sleep(60)
"""
CASES = {
    "a job": Case(SHOW + WHOLE, job_of("a")),
    "a gang": Case(
        SHOW + "if os.environ['RANK'] == '0':" + WHOLE.replace("\n", "\n    "), job_of("a"), THREE
    ),
    "a gang whose others print": Case(SHOW + "show(epoch=1, loss=int(os.environ['RANK']))", job_of("a"), TWO),
    "a trial": Case(
        SHOW + "show(epoch=1, accuracy=0.1); show(epoch=2, accuracy=None); show(epoch=3, accuracy=0.3)",
        trial_of("a"),
    ),
    "lines that are counted": Case(SHOW + "for value in (3, 2, 1): show(accuracy=value)", trial_of("a")),
    "nonsense": Case(
        SHOW + "show(epoch=0, accuracy=1); show(epoch=1, accuracy='high'); show(epoch=9, accuracy=1)\n"
        "time.sleep(60)",
        trial_of("a"),
    ),
    "a trial that goes on after its last epoch": Case(ON_AND_ON, trial_of("a")),
    "a job that goes on after its last epoch": Case(ON_AND_ON, job_of("a", epochs=3)),
    "a job that has shown all and does not end": Case(
        SHOW + "show(epoch=3)\ntime.sleep(60)", job_of("a", epochs=3)
    ),
    "a trial that shows no result of its last epoch, and goes on": Case(
        SHOW + "show(epoch=2, accuracy=1)\nshow(epoch=4, accuracy=1)\ntime.sleep(60)", trial_of("a")
    ),
    "a job that ends early": Case(SHOW + "show(epoch=1)", job_of("a", epochs=3)),
    "a job that fails after its last epoch": Case(SHOW + "show(epoch=3)\nsys.exit(4)", job_of("a", epochs=3)),
    "a folder of its own": Case(
        "print(os.listdir(os.environ['STRETTO_FOLDER']), sys.argv[1] == os.environ['STRETTO_FOLDER'])\n"
        "open(os.path.join(sys.argv[1], 'saved'), 'w').close()\n"
        "sys.exit(os.environ['STRETTO_RESTARTS'] == '0')",
        job_of("a"),
        retries=1,
    ),
    "a trial that fails after its last epoch": Case(
        SHOW + "show(epoch=3, accuracy=1)\nsys.exit(4)", trial_of("a")
    ),
    "a trial that ends early": Case(SHOW + "show(epoch=1, accuracy=1)", trial_of("a")),
    "a failure": Case("print('so far so good', file=sys.stderr)\n1 / 0", job_of("a")),
    "a silent failure": Case("sys.exit(3)", job_of("a")),
    "a failure of one rank": Case(
        "time.sleep(60 * (os.environ['RANK'] != '1'))\nsys.exit(3)", job_of("a"), TWO
    ),
    "a signal": Case("print('here', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)", job_of("a")),
    "failures": Case("sys.exit(int(os.environ['STRETTO_RESTARTS']) + 1)", trial_of("a"), retries=2),
    "failures with progress": Case(
        SHOW + "done = int(os.environ['STRETTO_RESTARTS']) + 1; show(epoch=done, accuracy=done); sys.exit(1)",
        trial_of("a"),
        retries=1,
    ),
    "a rigid trial that begins anew": Case(
        SHOW + "again = int(os.environ['STRETTO_RESTARTS'])\n"
        "for epoch in range(2 + again): show(accuracy=epoch)\nsys.exit(not again)",
        trial_of("a", tier=Tier.RIGID),
        retries=1,
    ),
}


def seen(events: Sequence[Event], folder: Path) -> list[tuple[object, ...]]:
    """What is the same wherever it happens: all but times and places."""
    told: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, JobReported):
            results = [(one.epoch, one.value, one.workers, one.nodes) for one in event.results]
            measured = (event.speeds, event.noise, event.losses, results)
            told.append((event.kind, event.work_done, event.epoch, event.resize_s is None, *measured))
        elif isinstance(event, JobRetried | JobFailed):
            attempt = event.attempt if isinstance(event, JobRetried) else None
            told.append(
                (event.kind, attempt, with_log(event.error, event.log).replace(str(folder), "FOLDER"))
            )
        elif isinstance(event, JobNoted):
            told.append((event.kind, with_log(event.text, event.log).replace(str(folder), "FOLDER")))
        else:
            told.append((event.kind,))
    return told


EXPECTED = json.loads(Path(__file__).with_name("command_cases.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_events_and_files_of_a_command(name: str, tmp_path: Path) -> None:
    case, expected = CASES[name], EXPECTED[name]
    with Bench(tmp_path, grace_s=0.3, retries=case.retries) as bench:
        metric = None if case.job.study is None else "accuracy"
        substrate = bench.substrate(bench.code(case.code, "{folder}", metric=metric))
        substrate.admit(case.job)
        substrate.apply([start("a", case.allocation)])
        events = every(substrate)
        substrate.close()
        log = sorted(bench.log.read_text().replace(str(tmp_path), "FOLDER").splitlines())
    assert list(map(repr, seen(events, tmp_path))) == expected["events"]
    assert log == expected["log"]
    assert bench.metrics.read_text() == expected["metrics"]


class Play:
    """One trial under command workers."""

    def __init__(
        self, folder: Path, code: str, job: Job, *, retries: int = 0, command_s: float = 30.0
    ) -> None:
        """`command_s` is how long processes have to leave; those that can do so at once."""
        self.bench = Bench(folder)
        self.job = job
        last = str(job.work.epochs)
        self.command = self.bench.code(SHOW + code, last, metric="accuracy")
        self.substrate = CommandWorkers(
            {"a": self.command}, folder, rules=Rules(retries=retries, command_s=command_s)
        )
        self.events: list[Event] = []
        self._number = 0

    def tell(self, action: Action, allocation: Allocation = NOTHING, batch: BatchChoice = BATCH) -> None:
        self._number += 1
        self.substrate.apply([Instruction(self._number, action, "a", allocation, batch)])

    def start(self, allocation: Allocation = ONE) -> None:
        self.substrate.admit(self.job)
        self.tell(Action.START, allocation)

    def let_go_to(self, epoch: int) -> None:
        """A command that saves does not go on after this epoch until it is let."""
        (self.bench.folder / "saved.until").write_text(str(epoch))

    def wait_until_told(self, count: int) -> None:
        """So many processes have begun."""
        assert eventually(lambda: len(told(self)) == count), told(self)

    def wait_for(self, kind: type[Event], epoch: int = 0) -> None:
        until_s = self.substrate.now_s() + 90.0
        while (event := self.substrate.next_event(until_s)) is not None:
            self.events.append(event)
            if isinstance(event, kind) and getattr(event, "epoch", 0) >= epoch:
                return
        raise AssertionError(f"no {kind.__name__} among {self.events}")

    def rest(self) -> list[Event]:
        self.events += every(self.substrate)
        return self.events

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.substrate.close()
        assert self.bench.left() == []


SAVING = """
path = os.path.join(os.path.dirname(sys.argv[0]), "saved")
epoch = int(open(path).read()) if os.path.exists(path) else 0
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "STRETTO_RESTARTS", "STRETTO_BATCH_ATOMIC")
os.write(1, ("told " + " ".join(os.environ[name] for name in names) + "\\n").encode())
first = os.environ["RANK"] == "0"
def leave(*_):
    if first:
        open(path + ".new", "w").write(str(epoch))
        os.replace(path + ".new", path)
    sys.exit()
def is_held():
    return os.path.exists(path + ".until") and epoch >= int(open(path + ".until").read() or 0)
signal.signal(signal.SIGTERM, leave)
part = path + os.environ["STRETTO_RESTARTS"] + "-"
open(part + os.environ["RANK"], "w").close()
while not all(os.path.exists(part + str(rank)) for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
while epoch < int(sys.argv[1]):
    time.sleep(0.05)
    if is_held():
        continue
    epoch += 1
    if first: show(epoch=epoch, accuracy=epoch)
"""


def told(play: Play) -> list[str]:
    log = play.bench.log.read_text() if play.bench.log.exists() else ""
    return [line for line in log.splitlines() if line.startswith("told")]


def test_whatever_changes_all_processes_save_and_start_again(tmp_path: Path) -> None:
    with Play(tmp_path, SAVING, trial_of("a", epochs=40)) as play:
        play.let_go_to(4)
        play.start()
        play.wait_for(JobReported, 3)
        play.tell(Action.RESIZE, THREE)
        play.wait_until_told(4)
        play.let_go_to(10)
        play.wait_for(JobReported, 8)
        play.tell(Action.SET_BATCH, THREE, BatchChoice(8))
        play.wait_until_told(7)
        play.let_go_to(15)
        play.wait_for(JobReported, 12)
        play.tell(Action.RESIZE, ONE, BatchChoice(8))
        play.wait_until_told(8)
        play.let_go_to(40)
        play.rest()
    epochs = [epoch for epoch, _ in shown(play.events)]
    assert epochs == list(range(1, 41)), "nothing is lost, nothing is told twice"
    assert sorted(told(play)) == [
        "told 0 0 1 1 0 16",
        "told 0 0 1 1 3 8",
        "told 0 0 3 3 1 16",
        "told 0 0 3 3 2 8",
        "told 1 1 3 3 1 16",
        "told 1 1 3 3 2 8",
        "told 2 2 3 3 1 16",
        "told 2 2 3 3 2 8",
    ]
    starts = [event.resize_s for event in play.events if isinstance(event, JobReported) and event.resize_s]
    assert len(starts) == 4


def test_a_change_of_mind_while_it_starts_counts(tmp_path: Path) -> None:
    with Play(tmp_path, SAVING, trial_of("a", epochs=3)) as play:
        play.let_go_to(0)
        play.start()
        play.tell(Action.RESIZE, THREE)
        play.tell(Action.RESIZE, TWO)
        assert eventually(lambda: any(line.split()[3] == "2" for line in told(play)))
        play.let_go_to(3)
        play.rest()
    assert [workers for event in play.events for workers in workers_of(event)] == [2, 2, 2]


def workers_of(event: Event) -> list[int]:
    return [result.workers for result in event.results] if isinstance(event, JobReported) else []


TALKATIVE = SAVING.replace(
    "def leave(*_):",
    "def leave(*_):\n    global epoch\n    epoch += 1\n    show(epoch=epoch, accuracy=epoch)",
)


def test_a_parked_trial_tells_its_last_epochs_when_it_goes_on(tmp_path: Path) -> None:
    with Play(tmp_path, TALKATIVE, trial_of("a", epochs=10)) as play:
        play.let_go_to(3)
        play.start()
        play.wait_for(JobReported, 3)
        play.tell(Action.PARK)
        assert every(play.substrate) == [], "it stands still"
        play.let_go_to(10)
        play.tell(Action.START, TWO)
        play.rest()
    assert [epoch for epoch, _ in shown(play.events)] == list(range(1, 11))
    assert play.count(JobFinished) == 1


def test_at_the_deadline_an_epoch_may_be_finished(tmp_path: Path) -> None:
    with Play(tmp_path, SAVING, trial_of("a", epochs=1000)) as play:
        play.start()
        play.wait_for(JobReported, 2)
        play.substrate.finish_epochs()
        play.rest()
        assert play.bench.left() == []
    assert play.count(JobFinished) == 0
    assert len(shown(play.events)) > 2
    assert (tmp_path / "saved").exists()


def test_results_that_nobody_lived_to_record_are_told(tmp_path: Path) -> None:
    job = trial_of("a", epochs=3)
    with Play(tmp_path, "for epoch in (1, 2, 3): show(epoch=epoch, accuracy=epoch)", job) as play:
        play.start()
        play.rest()
    first = next(event for event in play.events if isinstance(event, JobReported))
    began = Instruction(1, Action.START, "a", ONE, BATCH)
    decided = Decided(t_s=0.0, policy="p", instructions=(began,), reasons={}, memory=None)
    history: list[Event] = [JobSubmitted(t_s=0.0, job=job), decided, first]
    with Play(tmp_path, "show(epoch=4, accuracy=4)", job) as play:
        play.substrate.recover(history)
        events = play.rest()
    assert shown(events) == [(2, 2.0), (3, 3.0)]
    assert play.count(JobFinished) == 1
    assert len((tmp_path / "jobs/a/metrics.jsonl").read_text().splitlines()) == 3, "it was not started again"


WAITS = "waiting for an earlier process"


def test_results_of_a_command_that_was_still_leaving_are_told(tmp_path: Path) -> None:
    job = trial_of("a", epochs=4)
    began = Instruction(1, Action.START, "a", ONE, BATCH)
    decided = Decided(t_s=0.0, policy="p", instructions=(began,), reasons={}, memory=None)
    folder = tmp_path / "jobs/a"
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"epoch": 1, "accuracy": 1}\n')
    with Play(tmp_path, "show(epoch=3, accuracy=3); show(epoch=4, accuracy=4)", job) as play:
        with (folder / "lock.0").open("w") as old:
            fcntl.flock(old, fcntl.LOCK_EX)
            play.substrate.recover([JobSubmitted(t_s=0.0, job=job), decided])
            assert eventually(lambda: play.bench.log.exists() and WAITS in play.bench.log.read_text())
            with metrics.open("a") as late:
                late.write('{"epoch": 2, "accuracy": 2}\n')
        events = play.rest()
    assert shown(events) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_closing_does_not_wait_for_a_trial_that_has_shown_all(tmp_path: Path) -> None:
    lingers = f"show(epoch=3, accuracy=3); time.sleep(30); open({str(tmp_path / 'waited')!r}, 'w')"
    with Play(tmp_path, lingers, trial_of("a"), command_s=60.0) as play:
        play.start()
        play.wait_for(JobReported, 3)
        play.substrate.close()
        play.rest()
    assert play.count(JobFinished) == 1
    assert not (tmp_path / "waited").exists()


def test_a_worker_that_is_killed_takes_its_command_with_it(tmp_path: Path) -> None:
    with Play(tmp_path, SAVING, trial_of("a", epochs=20), retries=1) as play:
        play.let_go_to(5)
        play.start(TWO)
        play.wait_for(JobReported, 2)
        guards = [int(line.split()[0]) for line in running_with(str(tmp_path)) if "elastic/guard.py" in line]
        os.kill(parent_of(guards[0]), signal.SIGKILL)
        play.let_go_to(20)
        play.rest()
    assert (play.count(JobRetried), play.count(JobFinished)) == (1, 1)
    assert [epoch for epoch, _ in shown(play.events)] == list(range(1, 21))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_function_and_a_command_share_a_run_and_are_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    bench, began_s = Bench(tmp_path), time.monotonic()
    command = bench.code(SHOW + SAVING, "20", metric="accuracy")
    specs = {
        "command": TrainingJob(entry=NO_ENTRY, config={}, epochs=20, metric="accuracy", command=command),
        "function": TrainingJob(
            entry="train.py:train", config={"until_workers": 2}, epochs=local_bench.EPOCHS
        ),
    }
    substrate = LocalSubstrate(
        spec_of=lambda job: specs[job.id],
        run_dir=tmp_path,
        slots=Slots(("",) * 4),
        clock=lambda: time.monotonic() - began_s,
        rules=Rules(retries=0, command_s=30.0),
        trainer=local_bench.STUB,
        runs_commands=True,
    )
    (tmp_path / "saved.until").write_text("3")
    events: list[Event] = []

    def wait_until(count: int, epoch: int) -> None:
        """So many jobs have reported that they are so far."""
        far: set[str] = set()
        while len(far) < count:
            event = substrate.next_event(substrate.now_s() + 90.0)
            assert event is not None, events
            events.append(event)
            if isinstance(event, JobReported) and event.epoch >= epoch:
                far.add(event.job_id)

    for number, job in enumerate((trial_of("command", epochs=20), local_bench.job_of("function"))):
        substrate.admit(job)
        substrate.apply([start(job.id, number=number)])
    wait_until(2, 3)
    resizes = [Instruction(2 + at, Action.RESIZE, job_id, TWO, BATCH) for at, job_id in enumerate(specs)]
    substrate.apply(resizes)
    (tmp_path / "saved.until").write_text("20")
    events += every(substrate)
    substrate.close()
    assert {event.job_id for event in events if isinstance(event, JobFinished)} == {"command", "function"}
    assert [epoch for epoch, _ in shown(events)] == list(range(1, 21))
    reports = [event for event in events if isinstance(event, JobReported)]
    assert max(one.workers for event in reports for one in event.results) == 2
    assert {one.workers for event in reports if event.job_id == "function" for one in event.speeds} == {1, 2}
    assert running_with(str(tmp_path)) == []


def test_what_cannot_be_started_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    for argv, host, why in (
        ((str(program),), "", "it cannot be started"),
        (("no-such-thing",), "", "it cannot be started: .*No such file"),
        (("no-such-thing",), "10.0.0.7", "'no-such-thing' is not a program that node 10.0.0.7 can run"),
    ):
        if host:
            monkeypatch.setenv("STRETTO_HOST", host)
        with Play(tmp_path, "", trial_of("a"), retries=2) as play:
            play.substrate.close()
            play.substrate = CommandWorkers({"a": Command(argv)}, tmp_path, rules=Rules(retries=2))
            play.start()
            (event,) = play.rest()
            assert isinstance(event, JobFailed)
            assert re.search(why, event.error)


def test_a_place_is_read_as_it_was_said() -> None:
    for spot in (Spot("10.0.0.1", 5000, "0,1"), Spot("::1", 1, "")):
        assert Spot.read(str(spot)) == spot
