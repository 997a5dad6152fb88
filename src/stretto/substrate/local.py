"""Trains jobs for real on this machine, with workers that come and go while a job goes on.

Files of a run, under its folder: `lock`, `nursery.log` (what is printed while training code is imported),
and for each job `jobs/<id>/stdout.log`, `metrics.jsonl` and `checkpoints/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError, PolicyError
from stretto.core.events import Event, JobReported
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.local_effects import Effect, LocalJob, Moment, Rules
from stretto.substrate.local_engine import Engine
from stretto.substrate.local_gang import Gang
from stretto.substrate.local_lock import RunLock
from stretto.substrate.local_losses import Losses
from stretto.substrate.local_nodes import RentedSlots, whole_machine
from stretto.substrate.local_nursery import Trainer
from stretto.substrate.local_reports import Account, untold
from stretto.substrate.local_slots import Slots
from stretto.substrate.local_workers import Workers
from stretto.substrate.process_history import PastJob, fold
from stretto.wire.messages import Described, Task

_PATIENCE_S = 5.0
"""How much longer than the grace the end of everything may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How jobs are run."""

    rules: Rules = field(default_factory=Rules)
    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 2
    tensorboard: bool = False
    trainer: Trainer = field(default_factory=Trainer)


class LocalSubstrate:
    """Carries out instructions with elastic workers on the slots of this machine.

    `apply` returns at once. A worker starts when a slot is free: nothing new meets something old on a GPU.
    PARK saves a checkpoint at the next step boundary; STOP ends the workers where they are. A job whose
    workers are lost is started again from its last checkpoint (JobRetried), and fails (JobFailed) if that
    happens too often without progress. Reports that come after a PARK are told when the job runs again, or
    when it or the run ends.

    A wish for nodes is granted at once, as far as the slots go.
    """

    changes_batch_in_place = True

    def __init__(
        self,
        *,
        spec_of: Callable[[Job], LocalJob],
        run_dir: Path,
        slots: Slots,
        clock: Callable[[], float],
        options: Options | None = None,
    ) -> None:
        """`clock` gives the seconds since the run's first start."""
        self._spec_of = spec_of
        self._options = options or Options()
        self._slots = slots
        self._clock = clock
        self._behind_s = 0.0
        self._folder = run_dir.absolute()
        grace_s = self._options.rules.grace_s
        self._lock = RunLock(self._folder / "lock", patience_s=grace_s + _PATIENCE_S)
        self._last_number = -1
        self._gangs: dict[str, Gang] = {}
        self._rented = RentedSlots(len(slots))
        self._undecided: dict[str, int] = {}
        """Epochs of jobs that wait until their results were decided on."""
        self._closed = False
        self._engine = Engine(self.now_s, self._spawn)
        self._workers = Workers(
            slots=slots,
            trainer=self._options.trainer,
            grace_s=grace_s,
            run_dir=self._folder,
            lock_fd=self._lock.fd,
            post=self._engine.post,
            overseer=self._engine,
        )
        self._engine.start(self._workers)

    @property
    def node(self) -> Node:
        """The whole machine, for policies that do not rent."""
        return whole_machine(len(self._slots))

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
        """The next event; None at `until_s`, or, if that is never, once nothing runs any more.

        When this has to wait, whatever the last events gave rise to has been decided: the jobs that wait for
        a decision on their results are told that it was made.
        """
        event = self._engine.next_event(until_s, self._acknowledge)
        if isinstance(event, JobReported) and self._gangs[event.job_id].spec.waits_for_ack:
            self._undecided[event.job_id] = event.epoch
        return event

    def recover(self, history: Iterable[Event]) -> None:
        """Start what was running when the record ends, with the allocation and batch it had.

        The last wish is granted as far as it was not: whoever made it does not repeat it.
        Results that a job wrote to its metrics and nobody lived to record are told with its next report.
        """
        events = list(history)
        past = fold(events)
        self._behind_s = max(past.last_s - self._clock(), 0.0)
        self._last_number = past.last_number
        for event in self._rented.recall(events, self.now_s()):
            self._engine.emit(event)
        for job in past.jobs.values():
            if job.ended:
                continue
            self._admit(job)
            if job.allocation and job.batch is not None:
                self._instruct(
                    Instruction(past.last_number, Action.START, job.job.id, job.allocation, job.batch)
                )

    def described(self, job_id: str) -> Described | None:
        """What a job's training code turned out to want, once it has said so."""
        return self._gangs[job_id].described

    def finish_epochs(self) -> None:
        """Let every running job end its present epoch, save and leave; events tell of it as ever."""
        self._engine.tell_all(Gang.finish_epoch)

    def close(self) -> None:
        """Park everything, wait for it within the grace, and leave nothing behind.

        What jobs reported meanwhile can still be had with `next_event`.
        """
        self._close(Gang.close, self._options.rules.grace_s + _PATIENCE_S)

    def stop_now(self) -> None:
        """As `close`, without waiting for checkpoints."""
        self._close(Gang.kill, _PATIENCE_S)

    def _close(self, end: Callable[[Gang, Moment], Sequence[Effect]], patience_s: float) -> None:
        if self._closed:
            return
        self._engine.tell_all(end)
        self._engine.wait_until_idle(patience_s)
        self._workers.close()
        self._engine.stop()
        self._lock.release()
        self._closed = True

    def _admit(self, past: PastJob) -> None:
        job = past.job
        _check_job(job, len(self._slots))
        spec, folder = self._spec_of(job), self._folder_of(job)
        epoch = past.progress.epoch
        nodes = max(len(past.allocation.nodes), 1)
        account = Account(job, spec.metric, epoch, held=untold(folder / "metrics.jsonl", epoch, nodes))
        log = str(folder / "stdout.log")
        losses = Losses(self._options.rules.retries, past.failures)
        gang = Gang(job, spec, self._options.rules, log, account=account, losses=losses)
        self._gangs[job.id] = gang
        self._engine.add(gang)

    def _instruct(self, instruction: Instruction) -> None:
        wanted = instruction.allocation.worker_count
        if wanted > len(self._slots):
            raise PolicyError(
                f"{instruction.job_id} is given {wanted} workers; this machine has {len(self._slots)} slots"
            )
        self._engine.tell(self._gangs[instruction.job_id], lambda gang, now: gang.instruct(instruction, now))

    def _provision(self, wish: Wish) -> None:
        for event in self._rented.provision(wish, self.now_s()):
            self._engine.emit(event)

    def _acknowledge(self) -> None:
        for job_id, epoch in self._undecided.items():
            self._engine.acknowledge(self._gangs[job_id], epoch)
        self._undecided.clear()

    def _folder_of(self, job: Job) -> Path:
        return self._folder / "jobs" / job.id

    def _spawn(self, gang: Gang, worker_id: str) -> None:
        folder = self._folder_of(gang.job)
        folder.mkdir(parents=True, exist_ok=True)
        spec, options = gang.spec, self._options
        task = Task(
            job_id=gang.job.id,
            entry=spec.entry,
            config=dict(spec.config),
            folder=str(folder),
            epochs=spec.epochs,
            seed=spec.seed,
            metric=spec.metric,
            maximise=spec.maximise,
            checkpoint_every_s=options.checkpoint_every_s,
            keep_checkpoints=options.keep_checkpoints,
            waits_for_ack=spec.waits_for_ack,
            describe_only=spec.describe_only,
            tensorboard=options.tensorboard,
        )
        self._workers.spawn(worker_id, task, folder / "stdout.log")


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
