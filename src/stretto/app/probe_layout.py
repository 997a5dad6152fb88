"""Where the workers of a probe are put: gangs grow where they are, and new ones begin where there is room."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.core.allocation import Allocation, on_nodes
from stretto.core.cluster import Node


class Layout:
    """Who holds how many slots of which node; nobody asks for more than there are."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._free = {node.id: node.gpus for node in nodes}
        self._held: dict[str, dict[str, int]] = {}

    def place(self, job_id: str, workers: int) -> Allocation:
        """So many workers from now on: those that are there stay, others come beside them if they can."""
        before = self._held.get(job_id, {})
        self.clear(job_id)
        kept: dict[str, int] = {}
        for node, count in before.items():
            kept[node] = min(count, workers - sum(kept.values()))
        self._take(kept)
        while (missing := workers - sum(kept.values())) > 0:
            node = self._roomiest([node for node in kept if self._free[node]] or self._free)
            taken = min(missing, self._free[node])
            if not taken:
                raise ValueError(f"{job_id} wants {missing} slots more than there are")
            kept[node] = kept.get(node, 0) + taken
            self._take({node: taken})
        self._held[job_id] = {node: count for node, count in kept.items() if count}
        return on_nodes(self._held[job_id])

    def clear(self, job_id: str) -> None:
        """It holds nothing any more."""
        for node, count in self._held.pop(job_id, {}).items():
            self._free[node] += count

    def _roomiest(self, nodes: Iterable[str]) -> str:
        return max(nodes, key=lambda node: self._free[node])

    def _take(self, counts: dict[str, int]) -> None:
        for node, count in counts.items():
            self._free[node] -= count
