"""A job: one training run, what its tasks need, and how far a scheduler may resize it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stretto.core.resources import Resources

Value = float | int | str | bool
"""A hyperparameter's value."""


class Tier(StrEnum):
    """What a scheduler may change about a job."""

    RIGID = "rigid"
    """Nothing: the requested number of workers at the requested batch size."""
    ELASTIC = "elastic"
    """The number of workers; the total batch size stays as requested."""
    ADAPTIVE = "adaptive"
    """The number of workers and the batch size."""


class Communication(StrEnum):
    """How the workers of a job exchange gradients."""

    ALL_REDUCE = "all-reduce"
    PS_SYNC = "ps-sync"
    """With parameter servers; every step waits for all workers."""
    PS_ASYNC = "ps-async"
    """With parameter servers; each worker steps at its own pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of task of a job: what each task needs, and how many tasks there may be."""

    demand: Resources
    requested: int = 1
    min: int = 1
    max: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Batch sizes in examples: totals over all workers, and limits of one GPU."""

    initial: int
    """M0: the total batch size that the learning rate was chosen for; the unit of statistical work."""
    requested: int
    """The total batch size of a job that does not adapt it."""
    max: int
    per_gpu_min: int
    per_gpu_max: int
    accumulation: bool = True
    """Whether a worker may accumulate several passes before a step if its share does not fit on its GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """A job that ends when its normalised loss falls by less than `threshold` for `patience` epochs."""

    threshold: float
    patience: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """When a job is done: after a number of epochs, or at convergence (`epochs` is then None)."""

    units_per_epoch: float
    """Statistical units of one epoch: steps at the initial batch size."""
    epochs: int | None = None
    convergence: Convergence | None = None

    @property
    def total_units(self) -> float | None:
        return None if self.epochs is None else self.epochs * self.units_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run, as its owner submits it."""

    id: str
    application: str
    """Jobs of the same application share what was learned about its speed."""
    submit_s: float
    worker: Role
    server: Role | None = None
    """Parameter servers, if the job has any."""
    communication: Communication = Communication.ALL_REDUCE
    tier: Tier = Tier.RIGID
    batch: BatchLimits
    work: Work
    preemptible: bool = True
    """A running job that is not preemptible keeps exactly what it holds."""
    study: str | None = None
    """The study this job is a trial of."""
    config: tuple[tuple[str, Value], ...] = ()
    """A trial's hyperparameters by name."""
