"""Shortest remaining time first: jobs closest to their end run, at the size they asked for.

    remaining time = remaining statistical units / believed units per second,
    units per second = gain(requested batch) / step time at the requested size on the fewest nodes

Preemptive: a job that is further from its end gives way. Jobs that do not fit beside the shorter ones are
passed over and longer ones that fit run. Jobs about which nothing is believed yet go first, in order
of submission: only running tells how long they take. Running jobs that stay, stay where they are.
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

    def _make_room(self, job: JobView, gang: GangSize) -> tuple[Allocation | None, list[JobView]]:
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
