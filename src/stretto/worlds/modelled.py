"""Truth from formulas: the all-reduce speed model, and curves of the gradient noise scale over training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.observations import NoiseSample
from stretto.models.speed import AllReduceSpeed, Floats
from stretto.worlds.truth import StepTime, by_epoch


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The noise scale phi (in examples) of training at one batch size, at even steps from start to end."""

    batch: int
    phi: tuple[float, ...]


class ModelTruth:
    """What the formulas say. Jobs of one application share it, and what it remembers.

    log phi is linear over training between the points of a curve, and linear in the logarithm of the
    batch size between curves; smaller and larger batches than those of the curves are like the nearest.
    """

    def __init__(
        self,
        *,
        epochs: int,
        units_per_epoch: float,
        initial_batch: int,
        speed: AllReduceSpeed,
        noise: Sequence[NoiseCurve],
        losses: Sequence[float],
    ) -> None:
        self._epochs = epochs
        self._units_per_epoch = units_per_epoch
        self._initial_batch = initial_batch
        self.speed = speed
        self._log_batches = np.log([curve.batch for curve in noise])
        self._log_phi = np.array([_stretch(np.log(curve.phi), epochs) for curve in noise])
        self._losses = tuple(_stretch(np.array(losses), epochs).tolist())
        self._times: dict[tuple[int, int, int], StepTime] = {}
        self._noise: dict[tuple[int, int], NoiseSample] = {}

    @property
    def epochs(self) -> int:
        return self._epochs

    def units_at(self, epoch: int) -> float:
        if not 0 <= epoch <= self._epochs:
            raise IndexError(f"epoch {epoch} is not one of 0..{self._epochs}")
        return epoch * self._units_per_epoch

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        """Depends on the numbers of nodes and workers only, not on how they are spread."""
        key = (len(allocation.workers), allocation.worker_count, atomic)
        known = self._times.get(key)
        if known is None:
            step_s = float(self.speed.step_s(*key))
            known = self._times[key] = StepTime(step_s, step_s - float(self.speed.pass_s(atomic)))
        return known

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample:
        known = self._noise.get((total_batch, epoch))
        if known is None:
            known = self._noise[total_batch, epoch] = self._interpolate_noise(total_batch, epoch)
        return known

    def loss_at(self, epoch: int) -> float | None:
        return by_epoch(self._losses, epoch, first=1)

    def _interpolate_noise(self, total_batch: int, epoch: int) -> NoiseSample:
        if not 0 <= epoch < self._epochs:
            raise IndexError(f"epoch {epoch} is not one of 0..{self._epochs - 1}")
        phi = np.exp(np.interp(np.log(total_batch), self._log_batches, self._log_phi[:, epoch]))
        return NoiseSample(sqr=1.0, var=float(phi) / self._initial_batch)


def _stretch(values: Floats, epochs: int) -> Floats:
    """A value per epoch from points at even steps over training."""
    return np.interp(np.linspace(0.0, 1.0, epochs), np.linspace(0.0, 1.0, len(values)), values)
