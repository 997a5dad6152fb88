"""The substrate of a real run: elastic workers for training functions, processes for any other command."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.app.jobs_file import JobSpec
from stretto.app.real_commands import MACHINE_NODE, CommandsFor, CommandSubstrate
from stretto.app.real_drive import RealSubstrate, wall_clock
from stretto.app.real_scratch import scratch
from stretto.app.real_work import CommandLine, Entry, RealWork, sample_job
from stretto.app.run_folder import RunFolder
from stretto.core.allocation import BatchChoice, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.events import JobFailed
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.seeds import child_rng
from stretto.search.study import Direction, Study
from stretto.substrate.elastic import Files
from stretto.substrate.gang_effects import Rules, TrainingJob
from stretto.substrate.local import LocalSubstrate
from stretto.substrate.local_slots import find_slots
from stretto.substrate.process import Command
from stretto.wire.messages import Described

DESCRIBE_S = 300.0
"""Training code that has not come to its first batch by then is not waited for."""
LOOK_S = 0.1
LARGEST_SEED = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """What a substrate must know of a run."""

    work: Callable[[Job], RealWork]
    """What a job trains; all of a run's work is of one kind, so this answers for any job."""
    slots: int
    nodes: tuple[Node, ...] = ()
    """That are there from the start."""
    study: Study | None = None
    seed: int = 0
    retries: int = 2
    tensorboard: bool = False


MakeSubstrate = Callable[[Hands, RunFolder, Callable[[], float]], RealSubstrate]
"""Makes the substrate of a run in a folder, given its clock."""

Describe = Callable[[Sequence[JobSpec], int], dict[str, Described]]
"""What training code says of itself, by job; given the number of slots."""


def count_slots() -> int:
    """One for every GPU of this machine that may be used; without any, one for every core."""
    return len(find_slots())


def make_substrate(hands: Hands, folder: RunFolder, clock: Callable[[], float]) -> RealSubstrate:
    """Elastic workers if a run trains functions, processes if it runs commands."""
    slots = find_slots(hands.slots)
    if isinstance(hands.work(sample_job()), Entry):
        return LocalSubstrate(
            spec_of=lambda job: _local_job(hands, job),
            run_dir=folder.path,
            slots=slots,
            clock=clock,
            rules=Rules(retries=hands.retries),
            files=Files(tensorboard=hands.tensorboard),
        )
    if hands.tensorboard:
        raise InputError(
            "--tensorboard is for training functions; a command writes its own files.", remedy="Leave it out."
        )
    metric = None if hands.study is None else hands.study.metric
    return CommandSubstrate(
        CommandsFor(lambda job_id: _command(hands.work(sample_job(job_id)), metric)),
        run_dir=folder.path,
        slots=slots,
        clock=clock,
        retries=hands.retries,
    )


def describe_entries(jobs: Sequence[JobSpec], slots: int) -> dict[str, Described]:
    """Start the training code of each job and let it come to its first batch, which tells what it wants."""
    with scratch("describe") as folder:
        works = {job.name: job.work for job in jobs}
        hands = Hands(work=lambda job: works.get(job.id, jobs[0].work), slots=slots)
        substrate = LocalSubstrate(
            spec_of=lambda job: replace(_local_job(hands, job), describe_only=True),
            run_dir=folder.path,
            slots=find_slots(slots),
            clock=wall_clock(time.time()),
            rules=Rules(retries=0),
        )
        try:
            return {job.name: _described(substrate, job, number) for number, job in enumerate(jobs, start=1)}
        finally:
            substrate.stop_now()


def _described(substrate: LocalSubstrate, spec: JobSpec, number: int) -> Described:
    job = sample_job(spec.name, spec.config)
    substrate.admit(job)
    one = on_nodes({MACHINE_NODE: 1})
    substrate.apply([Instruction(number, Action.START, job.id, one, BatchChoice(1))])
    end_s = substrate.now_s() + DESCRIBE_S
    while (found := substrate.described(job.id)) is None:
        event = substrate.next_event(substrate.now_s() + LOOK_S)
        if isinstance(event, JobFailed) and event.job_id == job.id and substrate.described(job.id) is None:
            raise InputError("the training code failed.", where=f"job {job.id}", remedy=event.error)
        if substrate.now_s() > end_s:
            raise InputError(
                f"the training code took no batch of its loader within {DESCRIBE_S:g} s.",
                where=f"job {job.id}",
                remedy="Give the loader to run.prepare, and go through it inside run.epochs.",
            )
    return found


def _local_job(hands: Hands, job: Job) -> TrainingJob:
    study = hands.study if job.study is not None else None
    return TrainingJob(
        entry=str(hands.work(job)),
        config=dict(job.config),
        epochs=job.work.epochs,
        seed=int(child_rng(hands.seed, "training", job.id).integers(LARGEST_SEED)),
        metric=None if study is None else study.metric,
        maximise=study is None or study.direction is Direction.MAX,
        waits_for_ack=study is not None,
        follows_batch=job.study is None,
    )


def _command(work: RealWork, metric: str | None) -> Command:
    assert isinstance(work, CommandLine)
    return Command(work.argv, metric=metric)
