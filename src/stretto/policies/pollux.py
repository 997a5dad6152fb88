"""Pollux: GPUs and batch sizes for the highest goodput, shared fairly.

goodput_j(n, r) is the goodput of job j on r GPUs of n nodes at its best batch size (models/goodput.py). The
job's speedup compares it with a fair share of the cluster, ceil(G / J) GPUs as if on one node:

    s_j = goodput_j(n, r) / goodput_j(1, ceil(G/J)) * N/G * restart_j

    restart_j = max(age - restarts * d, 0) / (age + d)   if the job changes, else 1

restart_j is the restart penalty, with d the expected time of a restart. Pollux maximises the power mean

    fitness = ( mean_j (s_j + 0.001)^p )^(1/p)

p = 1 is the average. p = -1, the default of the paper, also favours jobs that are far behind. p -> -inf looks
only at the worst-off job. The objective is a sum over jobs, so the solver (allocate/solver.py) maximises it.
A job may grow to at most twice the GPUs it was seen with, so its speed model is never extrapolated far.

All jobs are considered once per interval. In between, when a job comes or goes, pollux gives free GPUs to
jobs that hold nothing and leaves the others alone, since every change costs a restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stretto.allocate.placements import Placement
from stretto.allocate.solver import Contender, Solution, solve
from stretto.core.allocation import Allocation, BatchChoice, on_nodes
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.job import Job, Tier
from stretto.core.units import counted
from stretto.models.batch import split_batch, within_largest
from stretto.models.goodput import GoodputTable, Ints, JobModel
from stretto.models.speed import Floats
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import (
    BASELINE_EVENTS,
    check_option,
    explain,
    requested_batch,
    require_gpu_jobs,
    round_is_due,
)
from stretto.policies.gangs import pinned

EXACT_FROM = 100.0
"""Larger goodputs are shown without decimals."""
FLOOR = 1e-3
"""Added to every speedup; a job without GPUs has this value."""
NEARLY_ZERO_P = 1e-6
"""A p closer to 0 counts as 0, since floats cannot tell the powers apart."""
LEXIMIN_P = -100.0
"""Used for p = -inf: jobs 1 % apart already differ by a factor e in weight."""
ALIKE = 0.005
"""Shares that differ by less are reported as equal."""
NEWCOMER = 0.01
"""The least restart factor of a waiting job; the formula gives 0 at age 0, and it would never start."""


@dataclass(frozen=True, kw_only=True)
class Pollux:
    """Goodput-optimal GPUs and batch sizes with a fairness knob."""

    name: ClassVar[str] = "pollux"
    wakes_on: ClassVar[frozenset[str]] = BASELINE_EVENTS
    interval_s: float = 60.0
    p: float = -1.0
    """Fairness: 1, 0 (geometric mean), -1, -10, -inf."""
    interference: bool = True
    """Avoid interference: at most one job that spans nodes on any node."""
    explore: float = 2.0
    """A job may grow to this many times the most GPUs it was seen with."""
    max_nodes: int = 16
    """Most nodes of one job."""
    hysteresis: float = 0.05
    """Change a running job's batch size only for a goodput higher by this share."""

    def __post_init__(self) -> None:
        for option, allowed, rule in (
            ("p", self.p <= 1, "1 or less; -inf looks at the worst-off job alone"),
            ("explore", 1 <= self.explore < math.inf, "1 or more"),
            ("max_nodes", self.max_nodes >= 1, "1 or more"),
            ("hysteresis", self.hysteresis >= 0, "0 or more"),
        ):
            check_option(self.name, option, getattr(self, option), allowed, rule)

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        require_gpu_jobs(view, self.name)
        speedups = Speedups(view)
        values = _Values(speedups, self.p)
        between = not round_is_due(memory, view.now_s, self.interval_s)
        solution = solve(
            [node.gpus for node in view.nodes],
            [self._contender(job, speedups, index, between) for index, job in enumerate(view.jobs)],
            values,
            max_nodes=self.max_nodes,
            avoid_interference=self.interference,
        )
        chosen = _allocations(view, solution)
        scores = speedups.of(solution.placements)
        gpus = view.total_gpus
        plain = speedups.of(solution.placements, penalised=False) / speedups.scale
        shares = dict(zip((job.id for job in view.jobs), plain, strict=True))
        batches = self._batches(view, chosen, speedups)
        fair_gpus = speedups.fair_gpus
        reasons = explain(view, chosen, lambda job, _: self._why(job, chosen, shares, gpus, fair_gpus))
        decision = Decision(
            allocations=chosen,
            batches=batches,
            reasons=reasons | _batch_reasons(view, chosen, batches, speedups),
            objective=power_mean(scores + FLOOR, self.p) if view.jobs else None,
        )
        return decision, memory if between else view.now_s

    def _contender(self, job: JobView, speedups: Speedups, index: int, between: bool) -> Contender:
        worker = job.job.worker
        held = speedups.held[index]
        stays = between or not job.job.preemptible
        if job.job.tier is Tier.RIGID:
            return Contender(held, worker.requested, worker.requested, stays)
        most = max(min(worker.max, self._most_believed(job), speedups.most_workers[index]), worker.min)
        return Contender(held, worker.min, most, stays)

    def _most_believed(self, job: JobView) -> int:
        """The most workers that the job's speed model is trusted for."""
        return max(int(min(self.explore * job.belief.max_workers_seen, 1e9)), 1)

    def _why(
        self,
        job: JobView,
        chosen: Mapping[str, Allocation],
        shares: Mapping[str, float],
        gpus: int,
        fair_gpus: int,
    ) -> str:
        """The reason of a job that changes or waits; `shares` are speedups relative to the fair share."""
        new, share = chosen.get(job.id), shares[job.id]
        if new is None:
            return why_waits(job, gpus, fair_gpus)
        gpus_now, nodes = counted(new.worker_count, "slot"), counted(len(new.nodes), "node")
        before = f"{job.allocation.worker_count} to " if job.allocation else ""
        sizes = f"{before}{gpus_now}, on {nodes}"
        alike = abs(share - 1.0) <= ALIKE
        much = "as much progress as" if alike else f"{share:.2f} times the progress it would make"
        fair = f"{much} on a fair share of {counted(fair_gpus, 'slot')}"
        why = "" if alike else self._why_not_fair(job, new.worker_count, share, fair_gpus, len(shares))
        return f"{sizes}: {fair}{why}"

    def _why_not_fair(self, job: JobView, workers: int, share: float, fair_gpus: int, jobs: int) -> str:
        """Why a job has more or less than its fair share; empty if its size is fixed."""
        if job.job.tier is Tier.RIGID:
            return ""
        if share > 1.0 and workers < fair_gpus:
            return f", as it trains slower on {fair_gpus}"
        if share > 1.0:
            return "" if jobs == 1 else ", as others gain less"
        if workers >= job.job.worker.max:
            return ", the most it can have"
        if workers == self._most_believed(job):
            return f"; it may grow once it has shown how it trains on {workers}"
        return "" if jobs == 1 else ", as others gain more"

    def _batches(
        self, view: ClusterView, chosen: Mapping[str, Allocation], speedups: Speedups
    ) -> dict[str, BatchChoice]:
        running = [(index, job) for index, job in enumerate(view.jobs) if job.id in chosen]
        best = speedups.best_batches([(index, chosen[job.id]) for index, job in running])
        batches = {}
        for (index, job), new in zip(running, best, strict=True):
            allocation = chosen[job.id]
            if job.job.tier is not Tier.ADAPTIVE:
                batches[job.id] = requested_batch(job.job, allocation.worker_count)
            elif self.hysteresis > 0 and job.batch is not None and allocation == job.allocation:
                gain = speedups.batch_gain(index, allocation, job.batch, new)
                batches[job.id] = new if gain > self.hysteresis else job.batch
            else:
                batches[job.id] = new
        return batches


