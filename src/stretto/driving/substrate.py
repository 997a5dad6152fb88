"""How a substrate of a real run trains each job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.job import Job
from stretto.core.seeds import child_rng
from stretto.inputs.work import CommandLine, RealWork
from stretto.search.study import Direction, Study
from stretto.substrate.elastic.command import Command, check_placeholders
from stretto.substrate.elastic.effects import TrainingJob
from stretto.substrate.elastic.fork_servers import NO_ENTRY

LARGEST_SEED = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The part of a run that its substrate needs."""

    work: Callable[[Job], RealWork]
    """The function or command of a job."""
    slots: int
    nodes: tuple[Node, ...] = ()
    """The nodes that the run has from its start."""
    study: Study | None = None
    seed: int = 0
    retries: int = 2
    tensorboard: bool = False
    temporary: bool = False
    """A probe: no checkpoints are kept."""
    describe_only: bool = False
    """Training code runs only until it has described itself."""
    runs_commands: bool = False
    """Whether some jobs are commands."""


def check_tensorboard(training: TrainingSpec) -> None:
    """InputError if TensorBoard files are asked of commands."""
    if training.tensorboard and training.runs_commands:
        raise InputError(
            "--tensorboard is for training functions; a command writes its own files.", remedy="Leave it out."
        )


def training_job(training: TrainingSpec, job: Job) -> TrainingJob:
    """The job as an elastic substrate trains it."""
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
