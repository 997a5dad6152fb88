"""The forecast of a study before it starts: when it finishes, what it costs, how many epochs it trains."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.seeds import child_rng
from stretto.core.units import HOUR_S, counted, format_duration, format_usd
from stretto.driving.request import CheckedStudy
from stretto.inputs.cluster import MachineSpec, machine_instance
from stretto.inputs.profile import MachineProfile, read_profile
from stretto.inputs.study import StudyFile, StudyOutline, WorldSpec
from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution, PlanRun
from stretto.planning.forecast import StudyProgress
from stretto.planning.plan import Plan
from stretto.planning.profile import Estimate, Latency, Profile
from stretto.planning.tuning import Tuning
from stretto.policies.base import Policy
from stretto.policies.registry import rents_nodes
from stretto.policies.rubberband.drift import progress_at_start
from stretto.policies.rubberband.policy import RubberBand
from stretto.pricing.instances import OWN_MACHINE, node_type
from stretto.runs.results import Prediction
from stretto.search.study import Direction
from stretto.simulation.plan import Planned, plan_to_begin
from stretto.simulation.studies import OutOfTimeError, simulate_study
from stretto.worlds.curves import FAMILIES

WORLDS = (3, 16)
"""The least and most simulated worlds per forecast."""
EPOCHS = 6_000
"""The most epochs of all trials in all worlds; fewer worlds are simulated to stay below."""
MOST_EPOCHS = 30_000
"""A study whose trials could train more epochs than this is not simulated beforehand."""
PLANNING_S = 20.0
"""The longest that simulations take; with a deadline, at most PLANNING_SHARE of the time left."""
PLANNING_SHARE = 1 / 4
INSTANT_S = 1e-3
"""Left for training if loading code takes all the time."""
DRAWS_EACH = 25
"""Profiles drawn per world; the median is used."""
SAMPLES = 1000
"""Monte Carlo samples of a plan's execution."""
LOADING_SD = 0.1
"""Relative standard deviation of the time that loading code takes: a probe sees it once."""
P90 = 1.2816
"""A normal's 0.9-quantile, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation(Prediction):
    """A prediction with what it was made from."""

    planned: Planned | None = None
    """The plan behind it, if the policy makes one."""
    first_usd_per_s: float = 0.0
    """Cost of the slots that are held from the start."""
    loading_s: float = 0.0
    """The part of the finish time that loading the training code takes."""
    kept_usd: float = 0.0
    """The part of the budget that is kept for stopping."""


UNKNOWN = Expectation(finish_s=None, cost_usd=None, epochs=None)


def expect(
    outline: StudyOutline,
    tuning: Tuning,
    policy: Policy,
    *,
    policy_name: str,
    options: Mapping[str, str],
    seed: int = 0,
    nodes: Iterable[Node] = (),
    loading_s: float = 0.0,
    within_s: float = PLANNING_S,
) -> Expectation:
    """The forecast of a run: from the plan of a policy that makes one, else from simulations.

    `nodes` are those that a policy that rents has from the start; a study made by `with_own` knows what they
    cost. While code is loaded, for `loading_s`, only a policy that rents trains anything. Finish and cost do
    not include that time, see `after_loading`. Simulations that take longer than `within_s` are given up,
    and then nothing is known.
    """
    rents = rents_nodes(policy)
    if isinstance(policy, RubberBand):
        found = _planned(tuning, policy, seed, tuple(nodes))
    elif _most_epochs(tuning) > MOST_EPOCHS:
        return UNKNOWN
    else:
        within = tuning if rents else once_loaded(tuning, loading_s)
        found = _simulated(outline, within, policy_name, options, seed, rents=rents, within_s=within_s)
    if tuning.limits.budget_usd is None:
        return found
    return dataclasses.replace(found, kept_usd=found.first_usd_per_s * stopping_s(tuning.profile))


def loading_s_of(checked: CheckedStudy) -> float:
    """How much longer the very first start takes than others, if a probe has seen that.

    Where nodes are launched, this is part of their start.
    """
    if checked.outline.profile is not None or not checked.folder.profile.is_file():
        return 0.0
    measured = read_profile(checked.folder.profile)
    return 0.0 if measured.node is not None else measured.loading_s


def once_loaded(tuning: Tuning, loading_s: float) -> Tuning:
    """The limits without loading and stopping, for a policy that holds all slots from the start."""
    limits = tuning.limits
    deadline_s, budget_usd = limits.deadline_s, limits.budget_usd
    if deadline_s is not None:
        deadline_s = max(deadline_s - loading_s, INSTANT_S)
    if budget_usd is not None:
        spent_usd = (loading_s + stopping_s(tuning.profile)) * _machine_usd_per_s(tuning)
        budget_usd = max(budget_usd - spent_usd, 0.0)
    left = dataclasses.replace(limits, deadline_s=deadline_s, budget_usd=budget_usd)
    return dataclasses.replace(tuning, limits=left)


def check_pays_an_epoch(tuning: Tuning, loading_s: float, *, rents: bool) -> None:
    """InputError if the budget is spent before a first epoch can end."""
    budget_usd, profile = tuning.limits.budget_usd, tuning.profile
    if budget_usd is None:
        return
    if rents:  # a single slot may be rented, and only for the epoch
        slots, needed_s = 1, profile.latency.epoch_s
        usd_per_s = min(one.usd_per_hour / one.gpus for one in tuning.instances) / HOUR_S
    else:
        slots, usd_per_s = tuning.max_nodes, _machine_usd_per_s(tuning)
        fastest = max(profile.scaling.speedup(count) for count in range(1, slots + 1))
        needed_s = loading_s + profile.start_s + profile.latency.epoch_s / fastest + stopping_s(profile)
    needed_usd = needed_s * usd_per_s
    if needed_usd > budget_usd:
        needed = f"{format_duration(needed_s)} on {counted(slots, 'slot')} cost {format_usd(needed_usd)}"
        raise InputError(
            f"a budget of ${budget_usd:g} does not pay for one epoch: "
            f"{needed}{'' if rents else ', with starting and stopping'}.",
            remedy="Give a larger --budget.",
        )


def _planned(tuning: Tuning, policy: RubberBand, seed: int, nodes: tuple[Node, ...]) -> Expectation:
    """The forecast of the plan that the policy will follow, if the run begins at once."""
    planned = plan_to_begin(tuning, nodes, planner=policy.planner, rule=policy.rule, seed=seed)
    plan, start = planned.outcome.followed(tuning.limits).plan, progress_at_start(tuning, nodes)
    run = carried_out(tuning, plan, child_rng(seed, "expect"), start)
    first = plan.stages[0]
    rented = max(first.nodes - (0 if start is None else start.held(first.instance)), 0)
    rented_usd_per_s = rented * tuning.instance(first.instance).usd_per_hour / HOUR_S
    epochs = float(sum(stage.trials * stage.epochs for stage in plan.stages))
    return Expectation(
        finish_s=_estimate(run.finish_s.tolist()),
        cost_usd=_estimate(run.cost_usd.tolist()),
        epochs=Estimate(epochs, epochs, epochs),
        planned=planned,
        first_usd_per_s=rented_usd_per_s + tuning.own_usd_per_s,
    )


def with_own(tuning: Tuning, nodes: Iterable[Node], machine: MachineSpec) -> Tuning:
    """The study of a policy that rents, with the user's own nodes that the run has throughout."""
    types = (node_type(node.gpus, machine.usd_per_slot_hour) for node in nodes if not node.instance)
    return dataclasses.replace(tuning, own=tuple(types))


