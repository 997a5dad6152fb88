"""Makes the plan that RubberBand executes, and tells how far reality has drifted from it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from stretto.core.cluster import Node
from stretto.core.events import NodeAdded
from stretto.core.observations import Result
from stretto.core.units import format_duration, format_usd
from stretto.planning.forecast import Forecast, Outcome, StudyProgress
from stretto.planning.learning import updated_delay
from stretto.planning.plan import StagePlan, roomy_nodes
from stretto.planning.planner import LimitRule, Planner, kept_how, plan_study
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.base import JobView
from stretto.policies.rubberband.memory import PlanBasis, PlanState, own_nodes


def make_plan(
    tuning: Tuning,
    rng: np.random.Generator,
    planner: Planner,
    rule: LimitRule,
    *,
    start: StudyProgress | None = None,
    slowness: float = 1.0,
) -> tuple[list[StagePlan], PlanBasis]:
    """Plans from `start` on, with epochs that take `slowness` times as long as in the profile."""
    slowed = replace(tuning, profile=replace(tuning.profile, latency=tuning.profile.latency.slowed(slowness)))
    outcome = plan_study(slowed, rng, planner=planner, rule=rule, start=start)
    return plan_to_follow(outcome, tuning, rule, start=start, slowness=slowness)


def plan_to_follow(
    outcome: Outcome,
    tuning: Tuning,
    rule: LimitRule,
    *,
    start: StudyProgress | None = None,
    slowness: float = 1.0,
) -> tuple[list[StagePlan], PlanBasis]:
    """The stages to follow from `start` on, and what they are based on."""
    forecast = outcome.followed(tuning.limits)
    stages = list(forecast.plan.stages)
    begun_s = start.elapsed_s if start else 0.0
    first = stages[0].instance
    steady = steady_s(tuning, stages, (first, start.held(first) if start else 0), slowness)
    footing = PlanBasis(
        text=_describe(tuning.limits, rule, forecast, kept=outcome.chosen is not None),
        made_s=begun_s,
        finish_s=forecast.finish_s.mean,
        stretch=(forecast.finish_s.mean - begun_s) / steady if steady > 0 else 1.0,
        slowness=slowness,
    )
    return stages, footing


def progress_at_start(tuning: Tuning, nodes: Iterable[Node]) -> StudyProgress | None:
    """The start of a study that has usable nodes of its own; None if it has none."""
    own = own_nodes(nodes, tuning.instances)
    return StudyProgress(stage=0, trials=tuning.study.trials, nodes=own) if own else None


def finish_s(
    tuning: Tuning, state: PlanState, now_s: float, jobs: Mapping[str, JobView], slowness: float
) -> float:
    """When the study will end at the present speed: after the rest of this stage and all later stages."""
    later = state.stages[state.stage + 1 :]
    held = (state.plan.instance, len(state.kept))
    later_s = steady_s(tuning, later, held, slowness) * state.footing.stretch
    return now_s + _stage_left_s(tuning, state, jobs, slowness) + later_s


def steady_s(tuning: Tuning, stages: Sequence[StagePlan], held: tuple[str, int], slowness: float) -> float:
    """How long the stages take if nothing varies; `held`: instance type and number of the first nodes."""
    profile = tuning.profile
    total_s = 0.0
    for stage in stages:
        if (stage.instance != held[0]) or stage.nodes > held[1]:
            total_s += profile.queue_s.mean + profile.init_s.mean
        work_s = stage.epochs * epoch_s(tuning, stage, slowness)
        total_s += stage.waves * (profile.start_s + work_s)
        held = (stage.instance, stage.nodes)
    return total_s


def epoch_s(tuning: Tuning, stage: StagePlan, slowness: float) -> float:
    """Time of an epoch in a stage."""
    instance = tuning.instance(stage.instance)
    spans = stage.nodes < roomy_nodes(stage.gpus_per_trial, stage.at_once, instance.gpus)
    speed = tuning.profile.scaling.speedup(stage.gpus_per_trial, spans=spans) * instance.speed
    return tuning.profile.latency.epoch_s * slowness / speed


def slowness_by_trial(tuning: Tuning, state: PlanState, jobs: Mapping[str, JobView]) -> dict[str, float]:
    """Slowness of every trial of the stage that has a measured epoch."""
    found = {
        trial: slowness_of(tuning, state.plan, jobs[trial].results) for trial in state.living if trial in jobs
    }
    return {trial: slowness for trial, slowness in found.items() if slowness is not None}


def slowness_of(tuning: Tuning, stage: StagePlan, results: Sequence[Result]) -> float | None:
    """Time of a trial's epochs in this stage relative to the profile; None if no epoch was measured."""
    instance = tuning.instance(stage.instance)
    ratios = []
    for result in reversed(results):
        if result.epoch < stage.first_epoch:
            break
        if result.epoch_s is not None:
            spans = result.nodes > -(-result.workers // instance.gpus)
            speed = tuning.profile.scaling.speedup(result.workers, spans=spans) * instance.speed
            ratios.append(result.epoch_s * speed / tuning.profile.latency.epoch_s)
    return fmean(ratios) if ratios else None


def with_seen_delays(tuning: Tuning, arrivals: Sequence[NodeAdded]) -> Tuning:
    """The tuning with delays of nodes updated by the nodes that came.

    Nodes of one request wait together, so they count as one waiting time. Nodes that were there at once tell
    nothing about delays.
    """
    waited = [one for one in arrivals if one.queue_s or one.init_s]
    if not waited:
        return tuning
    requests: dict[float, list[float]] = {}
    for one in waited:
        requests.setdefault(round(one.t_s - one.queue_s - one.init_s, 3), []).append(one.queue_s)
    profile = tuning.profile
    seen = replace(
        profile,
        queue_s=updated_delay(profile.queue_s, [fmean(queues_s) for queues_s in requests.values()]),
        init_s=updated_delay(profile.init_s, [one.init_s for one in waited]),
    )
    return replace(tuning, profile=seen)


def _trained_s(job: JobView, start_s: float) -> float:
    """How long a trial has trained in its current epoch, less the expected time of its start."""
    if not job.allocation.workers:
        return 0.0
    return max(job.start_age_s - start_s, 0.0) if job.epoch_age_s is None else job.epoch_age_s


def _stage_left_s(tuning: Tuning, state: PlanState, jobs: Mapping[str, JobView], slowness: float) -> float:
    """Time until the stage ends, if each pending trial takes the first slot that becomes free."""
    stage, start_s = state.plan, tuning.profile.start_s
    own = slowness_by_trial(tuning, state, jobs)

    def left_s(trial: str) -> float:
        epochs = stage.last_epoch - max(jobs[trial].epoch, stage.first_epoch - 1)
        each_s = epoch_s(tuning, stage, own.get(trial, slowness))
        return epochs * each_s - min(_trained_s(jobs[trial], start_s), each_s) if epochs else 0.0

    busy = [left_s(trial) for trial in state.runs if trial in jobs]
    idle = max(len(state.slots) - len(busy), 0)
    ends_s = [*busy, *[0.0] * idle]
    heapq.heapify(ends_s)
    last_s = max(busy, default=0.0)
    for trial in state.pending:
        end_s = heapq.heappop(ends_s) + start_s + left_s(trial)
        heapq.heappush(ends_s, end_s)
        last_s = max(last_s, end_s)
    return last_s


def _describe(limits: Limits, rule: LimitRule, forecast: Forecast, *, kept: bool) -> str:
    expected = (
        f"about {format_duration(forecast.finish_s.mean)} and {format_usd(forecast.cost_usd.mean)} in all"
    )
    bounds = []
    if limits.deadline_s is not None:
        bounds.append(f"ends by {format_duration(limits.deadline_s)}")
    if limits.budget_usd is not None:
        bounds.append(f"costs at most {format_usd(limits.budget_usd)}")
    if not bounds:
        return f"No limit is set; the plan with the best product of time and cost takes {expected}."
    promise = f"{' and '.join(bounds)} {kept_how(limits, rule)}"
    if not kept:
        instead = "cheapest" if limits.deadline_s is None else "earliest"
        return f"No plan {promise}; the {instead} takes {expected}."
    aim = "cheapest" if limits.deadline_s is not None else "fastest"
    return f"The {aim} plan that {promise} takes {expected}."
