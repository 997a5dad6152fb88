"""`stretto run` and `stretto tune` with commands, in processes of their own, and everything done to them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from fault_command import FLOOD, RAISE, SEEN
from fault_inject import Supply, damage_journal, lay_clock, no_descriptors, stand_still, step_clock
from live_processes import STRETTO, eventually, pids_with
from stretto.core.events import JobFailed, JobFinished, JobReported, JobSubmitted
from stretto.runs.folder import RunFolder

_SCRIPT = Path(__file__).with_name("fault_command.py")
JOBS, EPOCHS, NAP_S, SLOTS = 4, 8, 0.3, 2
STOPPED_S = 1.5
"""How long a process stands still, or has no descriptors left."""
ENDS_S = 60.0
"""Within which whoever is refused, or lost its folder, has ended."""

Way = Literal["run", "tune"]


class Kind(StrEnum):
    """What can be done to commands."""

    WORKER = "kill -9 of a command"
    STOP = "SIGSTOP of a command for a while"
    RAISE = "exception in a command"
    FLOOD = "flood of output"
    GUARD = "kill -9 of a guard"
    STOP_GUARD = "SIGSTOP of a guard for a while"
    CONTROLLER = "kill -9 of the controller"
    STOP_CONTROLLER = "SIGSTOP of the controller for a while"
    JOURNAL_BYTES = "journal damaged, controller killed"
    TWO_STARTS = "second start under the same name"
    EMFILE = "no file descriptors left, command killed"
    CLOCK = "clock stepped"
    FOLDER = "run folder deleted"


@dataclass(frozen=True, slots=True)
class Span:
    """When a process of a job was seen."""

    pid: int
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """What became of one job."""

    id: str
    seed: int
    state: str
    told: tuple[tuple[int, float | None], ...]
    """Epochs and values, as the journal has them."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended that was to end."""

    code: int | None
    """None: it did not."""
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run of commands after everything that was done to it."""

    way: Way
    faults: tuple[Kind, ...]
    ending: Ending
    unasked: tuple[str, ...] = ()
    """Times that it ended before its work was done, though nothing should have ended it."""
    second_starts: tuple[Ending, ...] = ()
    jobs: tuple[JobSeen, ...] = ()
    left: tuple[int, ...] = ()
    """Processes that are still there."""


class Commands:
    """A run of commands to its end, whatever happens."""

    def __init__(
        self, folder: Path, way: Way, seed: int, *, nap_s: float = NAP_S, deadline: str = ""
    ) -> None:
        self.folder = folder
        self.way = way
        self.run = folder / "runs" / "faults"
        self.faults: list[Kind] = []
        self._chance = random.Random(seed)
        self._deadline = deadline
        self._ended_on_purpose = False
        self._unasked: list[str] = []
        self._second_starts: list[Ending] = []
        self._seeds = {f"j{number}": number for number in range(JOBS)}
        self._lay_out(nap_s)
        self.process = self._start("command.log")

    # From the start to the end

    def live(self, supply: Supply[Kind], within_s: float, most: int = 1000) -> Outcome:
        """Strike again and again until the run is over."""
        end_s = time.monotonic() + within_s
        eventually(lambda: self._is_over() or bool(self._workers()), ENDS_S)
        eventually(self._is_over, self._chance.uniform(0.0, 4 * NAP_S))
        while not self._is_over():
            if time.monotonic() > end_s:
                self._unasked.append(f"it did not end within {within_s:g} s: {self.said()[-500:]}")
                self.process.kill()
                self.process.wait()
                break
            kind = supply.take() if len(self.faults) < most else None
            if kind is None:
                eventually(self._is_over, 1.0)
            elif self._strike_soon(kind):
                eventually(self._is_over, self._chance.uniform(0.0, 2 * NAP_S))
            else:
                supply.give_back(kind)
        return self.outcome()

    def strike(self, kind: Kind) -> bool:
        """Strike once; False if there is nothing to strike at the moment."""
        workers = self._workers()
        if not workers or self.process.poll() is not None:
            return False
        job_id = self._chance.choice(sorted(workers))
        self.faults.append(kind)
        if self._do(kind, workers[job_id], self._files_of(job_id)):
            return True
        self.faults.pop()
        return False

    def trains(self) -> bool:
        return bool(self._workers())

    def revive(self) -> None:
        """Start it again if a fault has ended it, and can be survived."""
        if self._ended_on_purpose and Kind.FOLDER not in self.faults:
            self._is_over()

    def said(self) -> str:
        return (self.folder / "command.log").read_text(errors="replace")

    def outcome(self) -> Outcome:
        code = self.process.poll()
        eventually(lambda: not pids_with(str(self.folder)), 20.0)
        return Outcome(
            way=self.way,
            faults=tuple(self.faults),
            ending=Ending(code=code, said=self.said()),
            unasked=tuple(self._unasked),
            second_starts=tuple(self._second_starts),
            jobs=tuple(self._jobs()) if (self.run / "spec.json").exists() else (),
            left=tuple(pids_with(str(self.folder))),
        )

    def close(self) -> None:
        """End whatever is left of it."""
        for pid in [self.process.pid, *pids_with(str(self.folder))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _strike_soon(self, kind: Kind) -> bool:
        struck = [False]

        def done() -> bool:
            over = self._is_over()
            struck[0] = not over and self.strike(kind)
            return over or struck[0]

        eventually(done, 20.0)
        return struck[0]

    def _is_over(self) -> bool:
        """Whoever was ended on purpose is started again."""
        code = self.process.poll()
        if code is None:
            return False
        if Kind.FOLDER in self.faults or (code == 0 and (self.run / "result.json").exists()):
            return True
        if not self._ended_on_purpose:
            self._unasked.append(f"it ended with {code}: {self.said()[-1000:]}")
        if len(self._unasked) > 3:
            return True
        self._ended_on_purpose = False
        self.process = self._start("command.log")
        return False

    def _lay_out(self, nap_s: float) -> None:
        command = [sys.executable, "-S", str(self.folder / _SCRIPT.name), "{seed}", str(EPOCHS), str(nap_s)]
        shutil.copy(_SCRIPT, self.folder)
        if self.way == "run":
            jobs = (
                f'[[job]]\nname = "{job_id}"\nepochs = {EPOCHS}\ncommand = {json.dumps(command)}\n'
                f"gpus = {{ max = 1 }}\nconfig = {{ seed = {seed} }}\n"
                for job_id, seed in self._seeds.items()
            )
            (self.folder / "faults.toml").write_text("\n".join(jobs))
        else:
            (self.folder / "faults.toml").write_text(
                f'[study]\nname = "faults"\nmetric = "loss"\ndirection = "min"\ntrials = {JOBS}\n'
                f"command = {json.dumps(command)}\ncheckpoints = true\n"
                f"[halving]\nrungs = []\neta = 2\nmax_epochs = {EPOCHS}\n"
                "[space]\nseed = { int = [0, 1000] }\n"
                f'[profile]\nepoch_s = {nap_s}\nspeedup = {{ "1" = 1.0 }}\nstart_s = 0.1\n'
            )
        lay_clock(self.folder)

    def _start(self, log: str) -> subprocess.Popen[bytes]:
        how = ["run", "faults.toml"]
        if self.way == "tune":
            how = ["tune", "faults.toml", "--policy", "random", "--deadline", self._deadline or "10h"]
        where = ["--slots", str(SLOTS), "--name", "faults", "--retries", "20", "--yes"]
        path = os.pathsep.join([str(self.folder / "clock"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-c", STRETTO, *how, *where],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FAULTS": str(self.folder)},
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    # The faults

    def _do(self, kind: Kind, worker: int, files: Path) -> bool:
        acts: dict[Kind, Callable[[], bool | None]] = {
            Kind.WORKER: lambda: _signal(worker, signal.SIGKILL),
            Kind.STOP: lambda: stand_still(worker),
            Kind.RAISE: (files / RAISE).touch,
            Kind.FLOOD: (files / FLOOD).touch,
            Kind.GUARD: lambda: _signal(_guard_of(worker), signal.SIGKILL),
            Kind.STOP_GUARD: lambda: stand_still(_guard_of(worker)),
            Kind.CONTROLLER: self._kill_controller,
            Kind.STOP_CONTROLLER: lambda: stand_still(self.process.pid),
            Kind.JOURNAL_BYTES: self._damage_journal,
            Kind.TWO_STARTS: self._start_again,
            Kind.EMFILE: lambda: self._without_descriptors(worker),
            Kind.CLOCK: self._step_clock,
            Kind.FOLDER: self._delete_folder,
        }
        return acts[kind]() is not False

    def _damage_journal(self) -> None:
        self._kill_controller()
        damage_journal(self.run / "journal.sqlite", self._chance)

    def _delete_folder(self) -> None:
        self._ended_on_purpose = True
        shutil.rmtree(self.run, ignore_errors=True)
        eventually(lambda: self.process.poll() is not None, ENDS_S)

    def _kill_controller(self) -> None:
        self._ended_on_purpose = True
        self.process.kill()
        self.process.wait()

    def _start_again(self) -> None:
        """Whoever comes second is told so, unless the first was over by then."""
        second = self._start("second.log")
        over = eventually(lambda: second.poll() is not None, ENDS_S)
        code = second.poll()
        if not over:
            second.kill()
            second.wait()
        if self.process.poll() is None and not (self.run / "result.json").exists():
            said = (self.folder / "second.log").read_text(errors="replace")
            self._second_starts.append(Ending(code=code, said=said))

    def _without_descriptors(self, worker: int) -> bool:
        """A start is needed while the controller can open nothing."""
        with no_descriptors([self.process.pid]):
            struck = _signal(worker, signal.SIGKILL)
            time.sleep(STOPPED_S)
        return struck

    def _step_clock(self) -> None:
        """Half of the time the controller is started anew after it, and reads the clock again."""
        step_clock(self.folder, self._chance)
        if self._chance.random() < 0.5:
            self._kill_controller()

    # What is there

    def _workers(self) -> dict[str, int]:
        """Commands that have shown a sign of life, by job."""
        seen = {span.pid for job_id in self._ids() for span in self._spans(job_id)}
        found = {}
        for pid in pids_with(str(self.folder / _SCRIPT.name)):
            if pid in seen:
                with suppress(OSError):
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    names = [one[12:].decode() for one in environment if one.startswith(b"STRETTO_JOB=")]
                    found.update(dict.fromkeys(names, pid))
        return found

    def _ids(self) -> list[str]:
        return sorted(path.name for path in self.run.glob("jobs/*"))

    def _files_of(self, job_id: str) -> Path:
        return self.run / "jobs" / job_id / "files"

    def _spans(self, job_id: str) -> tuple[Span, ...]:
        path = self._files_of(job_id) / SEEN
        times: dict[int, list[float]] = {}
        with suppress(FileNotFoundError):
            for line in path.read_text().splitlines():
                with suppress(ValueError):
                    beat = json.loads(line)
                    times.setdefault(beat["pid"], []).append(beat["t_s"])
        return tuple(Span(pid, one[0], one[-1]) for pid, one in times.items())

    def _jobs(self) -> Iterator[JobSeen]:
        events = list(RunFolder(self.run).events())
        states = {
            event.job_id: "finished" if isinstance(event, JobFinished) else f"failed: {event.error[-300:]}"
            for event in events
            if isinstance(event, JobFinished | JobFailed)
        }
        for event in events:
            if isinstance(event, JobSubmitted):
                job_id = event.job.id
                reports = [one for one in events if isinstance(one, JobReported) and one.job_id == job_id]
                told = [(one.epoch, one.loss) for report in reports for one in report.losses]
                shown = [(one.epoch, one.value) for report in reports for one in report.results]
                yield JobSeen(
                    id=job_id,
                    seed=int(dict(event.job.config)["seed"]),
                    state=states.get(job_id, "not over"),
                    told=tuple(shown if self.way == "tune" else told),
                    spans=self._spans(job_id),
                )


def _guard_of(pid: int) -> int:
    """The nearest of its parents that is not the command itself."""
    try:
        while _SCRIPT.name in Path(f"/proc/{pid}/cmdline").read_text().split("elastic/guard.py")[0]:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
    return pid


def _signal(pid: int, number: signal.Signals) -> bool:
    if pid <= 1:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
