"""The jobs of a killed run, as its journal has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeLost,
    NodeReleased,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.substrate.elastic.command_output import Progress


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of a job in a row, without progress in between."""

    count: int = 0
    furthest: Progress = field(default_factory=Progress)
    """The furthest progress at a failure."""

    def and_one(self, progress: Progress) -> Failures:
        """With another failure at this progress."""
        before = self.furthest
        advanced = progress.work_done > before.work_done or progress.epoch > before.epoch
        furthest = replace(
            progress,
            work_done=max(progress.work_done, before.work_done),
            epoch=max(progress.epoch, before.epoch),
        )
        return Failures(1 if advanced else self.count + 1, furthest)


@dataclass(slots=True)
class PastJob:
    """One job as the killed run left it."""

    job: Job
    allocation: Allocation = NOTHING
    """Empty if it was not running."""
    batch: BatchChoice | None = None
    starts: int = 0
    progress: Progress = field(default_factory=Progress)
    failures: Failures = field(default_factory=Failures)
    ended: bool = False

    def follow(self, instruction: Instruction) -> None:
        if instruction.action in {Action.PARK, Action.STOP}:
            self.allocation = NOTHING
            self.ended |= instruction.action is Action.STOP
            return
        if instruction.action is Action.SET_BATCH:
            if not self.allocation:
                return
        else:
            self.allocation = instruction.allocation
        self.batch = instruction.batch
        self.starts += 1

    def miss(self, node_id: str) -> None:
        """A node is gone: the job is parked if it was there."""
        if node_id in self.allocation.nodes:
            self.allocation = NOTHING

    def retry(self) -> None:
        self.failures = self.failures.and_one(self.progress)
        self.starts += bool(self.allocation)


@dataclass(slots=True)
class Past:
    """The fold of a history."""

    jobs: dict[str, PastJob] = field(default_factory=dict)
    last_number: int = -1
    last_s: float = 0.0


def fold(history: Iterable[Event]) -> Past:
    """The allocation and progress of each job at the end of the record, and its last instruction and time."""
    past = Past()
    for event in history:
        past.last_s = max(past.last_s, event.t_s)
        if isinstance(event, JobSubmitted):
            past.jobs[event.job.id] = PastJob(event.job)
        elif isinstance(event, Decided):
            for instruction in event.instructions:
                past.last_number = max(past.last_number, instruction.number)
                past.jobs[instruction.job_id].follow(instruction)
        elif isinstance(event, JobReported):
            past.jobs[event.job_id].progress = past.jobs[event.job_id].progress.after(event)
        elif isinstance(event, JobRetried):
            past.jobs[event.job_id].retry()
        elif isinstance(event, JobFinished | JobFailed):
            past.jobs[event.job_id].ended = True
        elif isinstance(event, NodeLost | NodeReleased):
            for one in past.jobs.values():
                one.miss(event.node_id)
    return past
