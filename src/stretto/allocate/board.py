"""A scratch board of nodes and the placements on them: where there is room, and who is in the way."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

Placement = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs; one node each, in node order."""

EMPTY: Placement = ()


class Board:
    """Free GPUs of each node while placements come and go.

    Nodes are kept in buckets by free GPUs, so that the tightest node for a job and the emptiest ones
    for a larger job are found without looking at all of them. With `avoid_interference` a node hosts
    at most one job that spans nodes; nodes that already host one are kept apart, so that single-node
    jobs fill those first.
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
        self.free_total = sum(gpus)

    def fits(self, placement: Placement) -> bool:
        spans = len(placement) > 1
        return all(
            self._free[node] >= count and not (spans and self._avoid and self._spanning[node])
            for node, count in placement
        )

    def put(self, placement: Placement) -> None:
        self._change(placement, -1)

    def lift(self, placement: Placement) -> None:
        self._change(placement, 1)

    def find(self, gpus: int) -> Placement | None:
        """A placement of `gpus` on the fewest nodes there is room for, or None."""
        if gpus <= self._largest:
            for free in range(gpus, self._largest + 1):
                for bucket in (self._shared[free], self._plain[free]):
                    if bucket:
                        return ((bucket[0], gpus),)
        return self._find_spanning(gpus) if gpus <= self.free_total else None

    def _find_spanning(self, gpus: int) -> Placement | None:
        """Emptiest nodes first; the last one is the tightest that holds the rest."""
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
            self.free_total += sign * count
            if spans:
                self._spanning[node] -= sign
            insort(self._bucket(node), node)

    def _remove(self, node: int) -> None:
        bucket = self._bucket(node)
        del bucket[bisect_left(bucket, node)]

    def _bucket(self, node: int) -> list[int]:
        return (self._shared if self._spanning[node] else self._plain)[self._free[node]]
