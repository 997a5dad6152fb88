"""Shortest remaining time first: the jobs closest to their end run, at their requested size.

    remaining time = remaining statistical units / believed units per second,
    units per second = gain(requested batch) / step time at the requested size on the fewest nodes

Preemptive: a job with more time left gives way. A job that does not fit beside the shorter ones is skipped,
and longer ones that fit run. Jobs of unknown remaining time come first, in order of submission, because only
running them tells how long they take. Jobs that keep running stay on their nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from stretto.allocate.free import FreeCapacity, place_packed
from stretto.core.allocation import Allocation
from stretto.core.decision import Decision, ReasonCode
from stretto.core.units import format_duration
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, fixed_size_decision, remaining_s
from stretto.policies.gangs import EmptyCluster, GangSize, held_gang, keep_running, never_fits, requested_gang


@dataclass(frozen=True, slots=True, kw_only=True)
class Srtf:
    """Shortest remaining time first, with preemption."""

    name: ClassVar[str] = "srtf"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        empty = EmptyCluster(view.nodes)
        left_s = {job.id: remaining_s(job, empty) for job in view.jobs}

        def unknown_first(job: JobView) -> float:
            known_s = left_s[job.id]
            return -inf if known_s is None else known_s

        order = sorted(view.jobs, key=unknown_first)
        rank = {job.id: i for i, job in enumerate(order, start=1)}
        allocations = serve_in_order(view, order)

        def why(job: JobView, code: ReasonCode) -> str:
            known_s = left_s[job.id]
            left = "Remaining time unknown" if known_s is None else f"{format_duration(known_s)} left"
            place = f"{left}: number {rank[job.id]} of {len(order)} in line"
            gang = requested_gang(job.job)
            if code not in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
                return f"{place}; {gang} fit."
            return never_fits(job, gang, empty) or f"{left}: {gang} do not fit beside jobs with less left."

        return fixed_size_decision(view, allocations, why), memory


def serve_in_order(view: ClusterView, order: Sequence[JobView]) -> dict[str, Allocation]:
    """Serves jobs in order of priority with their requested gangs; a job that does not fit is skipped.

    A job runs if it fits beside the jobs before it. Running jobs stay on their nodes, unless a job before
    them fits only in their place; then the last in the order give way first. Jobs that must not be preempted
    come first and keep exactly what they hold.
    """
    fixed = [job for job in order if job.allocation and not job.job.preemptible]
    unserved = FreeCapacity(view.nodes)
    served = keep_running(fixed, unserved)
    service = _Service(unserved)
    rest = [job for job in order if job.id not in served]
    service.keep([job for job in rest if held_gang(job.allocation) == requested_gang(job.job)])
    for job in rest:
        allocation = service.serve(job)
        if allocation is not None:
            served[job.id] = allocation
    return served


class _Service:
    """Serves jobs one by one, and keeps running jobs in place until it is their turn."""

    def __init__(self, unserved: FreeCapacity) -> None:
        self._unserved = unserved
        """Capacity that no served job holds."""
        self._free = unserved.copy()
        """Capacity that neither a served nor a running job holds."""
        self._running: dict[str, JobView] = {}

    def keep(self, jobs: Sequence[JobView]) -> None:
        """Keep these running jobs in place for now, in order of priority, as far as there is room."""
        kept = keep_running(jobs, self._free)
        self._running |= {job.id: job for job in jobs if job.id in kept}

    def serve(self, job: JobView) -> Allocation | None:
        if self._running.pop(job.id, None) is not None:
            self._unserved.take(job.job, job.allocation)
            return job.allocation
        gang = requested_gang(job.job)
        allocation = place_packed(job.job, *gang, self._free)
        gave_way: list[JobView] = []
        if allocation is None and place_packed(job.job, *gang, self._unserved) is not None:
            allocation, gave_way = self._make_room(job, gang)
        if allocation is not None:
            self._unserved.take(job.job, allocation)
            self._free.take(job.job, allocation)
        self.keep(gave_way)
        return allocation

    def _make_room(self, job: JobView, gang: GangSize) -> tuple[Allocation | None, list[JobView]]:
        """Preempts the fewest jobs from the end of the order that make room for this one, by bisection."""
        last_first = list(self._running.values())[::-1]
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
            del self._running[other.id]
        if allocation is None:
            allocation = place_packed(job.job, *gang, self._free)
        return allocation, leaving[::-1]

    def _without(self, jobs: Sequence[JobView]) -> FreeCapacity:
        free = self._free.copy()
        for job in jobs:
            free.give_back(job.job, job.allocation)
        return free
