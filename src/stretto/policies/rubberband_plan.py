"""Making the plan that `rubberband` executes, at first and again when reality drifts from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stretto.core.cluster import Node
from stretto.core.units import format_duration, format_usd
from stretto.planning.forecast import Forecast, Outcome, Progress
from stretto.planning.plan import StagePlan
from stretto.planning.planner import Planner, Rule, kept_how, plan_study
from stretto.planning.profile import LatencyBelief, LatencyDraws
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.rubberband_course import Footing, own_nodes
from stretto.policies.rubberband_outlook import steady_s


@dataclass(frozen=True, slots=True)
class Slowed:
    """What was believed about the time of an epoch, and how much longer epochs were seen to take."""

    belief: LatencyBelief
    slowness: float

    @property
    def epoch_s(self) -> float:
        return self.belief.epoch_s * self.slowness

    @property
    def trial_sd(self) -> float:
        return self.belief.trial_sd

    @property
    def node_sd(self) -> float:
        return self.belief.node_sd

    @property
    def epoch_sd(self) -> float:
        return self.belief.epoch_sd

    def draw(self, rng: np.random.Generator, samples: int) -> LatencyDraws:
        draws = self.belief.draw(rng, samples)
        return replace(draws, epoch_s=draws.epoch_s * self.slowness)


def beginning(tuning: Tuning, nodes: Iterable[Node]) -> Progress | None:
    """Where a study begins, with nodes that are simply there; None if there are none of use."""
    own = own_nodes(nodes, tuning.instances)
    return Progress(stage=0, trials=tuning.study.trials, nodes=own) if own else None


def make_plan(
    tuning: Tuning,
    rng: np.random.Generator,
    planner: Planner,
    rule: Rule,
    *,
    start: Progress | None = None,
    slowness: float = 1.0,
) -> tuple[list[StagePlan], Footing]:
    """The plan to follow from `start` on, if epochs take `slowness` times what the profile says."""
    latency = Slowed(tuning.profile.latency, slowness)
    as_seen = replace(tuning, profile=replace(tuning.profile, latency=latency))
    outcome = plan_study(as_seen, rng, planner=planner, rule=rule, start=start)
    return laid_out(outcome, tuning, rule, start=start, slowness=slowness)


def laid_out(
    outcome: Outcome, tuning: Tuning, rule: Rule, *, start: Progress | None = None, slowness: float = 1.0
) -> tuple[list[StagePlan], Footing]:
    """What was planned, to be followed from `start` on."""
    forecast = outcome.followed(tuning.limits)
    stages = list(forecast.plan.stages)
    begun_s = start.elapsed_s if start else 0.0
    first = stages[0].instance
    steady = steady_s(tuning, stages, (first, start.held(first) if start else 0), slowness)
    footing = Footing(
        text=_describe(tuning.limits, rule, forecast, kept=outcome.chosen is not None),
        made_s=begun_s,
        finish_s=forecast.finish_s.mean,
        stretch=(forecast.finish_s.mean - begun_s) / steady if steady > 0 else 1.0,
        slowness=slowness,
    )
    return stages, footing


def _describe(limits: Limits, rule: Rule, forecast: Forecast, *, kept: bool) -> str:
    expected = (
        f"about {format_duration(forecast.finish_s.mean)} and {format_usd(forecast.cost_usd.mean)} in all"
    )
    bounds = []
    if limits.deadline_s is not None:
        bounds.append(f"ends by {format_duration(limits.deadline_s)}")
    if limits.budget_usd is not None:
        bounds.append(f"costs at most {format_usd(limits.budget_usd)}")
    if not bounds:
        return f"No limit is set; the best use of time and money takes {expected}."
    promise = f"{' and '.join(bounds)} {kept_how(limits, rule)}"
    if not kept:
        instead = "cheapest" if limits.deadline_s is None else "earliest"
        return f"No plan {promise}; the {instead} takes {expected}."
    aim = "cheapest" if limits.deadline_s is not None else "fastest"
    return f"The {aim} plan that {promise} takes {expected}."
