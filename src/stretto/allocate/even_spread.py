"""Optimus' placement theorem: use the fewest nodes that hold a job, and spread workers and servers evenly.

Why: suppose each task has its own network link, and only traffic between nodes costs time. A worker exchanges
1/p of the model with each of p servers. Spread evenly over k nodes, each worker has 1/k of the servers on its
own node, so the share (k - 1) / k of its traffic crosses nodes. This grows with k, so fewer nodes are better.
An uneven spread increases it for some task, and a synchronous step waits for the slowest task.

The theorem does not hold if the tasks of a node share one link: w = p = 4 sends 2 model sizes through each
link on two nodes, and 1.5 on four.

Nodes are tried by free capacity: first those that hold the largest share of the job. Jobs are placed by
number of tasks, small ones first, so that none starves behind a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.allocate.free import SLACK, Counts, Floats, FreeCapacity, NodeIndex, place_packed
from stretto.allocate.marginal import TaskCounts
from stretto.core.allocation import Allocation
from stretto.core.job import Job
from stretto.core.resources import Resources

Placer = Callable[[Job, int, int, FreeCapacity], Allocation | None]
"""Places this many workers and servers of a job, all of them or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobToPlace:
    """A job to be placed, with the counts it was granted."""

    job: Job
    wanted: TaskCounts
    least: TaskCounts
    """The job waits if these do not fit."""
    held: Allocation
    """Where it runs now."""

    @property
    def stays(self) -> bool:
        return (self.held.worker_count, self.held.server_count) == self.wanted


def spread_evenly(job: Job, workers: int, servers: int, free: FreeCapacity) -> Allocation | None:
    """The even placement on the fewest nodes, without taking them; None if there is none."""
    index = free if isinstance(free, NodeIndex) else NodeIndex(free)
    worker, server = _demands(job)
    needs = workers * worker + servers * server
    most_free = index.most_free(needs, max(workers, servers))
    together = free.rows[most_free].cumsum(axis=0) + SLACK
    enough = np.flatnonzero(((together >= needs) | (needs <= 0)).all(axis=1))
    for nodes in range(int(enough[0]) + 1 if enough.size else len(most_free) + 1, len(most_free) + 1):
        for on_worker, on_server in _deals(workers, servers, nodes):
            used = on_worker[:, None] * worker + on_server[:, None] * server
            chosen = most_free[:nodes]
            if not ((used <= free.rows[chosen] + SLACK) | (used <= 0)).all():
                continue
            ids = [free.ids[i] for i in index.tightest(used.max(axis=0), nodes) or chosen]
            return free.allocation(_by_node(ids, on_worker), _by_node(ids, on_server))
    return None


def spread_or_pack(job: Job, workers: int, servers: int, free: FreeCapacity) -> Allocation | None:
    """The even placement if the job has servers and it fits; else packed on the fewest nodes."""
    even = spread_evenly(job, workers, servers, free) if servers else None
    if even is not None or not isinstance(free, NodeIndex):
        return even or place_packed(job, workers, servers, free)
    worker, server = _demands(job)
    if not (free.may_hold(worker, workers) and free.may_hold(server, servers)):
        return None
    return place_packed(job, workers, servers, free.with_room(worker, server))


def _demands(job: Job) -> tuple[Floats, Floats]:
    server = job.server.demand if job.server else Resources()
    return np.array(job.worker.demand.amounts()), np.array(server.amounts())


def place_all(seats: Sequence[JobToPlace], free: FreeCapacity, place: Placer) -> dict[str, Allocation]:
    """Places all jobs that fit, and takes their places; allocations by job id.

    A job with unchanged counts stays where it is. If another job then does not fit with its least counts, the
    largest staying jobs are placed again as well, twice as many in each attempt.
    """
    cluster = Resources(*free.capacity.sum(axis=0).tolist())
    # Of jobs with equally many tasks the bulky ones go first, since small ones fit beside them later.
    order = sorted(seats, key=lambda seat: (sum(seat.wanted), -_bulk(seat, cluster)))
    staying = [seat for seat in order if seat.stays]
    best, left = _attempt(order, staying, free, place)
    moved = 1
    while len(best) < len(seats) and moved < 2 * len(staying):
        placed, room = _attempt(order, staying[: max(len(staying) - moved, 0)], free, place)
        if len(placed) > len(best):
            best, left = placed, room
        moved *= 2
    free.rows = left.rows
    return best


def _attempt(
    order: Sequence[JobToPlace], staying: Sequence[JobToPlace], free: FreeCapacity, place: Placer
) -> tuple[dict[str, Allocation], FreeCapacity]:
    """One attempt in which these jobs stay: placements by job id, and the free capacity left."""
    left = NodeIndex(free)
    placed: dict[str, Allocation] = {}
    for seat in staying:
        if left.holds(seat.job, seat.held):
            left.take(seat.job, seat.held)
            placed[seat.job.id] = seat.held
    others = [seat for seat in order if seat.job.id not in placed]
    for seat in sorted(others, key=lambda seat: sum(seat.least)):
        least = place(seat.job, *seat.least, left)
        if least is not None:
            left.take(seat.job, least)
            placed[seat.job.id] = least
    for seat in others:
        least = placed.get(seat.job.id)
        if least is not None and seat.wanted != seat.least:
            left.give_back(seat.job, least)
            placed[seat.job.id] = _largest(seat, least, left, place)
            left.take(seat.job, placed[seat.job.id])
    return placed, left


def _largest(seat: JobToPlace, least: Allocation, free: FreeCapacity, place: Placer) -> Allocation:
    """The wanted counts if they fit; else the most that fit, or what the job holds if that is as many."""
    whole = place(seat.job, *seat.wanted, free)
    if whole is not None:
        return whole
    found = least
    sizes = list(_shrinking(seat.wanted, seat.least))
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        allocation = place(seat.job, *sizes[middle], free)
        if allocation is None:
            low = middle + 1
        else:
            high, found = middle, allocation
    held = seat.held
    return held if held and _size(held) >= _size(found) and free.holds(seat.job, held) else found


def _shrinking(wanted: TaskCounts, least: TaskCounts) -> Iterator[TaskCounts]:
    """Fewer and fewer tasks: one less of the role that still has the larger share of its wanted count."""
    workers, servers = wanted
    while (workers, servers) != least:
        workers_part = workers / wanted[0] if workers > least[0] else 0.0
        servers_part = servers / wanted[1] if servers > least[1] else 0.0
        if workers_part >= servers_part:
            workers -= 1
        else:
            servers -= 1
        yield workers, servers


def _deals(workers: int, servers: int, nodes: int) -> Iterator[tuple[Counts, Counts]]:
    """Even counts per node: surplus workers on the first nodes, surplus servers on the last or the first."""
    on_worker = _even(workers, nodes)
    on_server = _even(servers, nodes)
    yield on_worker, on_server[::-1]
    if servers % nodes:
        yield on_worker, on_server


def _even(count: int, nodes: int) -> Counts:
    each, odd = divmod(count, nodes)
    return np.array([each + 1] * odd + [each] * (nodes - odd))


def _by_node(ids: Sequence[str], counts: Counts) -> Mapping[str, int]:
    return {node_id: count for node_id, count in zip(ids, counts.tolist(), strict=True) if count}


def _size(allocation: Allocation) -> int:
    return allocation.worker_count + allocation.server_count


def _bulk(seat: JobToPlace, cluster: Resources) -> float:
    """Dominant share of the job's least counts."""
    workers, servers = seat.least
    server = seat.job.server.demand * servers if seat.job.server else Resources()
    return (seat.job.worker.demand * workers + server).dominant_share(cluster)
