"""Who got what when: every start, pause, resume, resize and stop that a journal tells of, with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.allocation import NOTHING, Allocation
from stretto.core.decision import Reason, ReasonCode
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction

_RESIZED = frozenset({ReasonCode.GREW, ReasonCode.SHRANK, ReasonCode.MOVED})
_PAST = {
    "start": "started",
    "resume": "resumed",
    "resize": "resized",
    "pause": "paused",
    "stop": "stopped",
    "set-batch": "changed its batch size",
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

    @property
    def past(self) -> str:
        """What it did, as a verb of the past."""
        if self.what == "resize" and self.reason is not None and self.reason.code in _RESIZED:
            return str(self.reason.code)
        return _PAST[self.what]

    @property
    def said(self) -> str:
        """The reason in a sentence; empty if there is none."""
        return self.why if self.reason is None else self.reason.text


class Changes:
    """What every job holds, folded over events, and how that changed."""

    def __init__(self) -> None:
        self._held: dict[str, Allocation] = {}
        self._started: set[str] = set()
        self._still = False

    def held(self, job_id: str) -> Allocation:
        """What a job holds, or will hold again when its run goes on."""
        return self._held.get(job_id, NOTHING)

    def observe(self, event: Event) -> list[Change]:
        """What an event changed, in the order in which it was told."""
        found: list[Change] = []
        match event:
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
        return Change(
            t_s=event.t_s,
            job_id=one.job_id,
            what=what,
            before=before,
            after=after,
            reason=event.reasons.get(one.job_id),
        )

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
