"""Tetris: packing over several resources, with a preference for jobs with little remaining work.

While anything fits, the pair of a job's next bundle and a node with the best score is granted:

    score(job, node) = alignment - eps (mean alignment / mean remaining work) remaining work

    alignment      = sum over resources r of (bundle_r / capacity_r) (free_r / capacity_r)   of that node
    remaining work = remaining time x sum over resources r of (requested gang_r / cluster_r)

The means are over the candidates at the start of the decision, so both terms have equal weight at eps = 1.
Remaining time is defined as for srtf; an unknown one counts as 0.

A job's first bundle is its smallest gang (for a rigid job all that it requested). Each further one is a
worker, and a server for jobs that have servers, up to its requested size. A bundle is scored by one worker
and one server, on nodes where the worker fits. A gang goes whole to the best node, or else it is packed on
the fewest nodes. A job that ends up on more nodes than it needs is packed again, since synchronising across
nodes is slow.

As in the paper, running tasks are never preempted: free capacity goes to waiting jobs and to running jobs
below their request. Ties: first submitted, first node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stretto.allocate.free import SLACK, Floats, FreeCapacity, place_packed
from stretto.core.allocation import NOTHING, Allocation
from stretto.core.decision import Decision, ReasonCode
from stretto.core.job import Job, Tier
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import BASELINE_EVENTS, check_option, fixed_size_decision, remaining_s
from stretto.policies.gangs import (
    EmptyCluster,
    GangSize,
    crowded_out,
    held_gang,
    keep_running,
    never_fits,
    next_bundle,
    pinned,
    requested_gang,
    smallest_gang,
)

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tetris:
    """Multi-resource packing, without preemption."""

    name: ClassVar[str] = "tetris"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0
    eps: float = 1.0
    """Weight of little remaining work relative to good packing; 0 only packs."""

    def __post_init__(self) -> None:
        check_option(self.name, "eps", self.eps, 0 <= self.eps < math.inf, "a finite number, 0 or more")

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        packing = _Packing(view, self.eps)
        packing.run()
        return fixed_size_decision(view, packing.allocations, packing.why), memory


class _Packing:
    """Scores of candidate jobs (rows) on nodes (columns) while free capacity is granted."""

    def __init__(self, view: ClusterView, eps: float) -> None:
        self._empty = EmptyCluster(view.nodes)
        self._free = FreeCapacity(view.nodes)
        self.allocations = keep_running(view.jobs, self._free)
        self._jobs = [job for job in view.jobs if self._next_bundle(job) is not None]
        self._workers = _rows([job.job.worker.demand for job in self._jobs])
        self._bundles = _rows([_scored(job.job).needs(job.job) for job in self._jobs])
        self._open = np.ones(len(self._jobs), dtype=bool)
        """Jobs that may still be granted a bundle."""
        alignment = self._alignment(np.arange(len(view.nodes)))
        work = np.array([self._remaining_work(job, view.capacity) for job in self._jobs])
        self._penalty = eps * _ratio_of_means(alignment[np.isfinite(alignment)], work) * work
        self._scores = alignment - self._penalty[:, None]
        self._won_by: dict[str, str] = {}

    def run(self) -> None:
        self._grant_what_fits()
        while self._gather():
            # Gathering may have made room for jobs that did not fit before.
            self._open[:] = True
            self._rescore(np.arange(len(self._free.ids)))
            self._grant_what_fits()

    def _grant_what_fits(self) -> None:
        while self._scores.size:
            row, column = divmod(int(np.argmax(self._scores)), self._scores.shape[1])
            score = float(self._scores[row, column])
            if score == -np.inf:
                return
            job, bundle = self._jobs[row], self._next_bundle(self._jobs[row])
            place = None if bundle is None else self._place(job.job, bundle, self._free.ids[column])
            if place is None:
                self._close(row)
                continue
            self._free.take(job.job, place)
            self.allocations[job.id] = self._free.joined(self.allocations.get(job.id, NOTHING), place)
            penalty = float(self._penalty[row])
            self._won_by[job.id] = f"alignment {score + penalty:.3g} less {penalty:.3g} for remaining work"
            self._rescore(self._free.places_of(place.nodes))

    def why(self, job: JobView, code: ReasonCode) -> str:
        if code in {ReasonCode.WAITS, ReasonCode.PREEMPTED}:
            gang = smallest_gang(job.job)
            return never_fits(job, gang, self._empty) or crowded_out(gang)
        return f"Gets {held_gang(self.allocations[job.id])}; the best score was its {self._won_by[job.id]}."

    def _gather(self) -> bool:
        """Packs jobs that were granted bundles on more nodes than they need; True if there were any."""
        gathered = False
        for job in self._jobs:
            spread = self.allocations.get(job.id, NOTHING)
            if len(spread.nodes) < 2 or spread == job.allocation:
                continue
            self._free.give_back(job.job, spread)
            packed = place_packed(job.job, *held_gang(spread), self._free)
            if packed is not None and len(packed.nodes) < len(spread.nodes):
                self.allocations[job.id] = packed
                gathered = True
            self._free.take(job.job, self.allocations[job.id])
        return gathered

    def _next_bundle(self, job: JobView) -> GangSize | None:
        held = self.allocations.get(job.id)
        if held is None:
            return smallest_gang(job.job)
        if pinned(job) or job.job.tier is Tier.RIGID:
            return None
        has, least = held_gang(held), smallest_gang(job.job)
        more = next_bundle(has, requested_gang(job.job))
        if more is None:
            return None
        return GangSize(
            max(more.workers, least.workers - has.workers), max(more.servers, least.servers - has.servers)
        )

    def _place(self, job: Job, bundle: GangSize, node_id: str) -> Allocation | None:
        if self._free.fits(node_id, bundle.needs(job)):
            servers = ((node_id, bundle.servers),) if bundle.servers else ()
            return Allocation(((node_id, bundle.workers),), servers)
        return place_packed(job, *bundle, self._free)

    def _alignment(self, columns: Indices) -> Floats:
        """Alignment of each job's bundle with each of these nodes; -inf where a worker does not fit."""
        free, capacity = self._free.rows[columns], self._free.capacity[columns]
        weights = np.divide(free, capacity**2, out=np.zeros_like(free), where=capacity > 0)
        shape = (len(self._jobs), len(columns))
        total, fits = np.zeros(shape), np.ones(shape, dtype=bool)
        # One resource at a time: a matrix product rounds equal nodes differently, which would break ties.
        for r in range(free.shape[1]):
            total += self._bundles[:, r, None] * weights[:, r]
            fits &= self._workers[:, r, None] <= np.maximum(free[:, r], 0.0) + SLACK
        return np.where(fits, total, -np.inf)

    def _rescore(self, columns: Indices) -> None:
        scores = self._alignment(columns) - self._penalty[:, None]
        self._scores[:, columns] = np.where(self._open[:, None], scores, -np.inf)

    def _close(self, row: int) -> None:
        self._open[row] = False
        self._scores[row] = -np.inf

    def _remaining_work(self, job: JobView, total: Resources) -> float:
        needs = requested_gang(job.job).needs(job.job).amounts()
        shares = sum(need / have for need, have in zip(needs, total.amounts(), strict=True) if have > 0)
        return (remaining_s(job, self._empty) or 0.0) * shares


def _scored(job: Job) -> GangSize:
    return GangSize(1, 1 if job.server else 0)


def _rows(resources: list[Resources]) -> Floats:
    return np.array([each.amounts() for each in resources], dtype=float).reshape(-1, 4)


def _ratio_of_means(alignment: Floats, work: Floats) -> float:
    if not alignment.size or not work.any():
        return 0.0
    return float(alignment.mean() / work.mean())
