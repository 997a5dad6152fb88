"""The world of a real run, as far as it was seen: its trials' learning curves, its jobs' speed and noise.

What a trial showed is repeated. Beyond its last epoch the curve goes on as a saturating power law,

    value(e) = c - a e^-b        0.1 <= b <= 2

with the b of the least squares on the recorded epochs, continued from the level of the last of them. With
fewer than six epochs the last value is held, and where they do not improve the last level. A power law gains
less with every doubling of the epochs than with the one before, so a continued curve gains no more than was
seen. A trial that never started gets the curve of one that did, drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from stretto.core.job import Job
from stretto.core.observations import LossPoint, NoiseSample, SpeedSample
from stretto.models.noise import GradientNoise
from stretto.models.speed import AllReduceSpeed, fit_all_reduce
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.worlds.curves import ROW, Floats
from stretto.worlds.modelled import ModelTruth, NoiseCurve

LEAST_EPOCHS = 6
"""With fewer the shape of a curve is a guess."""
TAIL = 3
"""Epochs whose mean deviation from the fit gives the level a curve is continued from."""
EXPONENTS = np.geomspace(0.1, 2.0, 25)
NOISE_POINTS = 20
"""Points of a job's noise scale over training."""


class Origin(StrEnum):
    """Where a value of a replayed trial comes from."""

    RECORDED = "recorded"
    EXTRAPOLATED = "extrapolated"
    DRAWN = "drawn"


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """What a real run showed of one trial."""

    values: tuple[float | None, ...]
    """The metric after each epoch; None: not a number, and so it stays."""
    relative_time: float | None
    """Time of its epochs relative to the mean of all trials; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCurves:
    """The trials of a real run as learning curves."""

    name: str
    metric: str
    direction: Direction
    configs: tuple[Config, ...]
    """One for each trial of the study, with its number as `row`; in the order a sampler will list them."""
    trials: Mapping[int, RecordedTrial]
    """Those that showed at least one epoch, by number."""
    notes: tuple[str, ...] = ()

    most_epochs = None

    def curve(self, config: Config, epochs: int, rng: np.random.Generator) -> tuple[float, ...]:
        row = row_of(config)
        if row not in self.trials:
            row = list(self.trials)[int(rng.integers(len(self.trials)))]
        return extended(self.trials[row].values, epochs, self.direction, self._best_possible())

    def relative_time(self, config: Config) -> float | None:
        trial = self.trials.get(row_of(config))
        return None if trial is None else trial.relative_time

    def origin(self, config: Config, epoch: int) -> Origin:
        """Where the value after so many epochs comes from."""
        trial = self.trials.get(row_of(config))
        if trial is None:
            return Origin.DRAWN
        return Origin.RECORDED if epoch <= len(trial.values) else Origin.EXTRAPOLATED

    def _best_possible(self) -> float:
        """Shares stay shares, and losses stay above 0, where all that was seen did."""
        seen = [value for trial in self.trials.values() for value in trial.values if value is not None]
        if self.direction is Direction.MIN:
            return 0.0 if min(seen, default=-1.0) >= 0.0 else -math.inf
        return 1.0 if seen and min(seen) >= 0.0 and max(seen) <= 1.0 else math.inf


def by_epoch(shown: Iterable[tuple[int, float | None]]) -> tuple[float | None, ...]:
    """Values of epochs 1, 2, .., from those that were shown, by their epochs.

    Between two of them the line through both; before the first, the first; a gap before a value that is
    not a number holds the last that was one.
    """
    known = dict(sorted(shown))
    if not known:
        return ()
    numbers = {epoch: value for epoch, value in known.items() if value is not None}
    epochs = np.arange(1, max(known) + 1)
    filled: list[float | None] = [None] * len(epochs)
    if numbers:
        filled = list(np.interp(epochs, list(numbers), list(numbers.values())).tolist())
    for epoch, value in known.items():
        if value is None:
            filled[epoch - 1] = None
    return tuple(filled)


def row_of(config: Config) -> int:
    """The number of the trial a configuration belongs to."""
    return next(int(value) for name, value in config if name == ROW)


def extended(
    values: Sequence[float | None], epochs: int, direction: Direction, best_possible: float
) -> tuple[float, ...]:
    """The recorded values, and from there on the continued curve; NaN once one is not a number."""
    known = [math.nan if value is None else value for value in values[:epochs]]
    if any(value != value for value in known):  # noqa: PLR0124  (NaN)
        first = next(index for index, value in enumerate(known) if value != value)  # noqa: PLR0124
        return (*known[:first], *(math.nan for _ in range(epochs - first)))
    sign = 1.0 if direction is Direction.MAX else -1.0
    to_come = np.arange(len(known) + 1, epochs + 1, dtype=float)
    more = sign * _continued(sign * np.array(known), to_come) if to_come.size else np.array([])
    bounded = (
        np.minimum(more, best_possible) if direction is Direction.MAX else np.maximum(more, best_possible)
    )
    return (*known, *bounded.tolist())


def _continued(scores: Floats, to_come: Floats) -> Floats:
    """Scores, of which more is better, after the epochs to come."""
    if len(scores) < LEAST_EPOCHS:
        return np.full(len(to_come), float(scores[-1]))
    law = min((_PowerLaw.fit(scores, float(b)) for b in EXPONENTS), key=lambda law: law.squares)
    return law.level + np.asarray(max(law.a, 0.0) * (float(len(scores)) ** -law.b - to_come**-law.b))


@dataclass(frozen=True, slots=True)
class _PowerLaw:
    """c - a e^-b through the scores of epochs 1, 2, .."""

    a: float
    b: float
    squares: float
    """Of the deviations, summed."""
    level: float
    """At the last epoch: the fit, with the mean deviation of the last few."""

    @staticmethod
    def fit(scores: Floats, b: float) -> _PowerLaw:
        x = np.arange(1, len(scores) + 1, dtype=float) ** -b
        a = -float(np.cov(x, scores, bias=True)[0, 1] / np.var(x))
        fitted = scores.mean() - a * (x - x.mean())
        errors = scores - fitted
        return _PowerLaw(a, b, float(errors @ errors), float(fitted[-1] + errors[-TAIL:].mean()))


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """What a real run showed of a job that is no trial."""

    job: Job
    epochs: int
    """Of the whole training."""
    speeds: tuple[SpeedSample, ...]
    """At least one."""
    noise: tuple[tuple[float, NoiseSample], ...]
    """Gradient statistics by the share of training done."""
    losses: tuple[LossPoint, ...]

    def speed(self) -> AllReduceSpeed:
        return fit_all_reduce(self.speeds)

    def noise_curve(self) -> NoiseCurve:
        """The noise scale as it was measured, held before the first and after the last time.

        A job that never measured it is taken to have one of its initial batch: half of what a larger
        batch adds is lost.
        """
        initial = self.job.batch.initial
        scales = [
            (share, GradientNoise(noise.sqr, noise.var, initial).noise_scale) for share, noise in self.noise
        ]
        known = [(share, scale) for share, scale in scales if 0.0 < scale < math.inf] or [
            (0.0, float(initial))
        ]
        shares, logs = [share for share, _ in known], [math.log(scale) for _, scale in known]
        grid = np.interp(np.linspace(0.0, 1.0, NOISE_POINTS), shares, logs)
        return NoiseCurve(initial, tuple(np.exp(grid).tolist()))

    def truth(self, speed: AllReduceSpeed) -> ModelTruth:
        """The job in a simulation, with steps of this speed."""
        return ModelTruth(
            epochs=self.epochs,
            units_per_epoch=self.job.work.units_per_epoch,
            initial_batch=self.job.batch.initial,
            speed=speed,
            noise=(self.noise_curve(),),
            losses=self._losses(),
        )

    def _losses(self) -> tuple[float, ...]:
        """By epoch: as recorded, then continued; flat where none was recorded."""
        seen = by_epoch(
            (point.epoch, point.loss)
            for point in self.losses
            if point.loss is not None and math.isfinite(point.loss)
        )
        return extended(seen, self.epochs, Direction.MIN, 0.0) if seen else (1.0,) * self.epochs


def slowed(speed: AllReduceSpeed, factor: float) -> AllReduceSpeed:
    """The same with every step taking so many times as long."""
    times = ("alpha_c", "beta_c", "floor_c", "alpha_n", "beta_n", "alpha_r", "beta_r")
    return replace(speed, **{name: getattr(speed, name) * factor for name in times})
