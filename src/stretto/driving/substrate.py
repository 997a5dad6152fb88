"""The substrate of a real run on this machine, and the training of each job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Job
from stretto.core.seeds import child_rng
from stretto.driving.drive import RealSubstrate
from stretto.inputs.work import CommandLine, RealWork
from stretto.runs.folder import RunFolder
from stretto.search.study import Direction, Study
from stretto.substrate.elastic.command import Command, check_placeholders
from stretto.substrate.elastic.effects import Rules, TrainingJob
from stretto.substrate.elastic.fork_servers import NO_ENTRY
from stretto.substrate.elastic.substrate import JobFiles
from stretto.substrate.local.ground import LocalSubstrate
from stretto.substrate.local.slots import find_slots

LARGEST_SEED = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """What a run trains, and with what."""

    work: Callable[[Job], RealWork]
    """The function or command of a job."""
    slots: int
    nodes: tuple[Node, ...] = ()
    """Those present from the start."""
    study: Study | None = None
    seed: int = 0
    retries: int = 2
    tensorboard: bool = False
    temporary: bool = False
    """Whether this is a trial run, whose files are not kept."""
    describe_only: bool = False
    """Whether training code only has to say what it wants."""
    runs_commands: bool = False
    """Whether some jobs are commands."""


MakeSubstrate = Callable[[TrainingSpec, RunFolder, Callable[[], float]], RealSubstrate]
"""Makes the substrate of a run in a folder, with a clock."""


def count_slots() -> int:
    """One slot for every GPU that may be used; without GPUs, one for every core."""
    return len(find_slots())


def make_substrate(
    training: TrainingSpec, folder: RunFolder, clock: Callable[[], float], store: str = ""
) -> RealSubstrate:
    """Workers on this machine. Checkpoints of functions are also copied to `store`."""
    check_tensorboard(training)
    return LocalSubstrate(
        spec_of=lambda job: training_job(training, job),
        run_dir=folder.path,
        slots=find_slots(training.slots),
        clock=clock,
        rules=Rules(retries=training.retries),
        files=JobFiles(tensorboard=training.tensorboard, store=store),
        runs_commands=training.runs_commands,
    )


def check_tensorboard(training: TrainingSpec) -> None:
    """InputError if commands are asked to write for TensorBoard."""
    if training.tensorboard and training.runs_commands:
        raise InputError(
            "--tensorboard is for training functions; a command writes its own files.", remedy="Leave it out."
        )


def training_job(training: TrainingSpec, job: Job) -> TrainingJob:
    """What a job trains, for an elastic substrate."""
    work, study = training.work(job), training.study if job.study is not None else None
    metric = None if study is None else study.metric
    if isinstance(work, CommandLine):
        command = Command(work.argv, cwd=work.folder, metric=metric, in_folder=work.in_folder)
        check_placeholders(command, job)
        return TrainingJob(
            entry=NO_ENTRY, config=dict(job.config), epochs=job.work.epochs, metric=metric, command=command
        )
    return TrainingJob(
        entry=str(work),
        config=dict(job.config),
        epochs=job.work.epochs,
        seed=int(child_rng(training.seed, "training", job.id).integers(LARGEST_SEED)),
        metric=metric,
        maximise=study is None or study.direction is Direction.MAX,
        waits_for_ack=study is not None,
        follows_batch=job.study is None,
        describe_only=training.describe_only,
    )
