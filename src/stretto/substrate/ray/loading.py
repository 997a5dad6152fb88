"""Nodes that have come and load the training code: they are told of when they are of use.

So what a node takes until it trains is its delay, which is learned and planned with, and not that of whatever
happens to be started on it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stretto.core.events import NodeAdded

LOADING_S = 120.0
"""A node that has not loaded the code by then is told of all the same: its workers will say why."""


@dataclass(slots=True)
class _Arrival:
    event: NodeAdded
    missing: set[str]
    """Entries that are not loaded."""


class Loading:
    """The nodes that are not told of yet, in the order they came."""

    def __init__(self) -> None:
        self._arrivals: dict[str, _Arrival] = {}

    def begin(self, event: NodeAdded, entries: Iterable[str]) -> None:
        self._arrivals[event.node.id] = _Arrival(event, set(entries))

    def loaded(self, node: str, entry: str) -> None:
        """Or it cannot be loaded, which is as good as it gets."""
        if node in self._arrivals:
            self._arrivals[node].missing.discard(entry)

    def over(self, t_s: float) -> list[NodeAdded]:
        """Those that are of use by now, and those that take too long."""
        ready = [
            node
            for node, one in self._arrivals.items()
            if not one.missing or t_s - one.event.t_s >= LOADING_S
        ]
        return [event for node in ready for event in self.cut_short(node, t_s)]

    def cut_short(self, node: str, t_s: float) -> list[NodeAdded]:
        """What was to be told of a node, now that something else is."""
        one = self._arrivals.pop(node, None)
        if one is None:
            return []
        came = one.event
        if came.queue_s == came.init_s == 0.0:  # nobody saw how long it took
            return [replace(came, t_s=t_s)]
        return [replace(came, t_s=t_s, init_s=came.init_s + t_s - came.t_s)]

    def cut_all_short(self, t_s: float) -> list[NodeAdded]:
        return [event for node in list(self._arrivals) for event in self.cut_short(node, t_s)]
