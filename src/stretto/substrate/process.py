"""Runs jobs as commands on this machine. Any command will do: a resize is a restart.

With K workers K processes of the command run, told their ranks as torchrun would tell them (RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT,
TORCHELASTIC_RUN_ID). A command that starts its workers itself runs once instead (`Command.gang`). It keeps
its own checkpoints, saves one on SIGTERM, and goes on from it when it is started again. All processes know

    STRETTO_JOB, STRETTO_RESTARTS         whose part they play, and how many starts came before
    STRETTO_WORKERS, STRETTO_SERVERS      tasks of the job
    STRETTO_NODES                         on how many nodes they are
    STRETTO_BATCH_ATOMIC                  examples per worker and pass
    STRETTO_BATCH_ACCUMULATION            passes added before each step
    STRETTO_METRICS_FILE                  where reports may be written instead of printed
    STRETTO_FOLDER                        a folder of the job's own, the same whenever it is started
    CUDA_VISIBLE_DEVICES                  the devices of the job; LOCAL_RANK is the index of one's own

Arguments may have placeholders (see `process_command`). The first process reports by JSON lines on its
standard output or in the metrics file (see `process_reports`), the first as soon as it trains: that line
ends its start.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed, JobFinished, JobNoted, JobReported, JobRetried
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job, Tier
from stretto.substrate.process_child import Exit, Files, GuardedCommand, cannot_start, end_of
from stretto.substrate.process_command import (
    METRICS,
    Command,
    check_placeholders,
    environment,
    filled_in,
    free_port,
    gang_environment,
    own_folder,
    rank_environments,
)
from stretto.substrate.process_devices import DevicePool
from stretto.substrate.process_end import Asked, failed_late
from stretto.substrate.process_history import Failures, PastJob, fold
from stretto.substrate.process_reports import Progress, Setup, read_report
from stretto.substrate.process_trials import Mark, Trial

__all__ = ["Command", "ProcessSubstrate"]

_NO_DEVICES: Mapping[str, Sequence[str]] = {}


@dataclass(slots=True)
class _Run:
    """One job and what runs of it."""

    job: Job
    command: Command
    files: Files
    setup: Setup | None = None
    process: GuardedCommand | None = None
    wanted: bool = False
    """Whether it is to run: if it fails now, it is started again at once."""
    port: int | None = None
    asked_s: float | None = None
    """When the present start was asked for; None once its first report has come."""
    starts: int = 0
    progress: Progress = field(default_factory=Progress)
    mark: Mark = field(default_factory=Mark)
    failures: Failures = field(default_factory=Failures)
    problems: set[str] = field(default_factory=set)
    """What was already noted in the log about its reports."""
    has_shown_wrong: bool = False
    """It was said that it shows its metric as something that is no number."""
    passed: bool = False
    """It has shown an epoch after the last one."""
    ended: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and not self.ended

    @property
    def trial(self) -> Trial | None:
        metric = self.command.metric
        return None if metric is None else Trial(metric, self.job.work.epochs)

    @property
    def asked(self) -> Asked:
        return Asked.of(self.job, self.command.metric)

    @property
    def complete(self) -> bool:
        """A job that has shown its last epoch is done, whatever its command still does."""
        return self.passed or self.asked.is_shown(self.progress)


class ProcessSubstrate:
    """Carries out instructions with real processes, one command per job.

    PARK sends SIGTERM to everything of the command, and SIGKILL after `grace_s`. RESIZE, and SET_BATCH
    too, as a command cannot be told its batch size while it runs, do the same and start it again. `apply`
    returns when all that had to stop has stopped, so that nothing new meets something old on a GPU.

    A command that fails is started again, `retries` times without progress in between; then its job has
    failed. One that has shown its last epoch may end by itself within `grace_s`; then it is stopped, and at
    once if it shows another.

    Output goes to `run_dir/jobs/<id>/stdout.log`, reports to `metrics.jsonl` beside it. If this process
    dies, its commands are stopped in the same way; a substrate that recovers starts them only after that.
    """

    changes_batch_in_place = False

    def __init__(
        self,
        nodes: tuple[Node, ...],
        commands: Mapping[str, Command],
        *,
        run_dir: Path,
        devices: Mapping[str, Sequence[str]] = _NO_DEVICES,
        clock: Callable[[], float] | None = None,
        grace_s: float = 10.0,
        retries: int = 2,
    ) -> None:
        """`commands` by the id of the job, or by the study whose trials run it.

        `devices` has the ids of each node's GPUs, one per slot; a node without is left to its commands.
        `clock` gives the seconds since the run's first start; by default that is now.
        """
        self._node_ids = frozenset(node.id for node in nodes)
        self._commands = commands
        self._folder = run_dir.absolute() / "jobs"
        self._devices = DevicePool(nodes, devices)
        self._clock = clock or _stopwatch()
        self._ahead_s = 0.0
        """What is added to the clock so that it does not fall behind the history of a recovered run."""
        self._grace_s = grace_s
        self._retries = retries
        self._last_number = -1
        self._runs: dict[str, _Run] = {}
        self._changed = threading.Condition()
        """Guards the queue and every `_Run`, which listening threads change too."""
        self._events: deque[Event] = deque()

    def now_s(self) -> float:
        return self._clock() + self._ahead_s

    def admit(self, job: Job) -> None:
        command = self._commands.get(job.id) or self._commands.get(job.study or "")
        if command is None or not command.argv:
            raise InputError("there is no command to run.", where=f"job {job.id}", remedy="Give it one.")
        if job.id in {"", ".", ".."} or "/" in job.id or "\0" in job.id:
            raise InputError(
                f"{job.id!r} cannot name a folder, and each job's output has one.",
                where="job",
                remedy="Leave out slashes, and do not use '.' or '..' alone.",
            )
        check_placeholders(command, job)
        folder = self._folder / job.id
        files = Files(log=folder / "stdout.log", metrics=folder / METRICS, lock=folder / "lock")
        self._runs[job.id] = _Run(job, command, files)

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
        self._ahead_s = max(past.last_s - self._clock(), 0.0)
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
        run.starts, run.progress, run.failures = past.starts, past.progress, past.failures
        if run.complete:
            with self._changed:
                self._end(run, JobFinished(t_s=self.now_s(), job_id=run.job.id))
        elif past.allocation and past.batch is not None:
            self._start(run, past.allocation, past.batch, self.now_s(), recovering=True)

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
        with self._changed:
            for run in runs:
                run.wanted = False
            processes = [run.process for run in runs if run.process is not None]
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.wait()
        with self._changed:
            for run in runs:
                self._release(run)

    def _release(self, run: _Run) -> None:
        run.process = run.port = None
        self._devices.give_back(run.job.id)

    def _start(
        self,
        run: _Run,
        allocation: Allocation,
        batch: BatchChoice,
        asked_s: float,
        *,
        recovering: bool = False,
    ) -> None:
        with self._changed:
            run.setup = setup = Setup(run.job.id, allocation, batch, run.trial)
            run.asked_s = asked_s
            run.starts += 1
            run.problems.clear()
            run.wanted = True
            run.mark = Mark(0 if run.job.tier is Tier.RIGID else run.progress.result_epoch)
            try:
                self._check_nodes(allocation)
                own_folder(run.files.log.parent).mkdir(parents=True, exist_ok=True)
                run.process = self._guarded(run, setup, recovering=recovering)
            except (OSError, ValueError, InputError) as error:
                self._on_exit(run, cannot_start(error))

    def _guarded(self, run: _Run, setup: Setup, *, recovering: bool) -> GuardedCommand:
        restarts, job_folder = run.starts - 1, run.files.log.parent
        env = environment(
            run.command,
            setup,
            restarts=restarts,
            job_folder=job_folder,
            devices=self._devices.take(run.job, setup.allocation),
        )
        if run.command.gang:
            run.port = free_port([other.port for other in self._runs.values()])
            world = setup.allocation.worker_count
            env |= gang_environment(
                run.job.id, world=world, local_world=world, restarts=restarts, port=run.port
            )
        return GuardedCommand(
            filled_in(run.command, run.job, setup, job_folder=job_folder),
            env=env,
            ranks=rank_environments(run.command, setup),
            cwd=run.command.cwd,
            files=run.files,
            keys=setup.keys,
            tells_missed=recovering and run.trial is not None,
            grace_s=self._grace_s,
            on_line=lambda text: self._on_line(run, setup, text),
            on_missed=lambda text: self._on_missed(run, setup, text),
            on_exit=lambda how: self._on_exit(run, how),
        )

    def _check_nodes(self, allocation: Allocation) -> None:
        for node in allocation.nodes:
            if node not in self._node_ids:
                known = ", ".join(sorted(self._node_ids))
                raise InputError(f"node {node!r} is not there.", remedy=f"The nodes are {known}.")

    def _on_line(self, run: _Run, setup: Setup, text: bytes) -> None:
        with self._changed:
            now_s = self.now_s()
            reading = read_report(text, setup, run.progress, t_s=now_s, mark=run.mark)
            run.mark = reading.mark
            if reading.report is not None and not run.complete:
                resize_s = None if run.asked_s is None else now_s - run.asked_s
                run.asked_s = None
                self._report(run, replace(reading.report, resize_s=resize_s))
            if reading.wrong and not run.has_shown_wrong:
                run.has_shown_wrong = True
                self._say(run, reading.wrong)
            if run.asked.is_passed(reading) and not run.passed and run.process is not None:
                run.passed = True
                run.process.ask_to_stop()
        self._note(run, reading.problems)

    def _on_missed(self, run: _Run, setup: Setup, text: bytes) -> None:
        """A line from before the present start, of which nobody knows whether it was read."""
        with self._changed:
            mark = Mark(counts=False)
            report = read_report(text, setup, run.progress, t_s=self.now_s(), mark=mark).report
            if report is not None and report.results and not run.complete:
                self._report(run, report)

    def _report(self, run: _Run, report: JobReported) -> None:
        run.progress = run.progress.after(report)
        self._events.append(report)
        self._changed.notify_all()
        if run.complete and run.process is not None:
            run.process.let_end()

    def _note(self, run: _Run, problems: Sequence[str]) -> None:
        """Tell whoever reads the log what their reports lack, each thing once per start."""
        new = [problem for problem in problems if problem not in run.problems]
        if new:
            run.problems.update(new)
            with contextlib.suppress(OSError), run.files.log.open("a", encoding="utf-8") as log:
                log.writelines(f"stretto: left out of a report: {problem}\n" for problem in new)

    def _on_exit(self, run: _Run, how: Exit) -> None:
        with self._changed:
            if run.complete or (how.code == 0 and not how.asked):
                self._tell_of_end(run, how)
                self._end(run, JobFinished(t_s=self.now_s(), job_id=run.job.id))
            elif not how.asked:
                self._on_failure(run, how)

    def _say(self, run: _Run, text: str) -> None:
        self._events.append(JobNoted(t_s=self.now_s(), job_id=run.job.id, text=text))
        self._changed.notify_all()

    def _tell_of_end(self, run: _Run, how: Exit) -> None:
        """Of a finished job: that its command was ended, or did less than was asked, or failed late."""
        if how.asked:
            text = run.asked.why_ended(run.progress)
        elif how.code == 0:
            text = run.asked.what_lacks(run.progress)
        else:
            text = failed_late(f"{how.text}; {end_of(run.files.log)}\nlog: {run.files.log}")
        if text:
            self._say(run, text)

    def _on_failure(self, run: _Run, how: Exit) -> None:
        error = f"{how.text}; {end_of(run.files.log)}\nlog: {run.files.log}"
        run.failures = run.failures.and_one(run.progress)
        if not how.started or run.failures.count > self._retries:
            self._end(run, JobFailed(t_s=self.now_s(), job_id=run.job.id, error=error))
            return
        attempt = run.failures.count
        now_s = self.now_s()
        self._events.append(JobRetried(t_s=now_s, job_id=run.job.id, attempt=attempt, error=error))
        self._changed.notify_all()
        if run.wanted and run.setup is not None:  # else it was about to be stopped anyway
            self._start(run, run.setup.allocation, run.setup.batch, now_s)

    def _end(self, run: _Run, event: Event) -> None:
        run.ended = True
        self._release(run)
        self._events.append(event)
        self._changed.notify_all()


def _stopwatch() -> Callable[[], float]:
    zero_s = time.monotonic()
    return lambda: time.monotonic() - zero_s
