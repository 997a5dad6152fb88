"""On which nodes the tasks of a gang are placed: free capacity as resource vectors, and packing into it.

This is for jobs that need more than GPUs. A gang is packed whole or not at all, on as few nodes as possible:

- on the tightest node that holds all of it, if there is one;
- else on the node that takes most of the remaining tasks, again and again; the last piece goes to the
  tightest node that holds it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from stretto.core.allocation import Allocation
from stretto.core.cluster import Node
from stretto.core.job import Job
from stretto.core.resources import TOLERANCE, Resources

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Key = tuple[float, ...]
SLACK = TOLERANCE / 2
"""Half the tolerance of the later checks, so that sums in another order pass them too."""
DECIMALS = 10
"""Smaller differences of amounts are float noise, well below the tolerance of later checks."""
GONE = -1.0
"""The amounts of a group without nodes: nothing fits there."""


class FreeCapacity:
    """Free capacity of each node, in the order of the nodes; one decision changes it as it places jobs."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.ids = tuple(node.id for node in nodes)
        self.capacity: Floats = np.array([node.capacity.amounts() for node in nodes], dtype=float).reshape(
            -1, 4
        )
        self.rows: Floats = self.capacity.copy()
        """Free amounts: one row per node, columns as in `Resources.amounts`."""
        self._index = {node_id: i for i, node_id in enumerate(self.ids)}

    def copy(self) -> FreeCapacity:
        """An independent copy."""
        twin = copy(self)
        twin.rows = self.rows.copy()
        return twin

    def take(self, job: Job, allocation: Allocation) -> None:
        """Subtract what the job holds; nodes that are going away are ignored."""
        self._add(job, allocation, -1.0)

    def give_back(self, job: Job, allocation: Allocation) -> None:
        self._add(job, allocation, 1.0)

    def _add(self, job: Job, allocation: Allocation, times: float) -> None:
        for node_id, used in allocation.uses(job).items():
            if node_id in self._index:
                self.rows[self._index[node_id]] += (used * times).amounts()

    def places_of(self, node_ids: Iterable[str]) -> Counts:
        """Positions of these nodes."""
        return np.array([self._index[node_id] for node_id in node_ids], dtype=np.int64)

    def total(self) -> Resources:
        """Free capacity of all nodes together, without float noise."""
        return Resources(*(max(round(float(amount), 6), 0.0) for amount in self.rows.sum(axis=0)))

    def fits(self, node_id: str, demand: Resources) -> bool:
        row = self.rows[self._index[node_id]]
        return all(need <= have + SLACK for need, have in zip(demand.amounts(), row, strict=True) if need > 0)

    def holds(self, job: Job, allocation: Allocation) -> bool:
        """Whether there is room for exactly this allocation; False if one of its nodes is gone."""
        return all(
            node_id in self._index and self.fits(node_id, used)
            for node_id, used in allocation.uses(job).items()
        )

    def allocation(self, workers: Mapping[str, int], servers: Mapping[str, int]) -> Allocation:
        """Tasks per node as an allocation, in the order of the nodes."""
        by_node = self._index.__getitem__
        return Allocation(
            tuple((node_id, workers[node_id]) for node_id in sorted(workers, key=by_node)),
            tuple((node_id, servers[node_id]) for node_id in sorted(servers, key=by_node)),
        )

    def joined(self, one: Allocation, other: Allocation) -> Allocation:
        """The tasks of both."""
        return self.allocation(
            _added(dict(one.workers), other.workers), _added(dict(one.servers), other.servers)
        )


def place_packed(job: Job, workers: int, servers: int, free: FreeCapacity) -> Allocation | None:
    """Finds nodes for all tasks of a gang, without taking them; None if they do not fit.

    Without servers the number of nodes is the least possible. With servers three ways are tried in order:
    filling node by node, placing each server where it costs the fewest workers, and an exact search for any
    placement.
    """
    packer = _Packer(job, free)
    rows = free.rows
    if packer.room(rows, packer.worker, workers).sum() < workers:
        return None
    if servers and packer.room(rows, packer.server, servers).sum() < servers:
        return None
    places = packer.node_by_node(rows, workers, servers)
    if places is None and servers:
        places = packer.servers_aside(rows, workers, servers)
    if places is None and servers:
        places = packer.any_way(rows, workers, servers)
    if places is None:
        return None
    return Allocation(
        tuple((free.ids[i], int(places[i, 0])) for i in np.flatnonzero(places[:, 0])),
        tuple((free.ids[i], int(places[i, 1])) for i in np.flatnonzero(places[:, 1])),
    )


