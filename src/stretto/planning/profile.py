"""What is believed about the speed of a study's trials and of the cloud, before and while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    """What is believed about a quantity that varies: stated values, or learned ones with their doubt."""

    @property
    def mean(self) -> float: ...

    @property
    def sd(self) -> float: ...

    def draw(self, rng: np.random.Generator, samples: int) -> SpreadDraws:
        """Values it may have."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity that varies, by a log-normal law: its mean and standard deviation."""

    mean: float
    sd: float = 0.0

    def draw(self, rng: np.random.Generator, samples: int) -> SpreadDraws:  # noqa: ARG002
        """Stated values are not doubted."""
        return SpreadDraws(np.full(samples, float(self.mean)), np.full(samples, float(self.sd)))


@dataclass(frozen=True, slots=True)
class Scaling:
    """Speed relative to one GPU, by GPUs on as few nodes as hold them, and the loss for spanning more.

    Between the points the logarithm of speed is linear in the logarithm of GPUs; beyond the last point
    nothing more is gained.
    """

    points: tuple[tuple[int, float], ...]
    """(GPUs, speed-up), ascending; the first is (1, 1.0)."""
    spanning: float = 0.0
    """Share of its speed a trial loses when it lies on more nodes than it needs."""

    def speedup(self, gpus: int, *, spans: bool = False) -> float:
        """Speed with so many GPUs; `spans`: on more nodes than would hold them."""
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
    """What is believed about the time of an epoch: a stated `Latency`, or a learned one with its doubt."""

    @property
    def epoch_s(self) -> float: ...

    @property
    def trial_sd(self) -> float: ...

    @property
    def node_sd(self) -> float: ...

    @property
    def epoch_sd(self) -> float: ...

    def draw(self, rng: np.random.Generator, samples: int) -> LatencyDraws:
        """Values it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Time of one epoch on one GPU: `epoch_s` times a factor of the trial, of the node and of the epoch.

    Each factor is log-normal with mean 1 and this relative standard deviation. A trial's factor stays
    with it and a node's with the node: averaging over epochs does not make them go away.
    """

    epoch_s: float
    trial_sd: float = 0.0
    node_sd: float = 0.0
    epoch_sd: float = 0.0

    def draw(self, rng: np.random.Generator, samples: int) -> LatencyDraws:  # noqa: ARG002
        """Stated values are not doubted."""
        values = (self.epoch_s, self.trial_sd, self.node_sd, self.epoch_sd)
        return LatencyDraws(*(np.full(samples, float(value)) for value in values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What `stretto plan` knows of a study's speed."""

    latency: LatencyBelief
    scaling: Scaling
    start_s: float = 0.0
    """Every start and resize of a trial takes this long .."""
    start_sd: float = 0.0
    """.. unless all of them together take more or less: how far off that may be, relative to it."""
    queue_s: SpreadBelief = Spread(0.0)
    """How long a request for nodes waits."""
    init_s: SpreadBelief = Spread(0.0)
    """How long a new node then takes to be of use."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantity that is not known for sure: its mean, and the bounds of its middle 80 %."""

    mean: float
    p10: float
    p90: float
