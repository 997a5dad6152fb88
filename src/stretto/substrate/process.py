"""Runs jobs as commands on this machine. Any command will do: a resize is a restart.

A command learns its part from its environment, keeps its own checkpoints, saves one on SIGTERM, and goes
on from it when it is started again:

    STRETTO_JOB, STRETTO_RESTARTS         whose part it plays, and how many starts came before
    STRETTO_WORKERS, STRETTO_SERVERS      tasks it may run
    STRETTO_NODES                         on how many nodes they are
    STRETTO_BATCH_ATOMIC                  examples per worker and pass
    STRETTO_BATCH_ACCUMULATION            passes added before each step

In its arguments, `{workers}` and `{batch}` (the total over all workers) are replaced. It reports by
printing JSON lines (see `process_reports`), the first as soon as it trains: that line ends its start.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed, JobFinished
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.process_child import Exit, GuardedCommand
from stretto.substrate.process_history import PastJob, fold
from stretto.substrate.process_reports import Progress, Setup, read_report

_TAIL_LINES = 10
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Command:
    """What to run for a job."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    cwd: Path | None = None


@dataclass(slots=True)
class _Run:
    """One job and what runs of it."""

    job: Job
    command: Command
    log: Path
    setup: Setup | None = None
    process: GuardedCommand | None = None
    asked_s: float | None = None
    """When the present start was asked for; None once its first report has come."""
    starts: int = 0
    progress: Progress = field(default_factory=Progress)
    problems: set[str] = field(default_factory=set)
    """What was already noted in the log about its reports."""
    ended: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and not self.ended


