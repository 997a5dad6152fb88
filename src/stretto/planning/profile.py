"""Beliefs about the speed of a study's trials and about the delays of the cloud."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SpreadDraws:
    """Possible values of a mean and a standard deviation, one of each per sample."""

    mean: Floats
    sd: Floats


class SpreadBelief(Protocol):
    """The belief about a varying quantity: stated values, or learned ones with their uncertainty."""

    @property
    def mean(self) -> float: ...

    @property
    def sd(self) -> float: ...

    def draw(self, rng: np.random.Generator, samples: int) -> SpreadDraws:
        """Possible values of mean and standard deviation."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity with a log-normal distribution: its mean and standard deviation."""

    mean: float
    sd: float = 0.0

    def draw(self, rng: np.random.Generator, samples: int) -> SpreadDraws:  # noqa: ARG002
        """The stated values, which have no uncertainty, once per sample."""
        return SpreadDraws(np.full(samples, float(self.mean)), np.full(samples, float(self.sd)))


@dataclass(frozen=True, slots=True)
class Scaling:
    """Speed relative to one GPU, by GPUs on the fewest nodes, and the loss for spanning more nodes.

    Between points the logarithm of speed is linear in the logarithm of GPUs; beyond the last point speed is
    constant.
    """

    points: tuple[tuple[int, float], ...]
    """(GPUs, speed-up), ascending; the first is (1, 1.0)."""
    spanning: float = 0.0
    """The share of its speed that a trial loses on more nodes than it needs."""

    def speedup(self, gpus: int, *, spans: bool = False) -> float:
        """Speed with this many GPUs; `spans`: on more nodes than needed."""
        return self._packed(gpus) * (1.0 - self.spanning if spans else 1.0)

    def _packed(self, gpus: int) -> float:
        below = self.points[0]
        for point in self.points:
            if point[0] == gpus:
                return point[1]
            if point[0] > gpus:
                part = math.log(gpus / below[0]) / math.log(point[0] / below[0])
                return float(below[1] * (point[1] / below[1]) ** part)
            below = point
        return below[1]

    @property
    def most_gpus(self) -> int:
        """The fewest GPUs that reach the highest speed."""
        return max(self.points, key=lambda point: (point[1], -point[0]))[0]


@dataclass(frozen=True, slots=True)
class LatencyDraws:
    """Possible values of a `Latency`, one of each per sample."""

    epoch_s: Floats
    trial_sd: Floats
    node_sd: Floats
    epoch_sd: Floats


class LatencyBelief(Protocol):
    """The belief about the time of an epoch: a stated `Latency`, or a learned one with its uncertainty."""

    @property
    def epoch_s(self) -> float: ...

    @property
    def trial_sd(self) -> float: ...

    @property
    def node_sd(self) -> float: ...

    @property
    def epoch_sd(self) -> float: ...

    def draw(self, rng: np.random.Generator, samples: int) -> LatencyDraws:
        """Possible values."""

    def slowed(self, factor: float) -> LatencyBelief:
        """The same belief with epochs that take `factor` times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Time of one epoch on one GPU: `epoch_s` times a factor of the trial, of the node and of the epoch.

    Each factor is log-normal with mean 1 and this relative standard deviation. A trial and a node keep their
    factor, so averaging over epochs does not remove it.
    """

    epoch_s: float
    trial_sd: float = 0.0
    node_sd: float = 0.0
    epoch_sd: float = 0.0

    def draw(self, rng: np.random.Generator, samples: int) -> LatencyDraws:  # noqa: ARG002
        """The stated values, which have no uncertainty, once per sample."""
        values = (self.epoch_s, self.trial_sd, self.node_sd, self.epoch_sd)
        return LatencyDraws(*(np.full(samples, float(value)) for value in values))

    def slowed(self, factor: float) -> Latency:
        return replace(self, epoch_s=self.epoch_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What `stretto plan` knows about a study's speed."""

    latency: LatencyBelief
    scaling: Scaling
    start_s: float = 0.0
    """The restart penalty: the time of every start and resize of a trial."""
    start_sd: float = 0.0
    """Relative uncertainty of `start_s`; all starts of a study are off by the same factor."""
    queue_s: SpreadBelief = Spread(0.0)
    """How long a request for nodes waits."""
    init_s: SpreadBelief = Spread(0.0)
    """How long the start-up of a new node takes."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An uncertain quantity: its mean, and its 10 % and 90 % quantiles."""

    mean: float
    p10: float
    p90: float
