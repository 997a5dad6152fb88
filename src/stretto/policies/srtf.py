"""Shortest remaining time first: jobs closest to their end run, at the size they asked for.

    remaining time = remaining statistical units / believed units per second,
    units per second = gain(requested batch) / step time at the requested size on the fewest nodes

Preemptive: a job that is further from its end gives way. Jobs that do not fit beside the shorter ones are
passed over and longer ones that fit run. Jobs about which nothing is believed yet go first, in order
of submission: only running tells how long they take. Running jobs that stay, stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import numpy as np

from stretto.allocate.free import FreeCapacity
from stretto.core.decision import Decision, ReasonCode
from stretto.core.units import format_duration
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import (
    BASELINE_EVENTS,
    fixed_size_decision,
    never_fits,
    requested_gang,
    serve_in_order,
)
from stretto.policies.remaining import remaining_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Srtf:
    """Shortest remaining time first, with preemption."""

    name: ClassVar[str] = "srtf"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        empty = FreeCapacity(view.nodes)
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
            return never_fits(job, gang, empty) or f"{place}; {gang} do not fit beside those before it."

        return fixed_size_decision(view, allocations, why), memory
