"""RubberBand's planner: what to rent in each stage of a study to keep its limits at the least cost.

1. Draw Monte Carlo samples of everything uncertain: epoch times, delays of nodes, ... (draws.py).
2. Find candidate plans by mean times: fixed clusters, and dynamic programming over stages (candidates.py).
3. Compare plans on samples, simulating the DAG of tasks of every plan (execution.py).
4. Improve the best plans by exchanges, or with the published greedy planner (improve.py).
5. Forecast the best plans on fresh samples. A plan that misses the limits there makes way for the next one,
   so a reported number never contradicts a promised limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stretto.planning.candidates import (
    Menu,
    Objective,
    PlanPool,
    by_cost,
    by_end,
    candidate_plans,
    mean_steps,
    menus_of,
    static_plans,
)
from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution
from stretto.planning.forecast import Forecast, Outcome, StudyProgress, VarianceShare, stages_left
from stretto.planning.improve import decrement, polish, polish_stages
from stretto.planning.plan import Plan
from stretto.planning.profile import Estimate, Floats
from stretto.planning.tuning import Limits, Tuning

Planner = Literal["search", "published"]
LimitRule = Literal["quantile", "mean"]

COARSE = 64
"""Samples for the mean times that candidate plans are made from."""
SAMPLES = 400
"""Samples on which plans are compared."""
FRESH = 1500
"""Fresh samples for the limits and the reported numbers; those used for comparison favour the winner."""
MARGIN = 1.05
"""Allowance for rounding stages to whole time steps."""
POLISHED = 2
"""Candidates that are improved by exchanges."""
FOR_DOUBTS = 500
"""Samples from which shares of variance are estimated."""
INDISTINCT = 0.002
"""Smaller relative differences are within the sampling error."""
PATIENCE = 200
"""Plans tried on fresh samples before the limits count as infeasible."""


@dataclass(frozen=True, slots=True)
class Search:
    """Everything a search for plans needs, and the pool of plans found so far."""

    tuning: Tuning
    start: StudyProgress | None
    menus: tuple[Menu, ...]
    statics: tuple[Plan, ...]
    coarse: Execution
    pool: PlanPool


def plan_study(
    tuning: Tuning,
    rng: np.random.Generator,
    *,
    planner: Planner = "search",
    rule: LimitRule = "quantile",
    start: StudyProgress | None = None,
) -> Outcome:
    """Plans a study within its limits, or the rest of one that is running.

    `planner`: our search, or the published greedy planner. `rule`: keep the limits with probability q, or on
    average as published. `start`: the progress of a running study.
    """
    objective = Objective(tuning.limits, by_mean=rule == "mean")
    search = prepare(tuning, rng, objective, start)
    if planner == "published":
        search_as_published(search)
    else:
        search_thoroughly(search)
    fresh = Execution(tuning, draw_study(tuning, rng, FRESH, start), start)
    return report(search.pool, search.statics, fresh, objective)


def kept_how(limits: Limits, rule: LimitRule) -> str:
    """How surely a plan keeps the limits, as a phrase."""
    return "on average" if rule == "mean" else f"with probability {limits.q:g}"


def prepare(
    tuning: Tuning, rng: np.random.Generator, objective: Objective, start: StudyProgress | None = None
) -> Search:
    """Draw the samples and find the options worth considering."""
    coarse = Execution(tuning, draw_study(tuning, rng, COARSE, start), start)
    fine = Execution(tuning, draw_study(tuning, rng, SAMPLES, start), start)
    menus = menus_of(tuning, stages_left(tuning.study, start), coarse)
    statics = tuple(static_plans(menus, tuning))
    return Search(tuning, start, menus, statics, coarse, PlanPool(fine, objective))


def search_as_published(search: Search) -> None:
    """The paper's greedy planner: start from the best fixed cluster and shrink it where that pays most."""
    decrement(search.pool.best(search.statics), search.menus, search.pool)


def search_thoroughly(search: Search) -> None:
    """Judge all fixed clusters and candidate plans, then improve the best ones."""
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
    for key in (by_cost, by_end):
        polish_stages(pool.best(tuple(pool.seen), key), menus, pool, key)
    for plan in pool.ordered(pool.seen)[:POLISHED]:
        polish(plan, menus, pool)


