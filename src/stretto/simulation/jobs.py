"""Simulates jobs under a policy, and measures the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.control.controller import Controller, Settings
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.errors import InputError
from stretto.core.resources import total_of
from stretto.core.source import Arrivals
from stretto.inputs.arguments import given, given_options
from stretto.journal.base import Journal, MemoryJournal
from stretto.journal.folds.history import History, JobHistory, history_of
from stretto.models.resize import DEFAULT_RESIZE_S
from stretto.policies.base import Policy
from stretto.policies.registry import checked_policy, make_policy
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.system.threads import one_blas_thread
from stretto.worlds.ftf import Clock, Memo, alone_s
from stretto.worlds.oracle import WorldOracle
from stretto.worlds.truth import SimulatedJob, Truth, Workload, make_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One row of the table. Times are in seconds; None: nothing to measure."""

    policy: str
    workload: str
    jobs: int
    completed: int
    mean_jct_s: float | None
    median_jct_s: float | None
    p90_jct_s: float | None
    p99_jct_s: float | None
    makespan_s: float | None
    """From the first submission to the last completion; None while jobs are unfinished."""
    gpu_hours: float
    """GPU hours held, starts and resizes included."""
    gpu_utilisation: float | None
    """Share of the cluster's GPU time that jobs held, from the first submission on."""
    cpu_utilisation: float | None
    """The same for CPUs; None on a cluster that lists none."""
    resize_share: float | None
    """Share of the held GPU time spent on starts and resizes."""
    restarts_per_job: float
    """Starts and resizes after the first start."""
    worst_ftf: float | None
    """Largest finish-time fairness: JCT over the JCT alone on a fair share."""
    decisions: int
    decision_ms_mean: float | None
    decision_ms_p95: float | None
    wall_s: float


def measure(
    history: History,
    nodes: Sequence[Node],
    truths: Mapping[str, Truth],
    *,
    policy: str,
    workload: str,
    clock: Clock,
    decision_s: Sequence[float],
    wall_s: float,
) -> Metrics:
    jobs = list(history.jobs.values())
    total = len(history.jobs.keys() | truths.keys())  # some may never have come before the run ended
    done = [job for job in jobs if job.finished_s is not None]
    jcts = [job.jct_s for job in done if job.jct_s is not None]
    begin_s = min((job.job.submit_s for job in jobs), default=0.0)
    span_s = history.end_s - begin_s
    capacity = total_of([node.capacity for node in nodes])
    held_gpu_s = sum(job.gpu_s for job in jobs)
    milliseconds = [1e3 * seconds for seconds in decision_s]
    return Metrics(
        policy=policy,
        workload=workload,
        jobs=total,
        completed=len(done),
        mean_jct_s=_mean(jcts),
        median_jct_s=_percentile(jcts, 50),
        p90_jct_s=_percentile(jcts, 90),
        p99_jct_s=_percentile(jcts, 99),
        makespan_s=span_s if jobs and len(done) == total else None,
        gpu_hours=held_gpu_s / 3600.0,
        gpu_utilisation=_share(held_gpu_s, capacity.gpu * span_s),
        cpu_utilisation=_share(sum(_held_cpu_s(job) for job in jobs), capacity.cpu * span_s),
        resize_share=_share(sum(job.resizing_gpu_s for job in jobs), held_gpu_s),
        restarts_per_job=sum(job.restarts for job in jobs) / len(jobs) if jobs else 0.0,
        worst_ftf=max(finish_time_fairness(done, jobs, nodes, truths, clock).values(), default=None),
        decisions=len(history.decisions),
        decision_ms_mean=_mean(milliseconds),
        decision_ms_p95=_percentile(milliseconds, 95),
        wall_s=wall_s,
    )


def finish_time_fairness(
    done: Sequence[JobHistory],
    jobs: Sequence[JobHistory],
    nodes: Sequence[Node],
    truths: Mapping[str, Truth],
    clock: Clock,
) -> dict[str, float]:
    """FTF by job: JCT over the JCT of the same job alone on ceil(G / mean active jobs) GPUs.

    The mean is over the lifetime of the job; start cost and clock are those of the run. Jobs with parameter
    servers or without GPUs are left out, because a share of GPUs does not describe them.
    """
    gpus = sum(node.gpus for node in nodes)
    if not gpus:
        return {}
    node_gpus = max(node.gpus for node in nodes)
    lives = np.array([(job.job.submit_s, math.inf if job.end_s is None else job.end_s) for job in jobs])
    memo: Memo = {}
    fairness = {}
    for job in done:
        if job.job.server is not None or job.job.worker.demand.gpu != 1:
            continue
        start_s, end_s = job.job.submit_s, job.finished_s or job.job.submit_s
        overlap_s = np.minimum(lives[:, 1], end_s) - np.maximum(lives[:, 0], start_s)
        active = float(np.maximum(overlap_s, 0.0).sum()) / (end_s - start_s) if end_s > start_s else 1.0
        fair_gpus = math.ceil(gpus / max(active, 1.0))
        alone = alone_s(job.job, truths[job.job.id], fair_gpus, node_gpus, clock, memo=memo)
        fairness[job.job.id] = (end_s - start_s) / alone
    return fairness


