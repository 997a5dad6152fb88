"""Runs jobs as real processes whose number may change, on this machine or on a cluster.

JobFiles of a run, under its folder: `lock`, `nursery.log` (what is printed while training code is imported),
and for each job `jobs/<id>/stdout.log`, `metrics.jsonl` and `checkpoints/`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from stretto.core.allocation import Allocation
from stretto.core.cluster import Wish
from stretto.core.errors import InputError, PolicyError
from stretto.core.events import Event, JobReported, NodeLost, NodeReleased
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.elastic.command import Command, token_of
from stretto.substrate.elastic.command_gang import CommandGang, PrintedAccount, SaidOnce, lines_of
from stretto.substrate.elastic.effects import Effect, Moment, Rules, Spawn, TrainingJob
from stretto.substrate.elastic.gang import Gang
from stretto.substrate.elastic.loop import GangLoop
from stretto.substrate.elastic.losses import Losses
from stretto.substrate.elastic.recovery import PastJob, fold
from stretto.substrate.elastic.reports import TrainingAccount, untold
from stretto.substrate.elastic.training import TrainingGang
from stretto.substrate.elastic.workers import WorkerGround, Workers
from stretto.substrate.fleet.provision import Provisioner, noting_nodes
from stretto.system.identity import RunLock, folder_identity
from stretto.system.private_files import make_private_folder
from stretto.wire.messages import Described, Task

LOG = "stdout.log"
METRICS = "metrics.jsonl"
PATIENCE_S = 5.0
"""How much longer than the grace the end of everything may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """How jobs keep their files."""

    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 2
    tensorboard: bool = False
    store: str = ""
    """An fsspec path where checkpoints are copied to; empty: nowhere."""


class RunGround(WorkerGround, Protocol):
    """Where the workers of a run are, and the nodes there."""

    @property
    def slots(self) -> int:
        """The most workers there may be."""

    @property
    def provisioner(self) -> Provisioner: ...

    @property
    def changes(self) -> bool:
        """Whether nodes may come and go by themselves."""

    def places_of(self, allocation: Allocation) -> Counter[str]:
        """The number of workers on each node."""

    def expect(self, entry: str) -> None:
        """This entry will run, so slow preparations can begin."""


