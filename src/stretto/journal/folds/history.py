"""The history of every job, folded from the journal of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from stretto.core.allocation import Allocation, BatchChoice
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobSubmitted,
    RunPaused,
    RunResumed,
)
from stretto.core.instructions import Action
from stretto.core.job import Job, Tier
from stretto.core.observations import LossPoint, NoiseSample, Result
from stretto.journal.folds.holdings import Handover, Holdings
from stretto.journal.folds.nodes import NodeStay, NodeStays


@dataclass(slots=True)
class Hold:
    """A period in which a job held one allocation with one batch size."""

    start_s: float
    end_s: float
    allocation: Allocation
    batch: BatchChoice
    ready_s: float
    """When its start or resize was complete; infinite if no report said so."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def resizing_s(self) -> float:
        """The time at its beginning that went into starting or resizing."""
        return max(min(self.ready_s, self.end_s) - self.start_s, 0.0)


@dataclass(frozen=True, slots=True)
class ProgressPoint:
    """A report: the statistical units done so far, and the gradient noise at that time."""

    t_s: float
    work_done: float
    noise: NoiseSample | None


@dataclass(slots=True)
class JobHistory:
    """One job from submission to end."""

    job: Job
    holds: list[Hold] = field(default_factory=list)
    progress: list[ProgressPoint] = field(default_factory=list)
    losses: list[LossPoint] = field(default_factory=list)
    starts: int = 0
    """Starts and resizes, also those when a run resumes."""
    finished_s: float | None = None
    failed_s: float | None = None
    stopped_s: float | None = None
    results: list[Result] = field(default_factory=list)
    result_s: list[float] = field(default_factory=list)
    """The time of each result."""

    @property
    def jct_s(self) -> float | None:
        """Job completion time, including queueing."""
        return None if self.finished_s is None else self.finished_s - self.job.submit_s

    @property
    def end_s(self) -> float | None:
        """When it finished, failed or was stopped."""
        ends = (self.finished_s, self.failed_s, self.stopped_s)
        return next((end_s for end_s in ends if end_s is not None), None)

    @property
    def restarts(self) -> int:
        """Starts and resizes after the first start; retries by the substrate do not count."""
        return max(0, self.starts - 1)

    @property
    def last_batch(self) -> int | None:
        """The last batch over all workers, if the batch is adaptive."""
        if self.job.tier is not Tier.ADAPTIVE or not self.holds:
            return None
        hold = self.holds[-1]
        return hold.batch.total(hold.allocation.worker_count)

    @property
    def diverged(self) -> bool:
        """Whether a trial's last result was not a number."""
        return bool(self.results) and self.results[-1].value is None

    def result_times(self) -> Iterator[tuple[float, float | None]]:
        """(time, value) of each result of a trial."""
        return ((t_s, result.value) for t_s, result in zip(self.result_s, self.results, strict=True))

    @property
    def gpu_s(self) -> float:
        return sum(hold.seconds * hold.allocation.gpus(self.job) for hold in self.holds)

    @property
    def resizing_gpu_s(self) -> float:
        return sum(hold.resizing_s * hold.allocation.gpus(self.job) for hold in self.holds)


@dataclass(frozen=True, slots=True)
class Gap:
    """A period without a running controller."""

    start_s: float
    end_s: float
    stopped: bool
    """The run was stopped cleanly; otherwise it was killed."""
    at_deadline: bool = False
    """It was over by the deadline it had then."""


@dataclass(frozen=True, slots=True)
class History:
    """The history of one run."""

    jobs: dict[str, JobHistory]
    decisions: list[Decided]
    end_s: float
    nodes: tuple[NodeStay, ...] = ()
    gaps: tuple[Gap, ...] = ()
    stopped: bool = False
    """The last event says that it was stopped."""

    def gaps_until(self, end_s: float, *, dead: bool) -> tuple[Gap, ...]:
        """The gaps of a run that ended at `end_s`; if it was `dead` by then, with the gap before its end."""
        seen = [replace(gap, end_s=min(gap.end_s, end_s)) for gap in self.gaps if gap.start_s < end_s]
        unseen = [Gap(self.end_s, end_s, self.stopped)] if dead and self.end_s < end_s else []
        return (*seen, *unseen)


