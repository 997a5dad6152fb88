"""Explains a run: its journal in time order, with the reason of every change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.core.allocation import Allocation
from stretto.core.errors import InputError, with_log
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobNoted,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunPaused,
    RunResumed,
    RunStarted,
    WorkerLost,
)
from stretto.core.job import Job
from stretto.core.units import counted, format_duration
from stretto.journal.folds.history import fed_to, history_of
from stretto.journal.folds.holdings import Change, ChangeFold
from stretto.runs.deadline import is_at_deadline
from stretto.runs.folder import RunFolder, RunSpec
from stretto.runs.live_state import NOT_STARTED, LiveState
from stretto.runs.metrics_files import Metrics, metrics_by_epoch, metrics_text
from stretto.search.study import Study

_TRIAL = re.compile(r"trial-(\d{3}|[1-9]\d{3,})")
"""Trials are numbered from 0, with at least three digits."""

MOST_AT_ONCE = 100
"""The most epochs of one report that get a line each."""


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One line of the story."""

    t_s: float
    subject: str
    """The job, node or policy it is about."""
    what: str
    text: str
    places: tuple[tuple[str, int], ...] = ()
    """In the story of one job: (node, workers) from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """The summary of one job."""

    id: str
    state: str
    epochs: int
    restarts: int
    """Starts and resizes after the first start, also those after a resume."""
    retries: int
    """Restarts after failures."""
    value: float | None
    """The best value of a trial."""
    metrics: Metrics
    """The metrics of a job after its last epoch."""
    last_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The story of a run or of one job."""

    run: str
    job: str | None
    lines: tuple[StoryLine, ...]
    jobs: tuple[JobSummary, ...]
    """All jobs; empty in the story of one job."""
    is_study: bool

    def as_dict(self) -> dict[str, Any]:
        """As a JSON-serialisable dict."""
        return dataclasses.asdict(self)


def explain(folder: RunFolder, job_id: str | None = None) -> Story:
    """The story of a run, or of one of its jobs."""
    spec = folder.begun_spec()
    study = spec.study
    if job_id is None:
        return Story(
            run=folder.name,
            job=None,
            lines=tuple(cluster_lines(folder.events(), spec)),
            jobs=tuple(_summaries(folder, study)),
            is_study=spec.is_study,
        )
    live = LiveState(study)
    found = job_lines(fed_to(folder.events(), live), job_id, metrics_by_epoch(folder, job_id))
    lines, known = tuple(found), list(live.jobs)
    if job_id not in live.jobs and study is not None and _is_of(study, job_id):
        drawn = f"only {len(known)} of the study's {counted(study.trials, 'trial')} were drawn so far"
        lines = (StoryLine(0.0 if live.last is None else live.last.t_s, job_id, NOT_STARTED, drawn),)
    elif job_id not in live.jobs:
        raise InputError(
            f"the run {folder.name} has no job {job_id!r}.",
            remedy=f"It has {_few(known)}." if known else "It has none yet.",
        )
    return Story(run=folder.name, job=job_id, lines=lines, jobs=(), is_study=spec.is_study)


def cluster_lines(events: Iterable[Event], spec: RunSpec | None = None) -> Iterator[StoryLine]:
    """The story of a run: its nodes, requests for nodes, and the changes of every job."""
    changes = ChangeFold()
    for event in events:
        match event:
            case RunStarted() | RunPaused() | RunResumed():
                yield _about_run(event, spec)
            case NodeLaunched() | NodeAdded() | NodeReleased() | NodeLost() | NodeDraining() | NodeRefused():
                yield _about_node(event)
            case Decided() if event.wish is not None:
                wished = (
                    ", ".join(f"{count} of {instance}" for instance, count in event.wish.nodes) or "nothing"
                )
                yield StoryLine(event.t_s, event.policy, "wish", wished)
            case JobFinished() | JobFailed() | JobRetried() | WorkerLost():
                yield from _about(event)
            case _:
                pass
        yield from (_change_line(change) for change in changes.observe(event))


def job_lines(
    events: Iterable[Event], job_id: str, metrics: Mapping[int, Metrics] | None = None
) -> Iterator[StoryLine]:
    """The story of one job: decisions and reasons, epochs, failures and places.

    `metrics` are its reports by epoch, which the journal has of trials only.
    """
    return iter(sorted(_job_lines(events, job_id, metrics or {}), key=lambda line: line.t_s))


