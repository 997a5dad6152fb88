"""The oracle for policies such as optimus-oracle: the true speed and remaining work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from stretto.core.allocation import packed
from stretto.core.job import Job
from stretto.models.batch import split_batch
from stretto.models.noise import step_gain
from stretto.worlds.truth import Truth


class WorldOracle:
    """Reads the ground truth of the jobs of one workload."""

    def __init__(self, truths: Mapping[str, Truth]) -> None:
        self._truths = truths
        self._steps_after = cache(self._count_steps)
        self._step_s = cache(self._time_step)

    def remaining_steps(self, job: Job, epoch: int) -> float:
        """Counted from the end of the epoch in progress, as published; at least one."""
        steps = self._steps_after(job)
        return max(steps[min(epoch + 1, len(steps) - 1)], 1.0)

    def step_s(self, job: Job, workers: int, gpus_per_node: int) -> float:
        return self._step_s(job, workers, gpus_per_node)

    def _count_steps(self, job: Job) -> list[float]:
        """Steps left after 0, 1, .. epochs; an epoch has its statistical units over the gain of a step."""
        truth = self._truths[job.id]
        left = [0.0]
        for epoch in range(truth.epochs - 1, -1, -1):
            noise = truth.noise_at(job.batch.requested, epoch)
            gain = step_gain(noise, job.batch.initial, job.batch.requested)
            left.append(left[-1] + (truth.units_at(epoch + 1) - truth.units_at(epoch)) / gain)
        return left[::-1]

    def _time_step(self, job: Job, workers: int, gpus_per_node: int) -> float:
        batch = split_batch(job.batch, job.batch.requested, workers)
        return (
            self._truths[job.id]
            .step_time(packed(workers, gpus_per_node), batch.atomic)
            .total_s(batch.accumulation)
        )
