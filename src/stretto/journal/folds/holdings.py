"""Which job holds which workers, and every change of that with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.core.allocation import NOTHING, Allocation
from stretto.core.decision import Reason, ReasonCode
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobSubmitted,
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Tier

_RESIZED = frozenset({ReasonCode.GREW, ReasonCode.SHRANK, ReasonCode.MOVED})
_PAST = {
    "start": "started",
    "resume": "resumed",
    "resize": "resized",
    "pause": "paused",
    "stop": "stopped",
    "set-batch": "split its batch otherwise",
}


@dataclass(frozen=True, slots=True)
class Handover:
    """A job holds something else, or gets another batch."""

    job_id: str
    before: Allocation
    after: Allocation
    instruction: Instruction | None = None
    """The instruction behind it; None if the job ended, or lost a worker or a node."""


@dataclass(slots=True)
class Holdings:
    """What every job holds now. All other folds learn it from here.

    While a run is paused its jobs keep what they hold: they get it back when the run resumes.
    """

    held: dict[str, Allocation] = field(default_factory=dict)
    """By job, without those that hold nothing."""

    def of(self, job_id: str) -> Allocation:
        """What a job holds."""
        return self.held.get(job_id, NOTHING)

    def observe(self, event: Event) -> list[Handover]:
        """Add an event; returns what it changed, in order."""
        match event:
            case Decided():
                return [self._instructed(instruction) for instruction in event.instructions]
            case JobFinished() | JobFailed() | WorkerLost():
                return self._dropped([event.job_id] if event.job_id in self.held else [])
            case NodeLost() | NodeReleased():
                node_id = event.node_id
                return self._dropped([job_id for job_id, held in self.held.items() if node_id in held.nodes])
            case _:
                return []

    def _instructed(self, instruction: Instruction) -> Handover:
        job_id = instruction.job_id
        before = self.of(job_id)
        after = before if instruction.action is Action.SET_BATCH else instruction.allocation
        if after:
            self.held[job_id] = after
        else:
            self.held.pop(job_id, None)
        return Handover(job_id, before, after, instruction)

    def _dropped(self, job_ids: list[str]) -> list[Handover]:
        return [Handover(job_id, self.held.pop(job_id), NOTHING) for job_id in job_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one job that is worth telling: by an instruction, or as its run paused and resumed."""

    t_s: float
    job_id: str
    what: str
    """start, resume, resize, pause, stop or set-batch."""
    before: Allocation
    after: Allocation
    reason: Reason | None = None
    """The policy's reason."""
    why: str = ""
    """The reason if no policy decided."""
    batch_before: int | None = None
    """Examples per step over all workers; None for the first batch, and if the batch is not adaptive."""
    batch_after: int | None = None

    @property
    def past(self) -> str:
        """The change as a verb in the past tense."""
        if self.what == "set-batch" and self.batch:
            return f"went from batch {self.batch_before} to {self.batch_after}"
        return self.resized or _PAST[self.what]

    @property
    def resized(self) -> str:
        """grew, shrank or moved; empty if this is no resize."""
        code = None if self.reason is None else self.reason.code
        return str(code) if self.what == "resize" and code in _RESIZED else ""

    @property
    def batch(self) -> str:
        """How the batch changed; empty if it did not."""
        before, after = self.batch_before, self.batch_after
        if before is None or after is None or before == after:
            return ""
        return f"batch {before} becomes {after}"

    @property
    def said(self) -> str:
        """The reason, with the change of the batch; empty if there is neither."""
        reason = self.why if self.reason is None else self.reason.text
        if not self.batch or self.what == "set-batch":
            return reason
        return f"{reason.rstrip('.')}; {self.batch}" if reason else self.batch


class ChangeFold:
    """Turns events into changes, and knows what each job holds."""

    def __init__(self) -> None:
        self._holdings = Holdings()
        self._batches: dict[str, int | None] = {}
        """The last batch of each job whose batch is adaptive."""
        self._started: set[str] = set()
        self._is_paused = False

    def held(self, job_id: str) -> Allocation:
        """What a job holds, or gets back when its run resumes."""
        return self._holdings.of(job_id)

    def observe(self, event: Event) -> list[Change]:
        """Add an event; returns what it changed, in order."""
        handovers = self._holdings.observe(event)
        found: list[Change] = []
        match event:
            case JobSubmitted() if event.job.tier is Tier.ADAPTIVE and event.job.study is None:
                self._batches[event.job.id] = None
            case Decided():
                found = [self._instructed(event, one) for one in handovers]
            case RunPaused() if not self._is_paused:
                found = self._all(event.t_s, "pause", "the run stands still.")
            case RunResumed():
                found = self._all(event.t_s, "resume", "the run continues.")
            case _:
                pass
        self._is_paused = isinstance(event, RunPaused)
        return found

    def _instructed(self, event: Decided, handover: Handover) -> Change:
        job_id, after, instruction = handover.job_id, handover.after, handover.instruction
        assert instruction is not None
        what = str(instruction.action)
        if instruction.action is Action.PARK:
            what = "pause"
        elif instruction.action is Action.START:
            what = "resume" if job_id in self._started else "start"
            self._started.add(job_id)
        batch_before = batch_after = None
        if job_id in self._batches:
            batch_before = self._batches[job_id]
            if after:
                self._batches[job_id] = batch_after = instruction.batch.total(after.worker_count)
        return Change(
            t_s=event.t_s,
            job_id=job_id,
            what=what,
            before=handover.before,
            after=after,
            reason=event.reasons.get(job_id),
            batch_before=batch_before,
            batch_after=batch_after,
        )

    def _all(self, t_s: float, what: str, why: str) -> list[Change]:
        """The change of every job that holds something, as its run pauses or resumes."""
        return [
            Change(
                t_s=t_s,
                job_id=job_id,
                what=what,
                before=held if what == "pause" else NOTHING,
                after=NOTHING if what == "pause" else held,
                why=why,
            )
            for job_id, held in self._holdings.held.items()
        ]
