"""Dominant resource fairness (DRF): the job with the smallest dominant share gets the next bundle of tasks.

A job's dominant share is its largest share of any one resource of the cluster:

    share = max over resources r of (what its tasks use of r) / (what the cluster has of r)

Every round fills the cluster from empty. The job with the smallest share (ties: first submitted) gets its
next bundle. The first bundle is its smallest gang (for a rigid job all that it requested). Each further one
is a worker, and a server for jobs that have servers, up to its maximum. A job whose bundle does not fit gets
no more. Running jobs that must not be preempted keep exactly what they hold.

Bundles are placed as they are granted, so every grant can run. A bundle goes to the first of these that has
room: where the job runs already, where no job runs, where a job runs whose turn has not come.

At the end jobs with unchanged counts stay where they are, and the others are packed on the fewest nodes. If
that works, the filling continues on the room it made. If not, the places of the first filling are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

import numpy as np

from stretto.allocate.free import FreeCapacity, place_packed
from stretto.core.allocation import NOTHING, Allocation, Tasks
from stretto.core.decision import Decision, ReasonCode
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, fixed_size_decision
from stretto.policies.gangs import (
    EmptyCluster,
    GangSize,
    crowded_out,
    held_gang,
    keep_running,
    largest_gang,
    never_fits,
    next_bundle,
    smallest_gang,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drf:
    """Dominant resource fairness by progressive filling."""

    name: ClassVar[str] = "drf"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        free = FreeCapacity(view.nodes)
        fixed = keep_running([job for job in view.jobs if not job.job.preemptible], free)
        jobs = [job for job in view.jobs if job.id not in fixed]
        filling = _Filling(jobs, free, view.capacity)
        filling.fill()
        if filling.settle():
            filling.fill()
        allocations = fixed | filling.granted
        return fixed_size_decision(view, allocations, _explainer(view, allocations)), memory


class _Filling:
    """Progressive filling of free capacity, with a place for every bundle."""

    def __init__(self, jobs: list[JobView], room: FreeCapacity, total: Resources) -> None:
        self._jobs = jobs
        self._total = total
        self._room = room
        self._free = room.copy()
        """Capacity that was not granted."""
        self._unclaimed = room.copy()
        """Capacity that was not granted, and where no job runs that may still be granted its place."""
        self._homes = keep_running(jobs, self._unclaimed)
        self.granted: dict[str, Allocation] = {}

    def fill(self) -> None:
        line = [(self._share(job), rank) for rank, job in enumerate(self._jobs)]
        heapify(line)
        while line:
            _, rank = heappop(line)
            job = self._jobs[rank]
            if self._grant(job):
                heappush(line, (self._share(job), rank))
            else:
                self._leave_home(job)

    def settle(self) -> bool:
        """Put unchanged jobs back where they run, and pack the others on few nodes; False if that fails."""
        free = self._room.copy()
        running = [job for job in self._jobs if job.id in self.granted]
        settled = keep_running([job for job in running if self._gang(job) == held_gang(job.allocation)], free)
        changed = [job for job in running if job.id not in settled]
        for job in sorted(changed, key=self._large_tasks_then_gangs):
            place = place_packed(job.job, *self._gang(job), free)
            if place is None:
                return False
            free.take(job.job, place)
            settled[job.id] = place
        self.granted, self._free, self._unclaimed = settled, free, free.copy()
        return True

    def _gang(self, job: JobView) -> GangSize:
        return held_gang(self.granted.get(job.id, NOTHING))

    def _share(self, job: JobView) -> float:
        return self._gang(job).needs(job.job).dominant_share(self._total)

    def _large_tasks_then_gangs(self, job: JobView) -> tuple[float, int]:
        return -job.job.worker.demand.dominant_share(self._total), -sum(self._gang(job))

    def _grant(self, job: JobView) -> bool:
        """Grants the job's next bundle; False if it has its maximum or there is no room."""
        before = self.granted.get(job.id, NOTHING)
        bundle = next_bundle(held_gang(before), largest_gang(job.job)) if before else smallest_gang(job.job)
        if bundle is None:
            return False
        place = self._at_home(job, bundle) or self._elsewhere(job, bundle)
        if place is None:
            return False
        self._free.take(job.job, place)
        self.granted[job.id] = self._free.joined(before, place)
        return True

    def _at_home(self, job: JobView, bundle: GangSize) -> Allocation | None:
        """Places the bundle where some of the job's tasks run now, if no other job was granted that."""
        home = self._homes.get(job.id, NOTHING)
        if home.worker_count < bundle.workers or home.server_count < bundle.servers:
            return None
        workers, other_workers = _split(home.workers, bundle.workers)
        servers, other_servers = _split(home.servers, bundle.servers)
        place = Allocation(workers, servers)
        if not self._free.holds(job.job, place):
            return None
        self._homes[job.id] = Allocation(other_workers, other_servers)
        return place

    def _elsewhere(self, job: JobView, bundle: GangSize) -> Allocation | None:
        self._leave_home(job)
        place = place_packed(job.job, *bundle, self._unclaimed) or place_packed(job.job, *bundle, self._free)
        if place is not None:
            self._unclaimed.take(job.job, place)
        return place

    def _leave_home(self, job: JobView) -> None:
        self._unclaimed.give_back(job.job, self._homes.pop(job.id, NOTHING))


def _split(tasks: Tasks, count: int) -> tuple[Tasks, Tasks]:
    """The first `count` tasks, and the others."""
    first: list[tuple[str, int]] = []
    others: list[tuple[str, int]] = []
    for node_id, here in tasks:
        taken = min(here, count)
        count -= taken
        if taken:
            first.append((node_id, taken))
        if here > taken:
            others.append((node_id, here - taken))
    return tuple(first), tuple(others)


def _explainer(
    view: ClusterView, allocations: Mapping[str, Allocation]
) -> Callable[[JobView, ReasonCode], str]:
    total, empty, free = view.capacity, EmptyCluster(view.nodes), FreeCapacity(view.nodes)
    for job in view.jobs:
        free.take(job.job, allocations.get(job.id, NOTHING))

    def percent(job: JobView, allocation: Allocation) -> str:
        return f"{held_gang(allocation).needs(job.job).dominant_share(total):.1%}"

    def why(job: JobView, code: ReasonCode) -> str:
        if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
            gang = smallest_gang(job.job)
            return never_fits(job, gang, empty) or crowded_out(gang)
        now = allocations[job.id]
        shares = f"from {percent(job, job.allocation)} to {percent(job, now)}"
        return f"Its dominant share goes {shares} with {held_gang(now)}, the smallest share first."

    return why