def _job_lines(events: Iterable[Event], job_id: str, metrics: Mapping[int, Metrics]) -> Iterator[StoryLine]:
    """The lines in the order of the journal."""
    changes, epochs, best = ChangeFold(), _Epochs(job_id, metrics), ""
    for event in events:
        held = changes.held(job_id)
        told = [change for change in changes.observe(event) if change.job_id == job_id]
        lines = [_change_line(change) for change in told] or list(_about_job(event, job_id, held))
        lines += epochs.told(event, held, changed=bool(told))
        if isinstance(event, CheckpointSaved) and event.job_id == job_id and event.best:
            # A resumed job reports its best checkpoint again.
            lines = [] if event.path == best else lines
            best = event.path
        held = told[-1].after if told else changes.held(job_id)
        yield from (dataclasses.replace(line, places=held.workers) for line in lines)


class _Epochs:
    """Writes lines about the epochs of a job that is not a trial; the journal only says that they ended."""

    def __init__(self, job_id: str, metrics: Mapping[int, Metrics]) -> None:
        self._job_id = job_id
        self._metrics = metrics
        self._epoch = 0
        self._since_s: float | None = None
        """When the present epoch began; None if not known."""
        self._told_s: float | None = None
        """When it was last told to start or resize."""

    def told(self, event: Event, held: Allocation, *, changed: bool) -> list[StoryLine]:
        """The lines of the epochs that an event ends; `changed` if the event changed what the job holds."""
        if changed or (isinstance(event, JobRetried | WorkerLost) and event.job_id == self._job_id):
            self._since_s = None
            self._told_s = event.t_s if changed else None
        if not isinstance(event, JobReported) or event.job_id != self._job_id:
            return []
        trains_s = self._trains_s(event)
        ended = range(self._epoch + 1, event.epoch + 1)
        lines = [] if event.results else self._lines(event, ended, held)
        if trains_s is not None:
            lines.insert(0, StoryLine(trains_s, self._job_id, "trains", f"after {event.resize_s:.2f} s"))
        self._epoch = max(self._epoch, event.epoch)
        self._since_s = event.t_s if ended else self._since_s
        return lines

    def _lines(self, event: JobReported, ended: range, held: Allocation) -> list[StoryLine]:
        """A line for each of the last epochs, and one for all before."""
        few = ended[-MOST_AT_ONCE:]
        lines = [self._line(event, epoch, len(ended), held) for epoch in few]
        if len(few) < len(ended):
            lines.insert(
                0, StoryLine(event.t_s, self._job_id, f"epochs {ended[0]} to {few[0] - 1}", "in one report")
            )
        return lines

    def _trains_s(self, event: JobReported) -> float | None:
        """When training began after a start or resize, if this is the first report since."""
        if event.resize_s is None:
            return None
        told_s, self._told_s = self._told_s, None
        self._since_s = event.t_s if told_s is None else min(told_s + event.resize_s, event.t_s)
        return self._since_s

    def _line(self, event: JobReported, epoch: int, ended: int, held: Allocation) -> StoryLine:
        shown = metrics_text(self._metrics.get(epoch, {})) or (_losses(event) if epoch == event.epoch else "")
        took_s = None if self._since_s is None else (event.t_s - self._since_s) / ended
        took = "" if took_s is None else f"in {took_s:.2f} s with {counted(held.worker_count, 'worker')}"
        return StoryLine(event.t_s, self._job_id, f"epoch {epoch}", " ".join(filter(None, (shown, took))))


def _about_job(event: Event, job_id: str, held: Allocation) -> Iterator[StoryLine]:
    """The lines of an event that does not change what the job holds."""
    match event:
        case Decided():
            if (reason := event.reasons.get(job_id)) is not None:
                yield StoryLine(event.t_s, job_id, str(reason.code), reason.text)
        case NodeLost() | NodeReleased() | NodeDraining():
            if (workers := dict(held.workers).get(event.node_id)) is not None:
                text = f"{event.node_id}, which had {workers} of its {counted(held.worker_count, 'worker')}"
                yield StoryLine(event.t_s, job_id, event.kind.replace("-", " "), text)
        case JobRetried() if event.job_id == job_id:
            yield StoryLine(event.t_s, job_id, f"retry {event.attempt} with {_where(held)}", _error(event))
        case _ if event.subject == job_id:
            yield from _about(event)


def _error(event: JobFailed | JobRetried) -> str:
    return with_log(event.error.strip(), event.log)


def _change_line(change: Change) -> StoryLine:
    held, given = change.before, change.after
    if change.what == "set-batch":
        return StoryLine(change.t_s, change.job_id, change.batch or "batch split otherwise", change.said)
    what = change.what + (f" with {_where(given)}" if given else "")
    if held and held != given:
        what += f" {'instead of' if given else 'of'} {_where(held)}"
    resized = f"{change.resized}: " if change.resized else ""
    return StoryLine(change.t_s, change.job_id, what, f"{resized}{change.said}")


