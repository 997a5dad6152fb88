"""Slots of this machine as nodes, for policies that rent: each node is one slot, there at once."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.core.cluster import Node, Wish
from stretto.core.errors import PolicyError
from stretto.core.events import Decided, Event, NodeAdded, NodeLaunched, NodeReleased
from stretto.core.resources import Resources
from stretto.worlds.cloud import node_name

SLOT = "slot"
"""The one instance type of this machine."""


def whole_machine(slots: int) -> Node:
    """The one node of a policy that does not rent."""
    return Node("local", Resources(gpu=slots))


class RentedSlots:
    """Nodes that come and go. A wish for more than there are slots is granted as far as they go."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._here: list[str] = []
        self._launched = 0

    def provision(self, wish: Wish, t_s: float) -> list[Event]:
        strange = [kind for kind, count in wish.nodes if kind != SLOT and count]
        if strange:
            raise PolicyError(f"nodes of {strange[0]} are wished for; this machine has nodes of {SLOT} only")
        events: list[Event] = []
        for node_id in wish.release:
            if node_id in self._here:
                self._here.remove(node_id)
                events.append(NodeReleased(t_s=t_s, node_id=node_id))
        wanted = min(dict(wish.nodes).get(SLOT, 0), self._slots)
        while len(self._here) < wanted:
            self._launched += 1
            node = Node(node_name(SLOT, self._launched), Resources(gpu=1), SLOT)
            self._here.append(node.id)
            events += [NodeLaunched(t_s=t_s, node=node), NodeAdded(t_s=t_s, node=node)]
        return events

    def look(self, t_s: float) -> list[Event]:
        """Slots neither come nor go by themselves."""
        del t_s
        return []

    def close(self) -> None:
        """They cost nothing when nobody is there."""

    def recall(self, history: Iterable[Event], t_s: float) -> list[Event]:
        """Go on where a run's record ends: what of its last wish had not come true, comes true now."""
        coming: dict[str, Node] = {}
        wish: Wish | None = None
        for event in history:
            if isinstance(event, NodeLaunched):
                self._launched += 1
                self._here.append(event.node.id)
                coming[event.node.id] = event.node
            elif isinstance(event, NodeAdded):
                del coming[event.node.id]
            elif isinstance(event, NodeReleased):
                self._here.remove(event.node_id)
            elif isinstance(event, Decided) and event.wish is not None:
                wish = event.wish
        added = [NodeAdded(t_s=t_s, node=node) for node in coming.values()]
        return [*added, *(self.provision(wish, t_s) if wish is not None else [])]
