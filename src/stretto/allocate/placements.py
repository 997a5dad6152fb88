"""Placements of jobs that need only GPUs: free GPUs by node, and how new sizes are placed with few moves.

A job that shrinks gives up its smallest pieces. A job that grows or starts goes to one node: a node that it
already has, or else the tightest node that holds it. If no node does, it spans the nodes with most room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import Node

Placement = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs; one node each, in node order."""

EMPTY: Placement = ()


class FreeGpus:
    """Free GPUs of each node while placements come and go.

    Nodes are in buckets by free GPUs, so the tightest node and the emptiest nodes are found without a scan.
    With `avoid_interference` a node hosts at most one job that spans nodes. Nodes that host one have buckets
    of their own, and jobs on a single node fill them first.
    """

    def __init__(self, gpus: Sequence[int], *, max_nodes: int, avoid_interference: bool) -> None:
        self._free = list(gpus)
        self._spanning = [0] * len(gpus)
        self._max_nodes = max_nodes
        self._avoid = avoid_interference
        self._largest = max(gpus, default=0)
        self._plain: list[list[int]] = [[] for _ in range(self._largest + 1)]
        self._shared: list[list[int]] = [[] for _ in range(self._largest + 1)]
        for node, count in enumerate(gpus):
            self._plain[count].append(node)
        self.total = sum(gpus)

    def fits(self, placement: Placement) -> bool:
        spans = len(placement) > 1
        return all(
            self._free[node] >= count and not (spans and self._avoid and self._spanning[node])
            for node, count in placement
        )

    def take(self, placement: Placement) -> None:
        self._change(placement, -1)

    def give_back(self, placement: Placement) -> None:
        self._change(placement, 1)

    def find(self, gpus: int) -> Placement | None:
        """A placement of `gpus` on the fewest nodes, or None if there is no room."""
        if gpus <= self._largest:
            for free in range(gpus, self._largest + 1):
                for bucket in (self._shared[free], self._plain[free]):
                    if bucket:
                        return ((bucket[0], gpus),)
        return self._find_spanning(gpus) if gpus <= self.total else None

    def _find_spanning(self, gpus: int) -> Placement | None:
        """Takes the emptiest nodes first; the last one is the tightest that holds the rest."""
        taken: list[tuple[int, int]] = []
        left = gpus
        buckets = (self._plain,) if self._avoid else (self._plain, self._shared)
        for free in range(self._largest, 0, -1):
            for kind in buckets:
                for node in kind[free]:
                    if left <= free:
                        last = self._tightest(left, {node for node, _ in taken})
                        return tuple(sorted([*taken, (last, left)]))
                    if len(taken) + 1 >= self._max_nodes:
                        return None
                    taken.append((node, free))
                    left -= free
        return None

    def _tightest(self, gpus: int, taken: set[int]) -> int:
        for free in range(gpus, self._largest + 1):
            for kind in (self._plain,) if self._avoid else (self._shared, self._plain):
                for node in kind[free]:
                    if node not in taken:
                        return node
        raise AssertionError("called only when some node has room")

    def _change(self, placement: Placement, sign: int) -> None:
        spans = len(placement) > 1
        for node, count in placement:
            self._remove(node)
            self._free[node] += sign * count
            self.total += sign * count
            if spans:
                self._spanning[node] -= sign
            insort(self._bucket(node), node)

    def _remove(self, node: int) -> None:
        bucket = self._bucket(node)
        del bucket[bisect_left(bucket, node)]

    def _bucket(self, node: int) -> list[int]:
        return (self._shared if self._spanning[node] else self._plain)[self._free[node]]


def place_counts(
    nodes: Sequence[Node], held: Mapping[str, Allocation], counts: Mapping[str, int]
) -> dict[str, Allocation]:
    """Places each job of `counts`, given what jobs hold now; together they must fit in the cluster."""
    free = {node.id: node.gpus for node in nodes}
    placed: dict[str, Allocation] = {}
    growing: list[str] = []
    for job_id, count in counts.items():
        old = held.get(job_id, NOTHING)
        lost = any(node not in free for node in old.nodes)
        if not old or lost or count > old.worker_count:
            growing.append(job_id)
            continue
        placed[job_id] = old if count == old.worker_count else _shrunk(old, count)
        for node, workers in placed[job_id].workers:
            free[node] -= workers
    for job_id in sorted(growing, key=lambda job_id: (-counts[job_id], job_id)):
        placed[job_id] = _grown(free, held.get(job_id, NOTHING), counts[job_id])
        for node, workers in placed[job_id].workers:
            free[node] -= workers
    return placed


def _shrunk(old: Allocation, count: int) -> Allocation:
    kept: dict[str, int] = {}
    for node, workers in sorted(old.workers, key=lambda piece: -piece[1]):
        kept[node] = min(workers, count)
        count -= kept[node]
    return on_nodes((node, kept[node]) for node, _ in old.workers)


def _grown(free: Mapping[str, int], old: Allocation, count: int) -> Allocation:
    whole = [node for node, room in free.items() if room >= count]
    if whole:
        own = {node for node, _ in old.workers}
        return on_nodes({min(whole, key=lambda node: (node not in own, free[node])): count})
    taken: dict[str, int] = {}
    for node, room in sorted(free.items(), key=lambda item: -item[1]):
        taken[node] = min(room, count)
        count -= taken[node]
    return on_nodes((node, taken[node]) for node in free)