class ElasticSubstrate:
    """Carries out instructions with elastic workers, which train functions or run commands.

    `apply` returns at once. A worker starts when a slot is free, so old and new never share a GPU. PARK saves
    a checkpoint at the next step boundary; STOP ends the workers at once. A job whose workers are lost starts
    again from its last checkpoint (JobRetried), and fails (JobFailed) if that happens too often without
    progress. A job that lost a node is parked until an instruction says where to continue. Reports that come
    after a PARK become events when the job runs again, or when it or the run ends.
    """

    def __init__(
        self,
        land: RunGround,
        *,
        spec_of: Callable[[Job], TrainingJob],
        run_dir: Path,
        lock: RunLock,
        clock: Callable[[], float],
        rules: Rules,
        files: JobFiles,
        runs_commands: bool = False,
    ) -> None:
        """`clock` gives the seconds since the run's first start. `runs_commands`: some jobs are commands."""
        self.changes_batch_in_place = not runs_commands
        self._land = land
        self._spec_of = spec_of
        self._rules = rules
        self._files = files
        self._clock = clock
        self._behind_s = 0.0
        self._folder = run_dir.absolute()
        self._lock = lock
        self._last_number = -1
        self._gangs: dict[str, Gang] = {}
        self._undecided: dict[str, int] = {}
        """Epochs whose results the controller has not decided about."""
        self._said = SaidOnce()
        self._life = secrets.token_hex(4)
        """Of this controller: tells the processes that it starts from those of an earlier one."""
        self._closed = False
        self._engine = GangLoop(self.now_s, self._spawn, self._look if land.changes else None)
        self._workers = Workers(
            ground=land, grace_s=rules.of_commands.grace_s, post=self._engine.post, overseer=self._engine
        )
        self._engine.start(self._workers)

    def now_s(self) -> float:
        return self._clock() + self._behind_s

    def admit(self, job: Job) -> None:
        self._admit(PastJob(job))

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if instruction.number > self._last_number:
                self._last_number = instruction.number
                self._instruct(instruction)

    def provision(self, wish: Wish) -> None:
        self._engine.post(lambda: self._provision(wish))

    def next_event(self, until_s: float) -> Event | None:
        """The next event; None at `until_s`. If that is infinite, None once nothing runs any more.

        A caller that waits here has decided about the results so far. Jobs that wait for that continue now.
        """
        event = self._engine.next_event(until_s, self._acknowledge)
        if isinstance(event, JobReported) and self._gangs[event.job_id].spec.waits_for_ack:
            self._undecided[event.job_id] = event.epoch
        return event

    def recover(self, history: Iterable[Event]) -> None:
        """Start what was running when the record ends, with the allocation and batch it had.

        Jobs on nodes that are gone by now are parked at once, as after any loss of a node. The rest of the
        last wish for nodes is granted, as the controller does not repeat it. Results that are in a job's
        metrics file but not in the journal come with its next report.
        """
        about_nodes: list[Event] = []
        past = fold(noting_nodes(history, about_nodes))
        self._behind_s = max(past.last_s - self._clock(), 0.0)
        self._last_number = past.last_number
        for job in past.jobs.values():
            if job.ended:
                continue
            self._admit(job)
            self._engine.tell(self._gangs[job.job.id], lambda gang, now: gang.finish_if_complete(now))
            if job.allocation and job.batch is not None:
                self._instruct(
                    Instruction(past.last_number, Action.START, job.job.id, job.allocation, job.batch)
                )
        self._engine.post(lambda: self._tell_nodes(self._land.provisioner.recall(about_nodes, self.now_s())))

    def described(self, job_id: str) -> Described | None:
        """What a job's training code wants, once it has said so."""
        return self._gangs[job_id].described

    def is_born(self, job_id: str) -> bool:
        """Whether a process of the job runs, so its training code was imported."""
        return self._gangs[job_id].is_born

    def finish_epochs(self) -> None:
        """Let every running job end its present epoch, save and leave."""
        self._engine.tell_all(lambda gang, now: gang.finish_epoch(now))
        self._engine.wind_down()

    def close(self) -> None:
        """Park everything, wait for it within the grace, and leave nothing behind.

        `next_event` still returns what jobs report meanwhile.
        """
        self._close(lambda gang, now: gang.close(now), self._rules.of_commands.grace_s + PATIENCE_S)

    def stop_now(self) -> None:
        """As `close`, without waiting for checkpoints."""
        self._close(lambda gang, now: gang.kill(now), PATIENCE_S)

    def _close(self, end: Callable[[Gang, Moment], Sequence[Effect]], patience_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:  # nodes are given back whatever goes wrong
            last.callback(self._lock.release)
            last.callback(self._land.provisioner.close)
            last.callback(self._engine.stop)
            self._engine.tell_all(end)
            self._engine.wind_down()
            self._engine.wait_until_idle(patience_s)
            self._workers.close()

    def _admit(self, past: PastJob) -> None:
        job = past.job
        _check_job(job, self._land.slots)
        spec = self._spec_of(job)
        gang = (
            self._gang(past, spec) if spec.command is None else self._command_gang(past, spec, spec.command)
        )
        self._gangs[job.id] = gang
        self._engine.add(gang)
        self._engine.post(lambda: self._land.expect(spec.entry))

    def _gang(self, past: PastJob, spec: TrainingJob) -> Gang:
        folder, epoch = self._folder_of(past.job), past.progress.epoch
        nodes = max(len(past.allocation.nodes), 1)
        written = partial(untold, folder / METRICS)
        return TrainingGang(
            past.job,
            spec,
            self._rules,
            str(folder / LOG),
            account=TrainingAccount(
                past.job, spec.metric, epoch, held=written(epoch, nodes), written=written
            ),
            losses=Losses(self._rules.retries, past.failures),
            places_of=self._land.places_of,
        )

    def _command_gang(self, past: PastJob, spec: TrainingJob, command: Command) -> CommandGang:
        folder = self._folder_of(past.job)
        missed = lines_of(folder / METRICS) if past.starts and spec.metric is not None else ()
        return CommandGang(
            past.job,
            spec,
            command,
            self._rules.of_commands,
            str(folder / LOG),
            account=PrintedAccount(past.job, spec.metric, progress=past.progress, missed=missed),
            losses=Losses(self._rules.retries, past.failures),
            places_of=self._land.places_of,
            starts=past.starts,
            token=token_of(self._identity, past.job.id),
            life=self._life,
            said=self._said,
        )

    @cached_property
    def _identity(self) -> str:
        return folder_identity(self._folder)

    def _instruct(self, instruction: Instruction) -> None:
        wanted = instruction.allocation.worker_count
        if wanted > self._land.slots:
            raise PolicyError(
                f"{instruction.job_id} is given {wanted} workers; there are {self._land.slots} slots"
            )
        self._engine.tell(self._gangs[instruction.job_id], lambda gang, now: gang.instruct(instruction, now))

    def _provision(self, wish: Wish) -> None:
        self._tell_nodes(self._land.provisioner.provision(wish, self.now_s()))

    def _look(self) -> None:
        self._tell_nodes(self._land.provisioner.look(self.now_s()))

    def _tell_nodes(self, events: Iterable[Event]) -> None:
        """Report that a node is gone before what follows for its jobs."""
        for event in events:
            self._engine.emit(event)
            if isinstance(event, NodeLost | NodeReleased):
                self._engine.strand(event.node_id)
                self._workers.lose_home(event.node_id, "its node is gone")

    def _acknowledge(self) -> None:
        for job_id, epoch in self._undecided.items():
            self._engine.acknowledge(self._gangs[job_id], epoch)
        self._undecided.clear()

    def _folder_of(self, job: Job) -> Path:
        return self._folder / "jobs" / job.id

    def _spawn(self, gang: Gang, spawn: Spawn) -> None:
        folder = self._folder_of(gang.job)
        make_private_folder(folder)
        spec, files = gang.spec, self._files
        task = Task(
            job_id=gang.job.id,
            entry=spec.entry,
            config=dict(spec.config),
            folder=str(folder),
            epochs=spec.epochs,
            seed=spec.seed,
            metric=spec.metric,
            maximise=spec.maximise,
            checkpoint_every_s=files.checkpoint_every_s,
            keep_checkpoints=files.keep_checkpoints,
            waits_for_ack=spec.waits_for_ack,
            describe_only=spec.describe_only,
            tensorboard=files.tensorboard,
            store=f"{files.store}/jobs/{gang.job.id}" if files.store else "",
            command=gang.command,
        )
        self._workers.spawn(spawn.worker_id, spawn.node, task, folder / LOG)


def _check_job(job: Job, slots: int) -> None:
    where = f"job {job.id}"
    if job.id in {"", ".", ".."} or "/" in job.id or "\0" in job.id:
        raise InputError(
            f"{job.id!r} cannot name a folder, and each job's files have one.",
            where="job",
            remedy="Leave out slashes, and do not use '.' or '..' alone.",
        )
    if job.server is not None:
        raise InputError(
            "it asks for parameter servers, and workers here exchange gradients among themselves.",
            where=where,
            remedy="Leave the servers out.",
        )
    if job.worker.min > slots:
        raise InputError(
            f"it needs {job.worker.min} workers at least, and there are {slots} slots.",
            where=where,
            remedy="Lower its minimum, or give more slots.",
        )
