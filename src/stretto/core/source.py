"""Where jobs come from: a list with times, or a study that draws its trials as it goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from stretto.core.events import Event, JobSubmitted
from stretto.core.job import Job


class JobSource(Protocol):
    """Hands out jobs when they are due. It sees every event, also those of a run that is resumed."""

    @property
    def to_come(self) -> int:
        """Jobs not yet handed out."""

    def next_s(self) -> float:
        """When the next job comes, as far as can be said now; infinite if none is in sight."""

    def due(self, now_s: float) -> Sequence[Job]:
        """Jobs that have come by now, in order; each is handed out once."""

    def observe(self, event: Event) -> None:
        """Take note of what happened."""


class Arrivals:
    """Jobs that come at their time of submission, whatever happens."""

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
        """A job that was submitted before the run was resumed does not come again."""
        if isinstance(event, JobSubmitted):
            self._waiting.pop(event.job.id, None)
