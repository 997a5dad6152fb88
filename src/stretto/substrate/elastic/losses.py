"""A worker crashes, hangs or is killed: the cause, and whether its job is tried again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from stretto.core.events import JobFailed, JobRetried
from stretto.substrate.elastic.command_output import Progress
from stretto.substrate.elastic.recovery import Failures

KILLED = "it did not save and leave in time and was killed"


class Blame(IntEnum):
    """How well a cause explains a loss; the lowest explains it best."""

    RAISED = 0
    DIED = 1
    SILENT = 2
    BYSTANDER = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a worker was lost."""

    blame: Blame
    text: str
    final: bool = False
    """Whether another try would fail in the same way."""


@dataclass(slots=True)
class Losses:
    """The losses of a gang, over all its incarnations."""

    retries: int
    """Restarts without progress in between."""
    failures: Failures
    causes: list[Cause] = field(default_factory=list)
    """The causes of the loss that ends the present incarnation."""
    newcomers: int = 0
    """Newcomers lost since the last instruction."""

    def take(self) -> Cause | None:
        """The best explanation; the others are forgotten."""
        causes, self.causes = self.causes, []
        return min(causes, key=lambda cause: cause.blame, default=None)

    def verdict(
        self, cause: Cause, reached: Progress, *, job_id: str, t_s: float, log: str
    ) -> JobFailed | JobRetried:
        """Whether a job that was lost is tried again or fails."""
        self.failures = self.failures.and_one(reached)
        attempt = self.failures.count
        if cause.final or attempt > self.retries:
            return JobFailed(t_s=t_s, job_id=job_id, error=cause.text, log=log)
        return JobRetried(t_s=t_s, job_id=job_id, attempt=attempt, error=cause.text, log=log)

    def does_without(self, cause: Cause) -> bool:
        """Another newcomer was lost. Returns whether to continue without it."""
        self.newcomers += 1
        return cause.final or self.newcomers > self.retries
