"""Whether a plan under way still ends when it should: observed epochs and delays against the profile."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from stretto.core.events import NodeAdded
from stretto.core.observations import Result
from stretto.planning.learning import updated_delay
from stretto.planning.packing import roomy_nodes
from stretto.planning.plan import StagePlan
from stretto.planning.tuning import Tuning
from stretto.policies.base import JobView
from stretto.policies.rubberband_course import Course


def slowness_of(tuning: Tuning, stage: StagePlan, results: Sequence[Result]) -> float | None:
    """Time of a trial's epochs in this stage relative to the profile; None if none was measured."""
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


def observed(tuning: Tuning, course: Course, jobs: Mapping[str, JobView]) -> dict[str, float]:
    """Slowness of every trial of the stage that showed it."""
    found = {
        trial: slowness_of(tuning, course.plan, jobs[trial].results)
        for trial in course.living
        if trial in jobs
    }
    return {trial: slowness for trial, slowness in found.items() if slowness is not None}


def as_seen(tuning: Tuning, arrivals: Sequence[NodeAdded]) -> Tuning:
    """What was believed, with the delays of nodes as those that came showed them.

    The nodes of one request wait together, so they tell one waiting time. Those that were there at once
    tell nothing: nobody had to bring them.
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


def steady_s(tuning: Tuning, stages: Sequence[StagePlan], held: tuple[str, int], slowness: float) -> float:
    """How long the stages take if nothing varies, beginning with so many nodes of a type."""
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


def finish_s(
    tuning: Tuning, course: Course, now_s: float, jobs: Mapping[str, JobView], slowness: float
) -> float:
    """When the study will end if trials go on as they did: the rest of this stage, and those to come."""
    later = course.stages[course.stage + 1 :]
    held = (course.plan.instance, len(course.kept))
    later_s = steady_s(tuning, later, held, slowness) * course.footing.stretch
    return now_s + _stage_left_s(tuning, course, jobs, slowness) + later_s


def _trained_s(job: JobView, start_s: float) -> float:
    """How long a trial has been at its epoch; it is taken to train once it has had the time to start."""
    if not job.allocation.workers:
        return 0.0
    return max(job.start_age_s - start_s, 0.0) if job.epoch_age_s is None else job.epoch_age_s


def _stage_left_s(tuning: Tuning, course: Course, jobs: Mapping[str, JobView], slowness: float) -> float:
    """Trials that wait take the slot that is free first."""
    stage, start_s = course.plan, tuning.profile.start_s
    own = observed(tuning, course, jobs)

    def left_s(trial: str) -> float:
        epochs = stage.last_epoch - max(jobs[trial].epoch, stage.first_epoch - 1)
        each_s = epoch_s(tuning, stage, own.get(trial, slowness))
        return epochs * each_s - min(_trained_s(jobs[trial], start_s), each_s) if epochs else 0.0

    busy = [left_s(trial) for trial in course.runs if trial in jobs]
    idle = max(len(course.slots) - len(busy), 0)
    ends_s = [*busy, *[0.0] * idle]
    heapq.heapify(ends_s)
    last_s = max(busy, default=0.0)
    for trial in course.pending:
        end_s = heapq.heappop(ends_s) + start_s + left_s(trial)
        heapq.heappush(ends_s, end_s)
        last_s = max(last_s, end_s)
    return last_s
