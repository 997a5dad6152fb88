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
    STRETTO_LAUNCH_FOLDER                 where relative paths begin, if it runs in that folder
    OMP_NUM_THREADS                       cores for each slot, unless it is set
    CUDA_VISIBLE_DEVICES                  the devices of the job; LOCAL_RANK is the index of one's own

Arguments may have placeholders (see `process_command`). The first process reports by JSON lines on its
standard output or in the metrics file (see `process_reports`), the first as soon as it trains: that line
ends its start.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed, JobFinished, JobNoted, JobReported, JobRetried
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job, Tier
from stretto.substrate.elastic.command import (
    METRICS,
    Command,
    check_placeholders,
    environment,
    filled_in,
    free_port,
    gang_environment,
    own_folder,
    rank_environments,
    token_of,
)
from stretto.substrate.elastic.command_output import (
    Asked,
    Mark,
    Progress,
    Setup,
    Trial,
    failed_late,
    killed_leaving,
    read_report,
)
from stretto.substrate.elastic.guard import START, TOKEN
from stretto.substrate.elastic.loop import EventQueue
from stretto.substrate.elastic.recovery import Failures, PastJob, fold
from stretto.substrate.elastic.shared_files import SharedFolder, overwritten
from stretto.substrate.local.command_child import Exit, Files, GuardedCommand, cannot_start, end_of
from stretto.system.identity import folder_identity
from stretto.system.limits import Retry
from stretto.system.private_files import make_private_folder


@dataclass(frozen=True, slots=True)
class Order:
    """A start that was asked for."""

    allocation: Allocation
    batch: BatchChoice
    asked_s: float


@dataclass(slots=True)
class JobRun:
    """One job and what runs of it."""

    job: Job
    command: Command
    files: Files
    number: int = 0
    """In the order in which jobs were admitted."""
    setup: Setup | None = None
    process: GuardedCommand | None = None
    leaving: bool = False
    """What runs of it was asked to stop, and holds its slots until it has."""
    retry: Retry | None = None
    """When it is started again that a limit of the machine kept from being started."""
    waiting: Order | None = None
    """How it is started as soon as there is room, and nothing of it is left from before."""
    parked: bool = False
    """It is not to run: what it still reports is held back until it does, or the run ends."""
    held: list[JobReported] = field(default_factory=list)
    port: int | None = None
    asked_s: float | None = None
    """When the present start was asked for; None once its first report has come."""
    starts: int = 0
    progress: Progress = field(default_factory=Progress)
    mark: Mark = field(default_factory=Mark)
    failures: Failures = field(default_factory=Failures)
    problems: set[str] = field(default_factory=set)
    """What was already noted in the log about its reports."""
    has_said_scarce: bool = False
    """It was said that it waits for a limit."""
    has_shown_wrong: bool = False
    """It was said that it shows its metric in a way that does not count."""
    passed: bool = False
    """It has shown an epoch after the last one."""
    ended: bool = False

    @property
    def busy(self) -> bool:
        """Something of it runs, or is about to."""
        return self.process is not None or self.waiting is not None

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

    def leave(self) -> None:
        """Ask what runs of it to stop."""
        if self.process is not None and not self.leaving:
            self.leaving = True
            self.process.ask_to_stop()

    def uses(self, node_id: str) -> float:
        """Slots of a node that it has until nothing of it runs any more."""
        return 0.0 if self.process is None or self.setup is None else _slots(self, self.setup, node_id)


def must_wait(run: JobRun, order: Order, runs: Iterable[JobRun], nodes: Sequence[Node]) -> bool:
    """Whether slots that a job is to have are still those of commands that are about to leave them."""
    others = [one for one in runs if one is not run]
    for node in nodes:
        wanted = _slots(run, order, node.id)
        taken = sum(one.uses(node.id) for one in others)
        leaving = any(one.leaving and one.uses(node.id) for one in others)
        if wanted and leaving and wanted + taken > node.gpus:
            return True
    return False


