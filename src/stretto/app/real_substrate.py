"""The substrate of a real run on this machine: elastic workers for functions, processes for commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.app.real_commands import CommandsFor, CommandSubstrate
from stretto.app.real_drive import RealSubstrate
from stretto.app.real_work import CommandLine, Entry, RealWork, sample_job
from stretto.app.run_folder import RunFolder
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Job
from stretto.core.seeds import child_rng
from stretto.search.study import Direction, Study
from stretto.substrate.elastic import Files
from stretto.substrate.gang_effects import Rules, TrainingJob
from stretto.substrate.local import LocalSubstrate
from stretto.substrate.local_slots import find_slots
from stretto.substrate.process_command import Command, check_placeholders

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
    tried: bool = False
    """To see how it goes: nothing of it is kept."""
    describe_only: bool = False
    """Training code need not go further than to say what it wants."""

    @property
    def runs_commands(self) -> bool:
        return not isinstance(self.work(sample_job()), Entry)


MakeSubstrate = Callable[[Hands, RunFolder, Callable[[], float]], RealSubstrate]
"""Makes the substrate of a run in a folder, given its clock."""


def count_slots() -> int:
    """One for every GPU of this machine that may be used; without any, one for every core."""
    return len(find_slots())


def make_substrate(
    hands: Hands, folder: RunFolder, clock: Callable[[], float], store: str = ""
) -> RealSubstrate:
    """On this machine: elastic workers if a run trains functions, processes if it runs commands.

    `store` is where checkpoints of functions go, too.
    """
    slots = find_slots(hands.slots)
    if not hands.runs_commands:
        return LocalSubstrate(
            spec_of=lambda job: training_job(hands, job),
            run_dir=folder.path,
            slots=slots,
            clock=clock,
            rules=Rules(retries=hands.retries),
            files=Files(tensorboard=hands.tensorboard, store=store),
        )
    check_commands(hands)
    return CommandSubstrate(
        CommandsFor(lambda job_id: _command(hands, sample_job(job_id))),
        run_dir=folder.path,
        slots=slots,
        clock=clock,
        retries=hands.retries,
    )


def training_job(hands: Hands, job: Job) -> TrainingJob:
    """What an elastic substrate is told of a job."""
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
        describe_only=hands.describe_only,
    )


def command_job(hands: Hands, job: Job) -> TrainingJob:
    """What an elastic substrate is told of a job that runs a command."""
    command, work = _command(hands, job), hands.work(job)
    assert isinstance(work, CommandLine)
    check_placeholders(command, job)
    return TrainingJob(
        entry=work.program,
        config=dict(job.config),
        epochs=job.work.epochs,
        metric=command.metric,
        command=command,
    )


def check_commands(hands: Hands) -> None:
    """InputError if something is asked that only training functions can do."""
    if hands.tensorboard:
        raise InputError(
            "--tensorboard is for training functions; a command writes its own files.", remedy="Leave it out."
        )


def _command(hands: Hands, job: Job) -> Command:
    work = hands.work(job)
    assert isinstance(work, CommandLine)
    metric = None if hands.study is None else hands.study.metric
    return Command(work.argv, cwd=work.folder, metric=metric, in_folder=work.in_folder)
