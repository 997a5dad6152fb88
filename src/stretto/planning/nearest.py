"""What could be kept instead of limits that no plan keeps: more time, more money, or less to train.

Every offer was planned, with the numbers as they are shown: whoever asks for it gets a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stretto.core.units import HOUR_S, shown_usd_above
from stretto.planning.forecast import Forecast, Outcome
from stretto.planning.tuning import Limits, Tuning

PlanBy = Callable[[Tuning], Outcome]
"""Plans a study, always in the same way."""

WIDER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""By which factors a limit is raised until a plan keeps it: another limit may lead to another search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Limits, trials and epochs that can be kept, and the plan that does."""

    limits: Limits
    trials: int
    max_epochs: int
    rungs: tuple[int, ...]
    plan: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The nearest offers in each direction; None where nothing was found."""

    more_time: Offer | None
    """Within the budget that was asked for, if any."""
    more_money: Offer | None
    """By the deadline that was asked for, if any; None without a budget."""
    more_of_both: Offer | None
    """Only where neither alone is enough."""
    fewer_trials: Offer | None
    """Within the limits as they are, and so the next."""
    fewer_epochs: Offer | None
    fewer_of_both: Offer | None
    """Trials of one epoch; only where neither alone is enough."""


def nearest_plans(tuning: Tuning, plan_by: PlanBy) -> Nearest:
    """Offers beside a study of which no plan keeps the limits."""
    search = _Search(tuning, plan_by)
    limits = tuning.limits
    more_time = search.more_time() if limits.deadline_s is not None else None
    more_money = search.more_money() if limits.budget_usd is not None else None
    fewer_trials = search.largest(tuning.study.trials, _with_trials)
    fewer_epochs = search.largest(tuning.study.max_epochs, _with_epochs)
    return Nearest(
        more_time=more_time,
        more_money=more_money,
        more_of_both=None if more_time or more_money else search.more_of_both(),
        fewer_trials=fewer_trials,
        fewer_epochs=fewer_epochs,
        fewer_of_both=None
        if fewer_trials or fewer_epochs
        else search.largest(
            tuning.study.trials, lambda one, trials: _with_epochs(_with_trials(one, trials), 1)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    tuning: Tuning
    plan_by: PlanBy

    def more_time(self) -> Offer | None:
        limits = self.tuning.limits
        free = self._planned(replace(limits, deadline_s=None))
        if free.chosen is None:
            return None
        soonest = min(free.chosen.due_s, free.earliest.due_s if limits.budget_usd is None else math.inf)
        asked_s = limits.deadline_s or 0.0
        return self._first_kept(
            replace(limits, deadline_s=time_s) for time_s in _raised_s(soonest) if time_s > asked_s
        )

    def more_money(self) -> Offer | None:
        limits = self.tuning.limits
        free = self._planned(replace(limits, budget_usd=None))
        chosen = free.cheapest if limits.deadline_s is None else free.chosen
        if chosen is None:
            return None
        asked_usd = limits.budget_usd or 0.0
        return self._first_kept(
            replace(limits, budget_usd=usd) for usd in _raised_usd(chosen.due_usd) if usd > asked_usd
        )

    def more_of_both(self) -> Offer | None:
        limits = self.tuning.limits
        free = self._planned(replace(limits, deadline_s=None, budget_usd=None))
        plan = free.cheapest if limits.deadline_s is None else free.earliest
        pairs = zip(_raised_s(plan.due_s), _raised_usd(plan.due_usd), strict=True)
        return self._first_kept(
            replace(
                limits,
                deadline_s=None if limits.deadline_s is None else max(time_s, limits.deadline_s),
                budget_usd=None if limits.budget_usd is None else max(usd, limits.budget_usd),
            )
            for time_s, usd in pairs
        )

    def largest(self, count: int, changed: Callable[[Tuning, int], Tuning]) -> Offer | None:
        """The most trials or epochs, below what was asked for, with which the limits are kept."""
        low, high, found = 1, count - 1, None
        while low <= high:
            middle = (low + high) // 2
            offer = self._kept(changed(self.tuning, middle))
            if offer is None:
                high = middle - 1
            else:
                low, found = middle + 1, offer
        return found

    def _first_kept(self, tried: Iterator[Limits]) -> Offer | None:
        offers = (self._kept(replace(self.tuning, limits=limits)) for limits in tried)
        return next((offer for offer in offers if offer is not None), None)

    def _kept(self, tuning: Tuning) -> Offer | None:
        chosen = self.plan_by(tuning).chosen
        if chosen is None:
            return None
        study = tuning.study
        return Offer(
            limits=tuning.limits,
            trials=study.trials,
            max_epochs=study.max_epochs,
            rungs=study.rungs,
            plan=chosen,
        )

    def _planned(self, limits: Limits) -> Outcome:
        return self.plan_by(replace(self.tuning, limits=limits))


def _raised_s(time_s: float) -> Iterator[float]:
    """In whole seconds or, from an hour on, minutes: as times are shown."""
    for factor in WIDER:
        step_s = 1.0 if time_s * factor < HOUR_S else 60.0
        yield math.ceil(time_s * factor / step_s) * step_s


def _raised_usd(usd: float) -> Iterator[float]:
    return (shown_usd_above(usd * factor) for factor in WIDER)


def _with_trials(tuning: Tuning, trials: int) -> Tuning:
    return replace(tuning, study=replace(tuning.study, trials=trials))


def _with_epochs(tuning: Tuning, epochs: int) -> Tuning:
    rungs = tuple(rung for rung in tuning.study.rungs if rung < epochs)
    return replace(tuning, study=replace(tuning.study, max_epochs=epochs, rungs=rungs))
