"""Sample runs, by which Optimus learns the speed of a new job, and what it remembers about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.core.job import Job
from stretto.models.parameter_server import ServerSpeedFit
from stretto.policies.gangs import GangSize, largest_gang, smallest_gang

PATTERN = (
    GangSize(1, 1),
    GangSize(2, 4),
    GangSize(4, 2),
    GangSize(4, 8),
    GangSize(8, 4),
    GangSize(6, 6),
    GangSize(1, 3),
    GangSize(3, 1),
    GangSize(3, 6),
    GangSize(6, 3),
)
"""The counts of sample runs, for a job whose smallest gang is one and one; for others they are shifted.

Off the diagonal: with always as many workers as servers, their costs could not be separated. Far apart:
a few tasks on one node say little about many tasks on several nodes. The first five counts determine a
synchronous model."""


@dataclass(frozen=True, slots=True)
class OptimusMemory:
    """What Optimus remembers between decisions."""

    round_s: float | None = None
    """Time of the last round."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Jobs in a sample run, and when it ends."""
    models: Mapping[str, list[float]] = field(default_factory=dict)
    """Jobs with all samples done, and the parameters of their last identified model, if there was one."""


def still_to_sample(job: Job, fit: ServerSpeedFit | None, samples: int) -> tuple[GangSize, ...]:
    """Counts to try next, in order; none once `samples` different ones were measured.

    Large counts come first, since the job makes progress with them. A model without measurements was stated
    by the user and is used as it is.
    """
    measured = fit.measured if fit else {}
    if len(measured) >= samples or (fit is not None and not measured):
        return ()
    plan = list(dict.fromkeys(_beyond_smallest(job, more) for more in PATTERN))[:samples]
    left = [gang for gang in plan if (gang.servers, gang.workers) not in measured]
    return tuple(sorted(left, key=sum, reverse=True))


def _beyond_smallest(job: Job, more: GangSize) -> GangSize:
    least, most = smallest_gang(job), largest_gang(job)
    return GangSize(
        min(least.workers + more.workers - 1, most.workers),
        min(least.servers + more.servers - 1, most.servers),
    )
