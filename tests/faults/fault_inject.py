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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from fault_seen import Step, last_step, marks_of, steps_of
from fault_study import NAME
from fault_train import FLOOD, POISON, RAISE
from live_processes import SUPPORT, pids_with

K = TypeVar("K")
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
    META = "damaged meta.json, worker killed"
    FLOOD = "flood of output"
    STOP_CONTROLLER = "SIGSTOP of the controller for a while"
    STOP_NURSERY = "SIGSTOP of the nursery for a while"
    JOURNAL_BYTES = "journal damaged, controller killed"
    TWO_STARTS = "second start under the same name"
    EMFILE = "no file descriptors left, worker killed"
    CLOCK = "clock stepped, controller killed"


RESTARTS = frozenset(Kind) - {
    Kind.DISK,
    Kind.NAN,
    Kind.FLOOD,
    Kind.STOP_CONTROLLER,
    Kind.STOP_NURSERY,
    Kind.TWO_STARTS,
}
"""Whoever is struck by these has to start again."""
COMMON = frozenset(
    {
        Kind.NURSERY,
        Kind.CONTROLLER,
        Kind.JOURNAL,
        Kind.STOP_CONTROLLER,
        Kind.STOP_NURSERY,
        Kind.JOURNAL_BYTES,
        Kind.TWO_STARTS,
        Kind.CLOCK,
    }
)
"""These strike all jobs at once."""
STOPPED_S = 1.5
"""How long a process stands still, or can open nothing."""
REFUSED_S = 60.0
"""Within which a second start has been refused."""
STEP_S = 1800.0
"""Of the clock, forwards or back."""


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


