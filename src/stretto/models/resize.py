"""The restart penalty: how long a job does not train when it starts or is resized.

A job's own times are shrunk toward those of its application, and these toward a default:

    application = (default + sum of the application's times) / (1 + their number)
    expected    = (2 application + sum of the job's own times) / (2 + their number)

So the default counts as one time of the application, and the application as two times of the job. The spread,
as relative variance v, is shrunk in the same way, from 0.3^2 for the default:

    v   = mean of (time / expected - 1)^2 over the same weighted times
    p90 = expected (1 + 1.28 sqrt(v))
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_RESIZE_S = 30.0
WARM_RESIZE_S = 5.0
"""The default of real runs: workers start with the training code loaded, and a resize stops no worker."""
DEFAULT_WEIGHT = 1.0
"""The default counts as this many times of the application."""
APPLICATION_WEIGHT = 2.0
"""The application counts as this many times of the job."""
DEFAULT_VARIATION = 0.3
"""Standard deviation of start times relative to their mean, before any was seen."""
NORMAL_P90 = 1.2816
"""The 90 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """The restart penalty: time without progress at a start or resize."""

    expected_s: float
    p90_s: float
    """The 90 % quantile."""
    samples: int
    """Number of measured times, of the job and of its application; 0: this is the default."""


@dataclass(slots=True)
class TimesSeen:
    """Measured times, as running sums of constant size."""

    count: int = 0
    sum_s: float = 0.0
    squares: float = 0.0

    def add(self, time_s: float) -> None:
        self.count += 1
        self.sum_s += time_s
        self.squares += time_s * time_s

    def add_all(self, others: TimesSeen) -> None:
        self.count += others.count
        self.sum_s += others.sum_s
        self.squares += others.squares

    def deviation(self, expected_s: float) -> float:
        """The sum of (time / expected - 1)^2."""
        relative = self.squares / expected_s**2 - 2.0 * self.sum_s / expected_s + self.count
        return max(relative, 0.0)


def learn_resize_cost(
    own: Iterable[float], prior: Iterable[float] = (), default_s: float = DEFAULT_RESIZE_S
) -> ResizeCost:
    """The expected time of the next resize, from the times of the job and of its application (`prior`)."""
    own_times, prior_times = TimesSeen(), TimesSeen()
    for times, seen_s in ((own_times, own), (prior_times, prior)):
        for time_s in seen_s:
            times.add(time_s)
    return expected_resize_cost(own_times, prior_times, default_s)


def expected_resize_cost(
    own: TimesSeen, prior: TimesSeen | None = None, default_s: float = DEFAULT_RESIZE_S
) -> ResizeCost:
    """The expected time of the next resize, from running sums of times."""
    prior = prior or TimesSeen()

    def shrunk(default: float, of_application: float, of_job: float) -> float:
        application = (DEFAULT_WEIGHT * default + of_application) / (DEFAULT_WEIGHT + prior.count)
        return (APPLICATION_WEIGHT * application + of_job) / (APPLICATION_WEIGHT + own.count)

    expected_s = shrunk(default_s, prior.sum_s, own.sum_s)
    if expected_s == 0.0:
        return ResizeCost(0.0, 0.0, own.count + prior.count)
    variance = shrunk(DEFAULT_VARIATION**2, prior.deviation(expected_s), own.deviation(expected_s))
    p90_s = expected_s * (1.0 + NORMAL_P90 * math.sqrt(variance))
    return ResizeCost(expected_s, p90_s, own.count + prior.count)
