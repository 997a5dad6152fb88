"""What the baseline policies share: gangs, batches, remaining time, reasons, service in an order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from stretto.allocate.free import FreeCapacity, place_packed
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
from stretto.core.resources import Resources
from stretto.models.batch import split_batch
from stretto.policies.base import ClusterView, JobView

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

CEIL_TOLERANCE = 1e-8
MAX_EPOCHS = 1000
"""Convergence is not looked for beyond this epoch."""

Why = Callable[[JobView, ReasonCode], str] | Mapping[str, str]
"""The sentence for a job, from its view and what happens to it, or by its id."""


def check_option(policy: str, option: str, value: object, allowed: bool, rule: str) -> None:
    """Refuse an option's value that is not allowed."""
    if not allowed:
        raise InputError(f"{policy}.{option}={value} is not valid.", remedy=f"It takes {rule}.")


class Gang(NamedTuple):
    """How many tasks of each role run together."""

    workers: int
    servers: int

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers != 1 else ''}"
        return (
            f"{workers} and {self.servers} server{'s' if self.servers != 1 else ''}"
            if self.servers
            else workers
        )

    def needs(self, job: Job) -> Resources:
        servers = job.server.demand * self.servers if job.server else Resources()
        return job.worker.demand * self.workers + servers


def requested_gang(job: Job) -> Gang:
    return Gang(job.worker.requested, job.server.requested if job.server else 0)


def smallest_gang(job: Job) -> Gang:
    """The least a job starts with: a rigid job's whole request."""
    if job.tier is Tier.RIGID:
        return requested_gang(job)
    return Gang(max(job.worker.min, 1), job.server.min if job.server else 0)


def largest_gang(job: Job) -> Gang:
    """The most a job can use; never more workers than its largest batch has examples."""
    if job.tier is Tier.RIGID:
        return requested_gang(job)
    return Gang(min(job.worker.max, job.batch.max), job.server.max if job.server else 0)


def held_gang(allocation: Allocation) -> Gang:
    return Gang(allocation.worker_count, allocation.server_count)


def next_bundle(held: Gang, limit: Gang) -> Gang | None:
    """One more worker, and one more server where the job has them and may have more; None at the limit."""
    if held.workers >= limit.workers:
        return None
    return Gang(1, 1 if held.servers < limit.servers else 0)


def requested_batch(job: Job, workers: int) -> BatchChoice:
    """The job's requested total batch, split over its workers."""
    return split_batch(job.batch, job.batch.requested, workers)


def explain(view: ClusterView, allocations: Mapping[str, Allocation], why: Why) -> dict[str, Reason]:
    """A reason for every job whose allocation changes and for every job that waits."""
    reasons: dict[str, Reason] = {}
    for job in view.jobs:
        code = change(job.allocation, allocations.get(job.id, NOTHING))
        if code is not ReasonCode.KEPT:
            reasons[job.id] = Reason(code, why(job, code) if callable(why) else why[job.id])
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


def keep_running(jobs: Sequence[JobView], free: FreeCapacity) -> dict[str, Allocation]:
    """Takes what these jobs hold; leaves out those on a node that is going away, unless they may not move."""
    kept: dict[str, Allocation] = {}
    for job in jobs:
        if job.allocation and (free.holds(job.job, job.allocation) or not job.job.preemptible):
            free.take(job.job, job.allocation)
            kept[job.id] = job.allocation
    return kept


def never_fits(job: JobView, gang: Gang, empty: FreeCapacity) -> str | None:
    """The sentence for a job that could not run even alone; None for all others."""
    if place_packed(job.job, *gang, empty) is not None:
        return None
    return f"Needs {gang} ({amounts(gang.needs(job.job))}), which do not fit even on the empty cluster."


def shortage(job: JobView, gang: Gang, free: FreeCapacity) -> str:
    """The sentence for a job that does not fit at the moment."""
    needs = amounts(gang.needs(job.job))
    return f"Needs {gang} together ({needs}); free over all nodes: {amounts(free.total())}."


def amounts(resources: Resources) -> str:
    """Amounts with their units, leaving out what is zero."""
    units = ("GPU", "CPU", "GiB", "Gbit/s")
    parts = [f"{amount:g} {unit}" for amount, unit in zip(resources.amounts(), units, strict=True) if amount]
    return ", ".join(parts) or "nothing"


def serve_in_order(view: ClusterView, order: Sequence[JobView]) -> dict[str, Allocation]:
    """Requested gangs in order of priority: each runs whole, or is passed over and others go on.

    A job runs if it fits beside those before it. Jobs that run already stay where they are, unless
    a job before them fits only in their place; the last in the order give way first. Jobs that may not
    be preempted come before all others and keep exactly what they have.
    """
    fixed = [job for job in order if job.allocation and not job.job.preemptible]
    promised = FreeCapacity(view.nodes)
    served = keep_running(fixed, promised)
    service = _Service(promised)
    rest = [job for job in order if job.id not in served]
    service.seat([job for job in rest if held_gang(job.allocation) == requested_gang(job.job)])
    for job in rest:
        allocation = service.serve(job)
        if allocation is not None:
            served[job.id] = allocation
    return served


class _Service:
    """Who was served, and who still sits where it ran before because its turn has not come."""

    def __init__(self, promised: FreeCapacity) -> None:
        self._promised = promised
        """Room beside the jobs served so far."""
        self._free = promised.copy()
        """.. and beside those that sit."""
        self._sitting: dict[str, JobView] = {}

    def seat(self, jobs: Sequence[JobView]) -> None:
        """Let these jobs, in order of priority, sit where they run, as far as there is room."""
        kept = keep_running(jobs, self._free)
        self._sitting |= {job.id: job for job in jobs if job.id in kept}

    def serve(self, job: JobView) -> Allocation | None:
        if self._sitting.pop(job.id, None) is not None:
            self._promised.take(job.job, job.allocation)
            return job.allocation
        gang = requested_gang(job.job)
        allocation = place_packed(job.job, *gang, self._free)
        gave_way: list[JobView] = []
        if allocation is None and place_packed(job.job, *gang, self._promised) is not None:
            allocation, gave_way = self._make_room(job, gang)
        if allocation is not None:
            self._promised.take(job.job, allocation)
            self._free.take(job.job, allocation)
        self.seat(gave_way)
        return allocation

    def _make_room(self, job: JobView, gang: Gang) -> tuple[Allocation | None, list[JobView]]:
        """The fewest jobs from the end of the order whose leaving lets this one in, found by bisection."""
        last_first = list(self._sitting.values())[::-1]
        low, high = 1, len(last_first)
        allocation: Allocation | None = None
        while low < high:
            middle = (low + high) // 2
            found = place_packed(job.job, *gang, self._without(last_first[:middle]))
            if found is None:
                low = middle + 1
            else:
                high, allocation = middle, found
        leaving = last_first[:high]
        self._free = self._without(leaving)
        for other in leaving:
            del self._sitting[other.id]
        if allocation is None:
            allocation = place_packed(job.job, *gang, self._free)
        return allocation, leaving[::-1]

    def _without(self, jobs: Sequence[JobView]) -> FreeCapacity:
        free = self._free.copy()
        for job in jobs:
            free.give_back(job.job, job.allocation)
        return free
