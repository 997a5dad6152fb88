"""Synthetic workloads: a published mix of jobs over a working day, and a small fixed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.core.allocation import Allocation
from stretto.core.errors import InputError
from stretto.core.observations import NoiseSample
from stretto.core.seeds import child_rng
from stretto.models.speed import Floats
from stretto.planning.profile import Scaling
from stretto.worlds.applications import Applications, builtin_catalogue
from stretto.worlds.truth import StepTime, Workload, even_units, make_workload

MIX = (
    ("ncf", 0.39),
    ("cifar10", 0.39),
    ("deepspeech2", 0.09),
    ("bert", 0.07),
    ("yolov3", 0.04),
    ("imagenet", 0.02),
)
"""Share of jobs of each application."""

DEMO_MIX = (("ncf", 13), ("cifar10", 16), ("deepspeech2", 5), ("bert", 4), ("yolov3", 2))
"""Jobs of the demo; none trains for a day."""


def synthetic_workload(
    rng: np.random.Generator,
    *,
    jobs: int = 160,
    hours: float = 8.0,
    name: str = "synthetic",
    applications: Applications | None = None,
) -> Workload:
    """`jobs` jobs over `hours`, drawn from the mix, each with a tuned request of its application."""
    if jobs < 1:
        raise InputError(f"jobs is {jobs}.", remedy="Ask for 1 job or more.")
    if not 0 < hours < float("inf"):
        raise InputError(f"hours is {hours}.", remedy="Ask for more than 0 hours.")
    shares = np.array([share for _, share in MIX])
    drawn = rng.choice(len(MIX), size=jobs, p=shares / shares.sum())
    return _workload(name, [MIX[i][0] for i in drawn], hours, rng, applications or builtin_catalogue())


def demo_workload() -> Workload:
    """Forty jobs in two hours, always the same."""
    rng = child_rng(0, "demo workload")
    names = [name for name, count in DEMO_MIX for _ in range(count)]
    rng.shuffle(names)
    return _workload("demo", names, 2.0, rng, builtin_catalogue())


@dataclass(frozen=True, slots=True)
class TimedTruth:
    """The truth about a job with a stated speed: one step is one epoch, whatever the batch size."""

    epochs: int
    epoch_s: float
    """Time of an epoch on one GPU."""
    scaling: Scaling

    def units_at(self, epoch: int) -> float:
        return even_units(epoch, self.epochs, 1.0)

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        """epoch_s / speedup(GPUs)."""
        del atomic
        return StepTime(self.epoch_s / self.scaling.speedup(allocation.worker_count), 0.0)

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        """None: the batch size is fixed."""
        del total_batch, epoch
        return None

    def loss_at(self, epoch: int) -> float | None:
        """None: the job reports no loss."""
        del epoch
        return None


def _workload(
    name: str, names: Sequence[str], hours: float, rng: np.random.Generator, applications: Applications
) -> Workload:
    known = []
    for index, (kind, submit_s) in enumerate(zip(names, _arrivals_s(len(names), hours, rng), strict=True)):
        application = applications.get(kind)
        request = application.tuned[rng.integers(len(application.tuned))]
        known.append((application.job(f"{kind}-{index}", float(submit_s), request), application.truth))
    return make_workload(name, known)


def _arrivals_s(count: int, hours: float, rng: np.random.Generator) -> Floats:
    """Times of a Poisson process with a given count; its rate triples until midday and falls again.

    rate(t) ~ 2 - cos(2 pi t / T), T a day or, if that is shorter, the whole time.
    """
    end_s = 3600.0 * hours
    day_s = min(end_s, 86400.0)
    grid_s = np.linspace(0.0, end_s, 10_001)
    turn = 2 * np.pi / day_s
    jobs_until = 2 * grid_s - np.sin(turn * grid_s) / turn
    at_s: Floats = np.interp(np.sort(rng.random(count)) * jobs_until[-1], jobs_until, grid_s)
    return at_s.round(3)
