"""What is really so, as far as a simulation knows: the truth about jobs, and the jobs it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from stretto.core.allocation import Allocation
from stretto.core.job import Job
from stretto.core.observations import NoiseSample


class StepTime(NamedTuple):
    """One optimisation step without accumulation passes, and the part of it that waits for gradients."""

    step_s: float
    sync_s: float

    def total_s(self, accumulation: int) -> float:
        """A step with so many passes before it, which need not wait."""
        return self.step_s + accumulation * (self.step_s - self.sync_s)


class Truth(Protocol):
    """What is really so about one job; only a simulation knows it."""

    @property
    def epochs(self) -> int:
        """Training is really over after this many."""

    def units_at(self, epoch: int) -> float:
        """Cumulative statistical units after `epoch` epochs; 0 after none."""

    def step_time(self, allocation: Allocation, atomic: int) -> StepTime:
        """How long a step takes with `atomic` examples per worker."""

    def noise_at(self, total_batch: int, epoch: int) -> NoiseSample | None:
        """Gradient statistics during the epoch with index `epoch`; None: the batch makes no difference."""

    def loss_at(self, epoch: int) -> float | None:
        """What the job reports at the end of its `epoch`-th epoch (the first is 1), if that is known."""


@runtime_checkable
class TrialTruth(Truth, Protocol):
    """What is really so about a trial. One unit of its work is an epoch, and a step is one, too."""

    def result_at(self, epoch: int) -> float | None:
        """The study's metric at the end of its `epoch`-th epoch (the first is 1); None: not a number."""

    def slowness_at(self, epoch: int, allocation: Allocation) -> float:
        """How much longer than usual the epoch with index `epoch` takes on these nodes; 1: as usual."""


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
    """What a reader left out or made up, in sentences for people."""

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
    """The value of an epoch, refusing the negative and the too large rather than wrapping around."""
    if not 0 <= epoch - first < len(values):
        raise IndexError(f"epoch {epoch} is not one of {first}..{first + len(values) - 1}")
    return values[epoch - first]
