"""Gangs: how many tasks of each role run together, where they run, and whether there is room for them."""

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


class GangSize(NamedTuple):
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


def pinned(job: JobView) -> bool:
    """Whether the job keeps exactly what it holds."""
    return bool(job.allocation) and not job.job.preemptible


def requested_gang(job: Job) -> GangSize:
    return GangSize(job.worker.requested, job.server.requested if job.server else 0)


def smallest_gang(job: Job) -> GangSize:
    """The least a job starts with: a rigid job's whole request."""
    if job.tier is Tier.RIGID:
        return requested_gang(job)
    return GangSize(max(job.worker.min, 1), job.server.min if job.server else 0)


def largest_gang(job: Job) -> GangSize:
    """The most a job can use: a rigid job's request; no more workers than its batch can fill."""
    if job.tier is Tier.RIGID:
        return requested_gang(job)
    filled = max(job.batch.requested // job.batch.per_gpu_min, job.worker.min)
    return GangSize(min(job.worker.max, filled), job.server.max if job.server else 0)


def held_gang(allocation: Allocation) -> GangSize:
    return GangSize(allocation.worker_count, allocation.server_count)


def next_bundle(held: GangSize, limit: GangSize) -> GangSize | None:
    """One more worker, and one more server where the job has them and may have more; None at the limit."""
    if held.workers >= limit.workers:
        return None
    return GangSize(1, 1 if held.servers < limit.servers else 0)


def keep_running(jobs: Sequence[JobView], free: FreeCapacity) -> dict[str, Allocation]:
    """Takes what these jobs hold; leaves out those on a node that is going away, unless they may not move."""
    kept: dict[str, Allocation] = {}
    for job in jobs:
        if job.allocation and (free.holds(job.job, job.allocation) or not job.job.preemptible):
            free.take(job.job, job.allocation)
            kept[job.id] = job.allocation
    return kept


class EmptyCluster:
    """The nodes without any job: whether, and where, a gang would run alone. Alike gangs are placed once."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.free = FreeCapacity(nodes)
        self._places: dict[tuple[Resources, Resources | None, GangSize], Allocation | None] = {}

    def place(self, job: Job, gang: GangSize) -> Allocation | None:
        key = (job.worker.demand, job.server.demand if job.server else None, gang)
        if key not in self._places:
            self._places[key] = place_packed(job, *gang, self.free)
        return self._places[key]


def never_fits(job: JobView, gang: GangSize, empty: EmptyCluster) -> str | None:
    """The sentence for a job that could not run even alone; None for all others."""
    if empty.place(job.job, gang) is not None:
        return None
    needs = "" if _takes_slots(job.job) else f" ({amounts(gang.needs(job.job))})"
    return f"Needs {gang}{needs}, which do not fit even on the empty cluster."


def shortage(job: JobView, gang: GangSize, free: FreeCapacity) -> str:
    """The sentence for a job that does not fit at the moment."""
    left = free.total()
    if _takes_slots(job.job) and left == Resources(gpu=round(left.gpu)):
        slots = counted(round(left.gpu), "slot") if left.gpu else "nothing"
        return f"Needs {gang} together; free over all nodes: {slots}."
    needs = amounts(gang.needs(job.job))
    return f"Needs {gang} together ({needs}); free over all nodes: {amounts(left)}."


def crowded_out(gang: GangSize) -> str:
    """The same in words that stay the same while the job waits: for policies under which many do."""
    return f"Needs {gang} together, and less is free."


def _takes_slots(job: Job) -> bool:
    """Whether its workers take a slot each, be that a GPU or a core, and nothing else."""
    return job.server is None and job.worker.demand == Resources(gpu=1)


def amounts(resources: Resources) -> str:
    """Amounts with their units, leaving out what is zero."""
    units = ("GPU", "CPU", "GiB", "Gbit/s")
    parts = [f"{amount:g} {unit}" for amount, unit in zip(resources.amounts(), units, strict=True) if amount]
    return ", ".join(parts) or "nothing"
