"""A study in processes of its own, and everything that is done to them."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fault_seen import Step, last_step, marks_of, steps_of
from fault_study import NAME
from fault_train import POISON, RAISE
from live_processes import pids_with

_TESTS = Path(__file__).parent
_LOOK_S = 0.02
_PATIENCE_S = 20.0
"""Whoever has not trained again by then is not waited for; the study's end tells whether that was right."""
_FULL_BYTES = 400_000
"""Files cannot grow beyond this on a full disk: more than any log has, less than a checkpoint."""
_FULL_S = 1.5
_STEPS_AHEAD = 6
"""A poisoned step lies so far ahead that all workers learn of it before."""


class Kind(StrEnum):
    """What can be done to a study."""

    WORKER = "kill -9 of a worker"
    NURSERY = "kill -9 of the nursery"
    CONTROLLER = "kill -9 of the controller"
    STOP = "SIGSTOP of a worker"
    CHECKPOINT = "damaged checkpoint, worker killed"
    DISK = "full disk for a while"
    JOURNAL = "no room for the journal"
    RAISE = "exception in user code"
    NAN = "loss is not a number"


RESTARTS = frozenset(Kind) - {Kind.DISK, Kind.NAN}
"""Whoever is struck by these has to start again."""
COMMON = frozenset({Kind.NURSERY, Kind.CONTROLLER, Kind.JOURNAL})
"""These strike all jobs at once."""
ENDS_COMMAND = frozenset({Kind.CONTROLLER, Kind.JOURNAL})


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done."""

    kind: Kind
    t_s: float
    job_id: str | None
    marks: frozenset[str]
    """Stretches of training that had begun before, of the job, or of all if it strikes all."""

    def again(self, steps: list[Step]) -> Step | None:
        """The first step that shows that training goes on."""
        for step in steps:
            if self.job_id is not None and step.job_id != self.job_id:
                continue
            if step.mark not in self.marks or (self.kind not in RESTARTS and step.t_s > self.t_s):
                return step
        return None


@dataclass(frozen=True, slots=True)
class Worker:
    pid: int
    job_id: str


class Supply:
    """Faults to come, handed out one by one to the studies that run."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._kinds = deque(kinds)
        self._lock = threading.Lock()

    def take(self) -> Kind | None:
        with self._lock:
            return self._kinds.popleft() if self._kinds else None

    def give_back(self, kind: Kind) -> None:
        """There was nothing to strike."""
        with self._lock:
            self._kinds.appendleft(kind)

    def __len__(self) -> int:
        return len(self._kinds)


