"""What every policy needs: when to wake, reasons for what it does, batches as asked, checked options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.errors import InputError
from stretto.core.events import (
    JobFailed,
    JobFinished,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLost,
    WorkerLost,
)
from stretto.core.job import Job, Tier
from stretto.models.batch import split_batch
from stretto.policies.base import ClusterView, JobView
from stretto.policies.gangs import held_gang

BASELINE_EVENTS: Final = frozenset(
    {
        JobSubmitted.kind,
        JobFinished.kind,
        JobFailed.kind,
        NodeAdded.kind,
        NodeDraining.kind,
        NodeLost.kind,
        WorkerLost.kind,
    }
)
"""Whatever changes the jobs or the room for them."""

EPS = 1e-9
"""Float noise in times."""

Why = Callable[[JobView, ReasonCode], str] | Mapping[str, str]
"""The sentence for a job, from its view and what happens to it, or by its id."""


def check_option(policy: str, option: str, value: object, allowed: bool, rule: str) -> None:
    """Refuse an option's value that is not allowed."""
    if not allowed:
        raise InputError(f"{policy}.{option}={value} is not valid.", remedy=f"It takes {rule}.")


def round_is_due(last_s: float | None, now_s: float, interval_s: float) -> bool:
    """Whether a multiple of the interval was reached since the last round, or there was none yet."""
    return last_s is None or (now_s + EPS) // interval_s > (last_s + EPS) // interval_s


def requested_batch(job: Job, workers: int) -> BatchChoice:
    """The job's requested total batch, split over its workers.

    Where the batch may be adapted, it is raised to the least that so many workers can take.
    """
    total = job.batch.requested
    if job.tier is Tier.ADAPTIVE:
        total = max(total, min(job.batch.per_gpu_min * workers, job.batch.max))
    return split_batch(job.batch, total, workers)


def explain(view: ClusterView, allocations: Mapping[str, Allocation], why: Why) -> dict[str, Reason]:
    """A reason for every job whose allocation changes and for every job that waits."""
    reasons: dict[str, Reason] = {}
    waits: dict[str, Reason] = {}
    for job in view.jobs:
        job_id = job.job.id
        if job.allocation.workers or job_id in allocations:
            code = change(job.allocation, allocations.get(job_id, NOTHING))
            if code is not ReasonCode.KEPT:
                reasons[job_id] = Reason(code, why(job, code) if callable(why) else why[job_id])
        else:  # most of them, where many wait
            text = why(job, ReasonCode.WAITS) if callable(why) else why[job_id]
            reasons[job_id] = waits.get(text) or waits.setdefault(text, Reason(ReasonCode.WAITS, text))
    return reasons


def change(old: Allocation, new: Allocation) -> ReasonCode:
    """What going from one allocation to another means for a job."""
    if not old or not new:
        if old:
            return ReasonCode.PREEMPTED
        return ReasonCode.STARTED if new else ReasonCode.WAITS
    before, after = held_gang(old), held_gang(new)
    if before != after:
        return ReasonCode.GREW if after > before else ReasonCode.SHRANK
    return ReasonCode.KEPT if old == new else ReasonCode.MOVED


def fixed_size_decision(view: ClusterView, allocations: Mapping[str, Allocation], why: Why) -> Decision:
    """A decision in which every job that runs uses its requested total batch."""
    return Decision(
        allocations=allocations,
        batches={
            job.id: requested_batch(job.job, allocations[job.id].worker_count)
            for job in view.jobs
            if job.id in allocations
        },
        reasons=explain(view, allocations, why),
    )