class _Packer:
    """Packs the tasks of one job into rows of free amounts. Places are counts by (node, worker or server)."""

    def __init__(self, job: Job, free: FreeCapacity) -> None:
        self.worker = np.array(job.worker.demand.amounts(), dtype=float)
        self.server = np.array(job.server.demand.amounts() if job.server else [0.0] * 4, dtype=float)
        # Amounts of different resources are compared as shares of the largest node.
        largest = free.capacity.max(axis=0, initial=0.0)
        self._scale = np.divide(1.0, largest, out=np.zeros(4), where=largest > 0)

    def room(self, rows: Floats, demand: Floats, limit: int) -> Counts:
        """How many tasks of a demand each node holds, at most `limit`."""
        needed = demand > 0
        if not needed.any():
            return np.full(len(rows), limit)
        fitting: Floats = ((rows[:, needed] + SLACK) / demand[needed]).min(axis=1, initial=limit)
        return np.maximum(np.floor(fitting), 0.0).astype(np.int64)

    def node_by_node(self, rows: Floats, workers: int, servers: int) -> Counts | None:
        places = np.zeros((len(rows), 2), dtype=np.int64)
        unused = np.ones(len(rows), dtype=bool)
        emptiness = (rows * self._scale).sum(axis=1)
        while workers or servers:
            last = self._holding_all(rows, unused, emptiness, workers, servers)
            if last is not None:
                places[last] = workers, servers
                return places
            taken_workers, taken_servers = self._filled(rows, workers, servers)
            tasks = np.where(unused, taken_workers + taken_servers, 0)
            most = tasks.max(initial=0)
            if most == 0:
                return None
            node = int(np.argmin(np.where(tasks == most, emptiness, np.inf)))
            places[node] = taken_workers[node], taken_servers[node]
            unused[node] = False
            workers -= int(taken_workers[node])
            servers -= int(taken_servers[node])
        return places

    def servers_aside(self, rows: Floats, workers: int, servers: int) -> Counts | None:
        """Places each server where it costs the fewest workers, then the workers."""
        rows = rows.copy()
        places = np.zeros((len(rows), 2), dtype=np.int64)
        cost = self._cost_of_server(rows, workers)
        for _ in range(servers):
            node = int(np.argmin(cost))
            if np.isinf(cost[node]):
                return None
            rows[node] -= self.server
            places[node, 1] += 1
            cost[node] = self._cost_of_server(rows[node : node + 1], workers)[0]
        seated = self.node_by_node(rows, workers, 0)
        return None if seated is None else seated + places

    def any_way(self, rows: Floats, workers: int, servers: int) -> Counts | None:
        """Exact search: by dynamic programming over nodes, the most servers beside each number of workers."""
        counts = np.arange(workers + 1)
        most = np.where(counts == 0, 0, -1)  # -1: this number of workers does not fit
        taken: list[Counts] = []
        for row in rows:
            fitting = int(self.room(row[None], self.worker, workers)[0])
            beside = self.room(row - np.outer(counts[: fitting + 1], self.worker), self.server, servers)
            # [workers so far, workers on this node]: servers on the nodes before, or -1 if impossible
            before = counts[:, None] - counts[None, : fitting + 1]
            earlier = np.where(before >= 0, most[np.maximum(before, 0)], -1)
            held = np.where(earlier >= 0, np.minimum(earlier + beside, servers), -1)
            taken.append(held.argmax(axis=1))
            most = held.max(axis=1)
        if most[workers] < servers:
            return None
        places = np.zeros((len(rows), 2), dtype=np.int64)
        for node in reversed(range(len(rows))):
            places[node, 0] = taken[node][workers]
            workers -= int(places[node, 0])
        room = self.room(rows - np.outer(places[:, 0], self.worker), self.server, servers)
        places[:, 1] = np.diff(np.minimum(np.cumsum(room), servers), prepend=0)
        return places

    def _holding_all(
        self, rows: Floats, unused: npt.NDArray[np.bool_], emptiness: Floats, workers: int, servers: int
    ) -> int | None:
        """The tightest unused node that holds everything."""
        needs = self.worker * workers + self.server * servers
        needed = needs > 0
        holding = unused & (rows[:, needed] + SLACK >= needs[needed]).all(axis=1)
        return int(np.argmin(np.where(holding, emptiness, np.inf))) if holding.any() else None

    def _filled(self, rows: Floats, workers: int, servers: int) -> tuple[Counts, Counts]:
        """How many tasks each node takes: both roles in proportion, then workers, then servers."""
        if not servers:
            none = np.zeros(len(rows), dtype=np.int64)
            return self.room(rows, self.worker, workers), none
        needs = self.worker * workers + self.server * servers
        needed = needs > 0
        part = ((rows[:, needed] + SLACK) / needs[needed]).min(axis=1, initial=1.0).clip(min=0.0)
        some_workers = np.floor(part * workers).astype(np.int64)
        some_servers = np.floor(part * servers).astype(np.int64)
        left = rows - np.outer(some_workers, self.worker) - np.outer(some_servers, self.server)
        more_workers = np.minimum(self.room(left, self.worker, workers), workers - some_workers)
        left = left - np.outer(more_workers, self.worker)
        more_servers = np.minimum(self.room(left, self.server, servers), servers - some_servers)
        return some_workers + more_workers, some_servers + more_servers

    def _cost_of_server(self, rows: Floats, workers: int) -> Floats:
        """How many workers one more server displaces on each node; infinite if it does not fit."""
        lost = self.room(rows, self.worker, workers) - self.room(rows - self.server, self.worker, workers)
        return np.where(self.room(rows, self.server, 1) > 0, lost, np.inf)


