"""What a policy is given, and what it must answer."""

from __future__ import annotations

from dataclasses import dataclass
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
"""What a policy wants to remember between decisions: plain JSON data. None at the first decision."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One job as a policy sees it: what was asked for, what was observed, what is believed."""

    job: Job
    allocation: Allocation
    """What it holds now; empty while it waits."""
    batch: BatchChoice | None
    """The batch size it runs with; None while it waits."""
    age_s: float
    """Time since submission."""
    attained_gpu_s: float
    """GPU seconds held so far, starting and resizing included."""
    held_s: float = 0.0
    """Time it held GPUs so far, starting and resizing included."""
    start_age_s: float = 0.0
    """Time since its last start or resize was asked for."""
    epoch_age_s: float | None = None
    """Time since it began the epoch it is in; None until it is known to train."""
    restarts: int
    """Starts and resizes so far, the first start excluded."""
    work_done: float
    """Statistical units done, as last reported."""
    epoch: int
    """Epochs completed, as last reported."""
    results: tuple[Result, ...] = ()
    """Of a trial: what it showed at the end of each epoch."""
    start_times_s: tuple[float, ...] = ()
    """How long each start and resize took, as far as reported."""
    belief: Belief

    @property
    def id(self) -> str:
        return self.job.id

    def later(self, age_s: float, start_age_s: float) -> JobView:
        """The same job, which holds nothing, after some time: a copy, as thousands may wait."""
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
    """Every job that is submitted and not finished, in order of submission, but for those `hidden`."""
    refused: tuple[NodeRefused, ...] = ()
    """Every time nodes that were wished for did not come, in order."""
    arrivals: tuple[NodeAdded, ...] = ()
    """Every node that was rented and came, in order, with how long it took."""
    hidden: int = 0
    """Jobs besides `jobs`: each waits for its first start behind jobs that are like it but came before."""

    @property
    def capacity(self) -> Resources:
        return total_of([node.capacity for node in self.nodes])

    @property
    def job_count(self) -> int:
        """All jobs, also those that are not shown."""
        return len(self.jobs) + self.hidden

    @property
    def total_gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


class Policy(Protocol):
    """A pure function from a view to a decision: no clock, no I/O, no state of its own.

    A policy is usually a frozen dataclass whose fields are its options.
    """

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def interval_s(self) -> float:
        """It is asked at least this often."""

    @property
    def wakes_on(self) -> frozenset[str]:
        """Kinds of events that make it decide at once."""

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        """Who gets what from now on, and what to remember. It changes neither `view` nor `memory`."""


def is_built_in(policy: Policy) -> bool:
    """Whether the policy is one of ours: these treat jobs that differ only in age alike, the oldest first."""
    return type(policy).__module__.startswith("stretto.policies.")


class Oracle(Protocol):
    """The truth about jobs, for the policies that say in their name that they are told it."""

    def remaining_steps(self, job: Job, epoch: int) -> float:
        """Steps at the requested batch after the epoch in progress, `epoch` being done; at least one."""

    def step_s(self, job: Job, workers: int, gpus_per_node: int) -> float:
        """True time of a step at the requested batch, workers packed on the fewest nodes."""
