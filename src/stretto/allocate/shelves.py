"""Nodes by what is free on them: equal ones are looked at once, however many there are."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from stretto.allocate.free import SLACK, Counts, Floats, FreeCapacity
from stretto.core.allocation import Allocation
from stretto.core.job import Job

DECIMALS = 10
"""Amounts that differ by less are float noise, well below what a check of the result allows."""
GONE = -1.0
"""Stands for every amount of a shelf without nodes: nothing fits there."""

Key = tuple[float, ...]


class Shelves(FreeCapacity):
    """Free capacity that knows which nodes have the same amounts free; what it began from stays as it is."""

    def __init__(self, free: FreeCapacity) -> None:
        vars(self).update(vars(free))  # the nodes, their capacities and their order do not change
        self.rows = free.rows.copy()
        kinds, shelf_of = np.unique(self.rows.round(DECIMALS), axis=0, return_inverse=True)
        self._kinds: Floats = kinds
        self._shelf: dict[Key, int] = {tuple(kind): shelf for shelf, kind in enumerate(kinds.tolist())}
        self._nodes: list[list[int]] = [[] for _ in kinds]
        for node, shelf in enumerate(shelf_of.ravel().tolist()):
            self._nodes[shelf].append(node)
        self._spare: list[int] = []
        largest = self.capacity.max(axis=0, initial=0.0)
        self._scale: Floats = np.divide(1.0, largest, out=np.zeros(4), where=largest > 0)

    def copy(self) -> Shelves:
        return Shelves(self)

    def take(self, job: Job, allocation: Allocation) -> None:
        self._move(job, allocation, -1.0)

    def give_back(self, job: Job, allocation: Allocation) -> None:
        self._move(job, allocation, 1.0)

    def may_hold(self, demand: Floats, count: int) -> bool:
        """Whether there is room for so many tasks of one demand; False where that is out of the question."""
        needed = demand > 0
        room = np.floor((self._kinds[:, needed] + SLACK) / demand[needed]).min(axis=1, initial=count)
        tasks = sum(int(r) * len(nodes) for r, nodes in zip(room, self._nodes, strict=True) if r > 0)
        return tasks >= count

    def with_room(self, *demands: Floats) -> FreeCapacity:
        """Only the nodes that hold a task of any of these demands, to look for room in."""
        shelves = np.zeros(len(self._kinds), dtype=bool)
        for demand in demands:
            shelves |= ((self._kinds + SLACK >= demand) | (demand <= 0)).all(axis=1)
        nodes = sorted(node for shelf in np.flatnonzero(shelves) for node in self._nodes[shelf])
        some = FreeCapacity(())
        some.ids = tuple(self.ids[node] for node in nodes)
        some.capacity, some.rows = self.capacity[nodes], self.rows[nodes]
        return some

    def most_free(self, needs: Floats, count: int) -> list[int]:
        """The `count` nodes that hold the largest parts of `needs`."""
        needed = needs > 0
        part = (self._kinds[:, needed] / needs[needed]).min(axis=1, initial=np.inf)
        return self._first(np.argsort(-part, kind="stable"), count)

    def tightest(self, needs: Floats, count: int) -> list[int]:
        """The `count` fullest nodes that hold `needs`, so that large jobs find room elsewhere; [] if too few.

        What the job has no use for must not be stranded: it goes where least of that is free.
        """
        needed = needs > 0
        holding = np.flatnonzero((self._kinds[:, needed] + SLACK >= needs[needed]).all(axis=1))
        emptiness = self._kinds[holding] * self._scale
        of_needed, of_others = emptiness[:, needed].sum(axis=1), emptiness[:, ~needed].sum(axis=1)
        found = self._first(holding[np.lexsort((of_needed, of_others.round(DECIMALS)))], count)
        return found if len(found) == count else []

    def _first(self, shelves: Counts, count: int) -> list[int]:
        """The first nodes, shelf by shelf."""
        found: list[int] = []
        for shelf in shelves.tolist():
            found += self._nodes[shelf][: count - len(found)]
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
        shelf = self._shelf[key]
        nodes = self._nodes[shelf]
        del nodes[bisect_left(nodes, node)]
        if not nodes:
            self._kinds[shelf] = GONE
            self._spare.append(self._shelf.pop(key))

    def _insert(self, node: int) -> None:
        key = self._key(node)
        shelf = self._shelf.get(key)
        if shelf is None:
            shelf = self._shelf[key] = self._new_shelf()
            self._kinds[shelf] = key
        insort(self._nodes[shelf], node)

    def _new_shelf(self) -> int:
        if not self._spare:
            known = len(self._kinds)
            self._spare = list(range(known, 2 * known + 1))
            self._kinds = np.vstack([self._kinds, np.full((known + 1, 4), GONE)])
            self._nodes += [[] for _ in self._spare]
        return self._spare.pop()

    def _key(self, node: int) -> Key:
        return tuple(self.rows[node].round(DECIMALS).tolist())