class Speedups:
    """Speedups of jobs relative to their fair share, for given placements."""

    def __init__(self, view: ClusterView) -> None:
        self._jobs = view.jobs
        gpus, count = view.total_gpus, max(view.job_count, 1)
        self.fair_gpus = max(math.ceil(gpus / count), 1)
        self.scale = len(view.nodes) / gpus if gpus else 1.0
        self._row, self._table = _table(view)
        self.most_workers = np.array([_most_workers(job.job) for job in view.jobs], dtype=np.int64)
        """By job: with more workers than this, even the smallest batches exceed the largest total batch."""
        known = self._row >= 0
        rows = self._row[known]
        fair = np.clip(self.most_workers[known], 1, self.fair_gpus)
        self._fair_goodput = np.full(len(view.jobs), np.nan)
        fair_goodput = self._table.best(rows, np.ones_like(rows), fair).goodput
        self._fair_goodput[known] = np.where(fair_goodput > 0, fair_goodput, np.inf)
        self.held = _held(view)
        self.restart = np.array([_restart_factor(job) for job in view.jobs])

    def __call__(self, job: Ints, nodes: Ints, gpus: Ints) -> Floats:
        """Speedup of placements without restart penalty; a job without a speed model scales linearly."""
        speedup = gpus / self.fair_gpus
        known = self._row[job] >= 0
        if known.any():
            some = job[known]
            best = self._table.best(self._row[some], nodes[known], gpus[known])
            speedup[known] = best.goodput / self._fair_goodput[some]
        return speedup * self.scale

    def of(self, placements: list[Placement], *, penalised: bool = True) -> Floats:
        """Speedup of each job with its placement; `penalised`: with restart penalties."""
        sizes = np.array([sum(count for _, count in placement) for placement in placements], dtype=np.int64)
        nodes = np.array([len(placement) for placement in placements], dtype=np.int64)
        speedup = np.zeros(len(placements))
        some = np.flatnonzero(sizes)
        if some.size:
            speedup[some] = self(some, nodes[some], sizes[some])
        if not penalised:
            return speedup
        changed = [new != held for new, held in zip(placements, self.held, strict=True)]
        return np.where(changed, speedup * self.restart, speedup)

    def batch_gain(self, index: int, allocation: Allocation, old: BatchChoice, new: BatchChoice) -> float:
        """Relative gain of goodput by a change of the batch; 0 without a speed model."""
        found = self.batch_goodputs(index, allocation, old, new)
        return 0.0 if found is None else found[1] / found[0] - 1.0

    def batch_goodputs(
        self, index: int, allocation: Allocation, old: BatchChoice, new: BatchChoice
    ) -> tuple[float, float] | None:
        """Goodput of a job with each of two batches; None without a speed model."""
        row = int(self._row[index])
        if row < 0:
            return None
        place = (row, len(allocation.nodes), allocation.worker_count)
        return self._table.at(*place, old), self._table.at(*place, new)

    def best_batches(self, placed: Sequence[tuple[int, Allocation]]) -> list[BatchChoice]:
        """The batch with the best goodput of each job; without a speed model the initial one."""
        known = [
            (self._row[index], len(new.nodes), new.worker_count)
            for index, new in placed
            if self._row[index] >= 0
        ]
        table = self._table.best(*np.array(known, dtype=np.int64).reshape(-1, 3).T)
        position = 0
        choices = []
        for index, new in placed:
            limits, workers = self._jobs[index].job.batch, new.worker_count
            if self._row[index] < 0:
                smallest = max(limits.initial, limits.per_gpu_min * workers)
                choices.append(split_batch(limits, smallest, workers))
                continue
            choices.append(within_largest(limits, table.choice(position), workers))
            position += 1
        return choices