def as_agreed(policy: Policy, expectation: Expectation) -> Policy:
    """The policy, which now follows the plan behind the forecast if there is one."""
    if isinstance(policy, RubberBand) and expectation.planned is not None:
        return dataclasses.replace(policy, agreed=expectation.planned.outcome)
    return policy


def carried_out(
    tuning: Tuning, plan: Plan, rng: np.random.Generator, start: StudyProgress | None = None
) -> PlanRun:
    """The plan over many samples, with the epochs and starts of a machine as busy as the plan makes it.

    Plans are compared as if all slots were always busy; a plan that holds few slots is faster.
    """
    draws, profile = draw_study(tuning, rng, SAMPLES), tuning.profile
    if not isinstance(profile, MachineProfile):
        return Execution(tuning, draws, start).run(plan)
    busy = [stage.at_once * stage.gpus_per_trial for stage in plan.stages]
    epochs = tuple(
        factors * profile.epoch_factor(slots) for factors, slots in zip(draws.epochs, busy, strict=True)
    )
    starts_s = [
        profile.start_s_at(slots, stage.gpus_per_trial)
        for slots, stage in zip(busy, plan.stages, strict=True)
    ]
    start_s = float(np.average(starts_s, weights=[stage.trials for stage in plan.stages]))
    so_busy = dataclasses.replace(tuning, profile=dataclasses.replace(profile, start_s=start_s))
    return Execution(so_busy, dataclasses.replace(draws, epochs=epochs), start).run(plan)


