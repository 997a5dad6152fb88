"""Goodput = throughput x statistical efficiency, and the batch size that maximises it.

Tables of goodput over jobs and configurations are the hot spot of a decision, so everything here works
on many (job, nodes, workers) triples at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.core.allocation import BatchChoice
from stretto.core.job import BatchLimits, Tier
from stretto.core.observations import NoiseSample
from stretto.models.batch import CEIL_TOLERANCE
from stretto.models.noise import gain
from stretto.models.speed import MAX_OVERLAP, TINY, AllReduceSpeed, Floats, p_norm

Ints = npt.NDArray[np.int64]

BATCH_SAMPLES = 50
"""Number of total batch sizes tried, in geometric steps from the smallest to the largest."""
CHUNK = 2048
"""Triples evaluated at once, so that the working set stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class JobModel:
    """What the goodput of one job depends on."""

    speed: AllReduceSpeed
    noise: NoiseSample
    batch: BatchLimits
    tier: Tier = Tier.ADAPTIVE


@dataclass(frozen=True, slots=True)
class BestBatches:
    """For each triple: the best goodput (examples at the initial batch per second) and how to reach it."""

    goodput: Floats
    atomic: Ints
    accumulation: Ints

    def choice(self, index: int) -> BatchChoice:
        return BatchChoice(int(self.atomic[index]), int(self.accumulation[index]))


class GoodputTable:
    """Goodput of many jobs, one row per job, evaluated at any (job, nodes, workers) triples."""

    def __init__(self, models: Sequence[JobModel]) -> None:
        theta = np.array([model.speed.parameters() for model in models]).reshape(-1, 7)
        self._alpha_c, self._beta_c, self._alpha_n, self._beta_n, self._alpha_r, self._beta_r, self._gamma = (
            theta.T
        )
        self._floor = np.array([model.speed.floor_c for model in models], dtype=float)
        self._sqr = np.array([model.noise.sqr for model in models], dtype=float)
        self._var = np.array([model.noise.var for model in models], dtype=float)
        adaptive = np.array([model.tier is Tier.ADAPTIVE for model in models], dtype=bool)
        self._fixed = ~adaptive
        requested = np.array([model.batch.requested for model in models], dtype=float)
        self._initial = np.array([model.batch.initial for model in models], dtype=float)
        self._lowest = np.where(adaptive, self._initial, requested)
        self._highest = np.where(adaptive, [model.batch.max for model in models], requested)
        self._per_gpu_min = np.array([model.batch.per_gpu_min for model in models], dtype=float)
        self._per_gpu_max = np.array([model.batch.per_gpu_max for model in models], dtype=float)
        self._accumulates = np.array([model.batch.accumulation for model in models], dtype=bool)

    def best(self, job: Ints, nodes: Ints, workers: Ints) -> BestBatches:
        """The best batch size of each triple; goodput is 0 if no batch size is possible."""
        size = job.size
        goodput = np.zeros(size)
        atomic = np.zeros(size, dtype=np.int64)
        accumulation = np.zeros(size, dtype=np.int64)
        for start in range(0, size, CHUNK):
            part = slice(start, start + CHUNK)
            goodput[part], atomic[part], accumulation[part] = self._best(
                job[part], nodes[part], workers[part]
            )
        return BestBatches(goodput, atomic, accumulation)

    def at(self, job: int, nodes: int, workers: int, batch: BatchChoice) -> float:
        """Goodput of one job with a given batch size."""
        one, atomic, passes = np.array([job]), np.array([[float(batch.atomic)]]), batch.accumulation + 1.0
        triple = (one, np.array([nodes]), np.array([workers]))
        return float(self._goodput(*triple, atomic, np.array([[passes]]))[0, 0])

    def _best(self, job: Ints, nodes: Ints, workers: Ints) -> tuple[Floats, Ints, Ints]:
        local = self._local_batches(job, workers)
        passes = self._passes(job, workers, local)
        atomic = np.ceil(local / passes - CEIL_TOLERANCE)
        goodput = self._goodput(job, nodes, workers, atomic, passes)
        possible = (atomic >= self._per_gpu_min[job, None]) & (atomic <= self._per_gpu_max[job, None])
        possible |= self._fixed[job, None]
        possible &= (self._per_gpu_min[job] * workers <= self._highest[job])[:, None]
        goodput = np.where(possible, goodput, 0.0)
        rows = np.arange(job.size)
        best = goodput.argmax(axis=1)
        return (
            goodput[rows, best],
            atomic[rows, best].astype(np.int64),
            passes[rows, best].astype(np.int64) - 1,
        )

    def _local_batches(self, job: Ints, workers: Ints) -> Floats:
        """Examples per worker and step to try: geometric steps from the smallest total to the largest."""
        low = np.log(np.maximum(self._lowest[job], self._per_gpu_min[job] * workers))
        high = np.log(self._highest[job])
        steps = np.linspace(0.0, 1.0, BATCH_SAMPLES)
        return np.exp(low[:, None] + (high - low)[:, None] * steps) / workers[:, None]

    def _passes(self, job: Ints, workers: Ints, local: Floats) -> Floats:
        passes = np.ceil(local / self._per_gpu_max[job, None] - CEIL_TOLERANCE)
        # A single worker needs two passes, to estimate gradient noise from their difference.
        alone = (workers == 1)[:, None] & (local > self._initial[job, None] + CEIL_TOLERANCE)
        passes = np.where(alone, np.maximum(passes, 2.0), np.maximum(passes, 1.0))
        return np.where(self._accumulates[job, None], passes, 1.0)

    def _goodput(self, job: Ints, nodes: Ints, workers: Ints, atomic: Floats, passes: Floats) -> Floats:
        further = np.maximum(workers - 2, 0)
        across = self._alpha_n[job] + self._beta_n[job] * further
        within = self._alpha_r[job] + self._beta_r[job] * further
        sync = np.where(nodes > 1, across, np.where(workers > 1, within, TINY))
        line = self._alpha_c[job, None] + self._beta_c[job, None] * atomic
        one_pass = line if not self._floor.any() else p_norm(line, self._floor[job, None], MAX_OVERLAP)
        step = p_norm(one_pass, np.broadcast_to(sync[:, None], one_pass.shape), self._gamma[job, None])
        time = (passes - 1.0) * one_pass + step
        scale = workers[:, None] * atomic * passes / self._initial[job, None]
        return self._initial[job, None] * gain(self._sqr[job, None], self._var[job, None], scale) / time
