"""Optimus as a published baseline: marginal gain with the true remaining work and the true step times.

Every job gets one GPU in order of submission. Then the GPU with the largest marginal gain is granted, again
and again:

    gain(r -> r + 1) = (T(r) - T(r + 1)) * remaining steps

T is the step time with r GPUs packed on the fewest nodes, at the job's requested total batch. A job with an
unchanged count keeps its nodes. The others are placed, small ones first, on the nodes with most free GPUs.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stretto.core.decision import Decision, ReasonCode
from stretto.core.job import Tier
from stretto.policies.base import ClusterView, JobView, Memory, Oracle
from stretto.policies.common import BASELINE_EVENTS, fixed_size_decision, place_most_free, require_gpu_jobs
from stretto.policies.gangs import pinned


@dataclass(frozen=True, kw_only=True)
class OptimusOracle:
    """Optimus for all-reduce jobs, with the truth about every job."""

    name: ClassVar[str] = "optimus-oracle"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    oracle: Oracle
    interval_s: float = 60.0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        require_gpu_jobs(view, self.name)
        counts = self._counts(view)
        kept = {
            job.id: job.allocation
            for job in view.jobs
            if counts[job.id] and counts[job.id] == _held(view, job)
        }
        movers = sorted(
            ((job, counts[job.id]) for job in view.jobs if counts[job.id] and job.id not in kept),
            key=lambda mover: mover[1],
        )
        allocations = place_most_free(view, kept, movers)

        def why(job: JobView, code: ReasonCode) -> str:
            return self._why(view, job, code, counts[job.id])

        return fixed_size_decision(view, allocations, why), memory

    def _counts(self, view: ClusterView) -> dict[str, int]:
        counts = {job.id: _held(view, job) if pinned(job) else 0 for job in view.jobs}
        left = view.total_gpus - sum(counts.values())
        open_jobs = [job for job in view.jobs if not counts[job.id]]
        for job in open_jobs:
            first = job.job.worker.requested if job.job.tier is Tier.RIGID else job.job.worker.min
            if first <= left:
                counts[job.id] = first
                left -= first
        gains = [
            (-self._gain(view, job, counts[job.id]), order, job)
            for order, job in enumerate(open_jobs)
            if counts[job.id]
        ]
        heapq.heapify(gains)
        while left and gains and gains[0][0] < 0:
            _, order, job = gains[0]
            counts[job.id] += 1
            left -= 1
            heapq.heapreplace(gains, (-self._gain(view, job, counts[job.id]), order, job))
        return counts

    def _gain(self, view: ClusterView, job: JobView, gpus: int) -> float:
        """Seconds saved by one more GPU; 0 if the job cannot take it."""
        limits = job.job.batch
        most = (
            0
            if job.job.tier is Tier.RIGID
            else min(job.job.worker.max, limits.requested // limits.per_gpu_min)
        )
        if gpus + 1 > most:
            return 0.0
        node_gpus = max(node.gpus for node in view.nodes)
        faster = self.oracle.step_s(job.job, gpus, node_gpus) - self.oracle.step_s(
            job.job, gpus + 1, node_gpus
        )
        return faster * self.oracle.remaining_steps(job.job, job.epoch)

    def _why(self, view: ClusterView, job: JobView, code: ReasonCode, gpus: int) -> str:
        if code is ReasonCode.WAITS or code is ReasonCode.PREEMPTED:
            return f"{view.total_gpus} GPUs went to the jobs submitted before it"
        steps = self.oracle.remaining_steps(job.job, job.epoch)
        saved_s = self._gain(view, job, gpus)
        return f"{steps:.0f} steps to go; one GPU more than {gpus} would save {saved_s:.0f} s"


def _held(view: ClusterView, job: JobView) -> int:
    """GPUs that the job holds; 0 if it must leave a node that is going away."""
    here = {node.id for node in view.nodes}
    stays = pinned(job) or here.issuperset(job.allocation.nodes)
    return job.allocation.worker_count if stays else 0