def _simulated(
    outline: StudyOutline,
    tuning: Tuning,
    policy: str,
    options: Mapping[str, str],
    seed: int,
    *,
    rents: bool,
    within_s: float,
) -> Expectation:
    end_s = time.monotonic() + within_s
    rng = child_rng(seed, "expect")
    least, most = WORLDS
    worlds = int(min(max(EPOCHS / _most_epochs(tuning), least), most))
    results, epochs = [], list[int]()
    for world, truth in enumerate(_truths(tuning.profile, rng, worlds)):
        file = simulated_file(outline, tuning, truth, rents=rents)
        try:
            run = simulate_study(
                file,
                FAMILIES[0],
                policy,
                seed=seed + world,
                options=options,
                stop=lambda: time.monotonic() >= end_s,
            )
        except OutOfTimeError:
            return UNKNOWN
        results.append(run.result)
        epochs.append(sum(len(job.results) for job in run.history.jobs.values()))
    return Expectation(
        finish_s=_estimate([result.finished_s for result in results]),
        cost_usd=_estimate([result.cost_usd for result in results]),
        epochs=_estimate(epochs),
        first_usd_per_s=0.0 if rents else _machine_usd_per_s(tuning),
    )


def _truths(profile: Profile, rng: np.random.Generator, count: int) -> Iterator[Profile]:
    """Possible true profiles, ordered from the shortest epochs to the longest.

    One from each part of the belief: a few random draws would lie too close together, or too far apart.
    """
    draws = profile.latency.draw(rng, count * DRAWS_EACH)
    chosen = np.argsort(draws.epoch_s, kind="stable")[DRAWS_EACH // 2 :: DRAWS_EACH]
    variance = math.log1p(profile.start_sd**2)
    starts = rng.lognormal(-variance / 2.0, math.sqrt(variance), count)
    for draw, start in zip(chosen, starts.tolist(), strict=True):
        values = (draws.epoch_s, draws.trial_sd, draws.node_sd, draws.epoch_sd)
        epoch_s, trial_sd, node_sd, epoch_sd = (float(value[draw]) for value in values)
        yield dataclasses.replace(
            profile,
            latency=Latency(epoch_s=epoch_s, trial_sd=trial_sd, node_sd=node_sd, epoch_sd=epoch_sd),
            start_s=profile.start_s * start,
        )


def _most_epochs(tuning: Tuning) -> float:
    """The most epochs that all trials together can train: by the study, and by the deadline on all slots."""
    deadline_s = tuning.limits.deadline_s
    in_time = (
        math.inf if deadline_s is None else deadline_s * tuning.max_nodes / tuning.profile.latency.epoch_s
    )
    return min(float(tuning.study.trials * tuning.study.max_epochs), in_time)


def simulated_file(outline: StudyOutline, tuning: Tuning, truth: Profile, *, rents: bool) -> StudyFile:
    """The study as a simulation on this machine. Metric values do not matter, so more is better."""
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


def _machine_usd_per_s(tuning: Tuning) -> float:
    return machine_instance(tuning).usd_per_hour / HOUR_S


def after_loading(expectation: Expectation, loading_s: float, deadline_s: float | None) -> Expectation:
    """The forecast with the time that loading the training code takes before the first start.

    That time costs money: a plan holds the slots of its first stage, any other policy the whole machine.
    """
    finish_s, cost_usd = expectation.finish_s, expectation.cost_usd
    if finish_s is None or cost_usd is None or loading_s <= 0:
        return expectation
    latest_s = math.inf if deadline_s is None or expectation.planned is not None else deadline_s
    later_s = _plus(finish_s, loading_s, latest_s)
    most_usd = math.inf if math.isinf(latest_s) else _held_usd(expectation, latest_s)

    def dearer(usd: float, before_s: float, after_s: float) -> float:
        return min(usd + (after_s - before_s) * expectation.first_usd_per_s, most_usd)

    return dataclasses.replace(
        expectation,
        loading_s=loading_s,
        finish_s=later_s,
        cost_usd=Estimate(
            mean=dearer(cost_usd.mean, finish_s.mean, later_s.mean),
            p10=dearer(cost_usd.p10, finish_s.p10, later_s.p10),
            p90=dearer(cost_usd.p90, finish_s.p90, later_s.p90),
        ),
    )


def until(expectation: Expectation, deadline_s: float | None, budget_usd: float | None = None) -> Expectation:
    """The forecast of a run that ends at its limits; a plan states its own finish and cost."""
    finish_s, cost_usd = expectation.finish_s, expectation.cost_usd
    if finish_s is None or cost_usd is None or expectation.planned is not None:
        return expectation
    if deadline_s is not None:
        finish_s = _at_most(finish_s, deadline_s)
        cost_usd = _at_most(cost_usd, _held_usd(expectation, deadline_s))
    if budget_usd is not None and expectation.first_usd_per_s:
        finish_s = _at_most(finish_s, budget_usd / expectation.first_usd_per_s)
        cost_usd = _at_most(cost_usd, budget_usd)
    return dataclasses.replace(expectation, finish_s=finish_s, cost_usd=cost_usd)


def after_measuring(expectation: Expectation, spent_usd: float) -> Expectation:
    """The forecast with the cost of measuring the training."""
    cost_usd = expectation.cost_usd
    if cost_usd is None:
        return expectation
    dearer = Estimate(cost_usd.mean + spent_usd, cost_usd.p10 + spent_usd, cost_usd.p90 + spent_usd)
    return dataclasses.replace(expectation, cost_usd=dearer)


def _held_usd(expectation: Expectation, until_s: float) -> float:
    """Cost until then of the slots held from the start; infinite if all nodes are rented later."""
    if not expectation.first_usd_per_s:
        return math.inf
    return expectation.first_usd_per_s * float(OWN_MACHINE.charged_s(np.array([until_s]))[0])


def _plus(estimate: Estimate, more: float, most: float) -> Estimate:
    """The sum with an independent quantity: squares of deviations add up."""
    mean, spread = estimate.mean + more, P90 * LOADING_SD * more
    low = mean - math.hypot(estimate.mean - estimate.p10, spread)
    high = mean + math.hypot(estimate.p90 - estimate.mean, spread)
    return _at_most(Estimate(mean, low, high), most)


def _at_most(estimate: Estimate, most: float) -> Estimate:
    return Estimate(*(min(one, most) for one in (estimate.mean, estimate.p10, estimate.p90)))


def corrected(forecast: Estimate, now_s: float, slowness: float, deadline_s: float | None) -> Estimate:
    """The forecast of the finish during the run: the rest takes `slowness` times as long.

    A forecast that is cut off by the deadline stays: it does not say when the run would end otherwise.
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
    # Positions k / (n + 1): the plain quantiles of a few values lie too close together.
    low, high = np.percentile(finite, [10.0, 90.0], method="weibull")
    return Estimate(float(np.mean(finite)), float(low), float(high))


STOPPING_S = (2.0, 15.0)
"""The least and most time that saving all trials and ending is expected to take."""


def stopping_s(profile: Profile) -> float:
    """How long stopping a run is expected to take; the budget must pay for that, too.

    A start includes the saving of the trial before it, so it takes at least as long as saving.
    """
    least_s, most_s = STOPPING_S
    return min(max(profile.start_s, least_s), most_s)