def _added(counts: dict[str, int], tasks: tuple[tuple[str, int], ...]) -> dict[str, int]:
    for node_id, count in tasks:
        counts[node_id] = counts.get(node_id, 0) + count
    return counts


class NodeIndex(FreeCapacity):
    """An independent copy of free capacity, with nodes grouped by free amounts for fast search."""

    def __init__(self, free: FreeCapacity) -> None:
        vars(self).update(vars(free))  # shared: the nodes, their capacities and their order never change
        self.rows = free.rows.copy()
        amounts, group_of = np.unique(self.rows.round(DECIMALS), axis=0, return_inverse=True)
        self._amounts: Floats = amounts
        self._group_of: dict[Key, int] = {tuple(row): group for group, row in enumerate(amounts.tolist())}
        self._nodes: list[list[int]] = [[] for _ in amounts]
        for node, group in enumerate(group_of.ravel().tolist()):
            self._nodes[group].append(node)
        self._spare: list[int] = []
        largest = self.capacity.max(axis=0, initial=0.0)
        self._scale: Floats = np.divide(1.0, largest, out=np.zeros(4), where=largest > 0)

    def copy(self) -> NodeIndex:
        return NodeIndex(self)

    def take(self, job: Job, allocation: Allocation) -> None:
        self._move(job, allocation, -1.0)

    def give_back(self, job: Job, allocation: Allocation) -> None:
        self._move(job, allocation, 1.0)

    def may_hold(self, demand: Floats, count: int) -> bool:
        """Whether `count` tasks of this demand fit on all nodes together; if not, no packing can work."""
        needed = demand > 0
        room = np.floor((self._amounts[:, needed] + SLACK) / demand[needed]).min(axis=1, initial=count)
        tasks = sum(int(r) * len(nodes) for r, nodes in zip(room, self._nodes, strict=True) if r > 0)
        return tasks >= count

    def with_room(self, *demands: Floats) -> FreeCapacity:
        """The nodes that have room for a task of any of these demands."""
        groups = np.zeros(len(self._amounts), dtype=bool)
        for demand in demands:
            groups |= ((self._amounts + SLACK >= demand) | (demand <= 0)).all(axis=1)
        nodes = sorted(node for group in np.flatnonzero(groups) for node in self._nodes[group])
        some = FreeCapacity(())
        some.ids = tuple(self.ids[node] for node in nodes)
        some.capacity, some.rows = self.capacity[nodes], self.rows[nodes]
        return some

    def most_free(self, needs: Floats, count: int) -> list[int]:
        """The `count` nodes that hold the largest shares of `needs`."""
        needed = needs > 0
        part = (self._amounts[:, needed] / needs[needed]).min(axis=1, initial=np.inf)
        return self._first(np.argsort(-part, kind="stable"), count)

    def tightest(self, needs: Floats, count: int) -> list[int]:
        """The `count` fullest nodes that hold `needs`, so that large jobs find room elsewhere; [] if too few.

        Nodes with little free of the other resources come first, so that these are not stranded.
        """
        needed = needs > 0
        holding = np.flatnonzero((self._amounts[:, needed] + SLACK >= needs[needed]).all(axis=1))
        emptiness = self._amounts[holding] * self._scale
        of_needed, of_others = emptiness[:, needed].sum(axis=1), emptiness[:, ~needed].sum(axis=1)
        found = self._first(holding[np.lexsort((of_needed, of_others.round(DECIMALS)))], count)
        return found if len(found) == count else []

    def _first(self, groups: Counts, count: int) -> list[int]:
        """The first `count` nodes, group by group."""
        found: list[int] = []
        for group in groups.tolist():
            found += self._nodes[group][: count - len(found)]
            if len(found) == count:
                break
        return found

    def _move(self, job: Job, allocation: Allocation, sign: float) -> None:
        uses = allocation.uses(job)
        for node, used in zip(self.places_of(uses).tolist(), uses.values(), strict=True):
            self._remove(node)
            self.rows[node] += np.multiply(sign, used.amounts())
            self._insert(node)

    def _remove(self, node: int) -> None:
        key = self._key(node)
        group = self._group_of[key]
        nodes = self._nodes[group]
        del nodes[bisect_left(nodes, node)]
        if not nodes:
            self._amounts[group] = GONE
            self._spare.append(self._group_of.pop(key))

    def _insert(self, node: int) -> None:
        key = self._key(node)
        group = self._group_of.get(key)
        if group is None:
            group = self._group_of[key] = self._new_group()
            self._amounts[group] = key
        insort(self._nodes[group], node)

    def _new_group(self) -> int:
        if not self._spare:
            known = len(self._amounts)
            self._spare = list(range(known, 2 * known + 1))
            self._amounts = np.vstack([self._amounts, np.full((known + 1, 4), GONE)])
            self._nodes += [[] for _ in self._spare]
        return self._spare.pop()

    def _key(self, node: int) -> Key:
        return tuple(self.rows[node].round(DECIMALS).tolist())