def _where(held: Allocation) -> str:
    """How many workers on which nodes."""
    where = ", ".join(f"{node}: {count}" for node, count in held.workers)
    return f"{counted(held.worker_count, 'worker')} ({where})"


def _about_run(event: RunStarted | RunPaused | RunResumed, spec: RunSpec | None) -> StoryLine:
    if isinstance(event, RunStarted):
        nodes = ", ".join(f"{node.id} with {counted(node.gpus, 'slot')}" for node in event.nodes)
        return StoryLine(event.t_s, event.subject, "run started", nodes or "without nodes")
    if isinstance(event, RunPaused):
        if spec is not None and is_at_deadline(event.t_s, spec.past_limits):
            return StoryLine(event.t_s, "run", "ended", "the deadline came; it was raised later")
        return StoryLine(event.t_s, "run", "stopped", "nothing runs until it is resumed")
    return StoryLine(event.t_s, "run", "resumed", f"nothing ran for {time_text(event.down_s)}")


def _about_node(
    event: NodeLaunched | NodeAdded | NodeReleased | NodeLost | NodeDraining | NodeRefused,
) -> StoryLine:
    what, text = event.kind.replace("-", " "), ""
    if isinstance(event, NodeLaunched | NodeAdded):
        text = counted(event.node.gpus, "slot")
    elif isinstance(event, NodeReleased) and event.never_came:
        text = "it never came, and costs nothing"
    elif isinstance(event, NodeRefused):
        what, text = f"{event.count} refused", event.why
    return StoryLine(event.t_s, event.subject, what, text)


def _about(event: Event) -> Iterator[StoryLine]:
    match event:
        case JobSubmitted():
            yield StoryLine(event.t_s, event.job.id, "submitted", _configured(event.job))
        case JobReported():
            yield from _reported(event)
        case CheckpointSaved():
            best = "the best so far, " if event.best else ""
            yield StoryLine(event.t_s, event.job_id, "checkpoint", f"{best}{event.path}")
        case JobRetried():
            yield StoryLine(event.t_s, event.job_id, f"retry {event.attempt}", _error(event))
        case JobFailed():
            yield StoryLine(event.t_s, event.job_id, "failed", _error(event))
        case JobFinished():
            yield StoryLine(event.t_s, event.job_id, "finished", "")
        case JobNoted():
            yield StoryLine(event.t_s, event.job_id, "note", with_log(event.text, event.log))
        case WorkerLost():
            yield StoryLine(event.t_s, event.job_id, "worker lost", event.node)
        case _:
            pass


def _reported(event: JobReported) -> Iterator[StoryLine]:
    """A line for each epoch. Reports within an epoch change no decision."""
    for result in event.results:
        value = "not a number" if result.value is None else f"{result.value:.6g}"
        took = "" if result.epoch_s is None else f" in {result.epoch_s:.2f} s"
        with_them = f"with {counted(result.workers, 'worker')}"
        yield StoryLine(event.t_s, event.job_id, f"epoch {result.epoch}", f"{value}{took} {with_them}")


def _losses(event: JobReported) -> str:
    values = ["not a number" if one.loss is None else f"{one.loss:.6g}" for one in event.losses]
    return f"loss {', '.join(values)}" if values else ""


def _configured(job: Job) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in job.config)
    return values or f"{job.work.epochs} epochs"


def _summaries(folder: RunFolder, study: Study | None) -> Iterator[JobSummary]:
    live = LiveState(study)
    histories = history_of(fed_to(folder.events(), live)).jobs
    for job_id, line in live.jobs.items():
        yield JobSummary(
            id=job_id,
            state=str(line.shown_phase),
            epochs=line.epoch,
            restarts=histories[job_id].restarts,
            retries=line.retries,
            value=None if study is None else live.best_value(line),
            metrics={} if study is not None else metrics_by_epoch(folder, job_id).get(line.epoch, {}),
            last_reason="" if line.reason is None else line.reason.text,
        )


def _is_of(study: Study, job_id: str) -> bool:
    """Whether this is the name of a trial of the study, drawn or not."""
    found = _TRIAL.fullmatch(job_id)
    return found is not None and int(found[1]) < study.trials


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


def time_text(t_s: float) -> str:
    """A time, with tenths below one minute."""
    return f"{t_s:.1f}s" if t_s < 60 else format_duration(t_s)