def _held_cpu_s(job: JobHistory) -> float:
    return sum(
        hold.seconds * total_of(list(hold.allocation.uses(job.job).values())).cpu for hold in job.holds
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


ROUND_S = 60.0
REPORT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of a simulation."""

    nodes: tuple[Node, ...] = field(default_factory=lambda: gpu_nodes(16, 4))
    interval_s: float = ROUND_S
    """Longest time between two decisions."""
    rounds: bool = False
    """Decide at multiples of the interval only, with epochs of whole seconds, as published simulators do."""
    whole_seconds: bool | None = None
    """Whether epochs are rounded to whole seconds; None: as `rounds`."""
    restart_s: float = 30.0
    believed_restart_s: float = DEFAULT_RESIZE_S
    """Restart penalty that policies assume before they have seen one."""
    interference: float = 0.0
    noise: float = 0.0
    priors: bool | None = None
    """New jobs learn from finished jobs of their application; None: unless `rounds`."""
    seed: int = 0
    until_s: float = math.inf

    @property
    def shares_priors(self) -> bool:
        return not self.rounds if self.priors is None else self.priors

    @property
    def rounds_epochs(self) -> bool:
        """Whether epochs are rounded to whole seconds."""
        return self.rounds if self.whole_seconds is None else self.whole_seconds

    def __post_init__(self) -> None:
        nodes: object = self.nodes
        if not isinstance(nodes, tuple) or not all(isinstance(node, Node) for node in nodes):
            raise InputError(
                f"{nodes!r} is not a tuple of nodes.",
                where="nodes",
                remedy="Give gpu_nodes(4, 4) of stretto.core.cluster: 4 nodes of 4 GPUs.",
            )

    def physics(self) -> Physics:
        return Physics(
            restart_s=self.restart_s,
            interference=self.interference,
            noise=self.noise,
            report_s=self.interval_s if self.rounds else min(REPORT_S, self.interval_s),
            whole_seconds=self.rounds_epochs,
        )

    def clock(self) -> Clock:
        return Clock(self.restart_s, self.interval_s if self.rounds else None)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """One simulation: its metrics, and everything that happened."""

    metrics: Metrics
    history: History
    workload: Workload
    setup: Setup
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that were set for the policy."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Progress of a simulation, for a progress bar."""

    now_s: float
    finished: int
    jobs: int


def simulate(
    workload: Workload | Sequence[SimulatedJob],
    policy: str | Policy,
    setup: Setup | None = None,
    *,
    options: Mapping[str, str] | None = None,
    journal: Journal | None = None,
    on_tick: Callable[[Tick], None] | None = None,
) -> SimulationResult:
    """Run a workload to its end under a policy: a name, `mine.py:LargestFirst`, or an object.

    A workload may be a list of jobs that `catalogue_job` and `own_job` made.
    An object is asked every `policy.interval_s`, a policy by name every `setup.interval_s`.
    If the journal already holds the beginning of this run, only the rest is simulated.
    """
    workload = workload if isinstance(workload, Workload) else _workload_of(workload)
    setup = Setup() if setup is None else setup
    given(setup, Setup, "setup", "Give Setup(nodes=gpu_nodes(4, 4)), or None.")
    journal = journal if journal is not None else MemoryJournal(with_memory=False)
    chosen = _chosen(policy, workload, setup, options)
    substrate = SimSubstrate(workload.truth_of, physics=setup.physics(), seed=setup.seed)
    started = time.perf_counter()

    def report(controller: Controller) -> None:
        if on_tick is not None:
            left = len(controller.state.jobs) + controller.jobs_to_come
            on_tick(Tick(substrate.now_s(), len(workload.jobs) - left, len(workload.jobs)))

    with one_blas_thread():
        controller = Controller(
            policy=chosen,
            substrate=substrate,
            journal=journal,
            nodes=setup.nodes,
            arrivals=Arrivals(workload.jobs),
            settings=Settings(
                seed=setup.seed,
                rounds=setup.rounds,
                share_priors=setup.shares_priors,
                resize_s=setup.believed_restart_s,
                until_s=setup.until_s,
            ),
            on_turn=report,
        )
        controller.run()
    history = history_of(journal.events())
    metrics = measure(
        history,
        setup.nodes,
        workload.truths,
        policy=chosen.name,
        workload=workload.name,
        clock=setup.clock(),
        decision_s=controller.decision_s,
        wall_s=time.perf_counter() - started,
    )
    return SimulationResult(metrics, history, workload, setup, options or {})


def _workload_of(jobs: object) -> Workload:
    remedy = "Give a list of jobs of catalogue_job() and own_job(), or a workload such as demo_workload()."
    if not isinstance(jobs, Sequence) or isinstance(jobs, str) or not jobs:
        raise InputError(f"{jobs!r} is no workload.", where="workload", remedy=remedy)
    names = set[str]()
    for index, one in enumerate(jobs):
        where = f"workload[{index}]"
        given(one, SimulatedJob, where, remedy)
        if one.job.id in names:
            raise InputError(f"{one.job.id!r} is there twice.", where=where, remedy="Rename one.")
        names.add(one.job.id)
    return make_workload("jobs", jobs)


def _chosen(
    policy: str | Policy, workload: Workload, setup: Setup, options: Mapping[str, str] | None
) -> Policy:
    if isinstance(policy, str):
        return make_policy(
            policy,
            interval_s=setup.interval_s,
            options=given_options(options),
            oracle=WorldOracle(workload.truths),
        )
    if options:
        raise InputError(
            f"options are given beside the object {policy!r}.",
            where="options",
            remedy="Set them where the object is made.",
        )
    return checked_policy(policy, where="policy")
