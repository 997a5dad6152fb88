"""Gangs: the tasks of a job that run together, their smallest and largest sizes, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stretto.allocate.free import FreeCapacity, place_packed
from stretto.core.allocation import Allocation
from stretto.core.cluster import Node
from stretto.core.job import Job, Tier
from stretto.core.resources import Resources
from stretto.core.units import counted
from stretto.policies.base import JobView

NEVER_FITS = "which do not fit even on the empty cluster"
"""The end of the reason of a job whose size no set of nodes can hold."""


class GangSize(NamedTuple):
    """How many tasks of each role run together."""

    workers: int
    servers: int

    def __str__(self) -> str:
        workers = counted(self.workers, "worker")
        return f"{workers} and {counted(self.servers, 'server')}" if self.servers else workers

    def needs(self, job: Job) -> Resources:
        servers = job.server.demand * self.servers if job.server else Resources()
        return job.worker.demand * self.workers + servers


def pinned(job: JobView) -> bool:
    """Whether the job runs and must not be preempted: it keeps exactly what it holds."""
    return bool(job.allocation) and not job.job.preemptible


def requested_gang(job: Job) -> GangSize:
    return GangSize(job.worker.requested, job.server.requested if job.server else 0)


def smallest_gang(job: Job) -> GangSize:
    """The fewest tasks a job can run with; for a rigid job all that it requested."""
    if job.tier is Tier.RIGID:
        return requested_gang(job)
    return GangSize(max(job.worker.min, 1), job.server.min if job.server else 0)


def largest_gang(job: Job) -> GangSize:
    """The most tasks a job can use: no more workers than its batch can fill; for a rigid job its request."""
    if job.tier is Tier.RIGID:
        return requested_gang(job)
    filled = max(job.batch.requested // job.batch.per_gpu_min, job.worker.min)
    return GangSize(min(job.worker.max, filled), job.server.max if job.server else 0)


def held_gang(allocation: Allocation) -> GangSize:
    return GangSize(allocation.worker_count, allocation.server_count)


def next_bundle(held: GangSize, limit: GangSize) -> GangSize | None:
    """One more worker, and one more server if `limit` allows it; None if `held` is at the limit."""
    if held.workers >= limit.workers:
        return None
    return GangSize(1, 1 if held.servers < limit.servers else 0)


def keep_running(jobs: Sequence[JobView], free: FreeCapacity) -> dict[str, Allocation]:
    """Takes what these jobs hold from `free`, except for jobs that must move from a node going away."""
    kept: dict[str, Allocation] = {}
    for job in jobs:
        if job.allocation and (free.holds(job.job, job.allocation) or not job.job.preemptible):
            free.take(job.job, job.allocation)
            kept[job.id] = job.allocation
    return kept


class EmptyCluster:
    """The nodes without any job: where a gang would run alone. Remembers the places of equal gangs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.free = FreeCapacity(nodes)
        self._places: dict[tuple[Resources, Resources | None, GangSize], Allocation | None] = {}

    def place(self, job: Job, gang: GangSize) -> Allocation | None:
        key = (job.worker.demand, job.server.demand if job.server else None, gang)
        if key not in self._places:
            self._places[key] = place_packed(job, *gang, self.free)
        return self._places[key]


def never_fits(job: JobView, gang: GangSize, empty: EmptyCluster) -> str | None:
    """The reason of a job that does not fit even on the empty cluster; None if it fits."""
    if empty.place(job.job, gang) is not None:
        return None
    needs = "" if _takes_slots(job.job) else f" ({amounts(gang.needs(job.job))})"
    return f"Needs {gang}{needs}, {NEVER_FITS}."


def shortage(job: JobView, gang: GangSize, free: FreeCapacity) -> str:
    """The reason of a job that does not fit at the moment, with what is free."""
    left = free.total()
    if _takes_slots(job.job) and left == Resources(gpu=round(left.gpu)):
        slots = counted(round(left.gpu), "slot") if left.gpu else "nothing"
        return f"Needs {gang} together; free over all nodes: {slots}."
    needs = amounts(gang.needs(job.job))
    return f"Needs {gang} together ({needs}); free over all nodes: {amounts(left)}."


def crowded_out(gang: GangSize) -> str:
    """The reason of a job that does not fit at the moment, in words that stay the same while it waits."""
    return f"Needs {gang} together, and less is free."


def _takes_slots(job: Job) -> bool:
    """Whether its workers need one slot each (a GPU or a CPU core) and nothing else."""
    return job.server is None and job.worker.demand == Resources(gpu=1)


def amounts(resources: Resources) -> str:
    """Amounts with their units, without zeros."""
    units = ("GPU", "CPU", "GiB", "Gbit/s")
    parts = [f"{amount:g} {unit}" for amount, unit in zip(resources.amounts(), units, strict=True) if amount]
    return ", ".join(parts) or "nothing"
