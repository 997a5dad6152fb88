"""The interface of a policy: what it sees, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.cluster import Node
from stretto.core.decision import Decision
from stretto.core.events import NodeAdded, NodeRefused
from stretto.core.job import Job
from stretto.core.observations import Result
from stretto.core.resources import Resources, total_of
from stretto.models.belief import Belief

Memory = Any
"""What a policy remembers between decisions, as plain JSON data; None at the first decision."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One job as a policy sees it: the request, the observations, and the belief."""

    job: Job
    allocation: Allocation
    """What it holds now; empty while it waits."""
    batch: BatchChoice | None
    """The batch size it runs with; None while it waits."""
    age_s: float
    """Time since submission."""
    attained_gpu_s: float
    """GPU seconds held so far, including starts and resizes."""
    held_s: float = 0.0
    """Time it held GPUs so far, including starts and resizes."""
    start_age_s: float = 0.0
    """Time since its last start or resize was requested."""
    epoch_age_s: float | None = None
    """Time since the start of its current epoch; None until it is known to train."""
    restarts: int
    """Starts and resizes so far, without the first start."""
    work_done: float
    """Statistical units done, as last reported."""
    epoch: int
    """Epochs completed, as last reported."""
    results: tuple[Result, ...] = ()
    """For a trial: its results, one per epoch."""
    start_times_s: tuple[float, ...] = ()
    """How long each reported start and resize took."""
    belief: Belief

    @property
    def id(self) -> str:
        return self.job.id

    def later(self, age_s: float, start_age_s: float) -> JobView:
        """The same waiting job at a later time; a fast copy, since thousands of jobs may wait."""
        copy = object.__new__(JobView)
        copy.__dict__.update(self.__dict__, age_s=age_s, start_age_s=start_age_s)
        return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Everything a decision may depend on."""

    now_s: float
    nodes: tuple[Node, ...]
    """Where tasks may be placed, in a fixed order."""
    jobs: tuple[JobView, ...]
    """Every unfinished job, in order of submission, except those that are `paused` or `hidden`."""
    refused: tuple[NodeRefused, ...] = ()
    """Every refusal of requested nodes so far, in order."""
    arrivals: tuple[NodeAdded, ...] = ()
    """Every rented node that came so far, in order, with its delays."""
    paused: Mapping[str, JobView] = field(default_factory=dict)
    """Paused trials, for a policy that `looks_up_paused`. The views are valid during the decision only."""
    hidden: int = 0
    """Number of waiting jobs that are not in `jobs`, because equal jobs that came earlier also wait."""

    @property
    def capacity(self) -> Resources:
        return total_of([node.capacity for node in self.nodes])

    @property
    def job_count(self) -> int:
        """The number of all jobs, including paused and hidden ones."""
        return len(self.jobs) + len(self.paused) + self.hidden

    def including(self, trials: Iterable[str]) -> ClusterView:
        """The same view, with those of `trials` that are paused among its jobs."""
        paused = tuple(self.paused[trial] for trial in trials if trial in self.paused)
        return replace(self, jobs=self.jobs + paused) if paused else self

    @property
    def total_gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


class Policy(Protocol):
    """A pure function from a view to a decision: no clock, no I/O, no state of its own.

    A policy is usually a frozen dataclass whose fields are its options. A policy may have a class attribute
    `looks_up_paused = True`: then a trial that waits after its first start leaves `view.jobs` for
    `view.paused` once a decision has repeated the reason for which it waits. It comes back when it reports
    something, and when a decision changes it or gives another reason.
    """

    @property
    def name(self) -> str:
        """The name by which users select it."""

    @property
    def interval_s(self) -> float:
        """The policy decides at least this often."""

    @property
    def wakes_on(self) -> frozenset[str]:
        """Kinds of events after which it decides at once."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        """Returns who gets what from now on, and the new memory. It changes neither `view` nor `memory`."""


def is_built_in(policy: Policy) -> bool:
    """Whether the policy is one of ours; ours serve jobs that differ only in age oldest first."""
    return type(policy).__module__.startswith("stretto.policies.")


class Oracle(Protocol):
    """The truth about jobs, which only policies with `oracle` in their name may see."""

    def remaining_steps(self, job: Job, epoch: int) -> float:
        """Steps left at the requested batch after the current epoch, with `epoch` completed; at least one."""

    def step_s(self, job: Job, workers: int, gpus_per_node: int) -> float:
        """True time of a step at the requested batch, with workers packed on the fewest nodes."""
