"""The live state of a real run, folded from its events: for displays and summaries."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
from stretto.core.decision import Reason
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
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.observations import Result
from stretto.journal.folds.holdings import Holdings
from stretto.planning.profile import Profile
from stretto.search.study import Study

RECENT = 5
"""The number of reports that a job's present pace is measured over."""
LATELY = 50
"""The number of epochs that the pace of the whole run is measured over."""


class JobPhase(StrEnum):
    """The phase of a job."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    """The policy ended it early."""
    FINISHED = "finished"
    FAILED = "failed"
    NOT_STARTED = "not started"
    """Shown for trials that never ran, also for those that were not drawn."""


ENDED = frozenset({JobPhase.STOPPED, JobPhase.FINISHED, JobPhase.FAILED})
NOT_STARTED = str(JobPhase.NOT_STARTED)


@dataclass(slots=True)
class LiveJob:
    """The live state of one job."""

    job: Job
    number: int = 0
    """In order of submission."""
    phase: JobPhase = JobPhase.WAITING
    allocation: Allocation = NOTHING
    batch: BatchChoice | None = None
    epoch: int = 0
    work_done: float = 0.0
    results: list[Result] = field(default_factory=list)
    """The metric of a trial after each epoch."""
    reason: Reason | None = None
    retries: int = 0
    error: str = ""
    log: str = ""
    """What the error is about."""
    started_s: float | None = None
    ended_s: float | None = None
    checkpoint: str = ""
    best_checkpoint: str = ""
    pace: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT + 1))
    """(time, work done) of the last reports since the last start or resize."""

    @property
    def shown_phase(self) -> JobPhase:
        """The phase as users see it: a trial that never ran was not started."""
        never_ran = self.job.study is not None and self.started_s is None
        return JobPhase.NOT_STARTED if never_ran else self.phase

    @property
    def value(self) -> float | None:
        return self.results[-1].value if self.results else None

    @property
    def work_left(self) -> float | None:
        total = self.job.work.total_units
        return None if total is None else max(total - self.work_done, 0.0)

    def finish_s(self, now_s: float) -> float | None:
        """When it will finish at its present pace; None if the pace is not known."""
        left = self.work_left
        if left is None or self.phase is not JobPhase.RUNNING or len(self.pace) < 2:
            return None
        (first_s, first), (last_s, last) = self.pace[0], self.pace[-1]
        if last <= first:
            return None
        return max(last_s + left * (last_s - first_s) / (last - first), now_s)


class LiveState:
    """All jobs of a run, in order of submission."""

    def __init__(self, study: Study | None = None) -> None:
        self._study = study
        self._best: LiveJob | None = None
        self._holdings = Holdings()
        self.jobs: dict[str, LiveJob] = {}
        self.now_s = 0.0
        self.last: Event | None = None
        self.down_s = 0.0
        """The part of that time in which the run stood still."""
        self._epochs: deque[tuple[float, int]] = deque(maxlen=LATELY)
        """(time, workers) of the last undisturbed epochs of all jobs."""

    def observe(self, event: Event) -> None:
        """Add an event."""
        self.now_s = max(self.now_s, event.t_s)
        self.last = event
        handovers = self._holdings.observe(event)
        for handover in handovers:
            self.jobs[handover.job_id].allocation = handover.after
        if isinstance(event, JobSubmitted):
            self.jobs[event.job.id] = LiveJob(event.job, len(self.jobs))
        elif isinstance(event, RunPaused | RunResumed):
            self._stands_still(event)
        elif isinstance(event, Decided):
            for instruction in event.instructions:
                self._instructed(self.jobs[instruction.job_id], instruction, event.t_s)
            for job_id, reason in event.reasons.items():
                self.jobs[job_id].reason = reason
        elif isinstance(event, NodeLost | NodeReleased):
            for handover in handovers:
                self._drop(self.jobs[handover.job_id])
        elif (line := self.jobs.get(event.subject)) is not None:
            self._heard(line, event)

    def best(self) -> LiveJob | None:
        """The trial with the best value that did not diverge; the first of equals."""
        assert self._study is not None
        return self._best

    def best_value(self, line: LiveJob) -> float | None:
        """The best value of a trial; None if it has none or diverged."""
        best = self.best_result(line)
        return None if best is None else best.value

    def best_result(self, line: LiveJob) -> Result | None:
        """The epoch with the best value; the first of equals."""
        return None if line.value is None else max(line.results, key=lambda one: self._score(one.value))

    def counts(self) -> dict[str, int]:
        """The number of jobs in each phase; of a study also the trials that were not drawn."""
        counts = Counter(line.shown_phase for line in self.jobs.values())
        if self._study is not None:
            counts[JobPhase.NOT_STARTED] += self._study.trials - len(self.jobs)
        return {str(phase): counts[phase] for phase in JobPhase if counts[phase]}

    def slowness(self, profile: Profile) -> float:
        """Recent epoch times relative to the profile; 1 if there are none."""
        expected = [profile.latency.epoch_s / profile.scaling.speedup(workers) for _, workers in self._epochs]
        return sum(epoch_s for epoch_s, _ in self._epochs) / sum(expected) if expected else 1.0

    def _score(self, value: float | None) -> float:
        return -math.inf if self._study is None else self._study.score(value)

    def _instructed(self, line: LiveJob, instruction: Instruction, t_s: float) -> None:
        if instruction.action is Action.STOP:
            self._end(line, JobPhase.STOPPED, t_s)
        elif instruction.action is Action.PARK:
            line.phase, line.batch = JobPhase.PAUSED, None
        else:
            line.batch = instruction.batch
            if instruction.action is not Action.SET_BATCH:
                line.started_s = t_s if line.started_s is None else line.started_s
                line.phase = JobPhase.STARTING if instruction.action is Action.START else line.phase
        line.pace.clear()

    def _stands_still(self, event: RunPaused | RunResumed) -> None:
        """Jobs leave their slots when the run pauses, and start there again when it resumes."""
        resumed = isinstance(event, RunResumed)
        self.down_s += event.down_s if isinstance(event, RunResumed) else 0.0
        for line in self.jobs.values():
            line.pace.clear()
            if line.allocation:
                line.phase = JobPhase.STARTING if resumed else JobPhase.PAUSED

    def _heard(self, line: LiveJob, event: Event) -> None:
        match event:
            case JobReported():
                self._reported(line, event)
            case JobFinished():
                self._end(line, JobPhase.FINISHED, event.t_s)
            case JobFailed():
                line.error, line.log = event.error, event.log
                self._end(line, JobPhase.FAILED, event.t_s)
            case WorkerLost():
                self._drop(line)
            case JobRetried():
                line.retries += 1
                line.error, line.log = event.error, event.log
                line.phase = JobPhase.STARTING
                line.pace.clear()
            case CheckpointSaved():
                line.checkpoint = event.path or line.checkpoint
                line.best_checkpoint = event.path if event.best else line.best_checkpoint
            case JobNoted() | _:
                pass

    def _reported(self, line: LiveJob, event: JobReported) -> None:
        line.epoch, line.work_done = event.epoch, event.work_done
        line.results.extend(event.results)
        if event.results and self._study is not None:
            self._compare(line)
        self._epochs.extend((one.epoch_s, one.workers) for one in event.results if one.epoch_s is not None)
        if line.phase in {JobPhase.STARTING, JobPhase.PAUSED} and line.allocation:
            line.phase = JobPhase.RUNNING
        if line.phase not in ENDED:
            line.pace.append((event.t_s, event.work_done))

    def _compare(self, line: LiveJob) -> None:
        """Update the best trial after a trial's new result, which may have diverged."""
        if line is self._best:
            if line.value is None:
                shown = [one for one in self.jobs.values() if one.value is not None]
                self._best = max(shown, key=self._rank, default=None)
        elif line.value is not None and (self._best is None or self._rank(line) > self._rank(self._best)):
            self._best = line

    def _rank(self, line: LiveJob) -> tuple[float, int]:
        return self._score(self.best_value(line)), -line.number

    def _drop(self, line: LiveJob) -> None:
        """The job lost what it held, and waits."""
        line.phase, line.batch = JobPhase.WAITING, None
        line.pace.clear()

    def _end(self, line: LiveJob, phase: JobPhase, t_s: float) -> None:
        if line.phase in ENDED:
            return
        line.phase, line.ended_s = phase, t_s
        line.batch = None
        line.pace.clear()
