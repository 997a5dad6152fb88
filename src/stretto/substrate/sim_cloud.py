"""Nodes of the simulated substrate that come and go: who is here, who is on the way."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from stretto.core.cluster import Node, Wish
from stretto.core.events import NodeAdded, NodeLaunched, NodeRefused, NodeReleased
from stretto.worlds.cloud import Cloud, node_name


@dataclass(frozen=True, slots=True, order=True)
class _Coming:
    """What a request brings next: a node that is launched, and later the same one ready."""

    t_s: float
    number: int
    is_ready: bool
    event: NodeLaunched | NodeAdded = field(compare=False)

    @property
    def node(self) -> Node:
        return self.event.node


class SimCloud:
    """Turns wishes into nodes, after the delays of a cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._here: dict[str, str] = {}
        """Instance type by node."""
        self._starting: set[str] = set()
        self._coming: list[_Coming] = []
        self._requests = 0
        self._asked = 0

    def next_s(self) -> float:
        return self._coming[0].t_s if self._coming else math.inf

    def deliver(self) -> NodeLaunched | NodeAdded:
        """What comes next."""
        event = heapq.heappop(self._coming).event
        if isinstance(event, NodeLaunched):
            self._starting.add(event.node.id)
        else:
            self._starting.discard(event.node.id)
            self._here[event.node.id] = event.node.instance
        return event

    def provision(self, now_s: float, wish: Wish) -> list[NodeReleased | NodeRefused]:
        """Ask for what is missing and give back what is too much, first what would come last."""
        refused: list[NodeRefused] = []
        gone = [node_id for node_id in wish.release if self._here.pop(node_id, None) is not None]
        wanted = Counter(dict(wish.nodes))
        for instance in sorted({*wanted, *(coming.node.instance for coming in self._coming)}):
            here = sum(1 for kind in self._here.values() if kind == instance)
            on_the_way = sorted(
                coming
                for coming in self._coming
                if coming.node.instance == instance and isinstance(coming.event, NodeAdded)
            )
            missing = wanted[instance] - here - len(on_the_way)
            if missing > 0:
                refused += self._request(now_s, instance, missing)
            elif missing < 0:
                gone += self._cancel({coming.node.id for coming in on_the_way[missing:]})
        return [*(NodeReleased(t_s=now_s, node_id=node_id) for node_id in gone), *refused]

    def _request(self, now_s: float, instance: str, count: int) -> list[NodeRefused]:
        """Ask for nodes; what the cloud does not have."""
        launches = self._cloud.launch(instance, count, self._requests)
        for launch in launches:
            self._asked += 1
            node = Node(node_name(instance, self._asked), launch.capacity, instance)
            begun_s = now_s + launch.queue_s
            ready_s = begun_s + launch.init_s
            added = NodeAdded(t_s=ready_s, node=node, queue_s=launch.queue_s, init_s=launch.init_s)
            launched = NodeLaunched(t_s=begun_s, node=node)
            heapq.heappush(self._coming, _Coming(begun_s, self._asked, is_ready=False, event=launched))
            heapq.heappush(self._coming, _Coming(ready_s, self._asked, is_ready=True, event=added))
        self._requests += 1
        missing = count - len(launches)
        why = f"the cloud had {len(launches)} of {count}"
        return [NodeRefused(t_s=now_s, instance=instance, count=missing, why=why)] if missing else []

    def _cancel(self, nodes: set[str]) -> list[str]:
        """Take back requests; those that are starting up are released."""
        self._coming = [coming for coming in self._coming if coming.node.id not in nodes]
        heapq.heapify(self._coming)
        launched = sorted(nodes & self._starting)
        self._starting -= nodes
        return launched
