"""The provisioner protocol: how nodes come and go, for this machine, fixed clusters and clouds."""

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
    """Turns wishes into nodes. Its methods may not block; slow work belongs into other threads."""

    def provision(self, wish: Wish, t_s: float) -> Sequence[Event]:
        """Begin to carry out a wish; the events that follow at once."""

    def look(self, t_s: float) -> Sequence[Event]:
        """What happened to wishes and nodes since the last look."""

    def recall(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        """Resume from a run's events; what happened to its nodes meanwhile."""

    def close(self) -> None:
        """The run is over or paused: release everything that costs money."""


def noting_nodes(history: Iterable[Event], noted: list[Event]) -> Iterator[Event]:
    """Yield the history, and append to `noted` the events that a provisioner needs."""
    for event in history:
        if event.kind in _ABOUT_NODES or (isinstance(event, Decided) and event.wish is not None):
            noted.append(event)
        yield event


class NodeFleet(Provisioner, Protocol):
    """A provisioner that can also clean up after a run that is not resumed."""

    def release_all(self, history: Iterable[Event], t_s: float) -> Sequence[Event]:
        """Release everything that was launched for it; `close` waits for that."""
