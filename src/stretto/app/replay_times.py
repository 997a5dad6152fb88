"""How fast the trials of a real run were: log epoch time = trial + workers, by least squares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from stretto.app.history import JobHistory
from stretto.planning.profile import Latency, Profile, Scaling

BELIEF_WEIGHT = 0.1
"""How much the profile's speed-up counts against one timed epoch."""


@dataclass(frozen=True, slots=True)
class Times:
    """Timed epochs taken apart: log epoch time = trial + workers + deviation."""

    by_trial: Mapping[int, float]
    """exp(trial): time of an epoch with one worker, by the trial's number."""
    scaling: Scaling
    epoch_sd: float

    @staticmethod
    def of(trials: Sequence[JobHistory], believed: Scaling) -> Times:
        timed = [
            (row, result.workers, math.log(result.epoch_s))
            for row, trial in enumerate(trials)
            for result in trial.results
            if result.epoch_s
        ]
        if not timed:
            return Times({}, believed, 0.0)
        rows = sorted({row for row, _, _ in timed})
        counts = sorted({workers for _, workers, _ in timed} - {1})
        columns = {("trial", row): index for index, row in enumerate(rows)}
        columns |= {("workers", workers): len(rows) + index for index, workers in enumerate(counts)}
        matrix = np.zeros((len(timed) + len(counts), len(columns)))
        target = np.zeros(len(timed) + len(counts))
        for index, (row, workers, log_s) in enumerate(timed):
            matrix[index, columns["trial", row]] = 1.0
            if workers > 1:
                matrix[index, columns["workers", workers]] = 1.0
            target[index] = log_s
        for index, workers in enumerate(counts, start=len(timed)):
            matrix[index, columns["workers", workers]] = BELIEF_WEIGHT
            target[index] = -BELIEF_WEIGHT * math.log(believed.speedup(workers))
        solved = np.linalg.lstsq(matrix, target, rcond=None)[0]
        errors = (matrix @ solved - target)[: len(timed)]
        seen = {workers: math.exp(-solved[columns["workers", workers]]) for workers in counts}
        return Times(
            {row: math.exp(solved[columns["trial", row]]) for row in rows},
            _corrected(believed, seen),
            float(errors.std()),
        )

    def relative(self, row: int) -> float | None:
        return self.by_trial[row] / fmean(self.by_trial.values()) if row in self.by_trial else None

    def profile(self, believed: Profile) -> Profile:
        """The true speeds; as believed where no epoch was timed."""
        if not self.by_trial:
            return believed
        times_s = list(self.by_trial.values())
        latency = Latency(
            epoch_s=fmean(times_s),
            trial_sd=float(np.std(times_s) / np.mean(times_s)),
            epoch_sd=self.epoch_sd,
        )
        return dataclasses.replace(believed, latency=latency, scaling=self.scaling)


def _corrected(believed: Scaling, seen: Mapping[int, float]) -> Scaling:
    """The speed-up that was seen, and the believed one for other numbers of workers."""
    points = {**dict(believed.points), **seen, 1: 1.0}
    return dataclasses.replace(believed, points=tuple(sorted(points.items())))
