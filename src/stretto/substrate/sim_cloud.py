"""Nodes of the simulated substrate that come and go: who is here, who is on the way."""

from __future__ import annotations

import heapq
import math
from collections import Counter

from stretto.core.cluster import Node, Wish
from stretto.core.events import NodeAdded, NodeReleased
from stretto.worlds.cloud import Cloud, node_name


class SimCloud:
    """Turns wishes into nodes, after the delays of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._here: dict[str, str] = {}
        """Instance type by node."""
        self._coming: list[tuple[float, int, NodeAdded]] = []
        self._requests = 0
        self._launched = 0

    def next_s(self) -> float:
        return self._coming[0][0] if self._coming else math.inf

    def deliver(self) -> NodeAdded:
        """The node that comes next."""
        _, _, added = heapq.heappop(self._coming)
        self._here[added.node.id] = added.node.instance
        return added

    def provision(self, now_s: float, wish: Wish) -> list[NodeReleased]:
        released = [node_id for node_id in wish.release if self._here.pop(node_id, None) is not None]
        wanted = Counter(dict(wish.nodes))
        for instance in {*wanted, *(added.node.instance for _, _, added in self._coming)}:
            here = sum(1 for kind in self._here.values() if kind == instance)
            coming = [entry for entry in self._coming if entry[2].node.instance == instance]
            missing = wanted[instance] - here - len(coming)
            if missing > 0:
                self._request(now_s, instance, missing)
            elif missing < 0 and coming:
                self._cancel(sorted(coming)[missing:])
        return [NodeReleased(t_s=now_s, node_id=node_id) for node_id in released]

    def _request(self, now_s: float, instance: str, count: int) -> None:
        for launch in self._cloud.launch(instance, count, self._requests):
            self._launched += 1
            ready_s = now_s + launch.queue_s + launch.init_s
            node = Node(node_name(instance, self._launched), launch.capacity, instance)
            added = NodeAdded(t_s=ready_s, node=node, queue_s=launch.queue_s, init_s=launch.init_s)
            heapq.heappush(self._coming, (ready_s, self._launched, added))
        self._requests += 1

    def _cancel(self, entries: list[tuple[float, int, NodeAdded]]) -> None:
        """Take back requests: those that would come last go first."""
        gone = {number for _, number, _ in entries}
        self._coming = [entry for entry in self._coming if entry[1] not in gone]
        heapq.heapify(self._coming)
