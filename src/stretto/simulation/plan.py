"""Plans a study: how long it takes and what it costs, before anything is rented."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from stretto.core.cluster import Node
from stretto.core.seeds import child_rng
from stretto.inputs.arguments import given_choice, given_whole
from stretto.inputs.study import StudyFile
from stretto.planning.forecast import Alternative, Forecast, Nearest, Outcome, PlanBy, nearest_plans
from stretto.planning.planner import LimitRule, Planner, plan_study
from stretto.planning.profile import Estimate
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.rubberband.drift import progress_at_start
from stretto.simulation.studies import with_limits_as
from stretto.system.threads import one_blas_thread

BEGIN_S = 0.5
"""Time between planning and the start of a run; a plan must keep its deadline in spite of it."""
LATER = 4.0
"""An alternative plan keeps its deadline even if planning it takes this many times as long."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a study, and how long planning took."""

    tuning: Tuning
    outcome: Outcome
    rule: LimitRule
    planning_s: float
    nearest: Nearest | None = None
    """Limits that could be kept instead; None if the limits are kept, or this was not asked."""


def plan(
    file: StudyFile,
    *,
    deadline: float | str | None = None,
    budget_usd: float | None = None,
    planner: Planner = "search",
    rule: LimitRule = "quantile",
    seed: int = 0,
) -> Planned:
    """Plans the study of a file within its limits.

    `deadline` (seconds or a text such as 20m) and `budget_usd` replace the limits of the file; infinity
    removes a limit.
    """
    started = time.perf_counter()
    file = with_limits_as(file, deadline, budget_usd)
    given_choice(planner, get_args(Planner), "planner")
    given_choice(rule, get_args(LimitRule), "rule")
    given_whole(seed, "seed")

    def plan_by(tuning: Tuning) -> Outcome:
        return plan_study(tuning, child_rng(seed, "plan"), planner=planner, rule=rule)

    with one_blas_thread():
        outcome = plan_by(file.tuning)
        nearest = None if outcome.feasible else nearest_plans(file.tuning, plan_by)
    return Planned(file.tuning, outcome, rule, time.perf_counter() - started, nearest)


def plan_to_begin(
    tuning: Tuning,
    nodes: Iterable[Node],
    *,
    planner: Planner = "search",
    rule: LimitRule = "quantile",
    seed: int = 0,
    instead: bool = False,
) -> Planned:
    """Plans a study that starts right after planning; it may have its own nodes and rent more.

    The plan keeps its deadline in spite of the time that planning took. `instead`: if the limits cannot be
    kept, search for limits that can, which takes several times as long.
    """
    held = tuple(nodes)

    def plan_later(later_s: float) -> PlanBy:
        def plan_by(one: Tuning) -> Outcome:
            nearer = replace(one, limits=_nearer(one.limits, later_s))
            rng, start = child_rng(seed, "plan"), progress_at_start(one, held)
            return plan_study(nearer, rng, planner=planner, rule=rule, start=start)

        return plan_by

    began_s = time.perf_counter()
    with one_blas_thread():
        outcome = plan_later(0.0)(tuning)
        planning_s = time.perf_counter() - began_s
        if not outcome.keeps_deadline(_nearer(tuning.limits, planning_s + BEGIN_S)):
            outcome = plan_later(2 * planning_s + BEGIN_S)(tuning)
            planning_s = time.perf_counter() - began_s
        nearest = None
        if instead and not outcome.feasible:
            nearest = nearest_plans(tuning, plan_later(LATER * planning_s + 2 * BEGIN_S))
    return Planned(tuning, outcome, rule, planning_s, nearest)


def _nearer(limits: Limits, later_s: float) -> Limits:
    """What is left of the limits after some time."""
    deadline_s = limits.deadline_s
    return limits if deadline_s is None else replace(limits, deadline_s=deadline_s - later_s)


def plan_json(planned: Planned) -> dict[str, Any]:
    """The plan as JSON data; null where an infeasible study has no value.

    Points are means, except `earliest`: its `jct_s` is the earliest deadline that this plan keeps.
    """
    limits, outcome = planned.tuning.limits, planned.outcome
    chosen = outcome.chosen
    return {
        "feasible": outcome.feasible,
        "deadline_s": limits.deadline_s,
        "budget_usd": limits.budget_usd,
        "q": limits.q,
        "cost_usd": None if chosen is None else _estimate(chosen.cost_usd),
        "jct_s": None if chosen is None else _estimate(chosen.finish_s),
        "p_on_time": None if chosen is None else chosen.p_on_time,
        "p_in_budget": None if chosen is None else chosen.p_in_budget,
        "stages": [] if chosen is None else _stages(chosen),
        "static": None if outcome.static is None else _static(outcome.static),
        "cheapest": _point(outcome.cheapest),
        "fastest": _point(outcome.fastest),
        "frontier": [_point(forecast) for forecast in outcome.frontier],
        "earliest": {"jct_s": outcome.earliest.due_s, "cost_usd": outcome.earliest.cost_usd.mean},
        "instead": _instead(planned.nearest),
        "prices": [
            {"instance": one.name, "gpus": one.gpus, "usd_per_hour": one.usd_per_hour}
            for one in (*planned.tuning.instances, *planned.tuning.own)
        ],
        "epoch_s": planned.tuning.profile.latency.epoch_s,
        "start_s": planned.tuning.profile.start_s,
        "doubts": [{"name": doubt.name, "share": doubt.share} for doubt in outcome.doubts],
        "planning_s": planned.planning_s,
    }


def _instead(nearest: Nearest | None) -> dict[str, Any] | None:
    """Limits that could be kept, by the limit that has to change; null where none was found."""
    if nearest is None:
        return None
    return {
        "more_time": _offer(nearest.more_time),
        "more_money": _offer(nearest.more_money),
        "more_of_both": _offer(nearest.more_of_both),
        "fewer_trials": _offer(nearest.fewer_trials),
        "fewer_epochs": _offer(nearest.fewer_epochs),
        "fewer_of_both": _offer(nearest.fewer_of_both),
    }


def _offer(offer: Alternative | None) -> dict[str, float | int | list[int] | None] | None:
    if offer is None:
        return None
    return {
        "deadline_s": offer.limits.deadline_s,
        "budget_usd": offer.limits.budget_usd,
        "trials": offer.trials,
        "max_epochs": offer.max_epochs,
        "rungs": list(offer.rungs),
        **_point(offer.plan),
    }


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.mean, "p10": estimate.p10, "p90": estimate.p90}


def _point(forecast: Forecast) -> dict[str, float]:
    return {"jct_s": forecast.finish_s.mean, "cost_usd": forecast.cost_usd.mean}


def _static(forecast: Forecast) -> dict[str, float | int | str]:
    stage = forecast.plan.stages[0]
    return {"nodes": stage.nodes, "instance": stage.instance, **_point(forecast)}


def _stages(forecast: Forecast) -> list[dict[str, int | str]]:
    return [
        {
            "stage": index,
            "first_epoch": stage.first_epoch,
            "last_epoch": stage.last_epoch,
            "trials": stage.trials,
            "gpus_per_trial": stage.gpus_per_trial,
            "at_once": stage.at_once,
            "nodes": stage.nodes,
            "instance": stage.instance,
        }
        for index, stage in enumerate(forecast.plan.stages, start=1)
    ]