class Supply(Generic[K]):
    """Faults to come, handed out one by one to the studies that run."""

    def __init__(self, kinds: Iterable[K]) -> None:
        self._kinds = deque(kinds)
        self._lock = threading.Lock()

    def take(self) -> K | None:
        with self._lock:
            return self._kinds.popleft() if self._kinds else None

    def give_back(self, kind: K) -> None:
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
        lay_clock(folder)
        self.process = self._start()

    def live(self, supply: Supply[Kind], within_s: float, most: int = 1000) -> None:
        """Strike again and again, so many times at `most`, until the study is over."""
        end_s = time.monotonic() + within_s
        self._wait(lambda: bool(steps_of(self.run)), 60.0)
        while not self._is_over():
            if time.monotonic() > end_s:
                self.problems.append(f"the study in {self.folder} did not end within {within_s:g} s")
                self.process.kill()
                self.process.wait()
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

    def trains(self) -> bool:
        return bool(self._training())

    def strike(self, kind: Kind) -> bool:
        """Strike once; False if there is nothing to strike at the moment."""
        fault = self._strike(kind)
        self.faults += [] if fault is None else [fault]
        return fault is not None

    def revive(self) -> None:
        """Start it again if a fault has ended it."""
        if self._ended_on_purpose and self.process.poll() is not None:
            self._is_over()

    def close(self) -> None:
        """End whatever is left of it."""
        self._limit_files(resource.RLIM_INFINITY)
        for pid in [self.process.pid, *pids_with(str(self.folder))]:
            _signal(pid, signal.SIGKILL)
        self.process.wait()

    # The command

    def _start(self, log_name: str = "command.log") -> subprocess.Popen[bytes]:
        paths = [str(_TESTS), str(SUPPORT), str(self.folder / CLOCK_FOLDER), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        with (self.folder / log_name).open("ab") as log:
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
        code = self.process.poll()
        if code is None:
            return False
        if (self.run / "result.json").exists() and code == 0:
            return True
        if not self._ended_on_purpose:
            tail = (self.folder / "command.log").read_text()[-2000:]
            self.problems.append(f"the command ended with {code}: {tail}")
        self._ended_on_purpose = False
        self.process = self._start()
        return False

    # The faults

    def _strike(self, kind: Kind) -> Fault | None:
        """None if there is nothing to strike at the moment."""
        workers = self._training()
        if not workers or self.process.poll() is not None:
            return None
        victim = self._chance.choice(workers)
        job_id = None if kind in COMMON else victim.job_id
        fault = Fault(kind, time.monotonic(), job_id, marks_of(self.run, job_id))
        return fault if self._do(kind, victim) else None

    def _do(self, kind: Kind, victim: Worker) -> bool:
        job, pid = self.run / "jobs" / victim.job_id, victim.pid
        checkpoints = job / "checkpoints"
        acts: dict[Kind, Callable[[], bool | None]] = {
            Kind.WORKER: lambda: _signal(pid, signal.SIGKILL),
            Kind.STOP: lambda: _signal(pid, signal.SIGSTOP),
            Kind.NURSERY: lambda: _signal(_parent(pid), signal.SIGKILL),
            Kind.CONTROLLER: self._kill_controller,
            Kind.CHECKPOINT: lambda: self._damage(checkpoints) and _signal(pid, signal.SIGKILL),
            Kind.DISK: self._fill_disk,
            Kind.JOURNAL: self._fill_journal,
            Kind.RAISE: (job / RAISE).touch,
            Kind.NAN: lambda: self._poison(job),
            Kind.META: lambda: self._damage_meta(checkpoints) and _signal(pid, signal.SIGKILL),
            Kind.FLOOD: (job / FLOOD).touch,
            Kind.STOP_CONTROLLER: lambda: stand_still(self.process.pid),
            Kind.STOP_NURSERY: lambda: stand_still(_parent(pid)),
            Kind.JOURNAL_BYTES: self._damage_journal,
            Kind.TWO_STARTS: self._start_again,
            Kind.EMFILE: lambda: self._without_descriptors(pid),
            Kind.CLOCK: self._step_clock,
        }
        return acts[kind]() is not False

    def _fill_disk(self) -> None:
        self._limit_files(_FULL_BYTES)
        self._full_until_s = time.monotonic() + _FULL_S

    def _fill_journal(self) -> None:
        self._ended_on_purpose = True
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def _damage_journal(self) -> None:
        self._kill_controller()
        damage_journal(self.run / "journal.sqlite", self._chance)

    def _without_descriptors(self, pid: int) -> bool:
        with no_descriptors([self.process.pid, _parent(pid)]):
            struck = _signal(pid, signal.SIGKILL)
            time.sleep(STOPPED_S)
        return struck

    def _step_clock(self) -> None:
        step_clock(self.folder, self._chance)
        self._kill_controller()

    def _kill_controller(self) -> None:
        self._ended_on_purpose = True
        self.process.kill()
        self.process.wait()

    def _start_again(self) -> None:
        """Whoever comes second must be refused in words, unless the first was over by then."""
        second = self._start("second.log")
        try:
            code = second.wait(REFUSED_S)
        except subprocess.TimeoutExpired:
            second.kill()
            code = second.wait()
        said = (self.folder / "second.log").read_text()
        going_on = self.process.poll() is None and not (self.run / "result.json").exists()
        if going_on and (code != 1 or "InputError: " not in said or "Traceback" in said):
            self.problems.append(f"a second start was not refused in words, {code}: {said[-1000:]}")

    def _damage_meta(self, checkpoints: Path) -> bool:
        """Of the newest checkpoint: as bytes get lost, or as nobody can read it."""
        whole = sorted(path for path in checkpoints.glob("[0-9]*") if len(path.name) == 8)
        if not whole:
            return False
        meta = whole[-1] / "meta.json"
        with suppress(FileNotFoundError):
            content = meta.read_bytes()
            at = self._chance.randrange(len(content))
            changed = bytes([content[at] ^ (1 << self._chance.randrange(8))])
            ways = (b"", content[:at], content[:at] + changed + content[at + 1 :], b"[" * 100_000)
            meta.write_bytes(self._chance.choice(ways))
            return True
        return False

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
                if pid != self.process.pid:
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


CLOCK_FOLDER = "clock"
_CLOCK = '''"""A clock that can be stepped: time.time() with the seconds of a file beside this one."""

import time
from pathlib import Path

_real, _offset = time.time, Path(__file__).with_name("offset")


def _stepped():
    try:
        return _real() + float(_offset.read_text())
    except (OSError, ValueError):
        return _real()


time.time = _stepped
'''


def lay_clock(folder: Path) -> None:
    """A folder of modules; programs that find it first have a clock that can be stepped."""
    (folder / CLOCK_FOLDER).mkdir()
    (folder / CLOCK_FOLDER / "sitecustomize.py").write_text(_CLOCK, encoding="utf-8")


def step_clock(folder: Path, chance: random.Random) -> None:
    """The time of day, as everybody in this folder sees it from now on."""
    (folder / CLOCK_FOLDER / "offset").write_text(str(chance.choice((-STEP_S, STEP_S, 0.0))))


def damage_journal(path: Path, chance: random.Random) -> None:
    """Turn round a few bits where something is written."""
    data = bytearray(path.read_bytes())
    written = [at for at in range(100, len(data)) if data[at]]
    for at in chance.sample(written, min(len(written), chance.choice((1, 1, 3)))):
        data[at] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@contextmanager
def no_descriptors(pids: Iterable[int]) -> Iterator[None]:
    """Processes that can open nothing for a while."""
    before = {}
    for pid in pids:
        with suppress(OSError):
            before[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            taken = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken, before[pid][1]))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def stand_still(pid: int) -> bool:
    """SIGSTOP, and SIGCONT a while later; False if there is no such process."""
    if not _signal(pid, signal.SIGSTOP):
        return False
    time.sleep(STOPPED_S)
    _signal(pid, signal.SIGCONT)
    return True


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