class _Values:
    """u(s) = (s + 0.001)^p / p (log for p = 0): the terms of the power mean, rising in s."""

    def __init__(self, speedups: Speedups, p: float) -> None:
        self._speedups = speedups
        self._p = 0.0 if abs(p) < NEARLY_ZERO_P else max(p, LEXIMIN_P)
        self.nothing = self._worth(np.zeros(len(speedups.held)))
        nodes = np.array([len(held) for held in speedups.held], dtype=np.int64)
        gpus = np.array([sum(count for _, count in held) for held in speedups.held], dtype=np.int64)
        self.keep = self.nothing.copy()
        holders = np.flatnonzero(gpus)
        if holders.size:
            self.keep[holders] = self._worth(speedups(holders, nodes[holders], gpus[holders]))
        idle = gpus == 0
        self._restart = np.where(idle, np.maximum(speedups.restart, NEWCOMER), speedups.restart)

    def changed(self, job: Ints, nodes: Ints, gpus: Ints) -> Floats:
        return self._worth(self._speedups(job, nodes, gpus) * self._restart[job])

    def _worth(self, speedup: Floats) -> Floats:
        base = speedup + FLOOR
        return np.log(base) if self._p == 0 else base**self._p / self._p


def power_mean(values: Floats, p: float) -> float:
    """(mean v^p)^(1/p), and its limits for p = 0 and -inf."""
    if p == -math.inf:
        return float(values.min())
    if abs(p) < NEARLY_ZERO_P:
        return float(np.exp(np.log(values).mean()))
    smallest = values.min()
    return float(smallest * ((values / smallest) ** p).mean() ** (1.0 / p))