class ProcessSubstrate:
    """Carries out instructions with real processes, one command per job.

    PARK sends SIGTERM to everything of the command, and SIGKILL after `grace_s`. RESIZE, and SET_BATCH
    too, as a command cannot be told its batch size while it runs, do the same and start it again. `apply`
    returns when all that had to stop has stopped, so that nothing new meets something old on a GPU.

    Output goes to `run_dir/jobs/<id>/stdout.log`. If this process dies, its commands are stopped in the
    same way; a substrate that recovers starts them only after that.
    """

    changes_batch_in_place = False

    def __init__(
        self,
        nodes: tuple[Node, ...],
        commands: Mapping[str, Command],
        *,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = 10.0,
    ) -> None:
        self._node_ids = frozenset(node.id for node in nodes)
        self._commands = commands
        self._folder = run_dir.absolute() / "jobs"
        self._clock = clock
        self._grace_s = grace_s
        self._zero_s = clock()
        self._last_number = -1
        self._runs: dict[str, _Run] = {}
        self._changed = threading.Condition()
        """Guards the queue and every `_Run`, which listening threads change too."""
        self._events: deque[Event] = deque()

    def now_s(self) -> float:
        return self._clock() - self._zero_s

    def admit(self, job: Job) -> None:
        command = self._commands.get(job.id)
        if command is None or not command.argv:
            raise InputError("there is no command to run.", where=f"job {job.id}", remedy="Give it one.")
        if job.id in {"", ".", ".."} or "/" in job.id or "\0" in job.id:
            raise InputError(
                f"{job.id!r} cannot name a folder, and each job's output has one.",
                where="job",
                remedy="Leave out slashes, and do not use '.' or '..' alone.",
            )
        self._runs[job.id] = _Run(job, command, self._folder / job.id / "stdout.log")

    def apply(self, instructions: Sequence[Instruction]) -> None:
        asked_s = self.now_s()
        new = [instruction for instruction in instructions if instruction.number > self._last_number]
        was_running = {i.job_id for i in new if self._runs[i.job_id].running}
        self._stop([self._runs[job_id] for job_id in sorted(was_running)])
        for instruction in new:
            if instruction.number <= self._last_number:
                continue  # given twice in one call
            self._last_number = instruction.number
            run = self._runs[instruction.job_id]
            if run.running:  # started by an earlier instruction of this call
                self._stop([run])
                was_running.add(run.job.id)
            if run.ended:
                continue  # on its own, before it could be told; the event that says so is on its way
            self._carry_out(instruction, run, asked_s, was_running=run.job.id in was_running)

    def provision(self, wish: Wish) -> None:
        """The slots of this machine are all there is."""

    def next_event(self, until_s: float) -> Event | None:
        """The next event; None at `until_s`, or, if that is never, once nothing runs any more."""
        with self._changed:
            while not self._events:
                left_s = until_s - self.now_s()
                if left_s <= 0 or (
                    math.isinf(left_s) and not any(run.running for run in self._runs.values())
                ):
                    return None
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            return self._events.popleft() if self._events[0].t_s <= until_s else None

    def recover(self, history: Iterable[Event]) -> None:
        """Start what was running when the record ends, with the allocation and batch it had."""
        past = fold(history)
        self._zero_s = self._clock() - past.last_s
        self._last_number = past.last_number
        for job in past.jobs.values():
            if not job.ended:
                self._take_up(job)

    def close(self) -> None:
        """Stop every command and wait until nothing of them is left."""
        self._stop([run for run in self._runs.values() if run.process is not None])

    def _take_up(self, past: PastJob) -> None:
        self.admit(past.job)
        run = self._runs[past.job.id]
        run.starts, run.progress = past.starts, past.progress
        if past.allocation and past.batch is not None:
            self._start(run, past.allocation, past.batch, self.now_s())

    def _carry_out(self, instruction: Instruction, run: _Run, asked_s: float, *, was_running: bool) -> None:
        if instruction.action is Action.SET_BATCH:
            if was_running and run.setup is not None:
                self._start(run, run.setup.allocation, instruction.batch, asked_s)
        elif instruction.action is Action.STOP:
            run.ended = True
        elif instruction.action is not Action.PARK:
            self._start(run, instruction.allocation, instruction.batch, asked_s)

    def _stop(self, runs: Sequence[_Run]) -> None:
        """All at once, so that they share the grace."""
        processes = [run.process for run in runs if run.process is not None]
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.wait()
        for run in runs:
            run.process = None

    def _start(self, run: _Run, allocation: Allocation, batch: BatchChoice, asked_s: float) -> None:
        run.setup = setup = Setup(run.job.id, allocation, batch)
        run.asked_s = asked_s
        run.starts += 1
        run.problems.clear()
        try:
            self._check_nodes(allocation)
            run.log.parent.mkdir(parents=True, exist_ok=True)
            run.process = GuardedCommand(
                _filled_in(run.command.argv, setup),
                env={**os.environ, **run.command.env, **_told(setup, restarts=run.starts - 1)},
                cwd=run.command.cwd,
                log=run.log,
                grace_s=self._grace_s,
                on_line=lambda text: self._on_line(run, setup, text),
                on_exit=lambda how: self._on_exit(run, how),
            )
        except (OSError, ValueError, InputError) as error:
            self._on_exit(run, Exit(None, asked=False, error=f"it cannot be started: {error}"))

    def _check_nodes(self, allocation: Allocation) -> None:
        for node in allocation.nodes:
            if node not in self._node_ids:
                known = ", ".join(sorted(self._node_ids))
                raise InputError(f"node {node!r} is not there.", remedy=f"The nodes are {known}.")

    def _on_line(self, run: _Run, setup: Setup, text: bytes) -> None:
        with self._changed:
            now_s = self.now_s()
            reading = read_report(text, setup, run.progress, t_s=now_s)
            if reading.report is not None:
                resize_s = None if run.asked_s is None else now_s - run.asked_s
                run.asked_s = None
                run.progress = run.progress.after(reading.report)
                self._events.append(replace(reading.report, resize_s=resize_s))
                self._changed.notify_all()
        self._note(run, reading.problems)

    def _note(self, run: _Run, problems: Sequence[str]) -> None:
        """Tell whoever reads the log what their reports lack, each thing once per start."""
        new = [problem for problem in problems if problem not in run.problems]
        if new:
            run.problems.update(new)
            with contextlib.suppress(OSError), run.log.open("a", encoding="utf-8") as log:
                log.writelines(f"stretto: left out of a report: {problem}\n" for problem in new)

    def _on_exit(self, run: _Run, how: Exit) -> None:
        if how.asked:
            return
        error = "" if how.code == 0 else f"{how.text}; {_tail(run.log)}"
        with self._changed:
            run.ended = True
            t_s = self.now_s()
            if how.code == 0:
                self._events.append(JobFinished(t_s=t_s, job_id=run.job.id))
            else:
                self._events.append(JobFailed(t_s=t_s, job_id=run.job.id, error=error))
            self._changed.notify_all()


def _filled_in(argv: Sequence[str], setup: Setup) -> list[str]:
    workers = setup.allocation.worker_count
    batch = setup.batch.total(workers)
    return [part.replace("{workers}", str(workers)).replace("{batch}", str(batch)) for part in argv]


def _told(setup: Setup, *, restarts: int) -> dict[str, str]:
    return {
        "STRETTO_JOB": setup.job_id,
        "STRETTO_RESTARTS": str(restarts),
        "STRETTO_WORKERS": str(setup.allocation.worker_count),
        "STRETTO_SERVERS": str(setup.allocation.server_count),
        "STRETTO_NODES": str(len(setup.allocation.nodes)),
        "STRETTO_BATCH_ATOMIC": str(setup.batch.atomic),
        "STRETTO_BATCH_ACCUMULATION": str(setup.batch.accumulation),
    }


def _tail(log: Path) -> str:
    """Where the log is, and how it ends."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return f"{log} ends:\n" + "\n".join(lines) if lines else f"nothing was written to {log}"
