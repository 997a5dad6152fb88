"""How a substrate's nodes come and go: one protocol for slots of this machine, fixed clusters and clouds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from stretto.core.cluster import Wish
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
    RunResumed,
    RunStarted,
)

_ABOUT_NODES: Final = frozenset(
    one.kind
    for one in (
        NodeAdded,
        NodeDraining,
        NodeLaunched,
        NodeLost,
        NodeRefused,
        NodeReleased,
        RunPaused,
        RunResumed,
        RunStarted,
    )
)


class Provisioner(Protocol):
    """Turns wishes into nodes. Nothing here may block: whatever takes time goes on elsewhere."""

    def provision(self, wish: Wish, t_s: float) -> Sequence[Event]:
        """Set about it; what can be told at once."""

    def look(self, t_s: float) -> Sequence[Event]:
        """What has come of wishes, and to nodes, since the last look."""

    def recall(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        """Go on where a run's record ends; what happened to its nodes meanwhile."""

    def close(self) -> None:
        """The run is over or paused: nothing may be left that costs and nobody uses."""


def noting_nodes(history: Iterable[Event], noted: list[Event]) -> Iterator[Event]:
    """The history; what a provisioner must know of it is noted on the way."""
    for event in history:
        if event.kind in _ABOUT_NODES or (isinstance(event, Decided) and event.wish is not None):
            noted.append(event)
        yield event


class NodeFleet(Provisioner, Protocol):
    """A provisioner that can also clear up after a run that does not go on."""

    def release_all(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        """End everything that was launched for it; `close` waits for that."""