def report(pool: PlanPool, statics: Sequence[Plan], execution: Execution, objective: Objective) -> Outcome:
    """The trade-off among the plans of the pool; `execution` runs on the fresh samples."""
    fresh = PlanPool(execution, objective)
    earliest = _earliest(pool, objective.limits)
    fixed = PlanPool(execution, objective, fixed=True)
    static = _first_that_keeps(PlanPool(pool.execution, objective, fixed=True).ordered(statics), fixed)
    found = _first_that_keeps((*_in_order(pool)[:PATIENCE], earliest), fresh)
    keeping = [plan for plan in (found, static) if plan is not None]
    chosen = fresh.best(keeping) if keeping else None

    def forecast(plan: Plan) -> Forecast:
        return _forecast(plan, fresh)

    return Outcome(
        feasible=chosen is not None,
        chosen=forecast(chosen) if chosen else None,
        cheapest=forecast(pool.best(pool.seen, by_cost)),
        fastest=forecast(pool.best(pool.seen, by_end)),
        static=_forecast(static, fixed) if static else None,
        frontier=tuple(forecast(plan) for plan in _frontier(pool, fresh)),
        earliest=forecast(earliest),
        doubts=_doubts(chosen or earliest, execution.first(FOR_DOUBTS)),
    )


def _in_order(pool: PlanPool) -> list[Plan]:
    """All plans, the best first; among plans as good as the best, the one with the earliest end first."""
    ordered = pool.ordered(pool.seen)
    best = pool.judge(ordered[0])
    as_good = [
        plan
        for plan in ordered
        if (score := pool.judge(plan)).excess <= best.excess
        and score.wanted <= best.wanted * (1.0 + INDISTINCT)
    ]
    as_good.sort(key=lambda plan: pool.judge(plan).due_s)
    return [*as_good, *ordered[len(as_good) :]]


def _first_that_keeps(plans: Iterable[Plan], fresh: PlanPool) -> Plan | None:
    return next((plan for plan in plans if fresh.judge(plan).excess <= 0.0), None)


def _earliest(pool: PlanPool, limits: Limits) -> Plan:
    budget_usd = math.inf if limits.budget_usd is None else limits.budget_usd
    affordable = [plan for plan, score in pool.seen.items() if score.due_usd <= budget_usd]
    return pool.best(affordable or pool.seen, by_end)


def _frontier(pool: PlanPool, fresh: PlanPool) -> list[Plan]:
    for plan in pool.frontier():
        fresh.judge(plan)
    return fresh.frontier()


def _forecast(plan: Plan, pool: PlanPool) -> Forecast:
    run, score, limits = pool.run(plan), pool.judge(plan), pool.objective.limits
    return Forecast(
        plan=plan,
        finish_s=_estimate(run.finish_s),
        cost_usd=_estimate(run.cost_usd),
        due_s=score.due_s,
        due_usd=score.due_usd,
        p_on_time=_probability(run.finish_s, limits.deadline_s),
        p_in_budget=_probability(run.cost_usd, limits.budget_usd),
    )


def _estimate(values: Floats) -> Estimate:
    p10, p90 = np.quantile(values, (0.1, 0.9))
    return Estimate(float(values.mean()), float(p10), float(p90))


def _probability(values: Floats, limit: float | None) -> float | None:
    return None if limit is None else float((values <= limit).mean())


def _doubts(plan: Plan, execution: Execution) -> tuple[VarianceShare, ...]:
    """How much the variance of the finish time falls if one source is fixed at its mean."""
    finish_s = execution.run(plan).finish_s
    variance = float(finish_s.var())
    if np.ptp(finish_s) <= 1e-9 * finish_s.mean():
        return ()
    shares = (
        VarianceShare(name, max(0.0, 1.0 - float(without.run(plan).finish_s.var()) / variance))
        for name, without in execution.without_each_source().items()
    )
    return tuple(sorted(shares, key=lambda doubt: -doubt.share))