class Disturbed:
    """Runs a study to its end, whatever happens, and makes things happen."""

    def __init__(self, folder: Path, policy: str, seed: int) -> None:
        self.folder = folder
        self.policy = policy
        self.seed = seed
        self.run = folder / "runs" / NAME
        self.faults: list[Fault] = []
        self.problems: list[str] = []
        self._command = [sys.executable, str(_TESTS / "fault_study.py"), str(folder), policy, str(seed)]
        self._chance = random.Random(seed)
        self._ended_on_purpose = False
        self._full_until_s = 0.0
        self._process = self._start()

    def live(self, supply: Supply, within_s: float, most: int = 1000) -> None:
        """Strike again and again, so many times at `most`, until the study is over."""
        end_s = time.monotonic() + within_s
        self._wait(lambda: bool(steps_of(self.run)), 60.0)
        while not self._is_over():
            if time.monotonic() > end_s:
                self.problems.append(f"the study in {self.folder} did not end within {within_s:g} s")
                self._process.kill()
                self._process.wait()
                return
            kind = supply.take() if len(self.faults) < most else None
            if kind is None:
                self._wait(self._is_over, 1.0)
                continue
            fault = self._strike_soon(kind)
            if fault is None:
                supply.give_back(kind)
                continue
            self.faults.append(fault)
            self._see_it_train_again(fault)

    def _see_it_train_again(self, fault: Fault) -> None:
        """Now and then the next fault comes before this one is over."""
        if self._chance.random() < 0.75:
            self._wait(lambda: self._is_over() or fault.again(steps_of(self.run)) is not None, _PATIENCE_S)
        self._wait(self._is_over, self._chance.uniform(0.0, 0.5))

    def _strike_soon(self, kind: Kind) -> Fault | None:
        """As soon as there is something to strike; None if the study is over before."""
        struck: list[Fault] = []

        def done() -> bool:
            fault = None if self._is_over() else self._strike(kind)
            struck.extend([fault] if fault is not None else [])
            return bool(struck) or self._is_over()

        self._wait(done, _PATIENCE_S)
        return struck[0] if struck else None

    def _wait(self, done: Callable[[], bool], within_s: float) -> None:
        end_s = time.monotonic() + within_s
        while not done() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    # The command

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.folder / "command.log").open("ab") as log:
            return subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_over(self) -> bool:
        """Whether the study has its result. Whoever ended before, for a known reason, is started again."""
        if self._full_until_s and time.monotonic() >= self._full_until_s:
            self._full_until_s = 0.0
            self._limit_files(resource.RLIM_INFINITY)
        code = self._process.poll()
        if code is None:
            return False
        if (self.run / "result.json").exists() and code == 0:
            return True
        if not self._ended_on_purpose:
            tail = (self.folder / "command.log").read_text()[-2000:]
            self.problems.append(f"the command ended with {code}: {tail}")
        self._ended_on_purpose = False
        self._process = self._start()
        return False

    # The faults

    def _strike(self, kind: Kind) -> Fault | None:
        """None if there is nothing to strike at the moment."""
        workers = self._training()
        if not workers or self._process.poll() is not None:
            return None
        victim = self._chance.choice(workers)
        job_id = None if kind in COMMON else victim.job_id
        fault = Fault(kind, time.monotonic(), job_id, marks_of(self.run, job_id))
        return fault if self._do(kind, victim) else None

    def _do(self, kind: Kind, victim: Worker) -> bool:
        job = self.run / "jobs" / victim.job_id
        match kind:
            case Kind.WORKER:
                return _signal(victim.pid, signal.SIGKILL)
            case Kind.STOP:
                return _signal(victim.pid, signal.SIGSTOP)
            case Kind.NURSERY:
                return _signal(_parent(victim.pid), signal.SIGKILL)
            case Kind.CONTROLLER:
                self._ended_on_purpose = True
                self._process.kill()
            case Kind.CHECKPOINT:
                return self._damage(job / "checkpoints") and _signal(victim.pid, signal.SIGKILL)
            case Kind.DISK:
                self._limit_files(_FULL_BYTES)
                self._full_until_s = time.monotonic() + _FULL_S
            case Kind.JOURNAL:
                self._ended_on_purpose = True
                resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            case Kind.RAISE:
                (job / RAISE).touch()
            case Kind.NAN:
                return self._poison(job)
        return True

    def _poison(self, job: Path) -> bool:
        if (job / POISON).exists():
            return False
        unfinished = job / f"{POISON}.new"
        unfinished.write_text(str(last_step(job) + _STEPS_AHEAD))
        unfinished.rename(job / POISON)
        return True

    def _damage(self, checkpoints: Path) -> bool:
        """The newest checkpoint, in one of the ways in which files get damaged."""
        whole = sorted(path for path in checkpoints.glob("[0-9]*") if len(path.name) == 8)
        if not whole:
            return False
        state, meta = whole[-1] / "state.pt", whole[-1] / "meta.json"
        with suppress(FileNotFoundError):
            match self._chance.randrange(4):
                case 0:
                    os.truncate(state, 0)
                case 1:
                    os.truncate(state, state.stat().st_size // 2)
                case 2:
                    _flip_a_byte(state)
                case 3:
                    os.truncate(meta, meta.stat().st_size // 2)
            return True
        return False

    def _limit_files(self, limit_bytes: int) -> None:
        """Of everything but the command: first of whoever starts workers, which inherit it."""
        for pid in pids_with(str(self.folder)):
            with suppress(ProcessLookupError):
                if pid != self._process.pid:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    # The processes

    def _training(self) -> list[Worker]:
        """Workers that have taken a step."""
        began = {step.pid for step in steps_of(self.run)}
        return [worker for worker in self._workers() if worker.pid in began and not _is_stopped(worker.pid)]

    def _workers(self) -> list[Worker]:
        """Children of the nurseries, by the log they write to."""
        found = []
        for pid in pids_with(str(self.folder)):
            with suppress(OSError):
                output = Path(f"/proc/{pid}/fd/1").readlink()
                if output.name == "stdout.log":
                    found.append(Worker(pid, output.parent.name))
        return sorted(found, key=lambda worker: (worker.job_id, worker.pid))


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _stat(pid: int) -> list[str]:
    """State, parent and what follows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _is_stopped(pid: int) -> bool:
    return _stat(pid)[0] in "TZX"


def _flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
