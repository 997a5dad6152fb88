"""When a job will converge: Optimus' loss curve, its online fit, and the uncertainty of that fit.

The loss at epoch k, normalised by the largest loss, follows

    l(k) = 1 / (b0 k + b1) + b2,    b0, b1, b2 >= 0

Fit: with c = b1 / b0 and a = 1 / b0 the curve is l(k) = a / (k + c) + b2. This is linear for a given c, so
non-negative least squares in the loss has a closed form for (a, b2). We scan c, then refine it. Rows are
weighted by 1 / loss, since losses scatter in proportion to their size.

Interval: by profile likelihood. The losses cannot rule out, at 80 %, a curve whose weighted squared error is
within sigma^2 t^2 of the best one's (t: Student's 90 % quantile). The interval spans the epochs at which
these curves converge. It assumes that the true curve has this shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stretto.core.job import Convergence
from stretto.core.observations import LossPoint
from stretto.models.speed import Floats, Numbers

MIN_POINTS = 3
"""The number of parameters of the curve."""
NEIGHBOURS = 3
"""A loss is compared with this many epochs before and after it."""
WEIGHT_FLOOR = 0.05
"""Losses below this part of the largest get no more weight, since they do not matter for decisions."""
PRIOR_NOISE = 0.02
"""Relative scatter, counted as one observation before any loss, so that three points do not look certain."""
FLAT = 1e-12
"""A curve that falls by less than this part of its height is flat."""
QUANTILE = 0.9
"""The quantile of Student's t on either side, for an 80 % interval."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """l(k) = 1 / (b0 k + b1) + b2."""

    b0: float
    b1: float
    b2: float

    def loss(self, epoch: Numbers) -> Floats:
        return 1.0 / (self.b0 * np.asarray(epoch, dtype=float) + self.b1) + self.b2

    def converged_epoch(self, convergence: Convergence) -> float:
        """The first epoch that ends `patience` epochs with falls below `threshold`, by its closed form.

        The fall in epoch k is b0 / ((b0 k - b0 + b1) (b0 k + b1)); it shrinks as k grows.
        """
        first = 2.0  # the first epoch has no predecessor to compare with
        if self.b0 > 0.0:
            root = np.sqrt(1.0 / (self.b0 * convergence.threshold) + 0.25)
            first = max(first, float(np.floor(root + 0.5 - self.b1 / self.b0)) + 1.0)
        return first + convergence.patience - 1


