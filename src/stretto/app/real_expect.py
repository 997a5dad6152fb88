"""What a study is expected to take on this machine, said before it starts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.app.plan import Planned
from stretto.app.profile_file import MachineProfile
from stretto.app.study_file import StudyFile, StudyOutline, WorldSpec
from stretto.app.study_run import simulate_study
from stretto.app.threads import one_blas_thread
from stretto.core.seeds import child_rng
from stretto.core.units import HOUR_S
from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution, PlanRun
from stretto.planning.forecast import Estimate
from stretto.planning.plan import Plan
from stretto.planning.planner import plan_study
from stretto.planning.profile import Latency, Profile
from stretto.planning.tuning import Tuning
from stretto.policies.registry import make_policy, rents_nodes
from stretto.policies.rubberband import RubberBand
from stretto.pricing.instances import Instance
from stretto.search.study import Direction
from stretto.worlds.curve_family import FAMILIES

MACHINE = "machine"
"""The type of node that all slots of this machine together are to a policy that does not rent."""
WORLDS = (3, 30)
"""Simulated worlds that a forecast is made of: at least, and at most."""
EPOCHS = 6_000
"""Of all trials in all worlds together: where there would be more, there are fewer worlds."""
MOST_EPOCHS = 30_000
"""Of all trials together: a study that could train more is not simulated beforehand."""
SAMPLES = 1000
"""Of a plan's execution, for what is expected of it here."""
LOADING_SD = 0.1
"""How much the time that loading code takes varies, relative to it: a probe sees it once."""
P90 = 1.2816
"""A normal's 0.9-quantile, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A forecast with the bounds of its middle 80 %; None: not known."""

    finish_s: Estimate | None
    cost_usd: Estimate | None
    epochs: Estimate | None
    """Epochs of all trials together."""
    planned: Planned | None = None
    """The plan behind it, of the policy that makes one."""


def expect(
    outline: StudyOutline, tuning: Tuning, policy: str, options: Mapping[str, str], seed: int
) -> Expectation:
    """By the plan of a policy that makes one; of any other by simulations in worlds that are believed in."""
    chosen = make_policy(policy, options=options, tuning=tuning)
    if isinstance(chosen, RubberBand):
        return _planned(tuning, chosen, seed)
    if _most_epochs(tuning) > MOST_EPOCHS:
        return Expectation(finish_s=None, cost_usd=None, epochs=None)
    return _simulated(outline, tuning, policy, options, seed, rents=rents_nodes(chosen))


def _planned(tuning: Tuning, policy: RubberBand, seed: int) -> Expectation:
    """What the plan comes to; the policy plans once more when the run begins, before it wishes for a slot."""
    began_s = time.perf_counter()
    with one_blas_thread():
        outcome = plan_study(tuning, child_rng(seed, "plan"), planner=policy.planner, rule=policy.rule)
    planning_s = time.perf_counter() - began_s
    forecast = outcome.chosen or (outcome.cheapest if tuning.limits.deadline_s is None else outcome.earliest)
    run = carried_out(tuning, forecast.plan, child_rng(seed, "expect"))
    epochs = float(
        sum(stage.trials * (stage.last_epoch - stage.first_epoch + 1) for stage in forecast.plan.stages)
    )
    return Expectation(
        finish_s=_estimate((run.finish_s + planning_s).tolist()),
        cost_usd=_estimate(run.cost_usd.tolist()),
        epochs=Estimate(epochs, epochs, epochs),
        planned=Planned(tuning, outcome, policy.rule, planning_s),
    )


def carried_out(tuning: Tuning, plan: Plan, rng: np.random.Generator) -> PlanRun:
    """The plan over many samples, with epochs and starts as they are on a machine as busy as it makes it.

    Plans are compared as if all slots were busy always; one that holds few of them is faster than that.
    """
    draws, profile = draw_study(tuning, rng, SAMPLES), tuning.profile
    if not isinstance(profile, MachineProfile):
        return Execution(tuning, draws).run(plan)
    busy = [stage.at_once * stage.gpus_per_trial for stage in plan.stages]
    epochs = tuple(
        factors * profile.epoch_factor(slots) for factors, slots in zip(draws.epochs, busy, strict=True)
    )
    trials = [stage.trials for stage in plan.stages]
    start_s = float(np.average([profile.start_s_at(slots) for slots in busy], weights=trials))
    so_busy = dataclasses.replace(tuning, profile=dataclasses.replace(profile, start_s=start_s))
    return Execution(so_busy, dataclasses.replace(draws, epochs=epochs)).run(plan)


