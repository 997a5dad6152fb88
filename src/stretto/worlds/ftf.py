"""Completion time of a job alone: the baseline of finish-time fairness (FTF)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stretto.core.allocation import Allocation, BatchChoice, packed
from stretto.core.job import BatchLimits, Job, Tier
from stretto.models.batch import split_batch
from stretto.models.noise import step_gain
from stretto.worlds.truth import Truth

BATCHES = 12
"""Number of total batch sizes tried for an adaptive job, in geometric steps."""


@dataclass(frozen=True, slots=True)
class Clock:
    """When a job alone on the cluster starts to train."""

    restart_s: float
    round_s: float | None
    """Decisions come at multiples of this; None: at once."""

    def ready_s(self, submit_s: float) -> float:
        """Time from submission to the first step; the first round ends one interval after the start."""
        if self.round_s is None:
            return self.restart_s
        return max(math.ceil(submit_s / self.round_s), 1) * self.round_s - submit_s + self.restart_s


Memo = dict[tuple[int, int, BatchLimits, Tier], float]
"""Training times by truth, workers, batch limits and tier; jobs of one application share them."""


def alone_s(
    job: Job, truth: Truth, gpus: int, gpus_per_node: int, clock: Clock, *, memo: Memo | None = None
) -> float:
    """Completion time on `gpus` GPUs packed on whole nodes, at the best batch size in every epoch.

    For jobs of workers with a GPU each and no parameter servers.
    """
    workers = _workers(job, gpus)
    known = {} if memo is None else memo
    key = (id(truth), workers, job.batch, job.tier)
    if key not in known:
        known[key] = _training_s(job, truth, packed(workers, gpus_per_node))
    return clock.ready_s(job.submit_s) + known[key]


def _workers(job: Job, gpus: int) -> int:
    if job.tier is Tier.RIGID:
        return job.worker.requested
    most = job.batch.max if job.tier is Tier.ADAPTIVE else job.batch.requested
    return max(1, min(gpus, job.worker.max, most // job.batch.per_gpu_min))


def _training_s(job: Job, truth: Truth, allocation: Allocation) -> float:
    choices = _batches(job, allocation.worker_count)
    seconds = 0.0
    for epoch in range(truth.epochs):
        units = truth.units_at(epoch + 1) - truth.units_at(epoch)
        seconds += min(units / _rate(job, truth, allocation, batch, epoch) for batch in choices)
    return seconds


def _batches(job: Job, workers: int) -> list[BatchChoice]:
    if job.tier is not Tier.ADAPTIVE:
        return [split_batch(job.batch, job.batch.requested, workers)]
    smallest = max(job.batch.initial, job.batch.per_gpu_min * workers)
    totals = np.geomspace(smallest, job.batch.max, BATCHES)
    choices = {split_batch(job.batch, math.ceil(total - 1e-8), workers) for total in totals}
    return [
        choice
        for choice in sorted(choices, key=lambda one: one.total(workers))
        if choice.total(workers) >= job.batch.initial
    ]


def _rate(job: Job, truth: Truth, allocation: Allocation, batch: BatchChoice, epoch: int) -> float:
    total = batch.total(allocation.worker_count)
    gain = step_gain(truth.noise_at(total, epoch), job.batch.initial, total)
    return gain / truth.step_time(allocation, batch.atomic).total_s(batch.accumulation)
