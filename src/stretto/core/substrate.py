"""Where work happens: a simulation, processes on this machine, a cluster. One protocol for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from stretto.core.cluster import Wish
from stretto.core.events import Event
from stretto.core.instructions import Instruction
from stretto.core.job import Job


class Substrate(Protocol):
    """Carries out instructions and says what happened. It owns the clock of the run."""

    @property
    def changes_batch_in_place(self) -> bool:
        """Whether a running job can be told another batch size; if not, it must be restarted for it."""

    def now_s(self) -> float:
        """Seconds since the run's start."""

    def admit(self, job: Job) -> None:
        """Make a submitted job known; it does not start before an instruction says so."""

    def apply(self, instructions: Sequence[Instruction]) -> None:
        """Carry out instructions in order. Those with a number seen before are passed over."""

    def provision(self, wish: Wish) -> None:
        """Set about making the cluster what is wished for; events tell what comes of it.

        A substrate whose nodes are simply there has nothing to do.
        """

    def next_event(self, until_s: float) -> Event | None:
        """The next event at or before `until_s`, waiting for it; None once `until_s` has come."""

    def recover(self, history: Iterable[Event]) -> None:
        """Bring a new substrate to where the journaled history of a killed run left it."""

    def close(self) -> None:
        """Stop everything this substrate started."""