class EventFold(Protocol):
    """A fold over events."""

    def observe(self, event: Event) -> None:
        """Add an event."""


def fed_to(events: Iterable[Event], *observers: EventFold) -> Iterator[Event]:
    """Pass on the events after feeding each to the folds: the journal is read once for all of them."""
    for event in events:
        for observer in observers:
            observer.observe(event)
        yield event


def history_of(events: Iterable[Event], until_s: float = 0.0) -> History:
    """Fold a journal. Jobs still running at its end hold what they have until then, or until `until_s`."""
    fold, nodes = _HistoryFold(), NodeStays()
    for event in events:
        fold.observe(event)
        nodes.observe(event)
    for job_id in list(fold.holding):
        fold.release(job_id, max(fold.end_s, until_s))
    return History(
        fold.jobs,
        fold.decisions,
        fold.end_s,
        nodes=tuple(nodes.stays),
        gaps=tuple(fold.gaps),
        stopped=fold.is_paused,
    )


class _HistoryFold:
    def __init__(self) -> None:
        self.jobs: dict[str, JobHistory] = {}
        self.decisions: list[Decided] = []
        self.holding: dict[str, Hold] = {}
        self.gaps: list[Gap] = []
        self.end_s = 0.0
        self.is_paused = False
        self._holdings = Holdings()
        self._starting: dict[str, list[Hold]] = {}
        """Each job's holds since its last start or resize, until a report says how long that took."""

    def observe(self, event: Event) -> None:
        self.end_s = max(self.end_s, event.t_s)
        for handover in self._holdings.observe(event):
            self._hand_over(event.t_s, handover)
        match event:
            case JobSubmitted():
                self.jobs[event.job.id] = JobHistory(event.job)
            case JobReported():
                self._report(event)
            case JobFinished():
                self.jobs[event.job_id].finished_s = event.t_s
            case JobFailed():
                self.jobs[event.job_id].failed_s = event.t_s
            case Decided():
                self.decisions.append(event)
            case RunResumed():
                self.gaps.append(Gap(event.t_s - event.down_s, event.t_s, self.is_paused))
                self._resume(event)
            case _:
                pass
        self.is_paused = isinstance(event, RunPaused)

    def release(self, job_id: str, t_s: float) -> None:
        hold = self.holding.pop(job_id, None)
        if hold is not None:
            hold.end_s = t_s
            self.jobs[job_id].holds.append(hold)

    def _hand_over(self, t_s: float, handover: Handover) -> None:
        job_id, instruction = handover.job_id, handover.instruction
        self.release(job_id, t_s)
        if instruction is None:
            return
        if instruction.action is Action.STOP:
            self.jobs[job_id].stopped_s = t_s
        if not handover.after:
            return
        if instruction.action in {Action.START, Action.RESIZE}:
            self.jobs[job_id].starts += 1
            self._starting[job_id] = []
        starting = self._starting.get(job_id)
        ready_s = t_s if starting is None else math.inf
        self.holding[job_id] = hold = Hold(t_s, t_s, handover.after, instruction.batch, ready_s)
        if starting is not None:
            starting.append(hold)

    def _resume(self, event: RunResumed) -> None:
        """Nothing was held while the run stood still; what ran is started again."""
        for job_id, hold in list(self.holding.items()):
            self.release(job_id, event.t_s - event.down_s)
            again = Hold(event.t_s, event.t_s, hold.allocation, hold.batch, math.inf)
            self.holding[job_id] = again
            self.jobs[job_id].starts += 1
            self._starting[job_id] = [again]

    def _report(self, event: JobReported) -> None:
        job = self.jobs[event.job_id]
        job.progress.append(ProgressPoint(event.t_s, event.work_done, event.noise))
        job.losses.extend(event.losses)
        job.results.extend(event.results)
        job.result_s.extend(event.t_s for _ in event.results)
        if event.resize_s is None:
            return
        held = self.holding.get(event.job_id)
        holds = self._starting.pop(event.job_id, [held] if held else [])
        for hold in holds:
            hold.ready_s = holds[0].start_s + event.resize_s
