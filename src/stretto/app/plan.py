"""The plan of a study: what it will take, before a cent is spent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from stretto.app.given_arguments import given_choice, given_whole
from stretto.app.study_file import StudyFile
from stretto.app.study_run import with_limits_as
from stretto.app.threads import one_blas_thread
from stretto.core.cluster import Node
from stretto.core.seeds import child_rng
from stretto.planning.forecast import Estimate, Forecast, Outcome
from stretto.planning.planner import Planner, Rule, plan_study
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.rubberband_plan import beginning

BEGIN_S = 0.5
"""Between planning and the start of a run: a plan must keep its deadline that much later, too."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A study's plan and how long it took to find."""

    tuning: Tuning
    outcome: Outcome
    rule: Rule
    planning_s: float


def plan(
    file: StudyFile,
    *,
    deadline: float | str | None = None,
    budget_usd: float | None = None,
    planner: Planner = "search",
    rule: Rule = "quantile",
    seed: int = 0,
) -> Planned:
    """Plan the study of a file within its limits.

    `deadline`, seconds or a text such as 20m, and `budget_usd` take the place of the file's; infinity lifts
    one of them.
    """
    started = time.perf_counter()
    file = with_limits_as(file, deadline, budget_usd)
    given_choice(planner, get_args(Planner), "planner")
    given_choice(rule, get_args(Rule), "rule")
    rng = child_rng(given_whole(seed, "seed"), "plan")
    with one_blas_thread():
        outcome = plan_study(file.tuning, rng, planner=planner, rule=rule)
    return Planned(file.tuning, outcome, rule, time.perf_counter() - started)


def plan_to_begin(
    tuning: Tuning,
    nodes: Iterable[Node],
    *,
    planner: Planner = "search",
    rule: Rule = "quantile",
    seed: int = 0,
) -> Planned:
    """Plan a study that begins as soon as that is done, with nodes that it has beside what it rents.

    The plan keeps its deadline also after the time it took to find it.
    """
    start = beginning(tuning, nodes)

    def plan_by(limits: Limits) -> Outcome:
        nearer, rng = replace(tuning, limits=limits), child_rng(seed, "plan")
        return plan_study(nearer, rng, planner=planner, rule=rule, start=start)

    began_s = time.perf_counter()
    with one_blas_thread():
        outcome = plan_by(tuning.limits)
        planning_s = time.perf_counter() - began_s
        if not outcome.keeps_deadline(_nearer(tuning.limits, planning_s + BEGIN_S)):
            outcome = plan_by(_nearer(tuning.limits, 2 * planning_s + BEGIN_S))
            planning_s = time.perf_counter() - began_s
    return Planned(tuning, outcome, rule, planning_s)


def _nearer(limits: Limits, later_s: float) -> Limits:
    """What is left of them so much later."""
    deadline_s = limits.deadline_s
    return limits if deadline_s is None else replace(limits, deadline_s=deadline_s - later_s)


def plan_json(planned: Planned) -> dict[str, Any]:
    """The answer for machines; what an infeasible study does not have is null.

    Points are means, but for `earliest`: its `jct_s` is the earliest deadline that can be kept.
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
        "doubts": [{"name": doubt.name, "share": doubt.share} for doubt in outcome.doubts],
        "planning_s": planned.planning_s,
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
