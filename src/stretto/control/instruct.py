"""From a decision to instructions (start, resize, park, stop): the checked difference to what runs now."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.decision import Decision
from stretto.core.errors import PolicyError
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Role, Tier
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView, JobView

NO_BATCH = BatchChoice(0)


def instructions_for(
    view: ClusterView, decision: Decision, first_number: int, *, batch_in_place: bool = True
) -> tuple[Instruction, ...]:
    """The instructions for all changes. Jobs that give up GPUs come first, so that others can take these.

    If a batch size cannot change in place, changing it is a resize, with its cost.
    """
    changes = list(_changes(view, decision, batch_in_place))
    if len(changes) > 1:
        held = {job.id: job.allocation.worker_count for job in view.jobs}
        changes.sort(key=lambda change: change[2].worker_count >= max(held[change[1]], 1))
    return tuple(
        Instruction(first_number + position, action, job_id, allocation, batch)
        for position, (action, job_id, allocation, batch) in enumerate(changes)
    )


def _changes(
    view: ClusterView, decision: Decision, batch_in_place: bool
) -> Iterator[tuple[Action, str, Allocation, BatchChoice]]:
    for job in view.jobs:
        new = decision.allocations.get(job.job.id)
        if not new and not job.allocation.workers and not decision.stops:
            continue
        if not new:
            if job.job.id in decision.stops:
                yield Action.STOP, job.id, NOTHING, NO_BATCH
            elif job.allocation:
                yield Action.PARK, job.id, NOTHING, NO_BATCH
            continue
        batch = decision.batches.get(job.id) or job.batch
        if batch is None or batch.atomic < 1 or batch.accumulation < 0:
            raise PolicyError(f"{job.id} is to run with {batch}; a decision must name a batch size")
        if new != job.allocation:
            yield Action.RESIZE if job.allocation else Action.START, job.id, new, batch
        elif batch != job.batch:
            yield Action.SET_BATCH if batch_in_place else Action.RESIZE, job.id, new, batch


def check(view: ClusterView, decision: Decision) -> None:
    """Raise PolicyError if the decision cannot be carried out or leaves something unexplained."""
    known = {job.job.id for job in view.jobs}
    for job_id in (*decision.allocations, *decision.stops):
        if job_id not in known:
            raise PolicyError(f"{job_id} is decided about but is not waiting or running")
    for job_id in decision.stops:
        if decision.allocations.get(job_id):
            raise PolicyError(f"{job_id} is stopped and given GPUs; it must be one of the two")
    if decision.wake_at_s is not None and decision.wake_at_s <= view.now_s:
        raise PolicyError(f"wake_at_s is {decision.wake_at_s} at {view.now_s} s; it must lie in the future")
    for job in view.jobs:
        if not job.allocation.workers and job.job.id not in decision.reasons:
            raise PolicyError(f"{job.id} waits or starts, and the decision gives no reason for it")
    if any(
        new is not job.allocation and new != job.allocation
        for job, new in ((job, decision.allocations.get(job.job.id, NOTHING)) for job in view.jobs)
    ):
        _check_changes(view, decision)
    _check_wish(view, decision)


def _check_changes(view: ClusterView, decision: Decision) -> None:
    """Unchanged jobs were checked at an earlier decision; all jobs together must still fit."""
    free = {node.id: node.capacity for node in view.nodes}
    for job in view.jobs:
        new = decision.allocations.get(job.job.id, NOTHING)
        if new is NOTHING and not job.allocation.workers:
            continue
        _check_gang(job, new)
        for node, used in new.uses(job.job).items():
            if node in free or new != job.allocation:  # a job may stay on a node that is draining
                free[node] = _take(job.id, node, used, free)
        if new != job.allocation and job.id not in decision.reasons:
            raise PolicyError(f"{job.id} is changed, and the decision gives no reason for it")


def _check_wish(view: ClusterView, decision: Decision) -> None:
    if decision.wish is None:
        return
    in_use = {node for allocation in decision.allocations.values() for node in allocation.nodes}
    for node in decision.wish.release:
        if node in in_use:
            raise PolicyError(f"node {node!r} is to be released while a job is placed on it")
    known = {node.id for node in view.nodes}
    for node in decision.wish.release:
        if node not in known:
            raise PolicyError(f"node {node!r} is to be released and is not there")
    for instance, count in decision.wish.nodes:
        if count < 0:
            raise PolicyError(f"{count} nodes of {instance} are requested; the number must be 0 or more")


def _take(job_id: str, node: str, used: Resources, free: dict[str, Resources]) -> Resources:
    if node not in free:
        raise PolicyError(f"{job_id} is placed on node {node!r}, which is not available")
    if not used.fits_in(free[node]):
        raise PolicyError(f"node {node!r} is over-allocated: {job_id} needs {used}, {free[node]} is free")
    return free[node] - used


def _check_gang(job: JobView, new: Allocation) -> None:
    if job.allocation and not job.job.preemptible and new != job.allocation:
        raise PolicyError(f"{job.id} is not preemptible and was changed from {job.allocation} to {new}")
    if not new:
        if new.servers:
            raise PolicyError(f"{job.id} is given parameter servers and no worker")
        return
    if any(count < 1 for _, count in (*new.workers, *new.servers)):
        raise PolicyError(f"{job.id} is given {new}; every count must be positive")
    if new == job.allocation:  # an unchanged job may keep a size that is not allowed for new ones
        return
    _check_count(job.id, "workers", new.worker_count, job.job.worker)
    if job.job.tier is Tier.RIGID and new.worker_count != job.job.worker.requested:
        raise PolicyError(f"{job.id} is rigid, asks for {job.job.worker.requested} workers and gets {new}")
    if job.job.server is not None:
        _check_count(job.id, "parameter servers", new.server_count, job.job.server)
    elif new.servers:
        raise PolicyError(f"{job.id} is given parameter servers and has no such role")


def _check_count(job_id: str, what: str, count: int, role: Role) -> None:
    if not role.min <= count <= role.max:
        raise PolicyError(f"{job_id} is given {count} {what}; it takes {role.min} to {role.max}")
