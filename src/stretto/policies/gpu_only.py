"""For the policies that deal in whole GPUs and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.core.allocation import Allocation
from stretto.core.errors import InputError
from stretto.core.job import Communication
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView, JobView
from stretto.policies.gangs import amounts

ONE_GPU = Resources(gpu=1)


def require_gpu_jobs(view: ClusterView, policy: str) -> None:
    """Refuse jobs such a policy has no model for."""
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
    """Place jobs, each with its number of GPUs, always on the node with the most free GPUs.

    As the published baselines do it. Together with what is `kept` they must fit in the cluster's total.
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