def _slots(run: JobRun, given: Setup | Order, node_id: str) -> float:
    uses = given.allocation.uses(run.job).get(node_id)
    return 0.0 if uses is None else uses.gpu


class DevicePool:
    """Hands out the devices of each node, one per slot, never one to two jobs."""

    def __init__(self, nodes: Sequence[Node], devices: Mapping[str, Sequence[str]]) -> None:
        """`devices` gives the ids of a node's slots, as CUDA_VISIBLE_DEVICES has them; none: not managed."""
        self._devices = {node.id: tuple(devices.get(node.id, ())) for node in nodes}
        self._held: dict[str, tuple[str, ...]] = {}
        every = [one for ids in self._devices.values() for one in ids]
        if len(set(every)) < len(every):
            raise InputError(f"a device is given twice: {', '.join(every)}.", remedy="Give each once.")
        for node in nodes:
            if self._devices[node.id] and len(self._devices[node.id]) < node.gpus:
                raise InputError(
                    f"node {node.id} has {node.gpus} slots and {len(self._devices[node.id])} devices.",
                    remedy="Give a device for each slot, or none at all.",
                )

    def take(self, job: Job, allocation: Allocation) -> tuple[str, ...] | None:
        """The devices the job has from now on instead of what it had; None if its nodes have no list."""
        self.give_back(job.id)
        held = {one for ids in self._held.values() for one in ids}
        managed = {node: uses for node, uses in allocation.uses(job).items() if self._devices.get(node)}
        if not managed:
            return None
        taken: list[str] = []
        for node, uses in managed.items():
            free = [one for one in self._devices[node] if one not in held]
            if uses.gpu > len(free):
                raise InputError(f"node {node} has {len(free)} free devices, and {uses.gpu:g} are needed.")
            taken += free[: round(uses.gpu)]
        self._held[job.id] = tuple(taken)
        return self._held[job.id]

    def give_back(self, job_id: str) -> None:
        self._held.pop(job_id, None)


__all__ = ["Command", "ProcessSubstrate"]

FLOOD = (
    "its command prints very fast, so Stretto reads at most 2 MB and 200 epochs a second of it; no epoch is "
    "lost, step lines in between are skipped"
)
_NO_DEVICES: Mapping[str, Sequence[str]] = {}


