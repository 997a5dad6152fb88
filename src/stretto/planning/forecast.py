"""What planning returns: plans with forecasts, and the nearest alternatives if no plan keeps the limits.

Each alternative was planned with exactly the limits shown, so a user who asks for it gets a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stretto.core.units import HOUR_S, shown_usd_above
from stretto.planning.plan import Plan
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Limits, Tuning
from stretto.search.study import Stage, Study, halving_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan with its expected time and cost, from the study's start and including what was spent so far."""

    plan: Plan
    finish_s: Estimate
    cost_usd: Estimate
    due_s: float
    """The earliest deadline that this plan keeps under the rule: its q-quantile, or its mean."""
    due_usd: float
    """The least budget that this plan keeps under the rule."""
    p_on_time: float | None
    """Probability of finishing by the deadline; None without a deadline."""
    p_in_budget: float | None
    """Probability of keeping the budget; None without a budget."""


@dataclass(frozen=True, slots=True)
class VarianceShare:
    """A source of uncertainty, and its share of the variance of the finish time."""

    name: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to "how long will it take, and what will it cost?"."""

    feasible: bool
    """Whether any plan keeps the limits."""
    chosen: Forecast | None
    """The best plan that keeps the limits, None if there is none.

    It is the cheapest; with only a budget the fastest; without limits the one with the least product of time
    and cost.
    """
    cheapest: Forecast
    fastest: Forecast
    static: Forecast | None
    """The best fixed cluster that keeps the limits, with all nodes held to the end."""
    frontier: tuple[Forecast, ...]
    """All plans that no other beats in both time and cost, fastest first: `due_s` rises, mean cost falls."""
    earliest: Forecast
    """The plan that keeps the earliest deadline, within the budget if any plan is."""
    doubts: tuple[VarianceShare, ...]
    """Sources of uncertainty of the chosen plan (or else the earliest), the largest first."""

    def followed(self, limits: Limits) -> Forecast:
        """The plan that a study follows.

        If no plan keeps the limits, it is the earliest, or without a deadline the cheapest.
        """
        return self.chosen or (self.cheapest if limits.deadline_s is None else self.earliest)

    def keeps_deadline(self, limits: Limits) -> bool:
        """Whether the chosen plan keeps the deadline of `limits`, if there are both."""
        deadline_s, chosen = limits.deadline_s, self.chosen
        return deadline_s is None or chosen is None or chosen.due_s <= deadline_s

    def cheapest_by(self, deadline_s: float) -> Forecast | None:
        """The cheapest plan of the frontier that keeps this deadline."""
        on_time = [forecast for forecast in self.frontier if forecast.due_s <= deadline_s]
        return min(on_time, key=lambda forecast: forecast.cost_usd.mean, default=None)


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node of the study: a rented one, or one of our own."""

    instance: str
    since_s: float
    """When its cost began."""
    free: bool = False
    """One of our own nodes, which is never given back; its cost is in `Tuning.own`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyProgress:
    """How far a running study is, to plan the rest of it."""

    stage: int
    """Index of the current stage, or of the one about to start, in `halving_stages(study)`."""
    trials: int
    """Trials of this stage."""
    epochs_done: int = 0
    """Epochs of this stage that its trials have completed."""
    nodes: tuple[HeldNode, ...] = ()
    elapsed_s: float = 0.0
    """Time since the study's start."""
    spent_usd: float = 0.0
    """Money spent so far, without `nodes`: they are charged when they are given back."""
    trial_factors: tuple[float, ...] = ()
    """Epoch time relative to the mean, of the trials where it is known; likely survivors come first."""

    def held(self, instance: str) -> int:
        """Nodes held of one instance type."""
        return sum(node.instance == instance for node in self.nodes)


def stages_left(study: Study, start: StudyProgress | None) -> tuple[Stage, ...]:
    """The rest of the stages of a study."""
    stages = halving_stages(study)
    if start is None:
        return stages
    now = stages[start.stage]
    later = (replace(stage, trials=min(stage.trials, start.trials)) for stage in stages[start.stage + 1 :])
    return (Stage(now.first_epoch + start.epochs_done, now.last_epoch, start.trials), *later)


PlanBy = Callable[[Tuning], Outcome]
"""Plans a study with fixed options."""

WIDER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
"""Factors by which a limit is raised until a plan keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A feasible change of the limits, trials or epochs, and its plan."""

    limits: Limits
    trials: int
    max_epochs: int
    rungs: tuple[int, ...]
    plan: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """The nearest alternative in each direction; None if there is none."""

    more_time: Alternative | None
    """A later deadline with the same budget."""
    more_money: Alternative | None
    """A larger budget with the same deadline."""
    more_of_both: Alternative | None
    """Only if neither alone is enough."""
    fewer_trials: Alternative | None
    """With the same limits, as are the next two."""
    fewer_epochs: Alternative | None
    fewer_of_both: Alternative | None
    """Trials of one epoch; only if neither alone is enough."""


def nearest_plans(tuning: Tuning, plan_by: PlanBy) -> Nearest:
    """Alternatives to a study for which no plan keeps the limits."""
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

    def more_time(self) -> Alternative | None:
        limits = self.tuning.limits
        free = self._planned(replace(limits, deadline_s=None))
        if free.chosen is None:
            return None
        soonest = min(free.chosen.due_s, free.earliest.due_s if limits.budget_usd is None else math.inf)
        asked_s = limits.deadline_s or 0.0
        return self._first_kept(
            replace(limits, deadline_s=time_s) for time_s in _raised_s(soonest) if time_s > asked_s
        )

    def more_money(self) -> Alternative | None:
        limits = self.tuning.limits
        free = self._planned(replace(limits, budget_usd=None))
        chosen = free.cheapest if limits.deadline_s is None else free.chosen
        if chosen is None:
            return None
        asked_usd = limits.budget_usd or 0.0
        return self._first_kept(
            replace(limits, budget_usd=usd) for usd in _raised_usd(chosen.due_usd) if usd > asked_usd
        )

    def more_of_both(self) -> Alternative | None:
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

    def largest(self, count: int, changed: Callable[[Tuning, int], Tuning]) -> Alternative | None:
        """The most trials or epochs, fewer than requested, that keep the limits."""
        low, high, found = 1, count - 1, None
        while low <= high:
            middle = (low + high) // 2
            offer = self._kept(changed(self.tuning, middle))
            if offer is None:
                high = middle - 1
            else:
                low, found = middle + 1, offer
        return found

    def _first_kept(self, tried: Iterator[Limits]) -> Alternative | None:
        offers = (self._kept(replace(self.tuning, limits=limits)) for limits in tried)
        return next((offer for offer in offers if offer is not None), None)

    def _kept(self, tuning: Tuning) -> Alternative | None:
        chosen = self.plan_by(tuning).chosen
        if chosen is None:
            return None
        study = tuning.study
        return Alternative(
            limits=tuning.limits,
            trials=study.trials,
            max_epochs=study.max_epochs,
            rungs=study.rungs,
            plan=chosen,
        )

    def _planned(self, limits: Limits) -> Outcome:
        return self.plan_by(replace(self.tuning, limits=limits))


def _raised_s(time_s: float) -> Iterator[float]:
    """Raised times, rounded up as they are shown: to seconds, or from an hour on to minutes."""
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
