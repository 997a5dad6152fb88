"""Who got what when: each start, pause, resume, resize, batch and stop of a journal, with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.allocation import NOTHING, Allocation, BatchChoice
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
from stretto.core.job import Job, Tier

_RESIZED = frozenset({ReasonCode.GREW, ReasonCode.SHRANK, ReasonCode.MOVED})
_PAST = {
    "start": "started",
    "resume": "resumed",
    "resize": "resized",
    "pause": "paused",
    "stop": "stopped",
    "set-batch": "split its batch otherwise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one job was told, or what became of it as its run stood still and went on."""

    t_s: float
    job_id: str
    what: str
    """start, resume, resize, pause, stop or set-batch."""
    before: Allocation
    after: Allocation
    reason: Reason | None = None
    """The policy's."""
    why: str = ""
    """Where no policy decided."""
    batch_before: int | None = None
    """Examples in a step of all workers; None unless it was told one before and its batch may be adapted."""
    batch_after: int | None = None

    @property
    def past(self) -> str:
        """What it did, as a verb of the past."""
        if self.what == "set-batch" and self.batch:
            return f"went from batch {self.batch_before} to {self.batch_after}"
        return self.resized or _PAST[self.what]

    @property
    def resized(self) -> str:
        """How a resize changed it; empty of anything else."""
        code = None if self.reason is None else self.reason.code
        return str(code) if self.what == "resize" and code in _RESIZED else ""

    @property
    def batch(self) -> str:
        """How its batch changed; empty if it did not."""
        before, after = self.batch_before, self.batch_after
        if before is None or after is None or before == after:
            return ""
        return f"batch {before} becomes {after}"

    @property
    def said(self) -> str:
        """The reason in a sentence, and how the batch changed by the way; empty if there is neither."""
        reason = self.why if self.reason is None else self.reason.text
        if not self.batch or self.what == "set-batch":
            return reason
        return f"{reason.rstrip('.')}; {self.batch}" if reason else self.batch


class ChangeFold:
    """What every job holds, folded over events, and how that changed."""

    def __init__(self) -> None:
        self._held: dict[str, Allocation] = {}
        self._batches: dict[str, int | None] = {}
        """The last batch that each job was told, of those whose batch may be adapted."""
        self._started: set[str] = set()
        self._still = False

    def held(self, job_id: str) -> Allocation:
        """What a job holds, or will hold again when its run goes on."""
        return self._held.get(job_id, NOTHING)

    def observe(self, event: Event) -> list[Change]:
        """What an event changed, in the order in which it was told."""
        found: list[Change] = []
        match event:
            case JobSubmitted() if _adapts(event.job):
                self._batches[event.job.id] = None
            case Decided():
                found = [self._told(event, one) for one in event.instructions]
            case RunPaused() if not self._still:
                found = self._all(event.t_s, "pause", "the run stands still.")
            case RunResumed():
                found = self._all(event.t_s, "resume", "the run goes on.")
            case JobFinished() | JobFailed() | WorkerLost():
                self._held.pop(event.job_id, None)
            case NodeLost() | NodeReleased():
                on_it = [job_id for job_id, held in self._held.items() if event.node_id in held.nodes]
                for job_id in on_it:
                    del self._held[job_id]
            case _:
                pass
        self._still = isinstance(event, RunPaused)
        return found

    def _told(self, event: Decided, one: Instruction) -> Change:
        before = self.held(one.job_id)
        after = before if one.action is Action.SET_BATCH else one.allocation
        what = str(one.action)
        if one.action is Action.PARK:
            what = "pause"
        elif one.action is Action.START:
            what = "resume" if one.job_id in self._started else "start"
            self._started.add(one.job_id)
        self._held[one.job_id] = after
        if not after:
            del self._held[one.job_id]
        batch_before = self._batches.get(one.job_id)
        batch_after = self._told_batch(one.job_id, one.batch, after)
        return Change(
            t_s=event.t_s,
            job_id=one.job_id,
            what=what,
            before=before,
            after=after,
            reason=event.reasons.get(one.job_id),
            batch_before=batch_before,
            batch_after=batch_after,
        )

    def _told_batch(self, job_id: str, batch: BatchChoice, held: Allocation) -> int | None:
        if not held or job_id not in self._batches:
            return None
        self._batches[job_id] = total = batch.total(held.worker_count)
        return total

    def _all(self, t_s: float, what: str, why: str) -> list[Change]:
        """Of everybody who holds something: paused with the run, or started there again."""
        return [
            Change(
                t_s=t_s,
                job_id=job_id,
                what=what,
                before=held if what == "pause" else NOTHING,
                after=NOTHING if what == "pause" else held,
                why=why,
            )
            for job_id, held in self._held.items()
        ]


def _adapts(job: Job) -> bool:
    return job.tier is Tier.ADAPTIVE and job.study is None
