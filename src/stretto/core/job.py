"""A job: one training run, what its tasks need, and how far it may be stretched."""

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
    """Parameter servers; every step waits for all workers."""
    PS_ASYNC = "ps-async"
    """Parameter servers; each worker steps at its own pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of task of a job: what each such task needs and how many there may be."""

    demand: Resources
    requested: int = 1
    min: int = 1
    max: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Batch sizes in examples: totals over all workers, and what one GPU can hold at once."""

    initial: int
    """M0: the total batch size the job's learning rate was chosen for; statistical work is counted in it."""
    requested: int
    """The total batch size of a job whose batch is not adapted."""
    max: int
    per_gpu_min: int
    per_gpu_max: int
    accumulation: bool = True
    """Whether a worker may add up several passes before a step when its share does not fit at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """A job that ends when its normalised loss falls by less than `threshold` for `patience` epochs."""

    threshold: float
    patience: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """When a job is done: after a number of epochs, or at convergence (then `epochs` is unknown)."""

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
    """Jobs of one application share what was learned about its speed."""
    submit_s: float
    worker: Role
    server: Role | None = None
    """Parameter servers, for the jobs that have them."""
    communication: Communication = Communication.ALL_REDUCE
    tier: Tier = Tier.RIGID
    batch: BatchLimits
    work: Work
    preemptible: bool = True
    """Once started, a job that is not preemptible keeps exactly what it has."""
    study: str | None = None
    """The study this job is a trial of."""
    config: tuple[tuple[str, Value], ...] = ()
    """A trial's hyperparameters by name."""
