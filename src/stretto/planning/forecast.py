"""What planning answers: plans with what they are expected to take, and where a running study stands."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stretto.planning.plan import Plan
from stretto.planning.tuning import Limits
from stretto.search.study import Stage, Study, halving_stages


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantity that is not known for sure: its mean, and the bounds of its middle 80 %."""

    mean: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan, and what is expected of it. Times count from the study's start, money spent so far included."""

    plan: Plan
    finish_s: Estimate
    cost_usd: Estimate
    due_s: float
    """The earliest deadline this plan keeps under the rule: its q-quantile, or its mean."""
    due_usd: float
    """The least budget this plan keeps under the rule."""
    p_on_time: float | None
    """Probability of finishing by the deadline; None where there is none."""
    p_in_budget: float | None
    """Probability of costing no more than the budget; None where there is none."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something that is not known beforehand, and its share of the variance of the finish time."""

    name: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to "what will it take?": a trade-off rather than a number."""

    feasible: bool
    """Whether some plan keeps the limits."""
    chosen: Forecast | None
    """The cheapest plan that keeps the limits (with a budget alone: the fastest). Without any limit it is
    the one with the least product of time and money. None if nothing keeps them."""
    cheapest: Forecast
    fastest: Forecast
    static: Forecast | None
    """The best fixed cluster that keeps the limits, all of it held to the end."""
    frontier: tuple[Forecast, ...]
    """Plans that no other beats in both time and money, fastest first: `due_s` rises, the mean cost falls.
    All that were found, however many."""
    earliest: Forecast
    """The plan with the earliest deadline that can be kept, within the budget where one can be."""
    doubts: tuple[Doubt, ...]
    """Sources of doubt about the chosen plan (or the earliest), the largest first."""

    def followed(self, limits: Limits) -> Forecast:
        """The plan a study goes by.

        Where none keeps the limits it is the one that ends first, or, without a deadline, costs least.
        """
        return self.chosen or (self.cheapest if limits.deadline_s is None else self.earliest)

    def keeps_deadline(self, limits: Limits) -> bool:
        """Whether that plan does now that it is nearer; one that never did is as good as ever."""
        deadline_s, chosen = limits.deadline_s, self.chosen
        return deadline_s is None or chosen is None or chosen.due_s <= deadline_s

    def cheapest_by(self, deadline_s: float) -> Forecast | None:
        """The cheapest plan of the frontier that keeps this deadline: what would an hour more save?"""
        on_time = [forecast for forecast in self.frontier if forecast.due_s <= deadline_s]
        return min(on_time, key=lambda forecast: forecast.cost_usd.mean, default=None)


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node that is paid for, or one that is simply there."""

    instance: str
    since_s: float
    """When it began to cost."""
    free: bool = False
    """It is there anyway, and is not given back: what it costs, used or not, is in `Tuning.own`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a running study stands, to plan again from there."""

    stage: int
    """Index of the stage it is in, or is about to begin, among `halving_stages(study)`."""
    trials: int
    """Trials that live in this stage."""
    epochs_done: int = 0
    """Epochs of this stage that its trials have behind them."""
    nodes: tuple[HeldNode, ...] = ()
    elapsed_s: float = 0.0
    """Time since the study's start."""
    spent_usd: float = 0.0
    """Money spent so far on what is over: the time of `nodes` is charged when they are given back."""
    trial_factors: tuple[float, ...] = ()
    """How much longer than usual an epoch takes each of the first trials, where that is known; those that
    are most likely to live on come first."""

    def held(self, instance: str) -> int:
        """Nodes held of one instance type."""
        return sum(node.instance == instance for node in self.nodes)


def stages_left(study: Study, start: Progress | None) -> tuple[Stage, ...]:
    """The stages of a study from where it stands."""
    stages = halving_stages(study)
    if start is None:
        return stages
    now = stages[start.stage]
    later = (replace(stage, trials=min(stage.trials, start.trials)) for stage in stages[start.stage + 1 :])
    return (Stage(now.first_epoch + start.epochs_done, now.last_epoch, start.trials), *later)
