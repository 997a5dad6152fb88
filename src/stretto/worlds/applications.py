"""What can be trained in a simulation: applications with their limits and truth, six of them built in.

- Speed: parameters are fitted to step times of 1 to 64 GPUs in nodes of four; the mean error is 4 to 9 %.
  cifar10 is fitted at usable total batch sizes only; a pass of ncf takes as long as on one GPU.
- Noise scale: condensed from training runs at the smallest, a middle and the largest batch size. Near each
  point of training it is the phi with the same mean M0 / (phi + M0), because time per unit of progress is
  linear in that. An epoch with infinite phi (no gradient signal left) counts as one in which every example
  helps.
- Loss: the validation metric at the smallest batch; for a metric that rises, its distance from 1 or 100 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.errors import InputError, did_you_mean
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.observations import NoiseSample
from stretto.core.resources import Resources
from stretto.models.speed import AllReduceSpeed, Floats
from stretto.worlds.truth import StepTime, Truth, by_epoch, even_units

MOST_WORKERS = 64
"""No application was measured with more GPUs."""


class Configuration(NamedTuple):
    """A number of GPUs and the total batch size on them."""

    workers: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """One kind of training run."""

    name: str
    truth: Truth
    initial_batch: int
    max_batch: int
    per_gpu_min: int
    per_gpu_max: int
    tier: Tier = Tier.ADAPTIVE
    max_workers: int = MOST_WORKERS
    """The most a scheduler may give; a rigid job may request more."""
    tuned: tuple[Configuration, ...] = ()
    """Well-chosen requests: each uses its GPUs at 50 to 80 % of the efficiency of one."""

    def job(self, job_id: str, submit_s: float, request: Configuration, *, where: str = "") -> Job:
        """A job with this request; InputError if the application cannot be trained with it."""
        self._check(request, where)
        limit = min(self.max_workers, self._workers_limit)
        return Job(
            id=job_id,
            application=self.name,
            submit_s=submit_s,
            tier=self.tier,
            worker=Role(
                demand=Resources(gpu=1),
                requested=request.workers,
                min=1,
                max=max(limit, request.workers) if self.tier is Tier.RIGID else limit,
            ),
            batch=BatchLimits(
                initial=self.initial_batch,
                requested=request.batch,
                max=self.max_batch,
                per_gpu_min=self.per_gpu_min,
                per_gpu_max=self.per_gpu_max,
            ),
            work=Work(
                units_per_epoch=self.truth.units_at(self.truth.epochs) / self.truth.epochs,
                epochs=self.truth.epochs,
            ),
        )

    @property
    def _workers_limit(self) -> int:
        return min(MOST_WORKERS, self.max_batch // self.per_gpu_min)

    def _check(self, request: Configuration, where: str) -> None:
        if not 1 <= request.workers <= self._workers_limit:
            raise InputError(
                f"{request.workers} replicas of {self.name}; it can use 1 to {self._workers_limit}.",
                where=where,
                remedy="Give a number in this range.",
            )
        if not self.initial_batch <= request.batch <= self.max_batch:
            raise InputError(
                f"batch size {request.batch} of {self.name} is outside the known "
                f"{self.initial_batch}..{self.max_batch}.",
                where=where,
                remedy="Give a total batch size in this range.",
            )
        if request.batch < request.workers * self.per_gpu_min:
            raise InputError(
                f"batch size {request.batch} over {request.workers} replicas of {self.name} leaves less than "
                f"{self.per_gpu_min} examples for each, the fewest one GPU can take.",
                where=where,
                remedy="Give a larger batch size or fewer replicas.",
            )


@dataclass(frozen=True, slots=True)
class Applications:
    """Applications by name."""

    source: str
    """Their source, for messages."""
    entries: Mapping[str, Application]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Applications that were found but cannot be used, and why."""

    def get(self, name: str, *, where: str = "") -> Application:
        """The application of this name; InputError with the names that exist."""
        found = self.entries.get(name)
        if found is not None:
            return found
        if name in self.left_out:
            raise InputError(
                f"application {name!r} cannot be used: {self.left_out[name]}.",
                where=where,
                remedy="Add the missing file or take the job out.",
            )
        raise InputError(
            f"unknown application {_short(name)}; {self.source} has {', '.join(sorted(self.entries))}.",
            where=where,
            remedy=f"{did_you_mean(name, self.entries)}Use one of these, or give a folder with its profile.",
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The noise scale phi (in examples) at one batch size, at even steps over training."""

    batch: int
    phi: tuple[float, ...]


class ModelTruth:
    """The truth as formulas, with a cache. Jobs of one application share it.

    log phi is linear over training between the points of a curve, and linear in the logarithm of the
    batch size between curves; batches outside the curves count as the nearest one.
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
        return even_units(epoch, self._epochs, self._units_per_epoch)

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        """Depends on the numbers of nodes and workers, not on the spread over nodes."""
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


@cache
def builtin_catalogue() -> Applications:
    """The built-in applications."""
    entries = (_bert(), _cifar10(), _deepspeech2(), _imagenet(), _ncf(), _yolov3())
    return Applications("the built-in catalogue", {entry.name: entry for entry in entries})


def _bert() -> Application:
    """Fine-tuning on SQuAD; the loss is 100 - F1."""
    return Application(
        name="bert",
        initial_batch=12,
        max_batch=384,
        per_gpu_min=4,
        per_gpu_max=12,
        tuned=_configurations((6, 384), (8, 384), (12, 384), (16, 384)),
        truth=ModelTruth(
            epochs=2,
            units_per_epoch=7387.0,
            initial_batch=12,
            speed=AllReduceSpeed(0.1719, 0.05861, 1.386, 0.009431, 0.2842, 0.009618, 1.902),
            noise=(
                NoiseCurve(12, (423, 1120)),
                NoiseCurve(96, (2210, 6710)),
                NoiseCurve(384, (11200, 12800)),
            ),
            losses=(13.3, 11.4),
        ),
    )


def _cifar10() -> Application:
    """ResNet-18; the loss is 1 - accuracy."""
    return Application(
        name="cifar10",
        initial_batch=128,
        max_batch=4096,
        per_gpu_min=32,
        per_gpu_max=1024,
        tuned=_configurations((6, 2048), (8, 2048), (12, 4096), (16, 4096)),
        truth=ModelTruth(
            epochs=100,
            units_per_epoch=390.63,
            initial_batch=128,
            speed=AllReduceSpeed(0.01882, 6.758e-4, 0.1239, 0.002661, 0.03668, 1.102e-4, 2.139),
            noise=(
                NoiseCurve(128, (174, 694, 2070, 2880, 3750, 4810, 6450, 9670, 16700, 25100, 32100)),
                NoiseCurve(1024, (448, 1960, 4160, 6230, 9140, 14000, 24600, 39200, 57900, 76900, 69500)),
                NoiseCurve(4096, (442, 2130, 5360, 7960, 11300, 17600, 32300, 70500, 126e3, 138e3, 137e3)),
            ),
            losses=(0.554, 0.159, 0.115, 0.105, 0.0818, 0.0749, 0.0687, 0.0589, 0.0557, 0.0556, 0.0552),
        ),
    )


def _deepspeech2() -> Application:
    """Speech recognition; the loss is the word error rate in percent."""
    return Application(
        name="deepspeech2",
        initial_batch=20,
        max_batch=640,
        per_gpu_min=10,
        per_gpu_max=80,
        tuned=_configurations((6, 320), (8, 320), (12, 640)),
        truth=ModelTruth(
            epochs=80,
            units_per_epoch=356.7,
            initial_batch=20,
            speed=AllReduceSpeed(0.3111, 0.02384, 0.4871, 0.009818, 0.08394, 0.00137, 1.413),
            noise=(
                NoiseCurve(20, (20.8, 150, 1250, 4680, 15700, 26700, 52700, 467e3, 452e3, 233e3, 339e3)),
                NoiseCurve(160, (59.5, 473, 2380, 11800, 27e3, 27600, 30600, 25600, 28300, 38100, 42200)),
                NoiseCurve(640, (69, 566, 1740, 3610, 6210, 21800, 77200, 170e3, 89e3, 99300, 91900)),
            ),
            losses=(99.5, 50.9, 35.6, 28.7, 24.2, 23.5, 23.0, 22.9, 23.0, 23.0, 22.9),
        ),
    )


def _imagenet() -> Application:
    """ResNet-50; the loss is 1 - accuracy."""
    return Application(
        name="imagenet",
        initial_batch=200,
        max_batch=12800,
        per_gpu_min=20,
        per_gpu_max=200,
        tuned=_configurations((24, 3200), (32, 6400), (48, 6400)),
        truth=ModelTruth(
            epochs=90,
            units_per_epoch=6405.8,
            initial_batch=200,
            speed=AllReduceSpeed(0.06417, 0.00448, 0.2994, 0.006638, 0.02649, 5.4e-5, 2.470),
            noise=(
                NoiseCurve(200, (2480, 5200, 5870, 6790, 11100, 11400, 11400, 13700, 14300, 14300, 14400)),
                NoiseCurve(1600, (2820, 6900, 8670, 11300, 33100, 31700, 31500, 63700, 91600, 89100, 87800)),
                NoiseCurve(
                    12800, (3060, 9390, 11800, 15300, 45700, 41800, 40200, 105e3, 212e3, 187e3, 175e3)
                ),
            ),
            losses=(0.844, 0.520, 0.465, 0.467, 0.304, 0.305, 0.306, 0.255, 0.247, 0.245, 0.244),
        ),
    )


def _ncf() -> Application:
    """Recommendation; the loss is 1 - hit rate. It can use one GPU only, so it is not adaptive."""
    return Application(
        name="ncf",
        initial_batch=256,
        max_batch=32768,
        per_gpu_min=32,
        per_gpu_max=32768,
        tier=Tier.RIGID,
        max_workers=1,
        tuned=_configurations((1, 32768)),
        truth=ModelTruth(
            epochs=10,
            units_per_epoch=19417.4,
            initial_batch=256,
            speed=AllReduceSpeed(0.007579, 4.426e-7, 0.01748, 5.56e-4, 0.005999, 4.4e-8, 1.248),
            noise=(
                NoiseCurve(
                    256, (18.6e3, 7.67e6, 297e3, 6.9e6, 7.49e6, 20.8e6, 18.3e6, 47.8e6, 39.2e6, 59.1e6)
                ),
                NoiseCurve(
                    4096, (161e3, 890e3, 738e3, 1.46e6, 3.35e6, 6.11e6, 5.83e6, 14.3e6, 15.1e6, 16.3e6)
                ),
                NoiseCurve(32768, (207e3, 1.87e6, 1.7e6, 1.68e6, 4.19e6, 8.12e6, 7.1e6, 57e6, 65e6, 63.7e6)),
            ),
            losses=(0.376, 0.329, 0.322, 0.310, 0.307, 0.305, 0.304, 0.304, 0.306, 0.305),
        ),
    )


def _yolov3() -> Application:
    """Object detection; the loss is the validation loss."""
    return Application(
        name="yolov3",
        initial_batch=8,
        max_batch=512,
        per_gpu_min=4,
        per_gpu_max=8,
        tuned=_configurations((4, 64)),
        truth=ModelTruth(
            epochs=50,
            units_per_epoch=2068.88,
            initial_batch=8,
            speed=AllReduceSpeed(0.1871, 0.02538, 0.7491, 0.01071, 0.1283, 0.01744, 1.108),
            noise=(
                NoiseCurve(8, (15.3, 264, 346, 449, 500, 506, 640, 846, 1470, 2790, 5440)),
                NoiseCurve(64, (15.0, 284, 357, 398, 456, 480, 674, 898, 1350, 2840, 8000)),
                NoiseCurve(512, (14.7, 298, 405, 437, 512, 617, 790, 945, 1360, 1600, 1880)),
            ),
            losses=(25.4, 17.3, 16.3, 15.4, 14.2, 13.3, 13.2, 12.9, 12.8, 12.9, 12.3),
        ),
    )


def _configurations(*pairs: tuple[int, int]) -> tuple[Configuration, ...]:
    return tuple(Configuration(*pair) for pair in pairs)
