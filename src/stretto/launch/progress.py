"""The progress of a real run as lines of text, for a console or a callback in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stretto.core.errors import last_line, with_log
from stretto.core.events import (
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
)
from stretto.core.units import counted, format_duration
from stretto.driving.drive import NoObserver, Observer
from stretto.driving.stop import Stop
from stretto.journal.folds.holdings import Change, ChangeFold
from stretto.pricing.instances import SLOT
from stretto.profiling.probe_data import ProbeProgress
from stretto.runs.live_state import JobPhase, LiveState
from stretto.runs.metrics_files import Metrics, metrics_text
from stretto.search.study import Study

STOPPING = "stopping: running jobs are asked to save and leave; Ctrl-C once more stops at once"
BEST_EVERY_S = 5.0
"""The least time between two lines about the best trial; only the last improvement gets a line."""

Reported = Callable[[str, int], Metrics]
"""Metrics that a job reported after an epoch, by job and epoch; empty for trials."""


def nothing_reported(job_id: str, epoch: int) -> Metrics:
    """Nothing, for trials: the journal has their metric."""
    del job_id, epoch
    return {}


@contextmanager
def telling(
    progress: Callable[[str], None] | None,
    *,
    stop: Stop,
    study: Study | None = None,
    reported: Reported = nothing_reported,
) -> Iterator[Observer]:
    """An observer that calls `progress` with a line for every change while the block runs."""
    if progress is None:
        yield NoObserver()
        return
    lines = ProgressLines(
        lambda t_s, text: progress(f"{format_duration(t_s):>8}  {text}"), study, stop, reported
    )
    try:
        yield lines
    finally:
        lines.close()


def measuring_line(progress: ProbeProgress, where: str = "") -> str:
    """The line about a probe: what it does, and how long that takes at most."""
    most = " ".join((f"{math.ceil(progress.time_s)} s at most", progress.since)).rstrip()
    return f"measuring{where}, {most}: {progress.doing}"


class ProgressLines:
    """One line for every change worth a note."""

    def __init__(
        self,
        say: Callable[[float, str], None],
        study: Study | None,
        stop: Callable[[], bool] = lambda: False,
        reported: Reported = nothing_reported,
    ) -> None:
        self._write = say
        self._said_s = 0.0
        self._stop = stop
        self._reported = reported
        self._stopping = False
        self._board = LiveState(study)
        self._changes = ChangeFold()
        self._study = study
        self._begun = False
        self._best: tuple[float, str] | None = None
        """The best value and its trial."""
        self._untold: tuple[str, str] | None = None
        """The trial of the last improvement and the line about it, until that is written."""
        self._told_s = -math.inf

    def observe(self, event: Event) -> None:
        """Writes the lines about an event."""
        self._board.observe(event)
        changes = self._changes.observe(event)
        if not self._begun:  # events of a run that is resumed
            return
        if isinstance(event, JobReported) and event.results and self._study is not None:
            self._note_best(self._study)
        for job_id, text in self._news(event, changes):
            if self._untold is not None and self._untold[0] == job_id:  # the improvement came first
                self._tell_best(event.t_s, 0.0)
            self._say(event.t_s, text)
        self._tell_best(event.t_s, BEST_EVERY_S)

    def tick(self, now_s: float) -> None:
        """Events after the first tick are news; those before belong to a resumed run."""
        if not self._begun and self._study is not None and (best := self._board.best()) is not None:
            value = self._board.best_value(best)
            self._best = None if value is None else (value, best.job.id)
        self._begun = True
        self._tell_best(now_s, BEST_EVERY_S)
        if self._stop() and not self._stopping:
            self._stopping = True
            self._say(now_s, STOPPING)

    def close(self) -> None:
        """Writes the line that is still held back."""
        self._tell_best(self._board.now_s, 0.0)

    def _say(self, t_s: float, text: str) -> None:
        """Keeps lines in order of time, even if an event arrives late."""
        self._said_s = max(self._said_s, t_s)
        self._write(self._said_s, text)

    def _tell_best(self, now_s: float, every_s: float) -> None:
        if self._untold is not None and now_s - self._told_s >= every_s:
            self._say(now_s, self._untold[1])
            self._told_s, self._untold = now_s, None

    def _note_best(self, study: Study) -> None:
        best = self._board.best()
        result = None if best is None else self._board.best_result(best)
        if best is None or result is None or result.value is None:
            return
        before, self._best = self._best, (result.value, best.job.id)
        shown = f"{result.value:.6g} after epoch {result.epoch}"
        if before is None or study.score(result.value) > study.score(before[0]):
            self._untold = best.job.id, f"{best.job.id} has the best {study.metric}: {shown}"
        elif result.value == before[0] and best.job.id != before[1]:
            # The summary, too, names the first of equals.
            self._untold = best.job.id, f"{best.job.id} has the same {study.metric} as {before[1]}: {shown}"

    def _news(self, event: Event, changes: list[Change]) -> Iterator[tuple[str, str]]:
        """Pairs of a subject and a line about it; a batch that is only split differently is no news."""
        for change in changes:
            if change.what != "set-batch" or change.batch:
                yield change.job_id, _with(f"{change.job_id} {change.past}", change.said)
        if isinstance(event, JobFinished) and self._board.jobs[event.job_id].phase is JobPhase.FINISHED:
            last = self._reported(event.job_id, self._board.jobs[event.job_id].epoch)
            yield event.job_id, _with(f"{event.job_id} finished", metrics_text(last))
        for text in (*trouble_lines(event), *node_lines(event)):
            yield event.subject, text


def _with(what: str, more: str) -> str:
    return f"{what}: {more}" if more else what


def trouble_lines(event: Event) -> Iterator[str]:
    """What went wrong in a job, and notes from its training code."""
    match event:
        case JobRetried():
            yield f"{event.job_id} is retried ({event.attempt}): {last_line(event.error)}"
        case JobFailed():
            yield f"{event.job_id} failed: {last_line(event.error)}"
        case JobNoted():
            yield with_log(f"{event.job_id}: {event.text}", event.log)
        case _:
            pass


def node_lines(event: Event) -> Iterator[str]:
    """Nodes that come and go, except the slots of this machine."""
    match event:
        case NodeRefused():
            yield f"{event.count} of {event.instance} will not come: {event.why}"
        case NodeLaunched() if event.node.instance != SLOT:
            yield f"node {event.node.id} is launched"
        case NodeAdded() if event.node.instance != SLOT:
            took = f" after {format_duration(event.init_s)}" if event.init_s else ""
            yield f"node {event.node.id} is here{took}: {counted(event.node.gpus, 'slot')}"
        case NodeLost():
            yield f"node {event.node_id} is lost; its jobs continue elsewhere"
        case NodeDraining():
            yield f"node {event.node_id} will go soon; its jobs move"
        case _:
            pass
