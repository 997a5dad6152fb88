"""The world of a real run: the recorded learning curves of its trials, the speed and noise of its jobs.

Recorded values are repeated. After the last epoch of a trial, its curve is extrapolated by a saturating power
law or an exponential,

    value(e) = c - a e^-b             0.1 <= b <= 2
    value(e) = c - a exp(-e / t)      t at most a third of the recorded epochs

whichever fits the recorded epochs better by least squares; it continues from the level of the last epochs.
With fewer than six epochs the last value is held; a curve that does not improve holds its last level. A power
law gains less with every doubling of the epochs. A trial that never started gets a random curve of one that
did.

Extrapolated and drawn values only let a policy continue; they are not results. The result of such a trial is
a range: from the best value that it showed to the most that its curve allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import numpy as np

from stretto.core.job import Job
from stretto.core.observations import LossPoint, NoiseSample, SpeedSample
from stretto.models.noise import GradientNoise
from stretto.models.speed import AllReduceSpeed, fit_all_reduce
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.worlds.applications import ModelTruth, NoiseCurve
from stretto.worlds.curves import ROW, Floats

LEAST_EPOCHS = 6
"""Least number of epochs for fitting a curve."""
TAIL = 3
"""Number of last epochs whose mean deviation from the fit sets the level."""
EXPONENTS = np.geomspace(0.1, 2.0, 25)
LEAST_TIME, TIMES = 0.5, 12
"""Shortest time constant of an exponential, in epochs; number of time constants tried."""
HUGE = 2.0**332
"""Larger numbers are scaled down to this (about 1e100) before they are squared."""
NOISE_POINTS = 20
"""Number of points of a noise curve."""


class ValueSource(StrEnum):
    """The source of a value of a replayed trial."""

    RECORDED = "recorded"
    EXTRAPOLATED = "extrapolated"
    DRAWN = "drawn"


@dataclass(frozen=True, slots=True)
class RecordedTrial:
    """The recorded values of one trial."""

    values: tuple[float | None, ...]
    """The metric after each epoch; None: not a number, from here on."""
    relative_time: float | None
    """Its epoch time relative to the mean of all trials; None: not measured."""
    failed: bool = False
    """The trial failed: its last value is None, though it did not report that."""

    def shown(self, epochs: int) -> tuple[float, ...]:
        """Its values in the first `epochs` epochs; empty if it had diverged by then."""
        seen = self.values[:epochs]
        if self.failed and len(seen) == len(self.values):
            seen = seen[:-1]
        if not seen or seen[-1] is None:
            return ()
        return tuple(value for value in seen if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCurves:
    """The trials of a real run as learning curves."""

    name: str
    metric: str
    direction: Direction
    configs: tuple[Config, ...]
    """One for each trial of the study, with its number as `row`, in the order of the sampler."""
    trials: Mapping[int, RecordedTrial]
    """Trials with at least one epoch, by number."""
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

    def origin(self, config: Config, epoch: int) -> ValueSource:
        """The source of the value after this epoch."""
        trial = self.trials.get(row_of(config))
        if trial is None:
            return ValueSource.DRAWN
        return ValueSource.RECORDED if epoch <= len(trial.values) else ValueSource.EXTRAPOLATED

    def best_shown(self, config: Config, epochs: int) -> float | None:
        """The best recorded value of the trial in the first `epochs` epochs."""
        trial = self.trials.get(row_of(config))
        return None if trial is None else self._best(trial.shown(epochs))

    def best_range(self, config: Config, epochs: int) -> tuple[float, float] | None:
        """The range of the best value of the trial after `epochs` epochs, the worse end first.

        None if the trial would have diverged or failed before it reported a number.
        """
        row = row_of(config)
        if row in self.trials:
            return self._range_of(self.trials[row], epochs)
        ranges = [found for trial in self.trials.values() if (found := self._range_of(trial, epochs))]
        if not ranges:
            return None
        return min((low for low, _ in ranges), key=self._score), max(
            (high for _, high in ranges), key=self._score
        )

    def _range_of(self, trial: RecordedTrial, epochs: int) -> tuple[float, float] | None:
        shown = trial.shown(epochs)
        best = self._best(shown)
        if best is None:
            return None
        if epochs <= len(trial.values) or trial.values[-1] is None:
            return best, best
        most = [best, *most_gained(shown, epochs, self.direction, self._best_possible())]
        if len(shown) == 1:  # one value shows no trend; other trials came as far as this
            most += [value for other in self.trials.values() for value in other.shown(epochs)]
        return best, max(most, key=self._score)

    def _best(self, values: Sequence[float]) -> float | None:
        return max(values, key=self._score, default=None)

    def _score(self, value: float) -> float:
        return value if self.direction is Direction.MAX else -value

    def _best_possible(self) -> float:
        """The bound of the metric: 1 or 0 if all recorded values respect it, else infinite."""
        seen = [value for trial in self.trials.values() for value in trial.values if value is not None]
        if self.direction is Direction.MIN:
            return 0.0 if min(seen, default=-1.0) >= 0.0 else -math.inf
        return 1.0 if seen and min(seen) >= 0.0 and max(seen) <= 1.0 else math.inf


def by_epoch(shown: Iterable[tuple[int, float | None]]) -> tuple[float | None, ...]:
    """Values of epochs 1, 2, .., from values of some epochs.

    Gaps are interpolated linearly. Before the first value, the first counts; a gap before a value that is not
    a number holds the last number.
    """
    known = dict(sorted(shown))
    if not known:
        return ()
    numbers = {epoch: value for epoch, value in known.items() if value is not None}
    epochs = np.arange(1, max(known) + 1)
    filled: list[float | None] = [None] * len(epochs)
    if numbers:
        values = np.array(list(numbers.values()), dtype=float)
        scale = _scale(values)
        filled = list((scale * np.interp(epochs, list(numbers), values / scale)).tolist())
    for epoch, value in known.items():
        if value is None:
            filled[epoch - 1] = None
    return tuple(filled)


def row_of(config: Config) -> int:
    """The number of the trial with this configuration."""
    return next(int(value) for name, value in config if name == ROW)


def extended(
    values: Sequence[float | None], epochs: int, direction: Direction, best_possible: float
) -> tuple[float, ...]:
    """The recorded values, then the extrapolated curve; NaN from the first value that is not a number."""
    known = [math.nan if value is None else value for value in values[:epochs]]
    if any(value != value for value in known):  # noqa: PLR0124  (NaN)
        first = next(index for index, value in enumerate(known) if value != value)  # noqa: PLR0124
        return (*known[:first], *(math.nan for _ in range(epochs - first)))
    to_come = np.arange(len(known) + 1, epochs + 1, dtype=float)
    if not to_come.size:
        return tuple(known)
    sign = 1.0 if direction is Direction.MAX else -1.0
    scores = sign * np.array(known)
    scale = _scale(scores)
    more = sign * scale * _continued(scores / scale, to_come).clip(-HUGE, HUGE)
    return (*known, *_bounded(more, direction, best_possible))


def most_gained(
    values: Sequence[float], epochs: int, direction: Direction, best_possible: float
) -> tuple[float, ...]:
    """The most that a curve allows after `epochs` epochs, by each way to extrapolate it.

    A power law never levels off, so the best one counts even if an exponential fits better. With a few epochs
    the shape is unknown: then every doubling gains as much as the last one.
    """
    sign = 1.0 if direction is Direction.MAX else -1.0
    scale = _scale(np.array(values))
    scores, last = sign * np.array(values) / scale, np.array([float(epochs)])
    if len(scores) < LEAST_EPOCHS:
        gained = max(float(scores[-1] - scores[(len(scores) - 1) // 2]), 0.0)
        ends = [scores[-1] + gained * math.log2(epochs / len(scores))]
    else:
        laws = [
            law.at(last, len(scores))[0]
            for law in (_best_law(scores), min(_power_laws(scores), key=_squares))
        ]
        ends = [float(end) for end in laws]
    return _bounded(sign * scale * np.array(ends).clip(-HUGE, HUGE), direction, best_possible)


def _scale(values: Floats) -> float:
    """Divisor of values, so that sums of their squares are finite."""
    return max(float(np.abs(values).max()) / HUGE, 1.0)


def _bounded(values: Floats, direction: Direction, best_possible: float) -> tuple[float, ...]:
    bounded = (
        np.minimum(values, best_possible) if direction is Direction.MAX else np.maximum(values, best_possible)
    )
    return tuple(bounded.tolist())


def _continued(scores: Floats, to_come: Floats) -> Floats:
    """Extrapolated scores (more is better) after the epochs to come."""
    if len(scores) < LEAST_EPOCHS:
        return np.full(len(to_come), float(scores[-1]))
    return _best_law(scores).at(to_come, len(scores))


def _best_law(scores: Floats) -> _Law:
    return min((*_power_laws(scores), *_exponentials(scores)), key=_squares)


def _power_laws(scores: Floats) -> list[_Law]:
    return [_Law.fit(scores, partial(_power, float(b))) for b in EXPONENTS]


def _exponentials(scores: Floats) -> list[_Law]:
    times = np.geomspace(LEAST_TIME, len(scores) / 3.0, TIMES)
    return [_Law.fit(scores, partial(_exponential, float(time))) for time in times]


def _power(b: float, epochs: Floats) -> Floats:
    return np.asarray(epochs**-b)


def _exponential(time: float, epochs: Floats) -> Floats:
    return np.asarray(np.exp(-epochs / time))


def _squares(law: _Law) -> float:
    return law.squares


@dataclass(frozen=True, slots=True)
class _Law:
    """The curve c - a f(e) fitted to the scores of epochs 1, 2, ..; f falls to 0."""

    falling: Callable[[Floats], Floats]
    a: float
    squares: float
    """Sum of squared deviations."""
    level: float
    """Level at the last epoch: the fit plus the mean deviation of the last few epochs."""

    @staticmethod
    def fit(scores: Floats, falling: Callable[[Floats], Floats]) -> _Law:
        x = falling(np.arange(1, len(scores) + 1, dtype=float))
        a = -float(np.cov(x, scores, bias=True)[0, 1] / np.var(x))
        fitted = scores.mean() - a * (x - x.mean())
        errors = scores - fitted
        return _Law(falling, a, float(errors @ errors), float(fitted[-1] + errors[-TAIL:].mean()))

    def at(self, epochs: Floats, known: int) -> Floats:
        """Scores after epochs later than `known`."""
        here = float(self.falling(np.array([float(known)]))[0])
        return self.level + np.asarray(max(self.a, 0.0) * (here - self.falling(epochs)))


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """What a real run recorded of a job that is not a trial."""

    job: Job
    epochs: int
    """Epochs of the whole training."""
    speeds: tuple[SpeedSample, ...]
    """One or more samples."""
    noise: tuple[tuple[float, NoiseSample], ...]
    """Gradient statistics by the share of training done."""
    losses: tuple[LossPoint, ...]

    def speed(self) -> AllReduceSpeed:
        return fit_all_reduce(self.speeds)

    def noise_curve(self) -> NoiseCurve:
        """The measured noise scale; constant before the first and after the last sample.

        Without samples it is the initial batch size: then half of the gain of a larger batch is lost.
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
        """The truth for a simulation, with steps of this speed."""
        return ModelTruth(
            epochs=self.epochs,
            units_per_epoch=self.job.work.units_per_epoch,
            initial_batch=self.job.batch.initial,
            speed=speed,
            noise=(self.noise_curve(),),
            losses=self._losses(),
        )

    def _losses(self) -> tuple[float, ...]:
        """Losses by epoch: recorded, then extrapolated; constant if none was recorded."""
        seen = by_epoch(
            (point.epoch, point.loss)
            for point in self.losses
            if point.loss is not None and math.isfinite(point.loss)
        )
        return extended(seen, self.epochs, Direction.MIN, 0.0) if seen else (1.0,) * self.epochs


def slowed(speed: AllReduceSpeed, factor: float) -> AllReduceSpeed:
    """The same model with steps that take `factor` times as long."""
    times = ("alpha_c", "beta_c", "floor_c", "alpha_n", "beta_n", "alpha_r", "beta_r")
    return replace(speed, **{name: getattr(speed, name) * factor for name in times})
