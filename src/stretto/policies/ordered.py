"""A base class for policies of ten lines: an order of the jobs, and how many workers each gets.

    class LargestFirst(OrderedPolicy):
        def key(self, job: JobView) -> float:
            return -job.job.worker.requested

Jobs are served by their key, the smallest first, and packed on as few nodes as possible. A job that does not
fit waits, and later jobs that fit may start before it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from stretto.allocate.free import FreeCapacity, place_packed
from stretto.core.allocation import Allocation
from stretto.core.decision import Decision, ReasonCode
from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, fixed_size_decision
from stretto.policies.gangs import (
    EmptyCluster,
    GangSize,
    held_gang,
    keep_running,
    never_fits,
    pinned,
    requested_gang,
    shortage,
)


@dataclass(frozen=True, kw_only=True)
class OrderedPolicy(ABC):
    """Serves jobs in the order of `key`, each with `size` workers. Fields of a subclass are its options."""

    name: ClassVar[str]
    """By default derived from the name of the class: LargestFirst is `largest-first`."""
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    preempts: ClassVar[bool] = False
    """Whether running jobs may be stopped or resized for jobs earlier in the order."""
    interval_s: float = 60.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    @abstractmethod
    def key(self, job: JobView) -> Any:
        """The job's place in line: the smallest key is served first, equal keys in order of submission."""

    def size(self, job: JobView, view: ClusterView) -> int:
        """How many workers an elastic job gets; a rigid job always gets what it requested."""
        del view
        return job.job.worker.requested

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        keys = {job.id: self.key(job) for job in view.jobs}
        try:
            line = sorted(view.jobs, key=lambda job: keys[job.id])
        except TypeError as error:
            raise InputError(
                f"the keys of policy {self.name} cannot be sorted: {error}.",
                remedy="Return a number from key(), or tuples of equal shape.",
            ) from error
        gangs = {job.id: self._gang(job, view) for job in line}
        free, empty = FreeCapacity(view.nodes), EmptyCluster(view.nodes)
        allocations = keep_running([job for job in line if pinned(job) or not self.preempts], free)
        waits = _serve([job for job in line if job.id not in allocations], gangs, allocations, free, empty)

        def why(job: JobView, code: ReasonCode) -> str:
            if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
                return f"{waits[job.id]} Its key is {_shown(keys[job.id])}."
            return f"Its key is {_shown(keys[job.id])}: it gets {held_gang(allocations[job.id])}."

        return fixed_size_decision(view, allocations, why), memory

    def _gang(self, job: JobView, view: ClusterView) -> GangSize:
        requested = requested_gang(job.job)
        if job.job.tier is Tier.RIGID:
            return requested
        workers: object = self.size(job, view)
        role = job.job.worker
        if not isinstance(workers, int | np.integer) or not role.min <= workers <= role.max:
            raise InputError(
                f"policy {self.name} gives {job.id} {workers!r} workers.",
                remedy=f"It takes {role.min} to {role.max}: return such a whole number from size().",
            )
        return GangSize(int(workers), requested.servers)


def _serve(
    line: Sequence[JobView],
    gangs: dict[str, GangSize],
    allocations: dict[str, Allocation],
    free: FreeCapacity,
    empty: EmptyCluster,
) -> dict[str, str]:
    """Packs the jobs in line into free capacity; returns the reason of each that must wait."""
    waits: dict[str, str] = {}
    for job in line:
        gang = gangs[job.id]
        stays = held_gang(job.allocation) == gang and free.holds(job.job, job.allocation)
        allocation = job.allocation if stays else place_packed(job.job, *gang, free)
        if allocation is None:
            waits[job.id] = never_fits(job, gang, empty) or shortage(job, gang, free)
            continue
        free.take(job.job, allocation)
        allocations[job.id] = allocation
    return waits


def _shown(key: Any) -> str:
    return f"{key:g}" if isinstance(key, int | float) else str(key)
