"""Nodes that are there anyway as something to rent: taken when they are wished for, given back for others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from stretto.substrate.fleet_nodes import NodeKind, Resource
from stretto.substrate.ray.launch import Failed, News
from stretto.substrate.ray.nodes import RayNode, read_nodes


class Pool:
    """All nodes of the connected cluster that have so many slots, under the name of one type.

    Nothing is launched: a fleet adopts the nodes it sees, and what it then still waits for does not come.
    """

    adopts = True

    def __init__(self, kind: NodeKind) -> None:
        self.kinds: Sequence[NodeKind] = (kind,)
        self._kind = kind
        self._asked: list[str] = []
        self._overdue: list[str] = []

    def read(self, resource: Resource | None) -> tuple[RayNode, ...]:
        """The nodes of the pool."""
        return tuple(
            replace(node, instance=self._kind.instance)
            for node in read_nodes(resource)
            if node.slots == self._kind.slots
        )

    def launched(self) -> Collection[str]:
        return ()  # there is none to end

    def recall(self, rented: Mapping[str, str]) -> None:
        """Those that were not there yet are found now or refused, as if they had just been asked for."""
        self._asked += rented

    def launch(self, name: str, instance: str) -> None:
        del instance
        self._asked.append(name)

    def release(self, name: str, ray_id: str) -> None:
        """It goes on being there."""

    def news(self) -> list[News]:
        """Of those asked for before the last time: what could be had of them was adopted since then."""
        refused, self._overdue, self._asked = self._overdue, self._asked, []
        return [Failed(name, f"no other node has {self._kind.slots} slots") for name in refused]

    def settle(self) -> frozenset[str]:
        return frozenset()  # nothing is on the way

    def close(self, awaited: Collection[str] = ()) -> None:
        """There is nothing to wait for."""
