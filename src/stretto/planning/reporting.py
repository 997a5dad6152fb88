"""From the plans that were looked at to the answer, measured on fresh samples.

The plans were compared on other ones. The fresh samples have a small part in the choice: a plan that does not
keep the limits on them makes way for the next, so that what is reported never contradicts what is promised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from stretto.planning.execution import Execution
from stretto.planning.forecast import Doubt, Estimate, Forecast, Outcome
from stretto.planning.plan import Plan
from stretto.planning.pool import Goal, Pool, cost, speed
from stretto.planning.profile import Floats
from stretto.planning.tuning import Limits

FOR_DOUBTS = 500
"""Samples from which shares of variance are estimated."""
INDISTINCT = 0.002
"""Smaller relative differences are within the error of the samples."""
PATIENCE = 200
"""Plans that are tried on the fresh samples before the limits count as out of reach."""


def report(pool: Pool, statics: Sequence[Plan], execution: Execution, goal: Goal) -> Outcome:
    """The trade-off among the plans of the pool; `execution` has the fresh samples."""
    fresh = Pool(execution, goal)
    earliest = _earliest(pool, goal.limits)
    fixed = Pool(execution, goal, fixed=True)
    static = _first_that_keeps(Pool(pool.execution, goal, fixed=True).ordered(statics), fixed)
    found = _first_that_keeps((*_in_order(pool)[:PATIENCE], earliest), fresh)
    keeping = [plan for plan in (found, static) if plan is not None]
    chosen = fresh.best(keeping) if keeping else None

    def forecast(plan: Plan) -> Forecast:
        return _forecast(plan, fresh)

    return Outcome(
        feasible=chosen is not None,
        chosen=forecast(chosen) if chosen else None,
        cheapest=forecast(pool.best(pool.seen, cost)),
        fastest=forecast(pool.best(pool.seen, speed)),
        static=_forecast(static, fixed) if static else None,
        frontier=tuple(forecast(plan) for plan in _frontier(pool, fresh)),
        earliest=forecast(earliest),
        doubts=_doubts(chosen or earliest, execution.first(FOR_DOUBTS)),
    )


def _in_order(pool: Pool) -> list[Plan]:
    """All plans, the best first; of those that are as good as the best the one that ends first."""
    ordered = pool.ordered(pool.seen)
    best = pool.judge(ordered[0])
    as_good = [
        plan
        for plan in ordered
        if (standing := pool.judge(plan)).excess <= best.excess
        and standing.wanted <= best.wanted * (1.0 + INDISTINCT)
    ]
    as_good.sort(key=lambda plan: pool.judge(plan).due_s)
    return [*as_good, *ordered[len(as_good) :]]


def _first_that_keeps(plans: Iterable[Plan], fresh: Pool) -> Plan | None:
    return next((plan for plan in plans if fresh.judge(plan).excess <= 0.0), None)


def _earliest(pool: Pool, limits: Limits) -> Plan:
    budget_usd = math.inf if limits.budget_usd is None else limits.budget_usd
    affordable = [plan for plan, standing in pool.seen.items() if standing.due_usd <= budget_usd]
    return pool.best(affordable or pool.seen, speed)


def _frontier(pool: Pool, fresh: Pool) -> list[Plan]:
    for plan in pool.frontier():
        fresh.judge(plan)
    return fresh.frontier()


def _forecast(plan: Plan, pool: Pool) -> Forecast:
    run, standing, limits = pool.run(plan), pool.judge(plan), pool.goal.limits
    return Forecast(
        plan=plan,
        finish_s=_estimate(run.finish_s),
        cost_usd=_estimate(run.cost_usd),
        due_s=standing.due_s,
        due_usd=standing.due_usd,
        p_on_time=_probability(run.finish_s, limits.deadline_s),
        p_in_budget=_probability(run.cost_usd, limits.budget_usd),
    )


def _estimate(values: Floats) -> Estimate:
    p10, p90 = np.quantile(values, (0.1, 0.9))
    return Estimate(float(values.mean()), float(p10), float(p90))


def _probability(values: Floats, limit: float | None) -> float | None:
    return None if limit is None else float((values <= limit).mean())


def _doubts(plan: Plan, execution: Execution) -> tuple[Doubt, ...]:
    """By how much the variance of the finish time falls when one source is held at its mean."""
    finish_s = execution.run(plan).finish_s
    variance = float(finish_s.var())
    if np.ptp(finish_s) <= 1e-9 * finish_s.mean():
        return ()
    shares = (
        Doubt(name, max(0.0, 1.0 - float(without.run(plan).finish_s.var()) / variance))
        for name, without in execution.without_each_source().items()
    )
    return tuple(sorted(shares, key=lambda doubt: -doubt.share))
