"""What a study is expected to take on this machine, said before it starts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.app.plan import Planned
from stretto.app.study_file import StudyFile, StudyOutline, WorldSpec
from stretto.app.study_run import simulate_study
from stretto.core.seeds import child_rng
from stretto.planning.forecast import Estimate
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
WORLDS = (3, 12)
"""Simulated worlds that a forecast is made of: at least, and at most."""
EPOCHS = 6_000
"""Of all trials in all worlds together: where there would be more, there are fewer worlds."""
MOST_EPOCHS = 30_000
"""Of all trials together: a study that could train more is not simulated beforehand."""


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
        outcome = plan_study(tuning, child_rng(seed, "plan"), planner=chosen.planner, rule=chosen.rule)
        forecast = outcome.chosen or (
            outcome.cheapest if tuning.limits.deadline_s is None else outcome.earliest
        )
        epochs = float(
            sum(stage.trials * (stage.last_epoch - stage.first_epoch + 1) for stage in forecast.plan.stages)
        )
        return Expectation(
            finish_s=forecast.finish_s,
            cost_usd=forecast.cost_usd,
            epochs=Estimate(epochs, epochs, epochs),
            planned=Planned(tuning, outcome, chosen.rule, 0.0),
        )
    if _most_epochs(tuning) > MOST_EPOCHS:
        return Expectation(finish_s=None, cost_usd=None, epochs=None)
    return _simulated(outline, tuning, policy, options, seed, rents=rents_nodes(chosen))


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
    """The same with the time that loading the training code takes before the first start."""
    finish_s = expectation.finish_s
    if finish_s is None or loading_s <= 0:
        return expectation
    latest_s = math.inf if deadline_s is None or expectation.planned is not None else deadline_s
    later = (min(one + loading_s, latest_s) for one in (finish_s.mean, finish_s.p10, finish_s.p90))
    return dataclasses.replace(expectation, finish_s=Estimate(*later))


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