class ProcessSubstrate:
    """Carries out instructions with real processes, one command per job.

    PARK sends SIGTERM to everything of the command, and SIGKILL after `grace_s`. RESIZE, and SET_BATCH
    too, as a command cannot be told its batch size while it runs, do the same and start it again. `apply`
    does not wait for that: a start waits for its slots until whoever leaves them has left, so that nothing
    new meets something old on a GPU. What a parked command still reports is told when it is started again.

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
        threads: int = 0,
    ) -> None:
        """`commands` by the id of the job, or by the study whose trials run it.

        `devices` has the ids of each node's GPUs, one per slot; a node without is left to its commands.
        Every process may use so many `threads`; 0: nobody says.
        `clock` gives the seconds since the run's first start; by default that is now.
        """
        self._nodes = nodes
        self._commands = commands
        self._run_dir = run_dir.absolute()
        self._folder = self._run_dir / "jobs"
        self._threads = threads
        self._identity = ""
        self._shared: dict[Path, SharedFolder] = {}
        """Folders in which commands of several jobs run."""
        self._flooding: set[str] = set()
        """Studies and jobs of which it was said that their command prints more than is read."""
        self._devices = DevicePool(nodes, devices)
        self._clock = clock or _stopwatch()
        self._ahead_s = 0.0
        """What is added to the clock so that it does not fall behind the history of a recovered run."""
        self._grace_s = grace_s
        self._retries = retries
        self._last_number = -1
        self._ends_at_once = False
        self._runs: dict[str, JobRun] = {}
        self._live: dict[str, JobRun] = {}
        """Those of which something runs, or is about to, and a few that were: most jobs wait or are over."""
        self._changed = threading.Condition()
        """Guards the queue and every `JobRun`, which listening threads change too."""
        self._events = EventQueue()

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
        with self._changed:
            self._runs[job.id] = JobRun(job, command, files, number=len(self._runs))

    def apply(self, instructions: Sequence[Instruction]) -> None:
        asked_s = self.now_s()
        with self._changed:
            for instruction in instructions:
                if instruction.number <= self._last_number:
                    continue
                self._last_number = instruction.number
                run = self._live[instruction.job_id] = self._runs[instruction.job_id]
                if not run.ended:  # else on its own, and the event that says so is on its way
                    _follow(instruction, run, asked_s)
            self._start_waiting()

    def provision(self, wish: Wish) -> None:
        """The slots of this machine are all there is."""

    def next_event(self, until_s: float) -> Event | None:
        """The next event; None at `until_s`, or, if that is never, once nothing runs any more."""
        with self._changed:
            while not self._events:
                now_s = self.now_s()
                left_s = until_s - now_s
                if left_s <= 0 or (math.isinf(left_s) and not any(run.busy for run in self._live.values())):
                    return None
                again_s = self._start_again_s(now_s)
                self._changed.wait(min(left_s, again_s, threading.TIMEOUT_MAX))
            return self._events.take(until_s)

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
        with self._changed:
            for run in self._runs.values():
                run.waiting = None
                run.leave()
            processes = [run.process for run in self._runs.values() if run.process is not None]
        for process in processes:
            process.wait()
        with self._changed:
            for run in self._runs.values():
                self._tell_held(run)

    def stop_now(self) -> None:
        """Kill every command."""
        with self._changed:
            self._ends_at_once = True
            for run in self._runs.values():
                run.waiting = None
                if run.process is not None:
                    run.leaving = True
                    run.process.end_now()
        self.close()

    def _take_up(self, past: PastJob) -> None:
        self.admit(past.job)
        run = self._runs[past.job.id]
        run.starts, run.progress, run.failures = past.starts, past.progress, past.failures
        if run.complete:
            with self._changed:
                self._end(run, JobFinished(t_s=self.now_s(), job_id=run.job.id))
        elif past.allocation and past.batch is not None:
            with self._changed:
                run.waiting = Order(past.allocation, past.batch, self.now_s())
                self._live[run.job.id] = run
                self._start_waiting()

    def _start_again_s(self, now_s: float) -> float:
        """Start whoever waited long enough for a limit of the machine; when the next one has."""
        if any(again_s <= now_s for again_s in self._tried_again_s()):
            self._start_waiting()
            return 0.0  # something may have come of it
        return min((again_s - now_s for again_s in self._tried_again_s()), default=math.inf)

    def _tried_again_s(self) -> list[float]:
        waiting = [run.retry for run in self._live.values() if run.waiting is not None]
        return [retry.again_s for retry in waiting if retry is not None]

    def _start_waiting(self) -> None:
        """Start whoever waits for nothing but this; first those who were admitted first."""
        now_s = self.now_s()
        self._live = {job_id: run for job_id, run in self._live.items() if run.busy}
        for run in sorted(self._live.values(), key=lambda run: run.number):
            order = run.waiting
            if order is not None and run.process is None:
                if run.retry is not None and now_s < run.retry.again_s:
                    continue
                if must_wait(run, order, self._live.values(), self._nodes):
                    continue
                run.waiting = None
                self._start(run, order)

    def _start(self, run: JobRun, order: Order) -> None:
        self._tell_held(run)
        run.setup = setup = Setup(run.job.id, order.allocation, order.batch, run.trial)
        run.asked_s = order.asked_s
        run.starts += 1
        run.parked = run.leaving = False
        run.problems.clear()
        run.mark = Mark(0 if run.job.tier is Tier.RIGID else run.progress.result_epoch)
        try:
            self._check_nodes(order.allocation)
            make_private_folder(own_folder(run.files.log.parent))
            run.process = self._guarded(run, setup)
            self._watch_folder(run)
        except (OSError, ValueError, InputError) as error:
            self._on_exit(run, cannot_start(error, error.errno if isinstance(error, OSError) else None))

    def _guarded(self, run: JobRun, setup: Setup) -> GuardedCommand:
        restarts, job_folder = run.starts - 1, run.files.log.parent
        env = environment(
            run.command,
            setup,
            restarts=restarts,
            job_folder=job_folder,
            devices=self._devices.take(run.job, setup.allocation),
            threads=self._threads,
        )
        self._identity = self._identity or folder_identity(self._run_dir)
        env |= {TOKEN: token_of(self._identity, run.job.id), START: secrets.token_hex(8)}
        if run.command.gang:
            run.port = free_port([other.port for other in self._live.values()])
            world = setup.allocation.worker_count
            env |= gang_environment(
                run.job.id, world=world, local_world=world, restarts=restarts, port=run.port
            )
        return GuardedCommand(
            filled_in(run.command, run.job, setup, job_folder=job_folder),
            env=env,
            ranks=rank_environments(run.command, setup),
            cwd=own_folder(job_folder) if run.command.in_folder else run.command.cwd,
            files=run.files,
            keys=setup.keys,
            metric=run.command.metric,
            tells_missed=run.trial is not None and restarts > 0,
            grace_s=self._grace_s,
            on_line=lambda text: self._on_line(run, setup, text),
            on_missed=lambda text: self._on_missed(run, setup, text),
            on_exit=lambda how: self._on_exit(run, how),
            on_flood=lambda: self._on_flood(run),
        )

    def _check_nodes(self, allocation: Allocation) -> None:
        for node in allocation.nodes:
            if node not in (known := sorted(one.id for one in self._nodes)):
                raise InputError(f"node {node!r} is not there.", remedy=f"The nodes are {', '.join(known)}.")

    def _on_line(self, run: JobRun, setup: Setup, text: bytes) -> None:
        with self._changed:
            if run.ended:
                return
            run.retry = None
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

    def _on_missed(self, run: JobRun, setup: Setup, text: bytes) -> None:
        """A line from before the present start, of which nobody knows whether it was read."""
        with self._changed:
            mark = Mark(counts=False)
            report = read_report(text, setup, run.progress, t_s=self.now_s(), mark=mark).report
            if report is not None and report.results and not run.complete and not run.ended:
                self._report(run, report)

    def _report(self, run: JobRun, report: JobReported) -> None:
        run.progress = run.progress.after(report)
        run.held.append(report)
        if not run.parked:
            self._tell_held(run)
        if run.complete and run.process is not None:
            run.process.let_end()

    def _tell_held(self, run: JobRun) -> None:
        now_s = self.now_s()
        for report in run.held:
            self._events.put(replace(report, t_s=now_s))
        run.held.clear()
        self._changed.notify_all()

    def _note(self, run: JobRun, problems: Sequence[str]) -> None:
        """Tell whoever reads the log what their reports lack, each thing once per start."""
        new = [problem for problem in problems if problem not in run.problems]
        if new:
            run.problems.update(new)
            with contextlib.suppress(OSError), run.files.log.open("a", encoding="utf-8") as log:
                log.writelines(f"stretto: left out of a report: {problem}\n" for problem in new)

    def _on_exit(self, run: JobRun, how: Exit) -> None:
        with self._changed:
            self._live[run.job.id] = run
            wanted = not run.leaving
            self._release(run)
            self._look_at_folder(run)
            if how.scarce is None:
                run.retry = None
            if run.ended:
                pass  # it was told to stop
            elif how.scarce is not None and self._waits_for_limit(run, how, wanted=wanted):
                pass
            elif run.complete or (how.code == 0 and not how.asked):
                self._tell_held(run)
                self._tell_of_end(run, how)
                self._end(run, JobFinished(t_s=self.now_s(), job_id=run.job.id))
            elif not how.asked:
                self._tell_held(run)
                self._on_failure(run, how, wanted=wanted)
            elif how.code == -signal.SIGKILL and not self._ends_at_once:
                self._say(run, killed_leaving(self._grace_s))
            self._start_waiting()
            self._changed.notify_all()

    def _waits_for_limit(self, run: JobRun, how: Exit, *, wanted: bool) -> bool:
        """Have a start that a limit of the machine kept from being tried again; False after long enough."""
        if not wanted or run.setup is None:
            return True
        now_s = self.now_s()
        run.retry = Retry.at(now_s, run.retry)
        if run.retry is None:
            return False
        run.starts -= 1
        run.waiting = run.waiting or Order(run.setup.allocation, run.setup.batch, run.asked_s or now_s)
        if not run.has_said_scarce:
            run.has_said_scarce = True
            self._say(run, f"{how.error}. It waits and is tried again; this is said once.")
        return True

    def _watch_folder(self, run: JobRun) -> None:
        if not run.command.in_folder:
            folder = run.command.launch_folder
            self._shared.setdefault(folder, SharedFolder(folder)).started(run.job.id)

    def _look_at_folder(self, run: JobRun) -> None:
        shared = self._shared.get(run.command.launch_folder)
        found = None if shared is None else shared.ended(run.job.id)
        if found is not None:
            self._say(run, overwritten(found, run.command.launch_folder))

    def _on_flood(self, run: JobRun) -> None:
        with self._changed:
            whose = run.job.study or run.job.id
            if whose not in self._flooding and not run.ended:
                self._flooding.add(whose)
                self._say(run, FLOOD)

    def _release(self, run: JobRun) -> None:
        run.process = run.port = None
        run.leaving = False
        self._devices.give_back(run.job.id)

    def _say(self, run: JobRun, text: str) -> None:
        self._events.put(JobNoted(t_s=self.now_s(), job_id=run.job.id, text=text))
        self._changed.notify_all()

    def _tell_of_end(self, run: JobRun, how: Exit) -> None:
        """Of a finished job: that its command was ended, or did less than was asked, or failed late."""
        if how.asked:
            text = run.asked.why_ended(run.progress)
        elif how.code == 0:
            text = run.asked.what_lacks(run.progress)
        else:
            text = failed_late(f"{how.text}; {end_of(run.files.log)}\nlog: {run.files.log}")
        if text:
            self._say(run, text)

    def _on_failure(self, run: JobRun, how: Exit, *, wanted: bool) -> None:
        error = f"{how.text}; {end_of(run.files.log)}\nlog: {run.files.log}"
        run.failures = run.failures.and_one(run.progress)
        if not how.started or run.failures.count > self._retries:
            self._end(run, JobFailed(t_s=self.now_s(), job_id=run.job.id, error=error))
            return
        attempt = run.failures.count
        now_s = self.now_s()
        self._events.put(JobRetried(t_s=now_s, job_id=run.job.id, attempt=attempt, error=error))
        if wanted and run.setup is not None:  # else it was about to be stopped anyway
            run.waiting = Order(run.setup.allocation, run.setup.batch, now_s)

    def _end(self, run: JobRun, event: Event) -> None:
        run.ended = True
        run.waiting = None
        self._events.put(event)
        self._changed.notify_all()


def _follow(instruction: Instruction, run: JobRun, asked_s: float) -> None:
    """What a job is to do from now on; what runs of it is asked to stop."""
    if instruction.action is Action.SET_BATCH:
        order = run.waiting
        if order is None and run.setup is not None and run.process is not None and not run.leaving:
            order = Order(run.setup.allocation, instruction.batch, asked_s)
        run.waiting = None if order is None else replace(order, batch=instruction.batch)
    elif instruction.action in {Action.PARK, Action.STOP}:
        run.waiting, run.retry, run.parked = None, None, True
        run.ended = instruction.action is Action.STOP
    else:
        run.waiting = Order(instruction.allocation, instruction.batch, asked_s)
    run.leave()


def _stopwatch() -> Callable[[], float]:
    zero_s = time.monotonic()
    return lambda: time.monotonic() - zero_s
