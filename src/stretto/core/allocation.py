"""Allocations: the tasks of one job on the nodes of the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stretto.core.job import Job
from stretto.core.resources import Resources

Tasks = tuple[tuple[str, int], ...]
"""(node, number of tasks); every count is positive and every node appears once."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Tasks per role per node for one job. Empty means the job holds nothing."""

    workers: Tasks = ()
    servers: Tasks = ()

    def __bool__(self) -> bool:
        return bool(self.workers)

    @property
    def worker_count(self) -> int:
        return sum(count for _, count in self.workers)

    @property
    def server_count(self) -> int:
        return sum(count for _, count in self.servers)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node with a task, in order."""
        return tuple(dict.fromkeys(node for node, _ in (*self.workers, *self.servers)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Workers on each used node, in order: (4, 2) is four on one node and two on another."""
        return tuple(count for _, count in self.workers)

    def uses(self, job: Job) -> dict[str, Resources]:
        """The resources that the job takes, by node."""
        taken: dict[str, Resources] = {}
        for tasks, role in ((self.workers, job.worker), (self.servers, job.server)):
            if role is None:
                continue
            for node, count in tasks:
                taken[node] = taken.get(node, Resources()) + role.demand * count
        return taken

    def gpus(self, job: Job) -> int:
        """GPU slots the job holds."""
        servers = self.server_count * job.server.demand.gpu if job.server else 0.0
        return round(self.worker_count * job.worker.demand.gpu + servers)


NOTHING = Allocation()


def on_nodes(workers: Mapping[str, int] | Iterable[tuple[str, int]]) -> Allocation:
    """An allocation of workers only; nodes without workers are left out."""
    pairs = workers.items() if hasattr(workers, "items") else workers
    return Allocation(tuple((node, int(count)) for node, count in pairs if count))


def packed(workers: int, per_node: int) -> Allocation:
    """Workers on the fewest nodes with `per_node` GPUs."""
    full, rest = divmod(workers, per_node)
    shape = [per_node] * full + ([rest] if rest else [])
    return Allocation(tuple((str(node), count) for node, count in enumerate(shape)))


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Examples per GPU and pass, and how many accumulation passes precede each step."""

    atomic: int
    accumulation: int = 0

    def total(self, workers: int) -> int:
        return workers * self.atomic * (self.accumulation + 1)
