"""How long a job stands still when it starts or is resized.

A job's own times are shrunk toward those of its application, and these toward a default:

    application = (default + sum of the application's times) / (1 + their number)
    expected    = (2 application + sum of the job's own times) / (2 + their number)

so that the default counts as one time seen of the application, and the application as two seen of the
job. The spread, as relative variance v, is shrunk the same way, from 0.3^2 for the default:

    v   = mean of (time / expected - 1)^2 over the same weighted times
    p90 = expected (1 + 1.28 sqrt(v))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_RESIZE_S = 30.0
DEFAULT_WEIGHT = 1.0
"""The default counts as this many times seen of the application."""
APPLICATION_WEIGHT = 2.0
"""The application counts as this many times seen of the job."""
DEFAULT_VARIATION = 0.3
"""Standard deviation of start times relative to their mean, before any was seen."""
NORMAL_P90 = 1.2816
"""The standard normal is below this nine times out of ten."""


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """Time without progress at a start or resize."""

    expected_s: float
    p90_s: float
    """Nine out of ten take no longer."""
    samples: int
    """Times measured, of the job and of its application; with none, this is the default."""


def learn_resize_cost(
    own: Sequence[float], prior: Sequence[float] = (), default_s: float = DEFAULT_RESIZE_S
) -> ResizeCost:
    """What the next resize will take, from the times seen of the job and, before it, of its application."""

    def shrunk(default: float, of_application: Sequence[float], of_job: Sequence[float]) -> float:
        application = (DEFAULT_WEIGHT * default + sum(of_application)) / (
            DEFAULT_WEIGHT + len(of_application)
        )
        return (APPLICATION_WEIGHT * application + sum(of_job)) / (APPLICATION_WEIGHT + len(of_job))

    expected_s = shrunk(default_s, prior, own)
    if expected_s == 0.0:
        return ResizeCost(0.0, 0.0, len(own) + len(prior))
    variance = shrunk(DEFAULT_VARIATION**2, _squared(prior, expected_s), _squared(own, expected_s))
    p90_s = expected_s * (1.0 + NORMAL_P90 * math.sqrt(variance))
    return ResizeCost(expected_s, p90_s, len(own) + len(prior))


def _squared(times_s: Sequence[float], expected_s: float) -> list[float]:
    """Squared relative deviations."""
    return [(time_s / expected_s - 1.0) ** 2 for time_s in times_s]
