"""Why a run did what it did: its journal told in time order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stretto.app.real_board import Board
from stretto.app.real_result import run_outline
from stretto.app.run_folder import RunFolder, RunSpec
from stretto.core.allocation import NOTHING, Allocation
from stretto.core.errors import InputError
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
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.units import counted, format_duration
from stretto.search.study import Study


@dataclass(frozen=True, slots=True)
class Line:
    """Something that happened, and what there is to say about it."""

    t_s: float
    subject: str
    """The job, node or policy it is about."""
    what: str
    text: str
    places: tuple[tuple[str, int], ...] = ()
    """Of one job: how many of its workers are on which node from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """One job in a line."""

    id: str
    state: str
    epochs: int
    starts: int
    retries: int
    value: float | None
    last_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run, or one job of it, explained."""

    run: str
    job: str | None
    lines: tuple[Line, ...]
    jobs: tuple[JobSummary, ...]
    """Every job; empty where the story is of one."""

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return dataclasses.asdict(self)


def explain(folder: RunFolder, job_id: str | None = None) -> Story:
    """The story of a run, or of one job of it."""
    events = list(folder.events())
    study = _study(folder, folder.begun_spec())
    if job_id is None:
        return Story(
            run=folder.name,
            job=None,
            lines=tuple(cluster_lines(events)),
            jobs=tuple(_summaries(events, study)),
        )
    known = [event.job.id for event in events if isinstance(event, JobSubmitted)]
    if job_id not in known:
        raise InputError(
            f"the run {folder.name} has no job {job_id!r}.",
            remedy=f"It has {_few(known)}." if known else "It has none yet.",
        )
    return Story(run=folder.name, job=job_id, lines=tuple(job_lines(events, job_id)), jobs=())


def cluster_lines(events: Iterable[Event]) -> Iterator[Line]:
    """The story of the cluster: nodes, wishes, and jobs that come and go."""
    for event in events:
        match event:
            case RunStarted() | RunPaused() | RunResumed():
                yield _about_run(event)
            case NodeLaunched() | NodeAdded() | NodeReleased() | NodeLost() | NodeDraining() | NodeRefused():
                yield _about_node(event)
            case Decided() if event.wish is not None:
                wished = (
                    ", ".join(f"{count} of {instance}" for instance, count in event.wish.nodes) or "nothing"
                )
                yield Line(event.t_s, event.policy, "wish", wished)
            case JobFinished() | JobFailed() | JobRetried() | WorkerLost():
                yield from _about(event)
            case Decided():
                for instruction in event.instructions:
                    if instruction.action is Action.STOP:
                        yield _told(event, instruction)
            case _:
                pass


def job_lines(events: Iterable[Event], job_id: str) -> Iterator[Line]:
    """Everything about one job: what was decided and why, what it showed, what went wrong, and where."""
    held, epoch = NOTHING, 0
    for event in events:
        lines = list(_about_job(event, job_id, held))
        if isinstance(event, JobReported) and event.job_id == job_id and event.epoch > epoch:
            epoch = event.epoch
            lines += [] if event.results else [Line(event.t_s, job_id, f"epoch {epoch}", _losses(event))]
        held = _held_after(event, job_id, held)
        yield from (dataclasses.replace(line, places=held.workers) for line in lines)


def _about_job(event: Event, job_id: str, held: Allocation) -> Iterator[Line]:
    """What an event says of a job that held so much before it."""
    match event:
        case Decided():
            told = [one for one in event.instructions if one.job_id == job_id]
            yield from (_told(event, instruction, held) for instruction in told)
            reason = event.reasons.get(job_id)
            if not told and reason is not None:
                yield Line(event.t_s, job_id, str(reason.code), reason.text)
        case NodeLost() | NodeReleased() | NodeDraining():
            if (workers := dict(held.workers).get(event.node_id)) is not None:
                text = f"{event.node_id}, which had {workers} of its {held.worker_count} workers"
                yield Line(event.t_s, job_id, event.kind.replace("-", " "), text)
        case JobRetried() if event.job_id == job_id:
            yield Line(event.t_s, job_id, f"retry {event.attempt} with {_on(held)}", event.error.strip())
        case _ if event.subject == job_id:
            yield from _about(event)


def _held_after(event: Event, job_id: str, held: Allocation) -> Allocation:
    match event:
        case Decided():
            for one in event.instructions:
                if one.job_id == job_id and one.action is not Action.SET_BATCH:
                    held = one.allocation
            return held
        case JobFinished() | JobFailed() | WorkerLost() if event.job_id == job_id:
            return NOTHING
        case NodeLost() | NodeReleased() if event.node_id in held.nodes:
            return NOTHING
        case _:
            return held


def _told(event: Decided, instruction: Instruction, held: Allocation = NOTHING) -> Line:
    reason, given = event.reasons.get(instruction.job_id), instruction.allocation
    what = f"{instruction.action}" + (f" with {_on(given)}" if given else "")
    if held and held != given:
        what += f" {'instead of' if given else 'of'} {_on(held)}"
    return Line(
        event.t_s, instruction.job_id, what, "" if reason is None else f"{reason.code}: {reason.text}"
    )


def _on(held: Allocation) -> str:
    """How many workers, and on which nodes."""
    where = ", ".join(f"{node}: {count}" for node, count in held.workers)
    return f"{held.worker_count} ({where})"


def _about_run(event: RunStarted | RunPaused | RunResumed) -> Line:
    if isinstance(event, RunStarted):
        nodes = ", ".join(f"{node.id} with {counted(node.gpus, 'slot')}" for node in event.nodes)
        return Line(event.t_s, event.subject, "run started", nodes or "without nodes")
    if isinstance(event, RunPaused):
        return Line(event.t_s, "run", "stopped", "nothing runs from here on")
    return Line(event.t_s, "run", "resumed", f"nothing ran for {time_text(event.down_s)}")


def _about_node(
    event: NodeLaunched | NodeAdded | NodeReleased | NodeLost | NodeDraining | NodeRefused,
) -> Line:
    what, text = event.kind.replace("-", " "), ""
    if isinstance(event, NodeLaunched | NodeAdded):
        text = counted(event.node.gpus, "slot")
    elif isinstance(event, NodeReleased) and event.never_came:
        text = "it never came, and costs nothing"
    elif isinstance(event, NodeRefused):
        what, text = f"{event.count} refused", event.why
    return Line(event.t_s, event.subject, what, text)


def _about(event: Event) -> Iterator[Line]:
    match event:
        case JobSubmitted():
            yield Line(event.t_s, event.job.id, "submitted", _configured(event.job))
        case JobReported():
            yield from _reported(event)
        case CheckpointSaved():
            best = "the best so far, " if event.best else ""
            yield Line(event.t_s, event.job_id, "checkpoint", f"{best}{event.path}")
        case JobRetried():
            yield Line(event.t_s, event.job_id, f"retry {event.attempt}", event.error.strip())
        case JobFailed():
            yield Line(event.t_s, event.job_id, "failed", event.error.strip())
        case JobFinished():
            yield Line(event.t_s, event.job_id, "finished", "")
        case JobNoted():
            yield Line(event.t_s, event.job_id, "note", event.text)
        case WorkerLost():
            yield Line(event.t_s, event.job_id, "worker lost", event.node)
        case _:
            pass


def _reported(event: JobReported) -> Iterator[Line]:
    """Epochs and starts; reports in between say nothing that a decision hangs on."""
    if event.resize_s is not None:
        yield Line(event.t_s, event.job_id, "trains", f"after {event.resize_s:.2f} s")
    for result in event.results:
        value = "not a number" if result.value is None else f"{result.value:.6g}"
        took = "" if result.epoch_s is None else f" in {result.epoch_s:.2f} s"
        workers = f"{result.workers} worker{'s' if result.workers > 1 else ''}"
        yield Line(event.t_s, event.job_id, f"epoch {result.epoch}", f"{value}{took} with {workers}")


def _losses(event: JobReported) -> str:
    values = ["not a number" if one.loss is None else f"{one.loss:.6g}" for one in event.losses]
    return f"loss {', '.join(values)}" if values else ""


def _configured(job: Job) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in job.config)
    return values or f"{job.work.epochs} epochs"


def _summaries(events: Iterable[Event], study: Study | None) -> Iterator[JobSummary]:
    board = Board(study)
    starts: dict[str, int] = {}
    for event in events:
        board.observe(event)
        if isinstance(event, Decided):
            for one in event.instructions:
                starts[one.job_id] = starts.get(one.job_id, 0) + (one.action in {Action.START, Action.RESIZE})
    for job_id, line in board.jobs.items():
        yield JobSummary(
            id=job_id,
            state=str(line.shown_phase),
            epochs=line.epoch,
            starts=starts.get(job_id, 0),
            retries=line.retries,
            value=None if study is None else board.best_value(line),
            last_reason="" if line.reason is None else line.reason.text,
        )


def _study(folder: RunFolder, spec: RunSpec) -> Study | None:
    return run_outline(folder, spec).study if spec.is_study else None


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


def time_text(t_s: float) -> str:
    """A time with tenths where those matter."""
    return f"{t_s:.1f}s" if t_s < 60 else format_duration(t_s)
