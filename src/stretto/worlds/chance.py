"""Random quantities of simulated worlds."""

from __future__ import annotations

import math

import numpy as np

from stretto.worlds.curves import Floats


def lognormal(mean: float, sd: float, count: int, rng: np.random.Generator) -> Floats:
    """Log-normal draws with this mean and standard deviation; a mean of 0 is never exceeded.

    exp(N(mu, s^2)) has mean exp(mu + s^2 / 2) and relative variance exp(s^2) - 1.
    """
    if mean == 0.0 or sd == 0.0:
        return np.full(count, mean)
    variance = math.log1p((sd / mean) ** 2)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
