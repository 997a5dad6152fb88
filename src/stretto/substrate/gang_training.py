"""The workers of one job that trains code of the user's: the first of a group reports for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stretto.core.allocation import Allocation
from stretto.core.job import Job
from stretto.substrate.gang import Gang
from stretto.substrate.gang_crew import Goal, Member
from stretto.substrate.gang_effects import Moment, Rules, TrainingJob
from stretto.substrate.gang_losses import Losses
from stretto.substrate.gang_reports import Account, Held
from stretto.wire.messages import Ack, FromWorker, Report, Saved


class TrainingGang(Gang):
    """One job's workers, which train together and resize without a restart."""

    _account: Account

    def __init__(
        self,
        job: Job,
        spec: TrainingJob,
        rules: Rules,
        log: str,
        *,
        account: Account,
        losses: Losses,
        places_of: Callable[[Allocation], Counter[str]],
    ) -> None:
        super().__init__(job, spec, rules, log, account=account, losses=losses, places_of=places_of)

    def _take(self, member: Member, message: FromWorker, now: Moment) -> None:
        match message:
            case Report() if member.led and self.goal is not Goal.OVER:
                self._report(message, now)
            case Saved() if member.led:
                self._emit(self._account.saved(message, t_s=now.t_s))
            case _:
                super()._take(member, message, now)

    def _tell_last(self, now: Moment) -> None:
        """Its last epoch may have been saved by a group that was lost before it could tell."""
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
