"""Learns the speed of trials and the delays of a cloud from a few observations, with their uncertainty.

The time of an epoch on one GPU of normal speed is t = exp(mu + a_trial + b_node + e_epoch), each term normal.
A few observations cannot separate the three spreads, and the difference matters: variation between epochs
averages out, variation between trials or nodes does not. So we keep draws from the posterior, and a forecast
uses other parameters in every sample.

Priors of the standard deviations of the logarithms (half-normal, so no spread at all is possible):
- trials 0.25: hyperparameters such as width or batch size change a trial's speed by tens of percent;
- nodes 0.05: machines of one type differ by a few percent;
- epochs 0.1: shared disks and networks delay an epoch by up to some tens of percent;
- delays 0.5: the delay of a cloud varies by half of its value.
The level mu has a flat prior, as we know nothing beforehand about the length of an epoch or a delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from stretto.core.errors import InputError
from stretto.planning.profile import Floats, LatencyDraws, Spread, SpreadBelief, SpreadDraws

TRIAL_SCALE = 0.25
NODE_SCALE = 0.05
EPOCH_SCALE = 0.1
DELAY_SCALE = 0.5
TRIED = 6000
"""The number of values drawn from the prior and weighted by the observations."""
KEPT = 2000
"""The number of draws kept from the posterior."""
CHUNK = 500
"""Covariances processed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured epoch."""

    trial: str
    node: str
    """Where it ran; several nodes are joined to one name."""
    epoch_s: float
    speed: float = 1.0
    """Expected speed relative to one normal GPU: speed-up times the speed of the GPU type."""


@dataclass(frozen=True, slots=True, eq=False)
class LatencyPosterior:
    """The posterior of the time of an epoch, as equally likely values."""

    draws: LatencyDraws

    @property
    def epoch_s(self) -> float:
        return float(self.draws.epoch_s.mean())

    @property
    def trial_sd(self) -> float:
        return float(self.draws.trial_sd.mean())

    @property
    def node_sd(self) -> float:
        return float(self.draws.node_sd.mean())

    @property
    def epoch_sd(self) -> float:
        return float(self.draws.epoch_sd.mean())

    def draw(self, rng: np.random.Generator, samples: int) -> LatencyDraws:
        """Some of the values, at random."""
        pick = _spread_out(rng, samples, len(self.draws.epoch_s))
        draws = self.draws
        return LatencyDraws(
            draws.epoch_s[pick], draws.trial_sd[pick], draws.node_sd[pick], draws.epoch_sd[pick]
        )

    def slowed(self, factor: float) -> LatencyPosterior:
        return LatencyPosterior(replace(self.draws, epoch_s=self.draws.epoch_s * factor))


@dataclass(frozen=True, slots=True, eq=False)
class SpreadPosterior:
    """The posterior of a delay, as equally likely values of its mean and spread."""

    draws: SpreadDraws

    @property
    def mean(self) -> float:
        return float(self.draws.mean.mean())

    @property
    def sd(self) -> float:
        return float(self.draws.sd.mean())

    def draw(self, rng: np.random.Generator, samples: int) -> SpreadDraws:
        """Some of the values, at random."""
        pick = _spread_out(rng, samples, len(self.draws.mean))
        return SpreadDraws(self.draws.mean[pick], self.draws.sd[pick])


def learn_latency(
    observations: Sequence[Observation], rng: np.random.Generator, *, node_scale: float = NODE_SCALE
) -> LatencyPosterior:
    """Learns the time of an epoch from measured epochs; `node_scale` 0: all nodes are one machine."""
    _check([one.epoch_s * one.speed for one in observations], "epoch time")
    cells = _Cells.of(observations)
    variances = np.stack(
        [(scale * _half_normal(rng, TRIED)) ** 2 for scale in (TRIAL_SCALE, node_scale, EPOCH_SCALE)], axis=1
    )
    log_weight, level, level_var = cells.likelihood(variances)
    pick = _resampled(log_weight, rng)
    level_drawn = level[pick] + np.sqrt(level_var[pick]) * rng.standard_normal(KEPT)
    drawn = variances[pick]
    return LatencyPosterior(
        LatencyDraws(np.exp(level_drawn + drawn.sum(axis=1) / 2.0), *(np.sqrt(np.expm1(drawn)).T))
    )


def learn_delay(delays_s: Sequence[float], rng: np.random.Generator) -> SpreadPosterior:
    """Learns a delay from observed delays."""
    _check(delays_s, "delay")
    logs = np.log(delays_s)
    sd = DELAY_SCALE * _half_normal(rng, TRIED)
    log_weight = -(len(logs) - 1) * np.log(sd) - ((logs - logs.mean()) ** 2).sum() / (2.0 * sd**2)
    drawn = sd[_resampled(log_weight, rng)]
    level = logs.mean() + drawn / len(logs) ** 0.5 * rng.standard_normal(KEPT)
    mean = np.exp(level + drawn**2 / 2.0)
    return SpreadPosterior(SpreadDraws(mean, mean * np.sqrt(np.expm1(drawn**2))))


def updated_delay(belief: SpreadBelief, delays_s: Sequence[float]) -> Spread:
    """A belief about a delay, updated by observed delays; the belief counts as one more observation.

    The variance is s^2 = mean of ((x - m)^2) over all of them, plus the believed variance for the belief. A
    belief of zero delay does not count.
    """
    mean, sd = belief.mean, belief.sd
    values = [*delays_s, mean] if mean > 0 else [*delays_s]
    middle = fmean(values)
    squares = sum((value - middle) ** 2 for value in values) + (sd**2 if mean > 0 else 0.0)
    return Spread(middle, (squares / len(values)) ** 0.5)


@dataclass(frozen=True, slots=True)
class _Cells:
    """Observations by (trial, node); the mean, count and inner spread of each cell are all that matters."""

    mean: Floats
    per_count: Floats
    """1 / number of observations."""
    same_trial: Floats
    """[cell, cell]: 1 if both have the same trial."""
    same_node: Floats
    inner_squares: float
    inner_count: int
    """Observations after the first of every cell."""

    @staticmethod
    def of(observations: Sequence[Observation]) -> _Cells:
        logs: dict[tuple[str, str], list[float]] = {}
        for one in observations:
            logs.setdefault((one.trial, one.node), []).append(float(np.log(one.epoch_s * one.speed)))
        trials, nodes = ([key[part] for key in logs] for part in (0, 1))
        return _Cells(
            mean=np.array([np.mean(values) for values in logs.values()]),
            per_count=np.array([1.0 / len(values) for values in logs.values()]),
            same_trial=np.equal.outer(trials, trials).astype(float),
            same_node=np.equal.outer(nodes, nodes).astype(float),
            inner_squares=float(sum(len(values) * np.var(values) for values in logs.values())),
            inner_count=len(observations) - len(logs),
        )

    def likelihood(self, variances: Floats) -> tuple[Floats, Floats, Floats]:
        """By row of (trial, node, epoch) variances: log-likelihood, level, and variance of the level.

        Cell means are normal with V = s_t^2 [same trial] + s_n^2 [same node] + s_e^2 / count. With the level
        integrated out the likelihood is |V|^-1/2 (1'V^-1 1)^-1/2 exp(-residual / 2).
        """
        parts = [self._chunk(variances[at : at + CHUNK]) for at in range(0, len(variances), CHUNK)]
        log_likelihood, level, level_var = (np.concatenate(values) for values in zip(*parts, strict=True))
        epoch_var = variances[:, 2]
        inner = self.inner_count * np.log(epoch_var) + self.inner_squares / epoch_var
        return log_likelihood - inner / 2.0, level, level_var

    def _chunk(self, variances: Floats) -> tuple[Floats, Floats, Floats]:
        trial_var, node_var, epoch_var = (column[:, None, None] for column in variances.T)
        covariance = (
            trial_var * self.same_trial + node_var * self.same_node + epoch_var * np.diag(self.per_count)
        )
        sides = np.stack([self.mean, np.ones_like(self.mean)], axis=1)
        solved = np.linalg.solve(covariance, np.broadcast_to(sides, (len(variances), *sides.shape)))
        precision = solved[:, :, 1].sum(axis=1)
        level = solved[:, :, 0].sum(axis=1) / precision
        residual = solved[:, :, 0] @ self.mean - level**2 * precision
        log_det = np.linalg.slogdet(covariance)[1]
        return -(log_det + np.log(precision) + residual) / 2.0, level, 1.0 / precision


def _half_normal(rng: np.random.Generator, count: int) -> Floats:
    """Half-normal values, kept away from zero, where a covariance cannot be inverted."""
    return np.maximum(np.abs(rng.standard_normal(count)), 1e-3)


def _resampled(log_weight: Floats, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Indices drawn by weight (systematic resampling: equal weights are drawn equally often)."""
    weight = np.exp(log_weight - log_weight.max())
    edges = np.cumsum(weight) / weight.sum()
    return np.searchsorted(edges, (np.arange(KEPT) + rng.uniform()) / KEPT).clip(max=len(edges) - 1)


def _spread_out(rng: np.random.Generator, samples: int, values: int) -> npt.NDArray[np.intp]:
    """Random indices, each value as often as any other."""
    return rng.permutation(np.arange(max(samples, values)) % values)[:samples]


def _check(values: Sequence[float], what: str) -> None:
    if not values:
        raise InputError(f"there is no {what} to learn from.", remedy="Observe at least one.")
    for value in values:
        if not 0.0 < value < float("inf"):
            raise InputError(f"a {what} of {value} s was observed.", remedy="It must be positive and finite.")
