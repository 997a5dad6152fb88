"""One job on a substrate of processes: what runs of it, what is to run next, and what was heard of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Node
from stretto.core.events import JobReported
from stretto.core.job import Job
from stretto.core.scarce import Retry
from stretto.substrate.process_child import Files, GuardedCommand
from stretto.substrate.process_command import Command
from stretto.substrate.process_end import Asked
from stretto.substrate.process_history import Failures
from stretto.substrate.process_reports import Progress, Setup
from stretto.substrate.process_trials import Mark, Trial


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