def fitness(view: ClusterView, allocations: Mapping[str, Allocation], p: float = -1.0) -> float | None:
    """The paper's objective for any allocations of these jobs; None without jobs."""
    if not view.jobs:
        return None
    index = {node.id: position for position, node in enumerate(view.nodes)}
    placements: list[Placement] = [
        tuple(sorted((index[node], count) for node, count in allocations[job.id].workers))
        if job.id in allocations
        else ()
        for job in view.jobs
    ]
    return power_mean(Speedups(view).of(placements) + FLOOR, p)


def why_waits(job: JobView, gpus: int, fair_gpus: int) -> str:
    """The reason of a job that waits, in words that stay the same while it waits."""
    least = job.job.worker.requested if job.job.tier is Tier.RIGID else job.job.worker.min
    if least > gpus:
        return f"needs {counted(least, 'slot')}, the cluster has {gpus}"
    return f"others gain more; a fair share is {counted(fair_gpus, 'slot')}"


def why_batch(old_goodput: float, new_goodput: float) -> str:
    """The reason of a job that keeps its slots and changes its batch size."""
    gain = new_goodput / old_goodput - 1.0
    new, old = _per_s(new_goodput), _per_s(old_goodput)
    return f"its new batch has a goodput of {new} examples/s, the old one {old} ({gain:+.0%})"


def _per_s(goodput: float) -> str:
    return f"{goodput:,.0f}" if goodput >= EXACT_FROM else f"{goodput:.3g}"


def _table(view: ClusterView) -> tuple[Ints, GoodputTable]:
    """Each job's row in a table of goodputs (-1: no speed model), and the table."""
    models: list[JobModel] = []
    row = np.full(len(view.jobs), -1, dtype=np.int64)
    for index, job in enumerate(view.jobs):
        speed = job.belief.speed
        if speed is not None:
            row[index] = len(models)
            models.append(JobModel(speed, job.belief.noise, job.job.batch, job.job.tier))
    return row, GoodputTable(models)


def _most_workers(job: Job) -> int:
    largest = job.batch.max if job.tier is Tier.ADAPTIVE else job.batch.requested
    return largest // job.batch.per_gpu_min


def _held(view: ClusterView) -> list[Placement]:
    """What each job holds, by node index; nothing if one of its nodes is going away and it may move."""
    index = {node.id: position for position, node in enumerate(view.nodes)}
    held: list[Placement] = []
    for job in view.jobs:
        there = [(index[node], count) for node, count in job.allocation.workers if node in index]
        leaves = len(there) < len(job.allocation.workers) and not pinned(job)
        held.append(() if leaves else tuple(sorted(there)))
    return held


def _restart_factor(job: JobView) -> float:
    """The restart penalty: the factor of a job's speedup if it changes."""
    cost_s = job.belief.resize.expected_s
    return max(job.age_s - job.restarts * cost_s, 0.0) / (job.age_s + cost_s)


def _allocations(view: ClusterView, solution: Solution) -> dict[str, Allocation]:
    """Placements as allocations; an unchanged job keeps the same object."""
    ids = [node.id for node in view.nodes]
    chosen = {}
    for job, placement in zip(view.jobs, solution.placements, strict=True):
        if pinned(job):
            chosen[job.id] = job.allocation
        elif placement:
            new = on_nodes((ids[node], count) for node, count in placement)
            chosen[job.id] = job.allocation if dict(new.workers) == dict(job.allocation.workers) else new
    return chosen


def _batch_reasons(
    view: ClusterView,
    chosen: Mapping[str, Allocation],
    batches: Mapping[str, BatchChoice],
    speedups: Speedups,
) -> dict[str, Reason]:
    """Reasons of jobs that change only their batch."""
    reasons = {}
    for index, job in enumerate(view.jobs):
        old, new = job.batch, batches.get(job.id)
        if old is None or new is None or old == new or chosen[job.id] != job.allocation:
            continue
        goodputs = speedups.batch_goodputs(index, job.allocation, old, new)
        if goodputs is not None:
            reasons[job.id] = Reason(ReasonCode.KEPT, why_batch(*goodputs))
    return reasons