def _simulated(
    outline: StudyOutline, tuning: Tuning, policy: str, options: Mapping[str, str], seed: int, *, rents: bool
) -> Expectation:
    rng = child_rng(seed, "expect")
    least, most = WORLDS
    worlds = int(min(max(EPOCHS / _most_epochs(tuning), least), most))
    draws = tuning.profile.latency.draw(rng, worlds)
    runs = []
    for world in range(worlds):
        drawn = (draws.epoch_s, draws.trial_sd, draws.node_sd, draws.epoch_sd)
        epoch_s, trial_sd, node_sd, epoch_sd = (float(values[world]) for values in drawn)
        latency = Latency(epoch_s=epoch_s, trial_sd=trial_sd, node_sd=node_sd, epoch_sd=epoch_sd)
        truth = dataclasses.replace(tuning.profile, latency=latency)
        file = simulated_file(outline, tuning, truth, rents=rents)
        runs.append(simulate_study(file, FAMILIES[0], policy, seed=seed + world, options=options))
    return Expectation(
        finish_s=_estimate([run.result.finished_s for run in runs]),
        cost_usd=_estimate([run.result.cost_usd for run in runs]),
        epochs=_estimate([sum(len(job.results) for job in run.history.jobs.values()) for run in runs]),
    )


def _most_epochs(tuning: Tuning) -> float:
    """What all trials together could train: all they may, or all there is time for on all slots."""
    deadline_s = tuning.limits.deadline_s
    in_time = (
        math.inf if deadline_s is None else deadline_s * tuning.max_nodes / tuning.profile.latency.epoch_s
    )
    return min(float(tuning.study.trials * tuning.study.max_epochs), in_time)


def simulated_file(outline: StudyOutline, tuning: Tuning, truth: Profile, *, rents: bool) -> StudyFile:
    """The study as a simulation on this machine; how good trials are plays no part, so more is better."""
    study = dataclasses.replace(tuning.study, direction=Direction.MAX)
    instances = tuning.instances if rents else (machine_instance(tuning),)
    return StudyFile(
        tuning=dataclasses.replace(
            tuning, study=study, instances=instances, max_nodes=tuning.max_nodes if rents else 1
        ),
        space=outline.space,
        sampler="random",
        fixed_nodes=1,
        world=WorldSpec(curves=FAMILIES[0].name, profile=truth),
        path=Path(outline.path),
    )


def machine_instance(tuning: Tuning) -> Instance:
    """All slots as one node."""
    slot = tuning.instances[0]
    return Instance(name=MACHINE, gpus=tuning.max_nodes, usd_per_hour=slot.usd_per_hour * tuning.max_nodes)


def after_loading(expectation: Expectation, loading_s: float, deadline_s: float | None) -> Expectation:
    """The same with the time that loading the training code takes before the first start.

    It is paid for: a plan holds the slots of its first stage meanwhile, any other policy the whole machine.
    """
    finish_s, cost_usd = expectation.finish_s, expectation.cost_usd
    if finish_s is None or cost_usd is None or loading_s <= 0:
        return expectation
    planned = expectation.planned
    latest_s = math.inf if deadline_s is None or planned is not None else deadline_s
    later_s = _plus(finish_s, loading_s, latest_s)
    if planned is None:
        dearer_usd = Estimate(*(_in_proportion(cost_usd, finish_s, later_s)))
    else:
        dearer_usd = _plus(cost_usd, _held_usd_per_s(planned) * loading_s, math.inf)
    return dataclasses.replace(expectation, finish_s=later_s, cost_usd=dearer_usd)


def _plus(estimate: Estimate, more: float, most: float) -> Estimate:
    """With something added that varies by itself, so that squares of deviations add up."""
    mean, spread = estimate.mean + more, P90 * LOADING_SD * more
    low = mean - math.hypot(estimate.mean - estimate.p10, spread)
    high = mean + math.hypot(estimate.p90 - estimate.mean, spread)
    return Estimate(*(min(one, most) for one in (mean, low, high)))


def _in_proportion(cost_usd: Estimate, finish_s: Estimate, later_s: Estimate) -> tuple[float, float, float]:
    """What is held to the end costs by the time."""
    usd_per_s = cost_usd.mean / finish_s.mean if finish_s.mean else 0.0
    costs = [
        cost + (later - before) * usd_per_s
        for cost, before, later in zip(
            dataclasses.astuple(cost_usd),
            dataclasses.astuple(finish_s),
            dataclasses.astuple(later_s),
            strict=True,
        )
    ]
    mean, low, high = costs
    return mean, low, high


def _held_usd_per_s(planned: Planned) -> float:
    """What the first stage's slots cost by the second."""
    outcome, tuning = planned.outcome, planned.tuning
    forecast = outcome.chosen or (outcome.cheapest if tuning.limits.deadline_s is None else outcome.earliest)
    stage = forecast.plan.stages[0]
    return stage.nodes * tuning.instance(stage.instance).usd_per_hour / HOUR_S


def corrected(forecast: Estimate, now_s: float, slowness: float, deadline_s: float | None) -> Estimate:
    """A forecast of the finish while the run goes on: what is left of it takes `slowness` times as long.

    A forecast that a deadline ends says nothing of when it would end without, so it stays.
    """
    latest_s = math.inf if deadline_s is None else max(deadline_s, now_s)

    def later(expected_s: float) -> float:
        if expected_s >= latest_s:
            return latest_s
        return min(now_s + max(expected_s - now_s, 0.0) * slowness, latest_s)

    return Estimate(later(forecast.mean), later(forecast.p10), later(forecast.p90))


def _estimate(values: Sequence[float]) -> Estimate | None:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = np.percentile(finite, [10.0, 90.0])
    return Estimate(float(np.mean(finite)), float(low), float(high))
