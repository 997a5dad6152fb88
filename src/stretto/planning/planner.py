"""The planner: what to rent in every stage of a study, so that its limits are kept at the least cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution
from stretto.planning.forecast import Outcome, Progress, stages_left
from stretto.planning.improve import decrement, polish, polish_stages
from stretto.planning.options import Menu, menus_of, static_plans
from stretto.planning.plan import Plan
from stretto.planning.pool import Goal, Pool, cost, speed
from stretto.planning.reporting import report
from stretto.planning.stagewise import candidate_plans, mean_steps
from stretto.planning.tuning import Limits, Tuning

Planner = Literal["search", "published"]
Rule = Literal["quantile", "mean"]

COARSE = 64
"""Samples for mean times, on which candidates are found."""
SAMPLES = 400
"""Samples on which plans are compared."""
FRESH = 1500
"""Samples, drawn anew, on which plans must keep the limits again and from which the numbers that are
reported come: those on which they were compared flatter the best."""
MARGIN = 1.05
"""Room for the rounding of stages to whole time steps."""
POLISHED = 2
"""Candidates that are improved by exchanges."""


@dataclass(frozen=True, slots=True)
class Search:
    """Everything a search for plans needs; what it finds is in the pool."""

    tuning: Tuning
    start: Progress | None
    menus: tuple[Menu, ...]
    statics: tuple[Plan, ...]
    coarse: Execution
    pool: Pool


def plan_study(
    tuning: Tuning,
    rng: np.random.Generator,
    *,
    planner: Planner = "search",
    rule: Rule = "quantile",
    start: Progress | None = None,
) -> Outcome:
    """What it takes to run a study within its limits, or to end one that is under way.

    `planner`: a thorough search, or the published greedy. `rule`: keep the limits with probability q, or in
    the mean, as published. `start`: plan from here on.
    """
    goal = Goal(tuning.limits, by_mean=rule == "mean")
    search = prepare(tuning, rng, goal, start)
    if planner == "published":
        search_as_published(search)
    else:
        search_thoroughly(search)
    fresh = Execution(tuning, draw_study(tuning, rng, FRESH, start), start)
    return report(search.pool, search.statics, fresh, goal)


def kept_how(limits: Limits, rule: Rule) -> str:
    """How surely a plan keeps the limits, in words."""
    return "on average" if rule == "mean" else f"with probability {limits.q:g}"


def prepare(tuning: Tuning, rng: np.random.Generator, goal: Goal, start: Progress | None = None) -> Search:
    """Draw the samples and find the options that are worth looking at."""
    coarse = Execution(tuning, draw_study(tuning, rng, COARSE, start), start)
    fine = Execution(tuning, draw_study(tuning, rng, SAMPLES, start), start)
    menus = menus_of(tuning, stages_left(tuning.study, start), coarse)
    statics = tuple(static_plans(menus, tuning))
    return Search(tuning, start, menus, statics, coarse, Pool(fine, goal))


def search_as_published(search: Search) -> None:
    """From the best fixed cluster, one node less where it pays most."""
    decrement(search.pool.best(search.statics), search.menus, search.pool)


def search_thoroughly(search: Search) -> None:
    """From every fixed cluster and from the plans that are best in the mean, up and down."""
    pool, menus = search.pool, search.menus
    steps = mean_steps(search.tuning, menus, search.coarse, search.start)
    elapsed_s = search.start.elapsed_s if search.start else 0.0
    shortest_s = sum(float(step.duration_s.min()) for step in steps)
    longest_s = sum(float(step.duration_s.max()) for step in steps)
    cheapest = candidate_plans(menus, steps, MARGIN * longest_s)[-1]
    horizons_s = [pool.judge(cheapest).finish_s - elapsed_s]
    if search.tuning.limits.deadline_s is not None:
        horizons_s.append(search.tuning.limits.deadline_s - elapsed_s)
    for horizon_s in horizons_s:
        if MARGIN * horizon_s > shortest_s:
            for plan in candidate_plans(menus, steps, MARGIN * horizon_s):
                pool.judge(plan)
    for plan in search.statics:
        pool.judge(plan)
    for key in (cost, speed):
        polish_stages(pool.best(tuple(pool.seen), key), menus, pool, key)
    for plan in pool.ordered(pool.seen)[:POLISHED]:
        polish(plan, menus, pool)
