"""A gang that trains user code. Rank 0 of the group reports for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stretto.core.allocation import Allocation
from stretto.core.events import NoteKind
from stretto.core.job import Job
from stretto.core.units import format_duration
from stretto.substrate.elastic.crew import Goal, Member
from stretto.substrate.elastic.effects import Effect, Moment, Rules, TrainingJob
from stretto.substrate.elastic.gang import Gang
from stretto.substrate.elastic.losses import Losses
from stretto.substrate.elastic.reports import Held, TrainingAccount
from stretto.wire.messages import Ack, FromWorker, Report, Saved

_SILENCE_S = 30.0
"""After this long without training, a note says what is waited for; again whenever the time has doubled."""
_NOTABLE_S = 5.0
"""No note if the job started less than this before the end."""


_IMPORTING = "the training code was still being imported"
_BEFORE_ITS_LOOP = "the training function had not come to run.epochs() or run.steps()"


class TrainingGang(Gang):
    """One job's workers, which train together and resize in place."""

    _account: TrainingAccount

    def __init__(
        self,
        job: Job,
        spec: TrainingJob,
        rules: Rules,
        log: str,
        *,
        account: TrainingAccount,
        losses: Losses,
        places_of: Callable[[Allocation], Counter[str]],
    ) -> None:
        super().__init__(job, spec, rules, log, account=account, losses=losses, places_of=places_of)
        self._silence_s = _SILENCE_S
        self._placed_s: float | None = None
        """When it last trained, rested or waited for a slot."""

    def tick(self, now: Moment) -> list[Effect]:
        """If the start takes long, note at growing intervals what it is doing."""
        doing = self._loading()
        if not doing or self._placed_s is None:
            self._silence_s, self._placed_s = _SILENCE_S, now.t_s
        elif now.t_s - self._placed_s >= self._silence_s:
            self._silence_s *= 2.0
            text = f"{doing} {format_duration(now.t_s - self._placed_s)} after it was started"
            self._note(text, now, NoteKind.NOT_BEGUN)
        return super().tick(now)

    def close(self, now: Moment) -> list[Effect]:
        doing, since_s = self._loading(), self._placed_s
        if doing and since_s is not None and now.t_s - since_s >= _NOTABLE_S:
            self._note(doing, now, NoteKind.NOT_BEGUN)
        return super().close(now)

    def _loading(self) -> str:
        """What a job with a slot does before it trains; empty if it trains or has no slot."""
        crew = self._crew
        here = [member for member in crew.members.values() if member.seated and not member.outgoing]
        if self.goal is not Goal.RUN or crew.group or not here or all(member.store for member in here):
            return ""
        return _BEFORE_ITS_LOOP if any(member.heard_s is not None for member in here) else _IMPORTING

    def _take(self, member: Member, message: FromWorker, now: Moment) -> None:
        match message:
            case Report() if member.led and self.goal is not Goal.OVER:
                self._report(message, now)
            case Saved() if member.led:
                self._emit(self._account.saved(message, t_s=now.t_s))
            case _:
                super()._take(member, message, now)

    def _tell_last(self, now: Moment) -> None:
        """A lost group may have saved the last epoch without reporting it."""
        workers = len(self._crew.formed or self._crew.members)
        self._account.make_up(self._order.nodes(workers))
        super()._tell_last(now)

    def _report(self, report: Report, now: Moment) -> None:
        workers = len(self._crew.formed or self._crew.forming)
        self._account.held.append(Held(report, workers, self._order.nodes(workers)))
        if not self._order.holds_reports:
            self._tell(now)
        elif report.ends:
            self._tell_group(Ack(report.epoch))
