"""How much a larger batch is worth: the gradient noise scale and statistical efficiency.

With |g|^2 = sqr and the trace of the gradient's covariance at the initial batch M0 = var, the noise
scale is phi = M0 var / sqr examples, and one step at batch M = r M0 makes as much progress as

    gain(r) = (var + sqr) / (var / r + sqr)

steps at M0. Efficiency, the progress per example, is gain / r = (phi + M0) / (phi + M).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.core.observations import NoiseSample
from stretto.models.speed import Floats, Numbers


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Gradient statistics at the initial batch size."""

    sqr: float
    var: float
    initial_batch: int

    @property
    def noise_scale(self) -> float:
        """Phi in examples; infinite if no gradient signal is left."""
        return self.initial_batch * self.var / self.sqr if self.sqr > 0 else float("inf")

    def gain(self, batch: Numbers) -> Floats:
        """How many steps at the initial batch one step at `batch` is worth."""
        return gain(self.sqr, self.var, np.asarray(batch, dtype=float) / self.initial_batch)

    def efficiency(self, batch: Numbers) -> Floats:
        """Progress per example relative to the initial batch."""
        return np.asarray(self.gain(batch) * self.initial_batch / np.asarray(batch, dtype=float))


PERFECTLY_SCALABLE = NoiseSample(sqr=0.0, var=1.0)
"""Assumed for a job without measurements: every example counts in full, whatever the batch size."""


def gain(sqr: Numbers, var: Numbers, scale: Numbers) -> Floats:
    """The gain at r = scale; 1 if both statistics are zero."""
    left = np.asarray(var / scale + sqr)
    return np.asarray(np.divide(var + sqr, left, out=np.ones_like(left), where=left > 0))


def step_gain(noise: NoiseSample | None, initial_batch: int, total_batch: int) -> float:
    """How many steps at the initial batch one step is worth; 1 without gradient statistics."""
    if noise is None:
        return 1.0
    return float(GradientNoise(noise.sqr, noise.var, initial_batch).gain(total_batch))
