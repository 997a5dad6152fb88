"""The append-only log of a run: what happened, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from stretto.core.events import Decided, Event


class Journal(Protocol):
    """Records events before they are acted on, and returns them all to be folded."""

    def append(self, events: Sequence[Event]) -> None:
        """Record events in order: all of them, or none if this is interrupted."""

    def events(self) -> Iterator[Event]:
        """Everything recorded so far, oldest first."""

    def close(self) -> None:
        """Close whatever the journal has open."""


class MemoryJournal:
    """A journal that lives as long as its process: for simulations."""

    def __init__(self, *, with_memory: bool = True) -> None:
        """Without `with_memory`, decisions are kept without the policy's memory.

        A study's memory grows with its trials, so one copy per decision takes memory that grows with the
        square of the trials. Only a run that is resumed needs it.
        """
        self._with_memory = with_memory
        self._events: list[Event] = []

    def append(self, events: Sequence[Event]) -> None:
        self._events.extend(events if self._with_memory else map(_without_memory, events))

    def events(self) -> Iterator[Event]:
        return iter(self._events)

    def close(self) -> None:
        """Nothing is held open; the events stay readable."""


def _without_memory(event: Event) -> Event:
    return replace(event, memory=None) if isinstance(event, Decided) else event
