"""The truth about simulated jobs, which policies never see; and workloads of such jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from stretto.core.allocation import Allocation
from stretto.core.job import Job
from stretto.core.observations import NoiseSample


class StepTime(NamedTuple):
    """Time of one optimisation step without accumulation passes, and the part that waits for gradients."""

    step_s: float
    sync_s: float

    def total_s(self, accumulation: int) -> float:
        """The time of a step with `accumulation` passes before it, which do not wait for gradients."""
        return self.step_s + accumulation * (self.step_s - self.sync_s)


class Truth(Protocol):
    """The truth about one job."""

    @property
    def epochs(self) -> int:
        """True number of epochs."""

    def units_at(self, epoch: int) -> float:
        """Cumulative statistical units after `epoch` epochs; 0 after none."""

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        """How long a step takes with `atomic` examples per worker."""

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        """Gradient statistics during the epoch with index `epoch`; None: the batch does not matter."""

    def loss_at(self, epoch: int) -> float | None:
        """The loss that the job reports after its `epoch`-th epoch (the first is 1), if known."""


@runtime_checkable
class TrialTruth(Truth, Protocol):
    """The truth about a trial. A step and a unit of work are one epoch."""

    def result_at(self, epoch: int) -> float | None:
        """The metric after its `epoch`-th epoch (the first is 1); None: not a number."""

    def slowness_at(self, epoch: int, allocation: Allocation) -> float:
        """Time of the epoch with index `epoch` on these nodes, relative to the usual time."""


class SimulatedJob(NamedTuple):
    """A job, and the truth about it."""

    job: Job
    truth: Truth


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of submission, and the truth about each of them by job id."""

    name: str
    jobs: tuple[Job, ...]
    truths: Mapping[str, Truth]
    notes: tuple[str, ...] = ()
    """Sentences for users on what was left out or drawn."""

    def truth_of(self, job: Job) -> Truth:
        return self.truths[job.id]


def make_workload(name: str, jobs: Iterable[tuple[Job, Truth]], notes: tuple[str, ...] = ()) -> Workload:
    """A workload of these jobs, sorted by the time of submission; jobs of the same time keep their order."""
    pairs = sorted(jobs, key=lambda pair: pair[0].submit_s)
    return Workload(
        name=name,
        jobs=tuple(job for job, _ in pairs),
        truths={job.id: truth for job, truth in pairs},
        notes=notes,
    )


def by_epoch(values: tuple[float, ...], epoch: int, *, first: int = 0) -> float:
    """The value of an epoch; IndexError for one that is negative or too large."""
    if not 0 <= epoch - first < len(values):
        raise IndexError(f"epoch {epoch} is not one of {first}..{first + len(values) - 1}")
    return values[epoch - first]


def even_units(epoch: int, epochs: int, units_per_epoch: float) -> float:
    """Cumulative units of epochs with equal work; IndexError for an epoch that is negative or too large."""
    if not 0 <= epoch <= epochs:
        raise IndexError(f"epoch {epoch} is not one of 0..{epochs}")
    return epoch * units_per_epoch
