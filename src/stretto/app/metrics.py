"""The numbers a run is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.app.history import History, JobHistory
from stretto.core.cluster import Node
from stretto.core.resources import total_of
from stretto.worlds.alone import Clock, Memo, alone_s
from stretto.worlds.truth import Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One row of the table; times in seconds, None where there is nothing to measure."""

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
    """Held, starting and resizing included."""
    gpu_utilisation: float | None
    """Share of the cluster's GPU time, from the first submission on, that jobs held."""
    cpu_utilisation: float | None
    """The same for CPUs; None on a cluster that lists none."""
    resize_share: float | None
    """Share of the held GPU time that went into starting and resizing."""
    restarts_per_job: float
    """Starts and resizes after the first start."""
    worst_ftf: float | None
    """Largest completion time relative to that of running alone on a fair share."""
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
    """Completion time over that of the same job alone on ceil(G / mean active jobs) GPUs.

    The mean is over the job's own lifetime; start cost and clock are those of the run. A share of GPUs
    says nothing of jobs with parameter servers, or without GPUs: they are left out.
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
