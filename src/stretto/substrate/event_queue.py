"""Events of a substrate until the controller asks for them: few of each job, whatever it prints."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from stretto.core.events import Event, JobReported

_MOST_REPORTS = 32
"""Of one job, that wait by themselves; what comes then is merged until the controller has caught up."""
_MOST_SPEEDS = 8
"""Samples of a step's time that a merged report has."""


def merged(first: JobReported, second: JobReported) -> JobReported:
    """Two reports of a job as one: how far it is now, and every result and loss of both."""
    return replace(
        second,
        speeds=(*first.speeds, *second.speeds)[-_MOST_SPEEDS:],
        noise=first.noise if second.noise is None else second.noise,
        losses=(*first.losses, *second.losses),
        results=(*first.results, *second.results),
        resize_s=second.resize_s if first.resize_s is None else first.resize_s,
    )


class EventQueue:
    """First come, first served; not for several threads at once."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._reports: Counter[str] = Counter()
        """Of each job, how many are in the queue."""
        self._merged: dict[str, JobReported] = {}
        """What has come since, of jobs that have too many there."""

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Event) -> None:
        if isinstance(event, JobReported):
            before = self._merged.get(event.job_id)
            if before is not None:
                self._merged[event.job_id] = merged(before, event)
            elif self._reports[event.job_id] >= _MOST_REPORTS:
                self._merged[event.job_id] = event
            else:
                self._append(event)
            return
        if (waiting := self._merged.pop(event.subject, None)) is not None:  # what it did before
            self._append(waiting)
        self._append(event)

    def take(self, until_s: float) -> Event | None:
        """The first one, unless it is from after `until_s` or there is none."""
        if not self._events or self._events[0].t_s > until_s:
            return None
        event = self._events.popleft()
        if isinstance(event, JobReported):
            self._reports[event.job_id] -= 1
            if (waiting := self._merged.pop(event.job_id, None)) is not None:
                self._append(waiting)
            elif not self._reports[event.job_id]:
                del self._reports[event.job_id]
        return event

    def _append(self, event: Event) -> None:
        """Times never go back, also of what waited to be merged."""
        if isinstance(event, JobReported):
            self._reports[event.job_id] += 1
            if self._events and event.t_s < self._events[-1].t_s:
                event = replace(event, t_s=self._events[-1].t_s)
        self._events.append(event)
