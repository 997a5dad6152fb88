"""Helpers for policies: checked options, reasons, decisions at fixed sizes, GPU-only jobs, remaining time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.errors import InputError
from stretto.core.events import (
    JobFailed,
    JobFinished,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLost,
    WorkerLost,
)
from stretto.core.job import Communication, Job, Tier
from stretto.core.resources import Resources
from stretto.models.batch import split_batch
from stretto.models.noise import step_gain
from stretto.policies.base import ClusterView, JobView
from stretto.policies.gangs import EmptyCluster, amounts, held_gang, requested_gang

Why = Callable[[JobView, ReasonCode], str] | Mapping[str, str]
"""The text of a job's reason: a function of its view and reason code, or a mapping by job id."""
BASELINE_EVENTS: Final = frozenset(
    {
        JobSubmitted.kind,
        JobFinished.kind,
        JobFailed.kind,
        NodeAdded.kind,
        NodeDraining.kind,
        NodeLost.kind,
        WorkerLost.kind,
    }
)
"""Events that change the jobs or the nodes."""
EPS = 1e-9
"""Float noise in times."""
MAX_EPOCHS = 1000
"""Limit of the search for the epoch of convergence."""
ONE_GPU = Resources(gpu=1)


def check_option(policy: str, option: str, value: object, allowed: bool, rule: str) -> None:
    """Refuse an option's value that is not allowed."""
    if not allowed:
        raise InputError(f"{policy}.{option}={value} is not valid.", remedy=f"It takes {rule}.")


def round_is_due(last_s: float | None, now_s: float, interval_s: float) -> bool:
    """Whether a multiple of the interval has passed since the last round, or there was none yet."""
    return last_s is None or (now_s + EPS) // interval_s > (last_s + EPS) // interval_s


def requested_batch(job: Job, workers: int) -> BatchChoice:
    """The job's requested total batch, split over its workers.

    For an adaptive job it is raised to the least that this many workers can take.
    """
    total = job.batch.requested
    if job.tier is Tier.ADAPTIVE:
        total = max(total, min(job.batch.per_gpu_min * workers, job.batch.max))
    return split_batch(job.batch, total, workers)


def explain(view: ClusterView, allocations: Mapping[str, Allocation], why: Why) -> dict[str, Reason]:
    """A reason for every job whose allocation changes and for every job that waits."""
    reasons: dict[str, Reason] = {}
    waits: dict[str, Reason] = {}
    for job in view.jobs:
        job_id = job.job.id
        if job.allocation.workers or job_id in allocations:
            code = change(job.allocation, allocations.get(job_id, NOTHING))
            if code is not ReasonCode.KEPT:
                reasons[job_id] = Reason(code, why(job, code) if callable(why) else why[job_id])
        else:  # most jobs take this branch if many wait
            text = why(job, ReasonCode.WAITS) if callable(why) else why[job_id]
            reasons[job_id] = waits.get(text) or waits.setdefault(text, Reason(ReasonCode.WAITS, text))
    return reasons


def change(old: Allocation, new: Allocation) -> ReasonCode:
    """The reason code for going from one allocation to another."""
    if not old or not new:
        if old:
            return ReasonCode.PREEMPTED
        return ReasonCode.STARTED if new else ReasonCode.WAITS
    before, after = held_gang(old), held_gang(new)
    if before != after:
        return ReasonCode.GREW if after > before else ReasonCode.SHRANK
    return ReasonCode.KEPT if old == new else ReasonCode.MOVED


def fixed_size_decision(view: ClusterView, allocations: Mapping[str, Allocation], why: Why) -> Decision:
    """A decision in which every running job uses its requested total batch."""
    return Decision(
        allocations=allocations,
        batches={
            job.id: requested_batch(job.job, allocations[job.id].worker_count)
            for job in view.jobs
            if job.id in allocations
        },
        reasons=explain(view, allocations, why),
    )


def require_gpu_jobs(view: ClusterView, policy: str) -> None:
    """Refuse jobs that a GPU-only policy has no model for."""
    for job in view.jobs:
        if job.job.communication is not Communication.ALL_REDUCE:
            raise InputError(
                f"job {job.id} uses parameter servers, and {policy} schedules all-reduce jobs only.",
                remedy="Use optimus, drf, tetris, srtf or fifo for it.",
            )
        if job.job.worker.demand != ONE_GPU:
            raise InputError(
                f"a worker of job {job.id} needs {amounts(job.job.worker.demand)}, and {policy} gives each "
                "worker one GPU and looks at nothing else.",
                remedy="Use optimus, drf, tetris, srtf or fifo for it.",
            )


def place_most_free(
    view: ClusterView, kept: Mapping[str, Allocation], starts: Sequence[tuple[JobView, int]]
) -> dict[str, Allocation]:
    """Place jobs, each with its number of GPUs, on the nodes with the most free GPUs.

    The published baselines do it this way. Together with `kept` the jobs must fit in the cluster.
    """
    free = {node.id: node.gpus for node in view.nodes}
    for allocation in kept.values():
        for node, count in allocation.workers:
            if node in free:
                free[node] -= count
    placed = dict(kept)
    for job, gpus in starts:
        tasks = []
        left = gpus
        while left:
            node = max(free, key=free.__getitem__)
            count = min(free[node], left)
            free[node] -= count
            left -= count
            tasks.append((node, count))
        placed[job.id] = Allocation(tuple(tasks))
    return placed


def remaining_s(job: JobView, empty: EmptyCluster) -> float | None:
    """Time to the job's end at its requested size on the fewest nodes of the empty cluster.

    None if it cannot be estimated yet, or if the job does not fit.
    """
    units, units_per_s = _remaining_units(job), _believed_units_per_s(job, empty)
    if units is None or units_per_s is None:
        return None
    return units / units_per_s if units_per_s > 0 else inf


def _remaining_units(job: JobView) -> float | None:
    work = job.job.work
    total = work.total_units
    if total is None:
        convergence = job.belief.convergence
        if convergence is None or work.convergence is None:
            return None
        total = convergence.epochs_to_converge(work.convergence, MAX_EPOCHS).expected * work.units_per_epoch
    return max(total - job.work_done, 0.0)


def _believed_units_per_s(job: JobView, empty: EmptyCluster) -> float | None:
    workers, servers = gang = requested_gang(job.job)
    batch = requested_batch(job.job, workers)
    if job.job.communication is not Communication.ALL_REDUCE:
        server_speed = job.belief.server_speed
        if server_speed is None:
            return None
        steps_per_s = float(server_speed.steps_per_s(servers, workers))
    else:
        speed = job.belief.speed
        place = None if speed is None else empty.place(job.job, gang)
        if speed is None or place is None:
            return None
        steps_per_s = 1.0 / float(speed.step_s(len(place.nodes), workers, batch.atomic, batch.accumulation))
    return steps_per_s * step_gain(job.belief.noise, job.job.batch.initial, batch.total(workers))
