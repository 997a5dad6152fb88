"""Which nodes a run had, and wished for, when its record ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stretto.core.cluster import Node, Wish
from stretto.core.events import (
    Decided,
    Event,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunPaused,
    RunStarted,
)
from stretto.substrate.fleet_refusals import Refusals


@dataclass(slots=True)
class Record:
    """A fold over a run's history."""

    here: dict[str, Node] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    coming: dict[str, tuple[Node, float]] = field(default_factory=dict)
    """Nodes that were launched, and when."""
    called_off: list[str] = field(default_factory=list)
    """Nodes that were on the way when the run was paused, and that no event has told the end of."""
    wish: Wish = field(default_factory=lambda: Wish(()))
    """The last one, less what was refused or lost since; what it gives back and was not seen to go."""
    refusals: Refusals = field(default_factory=Refusals)
    names: int = 0
    """The highest number that a node's name ends with."""

    @property
    def rented(self) -> tuple[str, ...]:
        """The nodes that were launched and, as far as is known, not let go of."""
        return (*(node.id for node in self.here.values() if node.instance), *self.coming)

    @staticmethod
    def of(history: Iterable[Event]) -> Record:
        record = Record()
        for event in history:
            record._apply(event)
        return record

    def _apply(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.here = {node.id: node for node in event.nodes}
            case NodeLaunched():
                self.coming[event.node.id] = event.node, event.t_s
                self._count(event.node.id)
            case NodeAdded():
                self._settle(event.node.id)
                self.draining.discard(event.node.id)
                self.here[event.node.id] = event.node
                if event.node.instance:
                    self.refusals = self.refusals.arrived()
            case NodeLost() | NodeReleased():
                self._miss(event.node_id)
                self._settle(event.node_id)
                self.draining.discard(event.node_id)
                self.here.pop(event.node_id, None)
            case NodeDraining():
                self._miss(event.node_id)
                self.draining.add(event.node_id)
            case NodeRefused():
                self.wish = self.wish.less(event.instance, event.count)
                self.refusals = self.refusals.after(event, awaits=self._awaits)
            case Decided() if event.wish is not None:
                unseen = [node_id for node_id in self.wish.release if node_id in self.here]
                self.wish = Wish(event.wish.nodes, (*unseen, *event.wish.release))
            case RunPaused():
                self.called_off += self.coming
                self.coming.clear()
            case _:
                pass

    def _settle(self, node_id: str) -> None:
        self.coming.pop(node_id, None)
        if node_id in self.called_off:
            self.called_off.remove(node_id)

    @property
    def _awaits(self) -> bool:
        """Whether anything is on the way, of a run that never had a node: also what did not begin yet."""
        return bool(self.coming) or any(count for _, count in self.wish.nodes)

    def _miss(self, node_id: str) -> None:
        """A node that was counted on is gone, unless it was given back."""
        node = self.here.get(node_id)
        if node is not None and node_id not in self.draining and node_id not in self.wish.release:
            self.wish = self.wish.less(node.instance, 1)

    def _count(self, name: str) -> None:
        number = name.rpartition("-")[2]
        if number.isdigit():
            self.names = max(self.names, int(number))
