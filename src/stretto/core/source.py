"""Where jobs come from: a list of arrivals, or a study that draws its trials during the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from stretto.core.events import Event, JobSubmitted
from stretto.core.job import Job


class JobSource(Protocol):
    """Hands out jobs when they are due. It sees every event, including past events of a resumed run."""

    @property
    def to_come(self) -> int:
        """The number of jobs not yet handed out."""

    def next_s(self) -> float:
        """When the next job arrives; infinite if that is unknown or there is none."""

    def due(self, now_s: float) -> Sequence[Job]:
        """Jobs that have arrived by now, in order; each is handed out once."""

    def observe(self, event: Event) -> None:
        """Process an event."""


class Arrivals:
    """Jobs that arrive at their time of submission."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._waiting = {job.id: job for job in sorted(jobs, key=lambda job: job.submit_s)}

    @property
    def to_come(self) -> int:
        return len(self._waiting)

    def next_s(self) -> float:
        return next(iter(self._waiting.values())).submit_s if self._waiting else math.inf

    def due(self, now_s: float) -> Sequence[Job]:
        come = []
        while self.next_s() <= now_s:
            come.append(self._waiting.pop(next(iter(self._waiting))))
        return come

    def observe(self, event: Event) -> None:
        """A job that was submitted before the run was resumed does not arrive again."""
        if isinstance(event, JobSubmitted):
            self._waiting.pop(event.job.id, None)
