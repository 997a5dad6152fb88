"""Tiresias: two queues by attained service, first come, first served within each.

A job starts in the upper queue. Once its attained service (GPUs times seconds) reaches a threshold, 16 GPU
hours in the paper, it moves to the lower queue and stays there. In every round GPUs are granted anew: first
the upper queue, then the lower one, each in order. A job gets all of its requested GPUs or none; one that
does not fit is skipped. Jobs that keep running stay where they are, the others go to the nodes with the most
free GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.decision import Decision, ReasonCode
from stretto.core.units import counted
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import (
    BASELINE_EVENTS,
    check_option,
    fixed_size_decision,
    place_most_free,
    require_gpu_jobs,
)
from stretto.policies.gangs import pinned

FLOAT_NOISE_GPU_S = 1e-3
"""When the policy wakes up for a job at the threshold, rounding may put the job this far below it."""


@dataclass(frozen=True, kw_only=True)
class Tiresias:
    """Discretised least attained service: preemptive, with fixed job sizes."""

    name: ClassVar[str] = "tiresias"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0
    threshold_gpu_h: float = 16.0
    """Attained service at which a job moves to the lower queue."""

    def __post_init__(self) -> None:
        check_option(
            self.name, "threshold_gpu_h", self.threshold_gpu_h, self.threshold_gpu_h > 0, "more than 0"
        )

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        require_gpu_jobs(view, self.name)
        demoted = self._demoted(view, memory)
        runs = self._admit(view, demoted)
        kept = {
            job.id: job.allocation
            for job in view.jobs
            if job.id in runs and job.allocation.worker_count == _gpus(job)
        }
        starts = [job for job in self._queue(view, demoted) if job.id in runs and job.id not in kept]
        allocations = place_most_free(view, kept, [(job, _gpus(job)) for job in starts])
        decision = fixed_size_decision(view, allocations, lambda job, code: self._why(job, code, demoted))
        return replace(decision, wake_at_s=self._next_demotion_s(view, allocations, demoted)), demoted

    def _demoted(self, view: ClusterView, memory: Memory) -> list[str]:
        """Jobs of the lower queue, in the order in which they moved there."""
        here = {job.id for job in view.jobs}
        earlier = [job_id for job_id in memory or [] if job_id in here]
        known = set(earlier)
        full = self._threshold_gpu_s - FLOAT_NOISE_GPU_S
        return earlier + [job.id for job in view.jobs if job.id not in known and job.attained_gpu_s >= full]

    def _queue(self, view: ClusterView, demoted: list[str]) -> list[JobView]:
        """Jobs in order of service: those that must not be preempted, the upper queue, the lower queue."""
        lower = set(demoted)
        by_id = {job.id: job for job in view.jobs}
        order = [job for job in view.jobs if job.id not in lower] + [by_id[job_id] for job_id in demoted]
        return sorted(order, key=lambda job: not pinned(job))

    def _admit(self, view: ClusterView, demoted: list[str]) -> set[str]:
        left = view.total_gpus
        runs = set()
        for job in self._queue(view, demoted):
            if _gpus(job) <= left or pinned(job):
                left -= _gpus(job)
                runs.add(job.id)
        return runs

    def _next_demotion_s(
        self, view: ClusterView, allocations: dict[str, Allocation], demoted: list[str]
    ) -> float | None:
        lower = set(demoted)
        return min(
            (
                view.now_s + (self._threshold_gpu_s - job.attained_gpu_s) / _gpus(job)
                for job in view.jobs
                if job.id in allocations and job.id not in lower
            ),
            default=None,
        )

    @property
    def _threshold_gpu_s(self) -> float:
        return self.threshold_gpu_h * 3600.0

    def _why(self, job: JobView, code: ReasonCode, demoted: list[str]) -> str:
        queue = "lower" if job.id in demoted else "upper"
        served_h = job.attained_gpu_s / 3600.0
        service = f"{served_h:.1f} of {self.threshold_gpu_h:g} slot hours served, {queue} queue"
        wants = counted(_gpus(job), "slot")
        if code is ReasonCode.WAITS:
            return f"{service}; the jobs before it leave less than its {wants}"
        if code is ReasonCode.PREEMPTED:
            return f"{service}; jobs before it in the queue took its {wants}"
        return f"{service}; there is room for its {wants} after the jobs before it"


def _gpus(job: JobView) -> int:
    """The requested GPUs; those it holds if it must not be changed."""
    return job.allocation.worker_count if pinned(job) else job.job.worker.requested