@dataclass(frozen=True, slots=True)
class EpochInterval:
    """Epochs from the start of the job to convergence; `max_epochs` means this epoch or later."""

    low: int
    expected: int
    high: int
    """The truth is between low and high in about 80 % of cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceFit:
    """The curve that fits the losses best, and the other plausible curves."""

    b0: float
    b1: float
    b2: float
    scale: float
    """The loss that corresponds to 1 on the normalised curve: the fitted loss at the first epoch seen."""
    plausible: tuple[LossCurve, ...] = field(default=(), repr=False)
    """Curves at the edge of the plausible region, each normalised; empty: the curve is certain."""

    @property
    def curve(self) -> LossCurve:
        return LossCurve(self.b0, self.b1, self.b2)

    def loss(self, epoch: Numbers) -> Floats:
        """The expected loss at the end of an epoch, in the unit of the reports."""
        return self.scale * self.curve.loss(epoch)

    def epochs_to_converge(self, convergence: Convergence, max_epochs: int) -> EpochInterval:
        """How many epochs the job takes in total, including those already done."""
        expected = self.curve.converged_epoch(convergence)
        epochs = [expected, *(curve.converged_epoch(convergence) for curve in self.plausible)]
        low, expected, high = (int(min(epoch, max_epochs)) for epoch in (min(epochs), expected, max(epochs)))
        return EpochInterval(low, expected, high)


def converged_at(losses: Sequence[float] | Floats, convergence: Convergence, max_epochs: int) -> int | None:
    """The epoch at which losses at the ends of epochs 1, 2, .. have converged; None if not by `max_epochs`.

    The fall in each epoch is relative to the largest loss so far; a rise counts as no fall.
    """
    seen = np.asarray(losses, dtype=float)[:max_epochs]
    small = -np.diff(seen) < convergence.threshold * np.fmax.accumulate(seen)[1:]
    at = np.arange(small.size)
    streak = at - np.maximum.accumulate(np.where(small, -1, at))
    long_enough = np.flatnonzero(streak >= convergence.patience)
    return int(long_enough[0]) + 2 if long_enough.size else None


def fit_convergence(losses: Sequence[LossPoint]) -> ConvergenceFit | None:
    """Fit the curve to the losses reported so far; None if fewer than three epochs have one.

    Losses that are missing, not finite or not positive are ignored. Several losses of one epoch count as
    their mean.
    """
    by_epoch: defaultdict[int, list[float]] = defaultdict(list)
    for point in losses:
        if point.loss is not None and 0.0 < point.loss < np.inf:
            by_epoch[point.epoch].append(point.loss)
    if len(by_epoch) < MIN_POINTS:
        return None
    epochs = np.array(sorted(by_epoch), dtype=float)
    reported = np.array([sum(by_epoch[epoch]) / len(by_epoch[epoch]) for epoch in sorted(by_epoch)])
    cleaned = without_spikes(reported)
    largest = float(cleaned.max())
    data = _Losses.of(epochs, cleaned / largest)
    best = data.best()
    allowed = best.error + data.allowance(reported / largest, best)
    first = float(epochs[0])
    curve, height = _normalised(best.a, best.c, best.b2, first)
    return ConvergenceFit(
        b0=curve.b0,
        b1=curve.b1,
        b2=curve.b2,
        scale=height * largest,
        plausible=tuple(_normalised(a, c, b2, first)[0] for a, c, b2 in data.edge_of_likely(best.c, allowed)),
    )


def without_spikes(losses: Floats) -> Floats:
    """Replace each loss outside the range of its neighbours by their mean.

    The first and the last loss are kept, since they are always outside on a falling curve.
    """
    gap = np.full(NEIGHBOURS, np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([gap, losses, gap]), 2 * NEIGHBOURS + 1
    )[1:-1]
    others = np.delete(windows, NEIGHBOURS, axis=1)
    inner = losses[1:-1]
    spike = (inner < np.nanmin(others, axis=1)) | (inner > np.nanmax(others, axis=1))
    return np.concatenate([losses[:1], np.where(spike, np.nanmean(others, axis=1), inner), losses[-1:]])


def _normalised(a: float, c: float, b2: float, first_epoch: float) -> tuple[LossCurve, float]:
    """The curve divided by its largest value, and that value. A flat curve has b0 = 0."""
    height = a / (first_epoch + c) + b2
    if a <= FLAT * height:
        return LossCurve(0.0, 1.0, 0.0), height
    return LossCurve(height / a, height * c / a, b2 / height), height


class _Curve(NamedTuple):
    a: float
    c: float
    b2: float
    error: float
    """Weighted squared error."""


@dataclass(frozen=True, slots=True)
class _Losses:
    """Normalised losses, and least squares over them for many c at once."""

    epochs: Floats
    losses: Floats
    weights: Floats
    """Weights of the squared errors."""
    mean: float

    @staticmethod
    def of(epochs: Floats, losses: Floats) -> _Losses:
        weights = 1.0 / np.maximum(losses, WEIGHT_FLOOR) ** 2
        return _Losses(epochs, losses, weights, float(np.average(losses, weights=weights)))

    def best(self) -> _Curve:
        """Scan c, then narrow the grid around the best four times."""
        grid = self._grid()
        for _ in range(4):
            i = int(self.columns(grid).error.argmin())
            grid = _between(grid[max(i - 1, 0)], grid[min(i + 1, grid.size - 1)], 24)
        columns = self.columns(grid)
        i, a = int(columns.error.argmin()), columns.a
        return _Curve(float(a[i]), float(grid[i]), float(columns.b2(a)[i]), float(columns.error[i]))

    def allowance(self, reported: Floats, best: _Curve) -> float:
        """sigma^2 t^2, with sigma from the reported losses, since replacing spikes also hides noise.

        Spikes count as at most three standard deviations, estimated from the median error.
        """
        from scipy.special import stdtrit  # noqa: PLC0415  (slow to import, and not every job converges)

        errors = np.sqrt(self.weights) * (reported - best.a / (self.epochs + best.c) - best.b2)
        limit = 3.0 * 1.4826 * float(np.median(np.abs(errors)))
        squares = float(np.sum(np.clip(errors, -limit, limit) ** 2))
        freedom = errors.size - MIN_POINTS + 1
        return (squares + PRIOR_NOISE**2) / freedom * float(stdtrit(freedom, QUANTILE)) ** 2

    def edge_of_likely(self, best_c: float, allowed: float) -> list[list[float]]:
        """(a, c, b2) with the smallest and the largest a, for each c with an error within `allowed`."""
        grid = np.union1d(self._grid(), [best_c])
        for _ in range(2):
            likely = np.flatnonzero(self.columns(grid).error <= allowed)
            edge = _between(grid[max(likely[0] - 1, 0)], grid[min(likely[-1] + 1, grid.size - 1)], 24)
            grid = np.union1d(edge, [best_c])
        columns = self.columns(grid)
        likely = np.flatnonzero(columns.error <= allowed)
        return [
            curve
            for a in columns.range_of_a(allowed)
            for curve in np.column_stack([a, grid, columns.b2(a)])[likely].tolist()
        ]

    def columns(self, c: Floats) -> _Columns:
        x = 1.0 / (self.epochs + c[:, None])
        x_mean = x @ self.weights / self.weights.sum()
        free = _Slopes.of(x - x_mean[:, None], self.losses - self.mean, self.weights)
        through_zero = _Slopes.of(x, self.losses, self.weights)
        return _Columns(x_mean, free, through_zero, self.mean)

    def _grid(self) -> Floats:
        """Values of c, from 0 (a pole at epoch 0) to where the curve looks straight over the epochs seen."""
        lowest = [0.0] if self.epochs[0] > 0 else []
        return np.concatenate([lowest, np.geomspace(0.01, 100.0 * self.epochs[-1], 40)])


@dataclass(frozen=True, slots=True)
class _Slopes:
    """Weighted least squares of y = a x, one per row of x."""

    a: Floats
    error: Floats
    """The squared error at a."""
    curvature: Floats
    """The squared error at a + d is `error` + `curvature` d^2."""

    @staticmethod
    def of(x: Floats, y: Floats, weights: Floats) -> _Slopes:
        curvature = np.asarray(x**2 @ weights)
        a = x @ (weights * y) / curvature
        return _Slopes(a, np.asarray((y - a[:, None] * x) ** 2 @ weights), curvature)

    def error_at(self, a: Floats) -> Floats:
        return self.error + self.curvature * (a - self.a) ** 2

    def end(self, allowed: float, sign: int) -> Floats:
        """The smallest (sign -1) or largest (+1) a with an error within `allowed`."""
        reach: Floats = np.sqrt(np.maximum(allowed - self.error, 0.0) / self.curvature)
        return self.a + sign * reach


@dataclass(frozen=True, slots=True)
class _Columns:
    """Non-negative least squares of l = a x + b2 with x = 1 / (k + c), one entry per c."""

    x_mean: Floats
    free: _Slopes
    """With the best b2 of either sign, mean - a x_mean."""
    through_zero: _Slopes
    """With b2 = 0, which is best if the best b2 is negative."""
    mean: float

    @property
    def a(self) -> Floats:
        return self._feasible(self.free.a, self.through_zero.a)

    @property
    def error(self) -> Floats:
        a = self.a
        return np.where(self._negative(a), self.through_zero.error_at(a), self.free.error_at(a))

    def b2(self, a: Floats) -> Floats:
        return np.maximum(self.mean - a * self.x_mean, 0.0)

    def range_of_a(self, allowed: float) -> tuple[Floats, Floats]:
        """Smallest and largest a >= 0 whose error, at the best b2 >= 0, is within `allowed`."""
        low, high = (
            self._feasible(self.free.end(allowed, sign), self.through_zero.end(allowed, sign))
            for sign in (-1, +1)
        )
        return low, high

    def _feasible(self, free: Floats, through_zero: Floats) -> Floats:
        return np.maximum(np.where(self._negative(free), through_zero, free), 0.0)

    def _negative(self, a: Floats) -> npt.NDArray[np.bool_]:
        """True where the best b2 is below zero."""
        return np.asarray(a * self.x_mean > self.mean)


def _between(low: float, high: float, count: int) -> Floats:
    """A grid of values; geometric if it spans a large range."""
    if low > 0.0 and high > 4.0 * low:
        return np.geomspace(low, high, count)
    return np.linspace(low, high, count)
