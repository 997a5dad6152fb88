"""First in, first out: jobs start in order of submission, at their requested size, and run to the end.

No job is preempted or moved. The first job that does not fit blocks all later ones. With `backfill`, later
jobs that fit may start, although they can delay the first one. A job that does not fit even on the empty
cluster is skipped, since it would block the others forever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stretto.allocate.free import FreeCapacity, place_packed
from stretto.core.allocation import Allocation
from stretto.core.decision import Decision, ReasonCode
from stretto.core.units import counted
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, fixed_size_decision
from stretto.policies.gangs import (
    EmptyCluster,
    crowded_out,
    keep_running,
    never_fits,
    requested_gang,
    shortage,
)

BEHIND = "Behind jobs that came first and do not fit yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo:
    """First in, first out, without preemption."""

    name: ClassVar[str] = "fifo"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0
    backfill: bool = False
    """Whether later jobs may start before one that does not fit."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        queue = _Queue(view, backfill=self.backfill)
        for job in view.jobs:
            queue.admit(job)
        return fixed_size_decision(view, queue.allocations, queue.why), memory


class _Queue:
    """Admits jobs to one cluster in order."""

    def __init__(self, view: ClusterView, *, backfill: bool) -> None:
        self._empty = EmptyCluster(view.nodes)
        self._free = FreeCapacity(view.nodes)
        self._backfill = backfill
        self._blocked_by: JobView | None = None
        self._waits: dict[str, str] = {}
        self.allocations: dict[str, Allocation] = keep_running(view.jobs, self._free)

    def admit(self, job: JobView) -> None:
        if job.id in self.allocations:
            return
        gang = requested_gang(job.job)
        first = self._blocked_by
        if first is not None and not self._backfill:
            impossible = never_fits(job, gang, self._empty)
            self._waits[job.id] = impossible or BEHIND
            return
        allocation = place_packed(job.job, *gang, self._free)
        if allocation is not None:
            self._free.take(job.job, allocation)
            self.allocations[job.id] = allocation
            return
        impossible = never_fits(job, gang, self._empty)
        short = crowded_out(gang) if first is not None else shortage(job, gang, self._free)
        self._waits[job.id] = impossible or short
        if impossible is None and first is None:
            self._blocked_by = job

    def why(self, job: JobView, code: ReasonCode) -> str:
        if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
            return self._waits[job.id]
        gang, nodes = requested_gang(job.job), len(self.allocations[job.id].nodes)
        where = f"{gang} fit on {counted(nodes, 'node')}"
        if code is not ReasonCode.STARTED:
            return f"Its nodes are gone; {where}."
        return f"Its turn after {job.age_s:.0f} s; {where}."
