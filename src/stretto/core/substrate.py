"""The substrate: where jobs run. One protocol for a simulation, this machine and a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from stretto.core.cluster import Wish
from stretto.core.events import Event
from stretto.core.instructions import Instruction
from stretto.core.job import Job


class Substrate(Protocol):
    """Carries out instructions and reports events. It owns the clock of the run."""

    @property
    def changes_batch_in_place(self) -> bool:
        """Whether a running job can change its batch size without a restart."""

    def now_s(self) -> float:
        """Seconds since the run's start."""

    def admit(self, job: Job) -> None:
        """Make a submitted job known; an instruction starts it later."""

    def apply(self, instructions: Sequence[Instruction]) -> None:
        """Carry out instructions in order; those with a number seen before are skipped."""

    def provision(self, wish: Wish) -> None:
        """Begin to request and release nodes as wished; events report the outcome.

        A substrate with fixed nodes does nothing.
        """

    def next_event(self, until_s: float) -> Event | None:
        """Wait for the next event and return it; None if there is none by `until_s`."""

    def recover(self, history: Iterable[Event]) -> None:
        """Bring a new substrate to the state in which a killed run ended, from its journaled events."""

    def close(self) -> None:
        """Stop everything this substrate started."""
