"""Figure 5: whether the planner's intervals hold what they promise.

Each of 30 studies has its own family of simulated worlds (calibration_worlds.py). In one world of the family
we observe epochs and delays, learn a profile from them and choose a plan. Then the plan is carried out in
other worlds of the family, with other trials, nodes and delays. This is done twice.

1. All plans, 10,000 times each, by the planner's own execution model (planning/execution.py). This tests
   what is learned from few observations, and how its uncertainty is propagated. It cannot show whether the
   model behaves as the policy does.
2. Eight plans, 60 times each, by `rubberband` itself, through the controller and the simulated cloud. Most
   of these plans end with several trials. The model's results for the same family are printed beside them.
   Errors that both have come from the profile; a difference between them comes from the model.

All executions of a plan share the errors of its few observations, so 30 plans drawn at random would say
little. So families are drawn as a Latin hypercube. The observed worlds are stratified by the mean and the
spread of their epoch times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from calibration_worlds import (
    OBSERVATIONS,
    PLANS,
    WIDTHS,
    Chances,
    Family,
    Seen,
    a_look,
    families,
    learned,
)
from common import verdict

from stretto.core.events import Decided
from stretto.inputs.study import StudyFile, WorldSpec
from stretto.journal.base import MemoryJournal
from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution, PlanRun
from stretto.planning.plan import Plan
from stretto.planning.planner import plan_study
from stretto.planning.profile import Floats, Profile, Scaling
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.rubberband.memory import PlanState
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance
from stretto.search.halving import halving_epochs, make_rungs
from stretto.search.space import parse_space
from stretto.search.study import Direction, Study
from stretto.simulation.studies import simulate_study

SEED = 41
EXECUTIONS = 10_000
SCALINGS = (
    Scaling(((1, 1.0), (2, 1.87), (4, 3.42), (8, 5.6)), spanning=0.1),
    Scaling(((1, 1.0), (2, 1.6), (4, 2.3), (8, 2.9)), spanning=0.2),
)
STUDIES = ((8, 2, 2), (16, 2, 2), (16, 1, 4), (27, 1, 3))
"""(trials, min_epochs, eta)"""
SIMULATED = (
    (8, 2, 2, 4),
    (27, 1, 3, 4),
    (8, 2, 2, 2),
    (16, 1, 4, 2),
    (16, 2, 2, 3),
    (27, 1, 3, 3),
    (7, 4, 2, 2),
    (6, 8, 2, 1),
)
"""(trials, min_epochs, eta, stages) of the plans that are simulated: all but two end with several trials."""
SIMULATIONS = 60
SURE = 0.99
"""The probability with which simulated plans keep their deadline: simulations are cut off there."""


def make_study(trials: int, min_epochs: int, eta: int, stages: int | None = None) -> Study:
    """Halving to the end, or of `stages` stages."""
    max_epochs = halving_epochs(trials, min_epochs=min_epochs, eta=eta)
    rungs = make_rungs("additive", min_epochs=min_epochs, eta=eta, max_epochs=max_epochs)
    ends = (*rungs, max_epochs)[:stages]
    return Study(
        name="calibration",
        metric="accuracy",
        direction=Direction.MAX,
        trials=trials,
        rungs=ends[:-1],
        eta=eta,
        max_epochs=ends[-1],
    )


def make_tuning(study: Study, profile: Profile, per: Per) -> Tuning:
    return Tuning(
        study=study,
        profile=profile,
        instances=(Instance(name="p3.8xlarge", gpus=4, usd_per_hour=12.24),),
        max_nodes=8,
        billing=Billing(per=per),
    )


def with_deadline(tuning: Tuning, tightness: float, q: float, rng: np.random.Generator) -> Tuning:
    """A deadline between what the fastest plan can keep and what the cheapest can."""
    free = plan_study(replace(tuning, limits=Limits(q=q)), rng)
    deadline_s = free.fastest.due_s * (free.cheapest.due_s / free.fastest.due_s) ** tightness
    return replace(tuning, limits=Limits(deadline_s=deadline_s, q=q))


@dataclass(frozen=True, slots=True)
class Score:
    """The forecast of one plan, compared with what happened."""

    finishes_held: float
    costs_held: float
    on_time_promised: float
    on_time: float


def score(family: Family, seen: Seen, plan: int) -> Score:
    """Learn, plan, carry out."""
    rng = np.random.default_rng((SEED, plan, len(seen.epochs)))
    fixed = np.random.default_rng((SEED, plan))
    study = make_study(*STUDIES[int(fixed.integers(len(STUDIES)))])
    per = (Per.INSTANCE, Per.FUNCTION)[int(fixed.integers(2))]
    tuning = make_tuning(study, learned(seen, SCALINGS[plan // 2 % 2], rng), per)
    tuning = with_deadline(tuning, float(fixed.uniform(0.1, 0.9)), Limits().q, rng)
    chosen = plan_study(tuning, rng).chosen
    assert chosen is not None
    assert chosen.p_on_time is not None
    run = Execution(tuning, family.draws(tuning, rng, EXECUTIONS)).run(chosen.plan)
    return Score(
        finishes_held=_share_within(run.finish_s, chosen.finish_s.p10, chosen.finish_s.p90),
        costs_held=_share_within(run.cost_usd, chosen.cost_usd.p10, chosen.cost_usd.p90),
        on_time_promised=chosen.p_on_time,
        on_time=float((run.finish_s <= (tuning.limits.deadline_s or 0.0)).mean()),
    )


def _share_within(values: Floats, low: float, high: float) -> float:
    return float(((values >= low) & (values <= high)).mean())


def scores(count: int) -> list[Score]:
    """The score of every plan made from `count` observations."""
    rng = np.random.default_rng((SEED, count, 0))
    places = rng.permutation(PLANS)
    return [
        score(family, a_look(family, count, int(place), rng), plan)
        for plan, (family, place) in enumerate(
            zip(families(np.random.default_rng(SEED)), places, strict=True)
        )
    ]


@dataclass(frozen=True, slots=True)
class Match:
    """Executions of one study against their forecasts: shares within [P10, P90], and relative errors."""

    finishes_held: float
    costs_held: float
    finish_error: float
    cost_error: float


def match(runs: Sequence[PlanRun], forecasts: Sequence[PlanRun]) -> Match:
    """For each run: executions of the plan that its forecast is about."""

    def held(values: Floats, believed: Floats) -> float:
        return _share_within(values, *np.quantile(believed, (0.1, 0.9)))

    def error(values: Floats, believed: Floats) -> float:
        return float(values.mean() / believed.mean()) - 1.0

    pairs = list(zip(runs, forecasts, strict=True))
    return Match(
        finishes_held=float(np.mean([held(run.finish_s, told.finish_s) for run, told in pairs])),
        costs_held=float(np.mean([held(run.cost_usd, told.cost_usd) for run, told in pairs])),
        finish_error=float(np.mean([error(run.finish_s, told.finish_s) for run, told in pairs])),
        cost_error=float(np.mean([error(run.cost_usd, told.cost_usd) for run, told in pairs])),
    )


def simulated(family: Family, seen: Seen, number: int) -> tuple[Match, Match]:
    """Executions by the policy, and by the planner's model in the same family of worlds."""
    rng = np.random.default_rng((SEED, number, 1))
    scaling = SCALINGS[number // 2 % 2]
    tuning = make_tuning(make_study(*SIMULATED[number]), learned(seen, scaling, rng), Per.INSTANCE)
    tuning = with_deadline(tuning, float(rng.uniform(0.1, 0.9)), SURE, rng)
    file = StudyFile(
        tuning=tuning,
        space=parse_space({"width": {"choice": list(WIDTHS)}}, where="figure 5"),
        sampler="random",
        fixed_nodes=tuning.max_nodes,
        world=WorldSpec(curves="", profile=family.truth(scaling)),
        path=Path("study.toml"),
    )
    followed = [follow(file, Chances(family.widths), seed) for seed in range(SIMULATIONS)]
    believed = Execution(tuning, draw_study(tuning, rng, EXECUTIONS // 5))
    lived = Execution(tuning, family.draws(tuning, rng, EXECUTIONS // 5))
    forecasts = {plan: believed.run(plan) for plan, _ in followed}
    return (
        match([run for _, run in followed], [forecasts[plan] for plan, _ in followed]),
        match([lived.run(plan) for plan in forecasts], list(forecasts.values())),
    )


def follow(file: StudyFile, curves: Chances, seed: int) -> tuple[Plan, PlanRun]:
    """One simulation of the policy: the plan that it made, and what that took."""
    journal = MemoryJournal()
    result = simulate_study(
        file, curves, "rubberband", seed=seed, options={"replan": "0"}, journal=journal
    ).result
    memory = next(event.memory for event in journal.events() if isinstance(event, Decided) and event.memory)
    run = PlanRun(np.array([result.finished_s]), np.array([result.cost_usd]))
    return Plan(tuple(msgspec.convert(memory["course"], PlanState).stages)), run


def _line(name: str, values: Sequence[float]) -> str:
    return f"    {name:24}{np.mean(values):7.1%} (from {min(values):.0%} to {max(values):.0%} by plan)"


def print_modelled() -> None:
    print(f"Figure 5: {PLANS} plans (seed {SEED}), {EXECUTIONS:,} executions of each in other worlds")
    for count in OBSERVATIONS:
        began_s = time.process_time()
        found = scores(count)
        print(f"  {count} observations ({time.process_time() - began_s:.0f} s of CPU)")
        for name, held in (
            ("finishes in [P10, P90]", [one.finishes_held for one in found]),
            ("costs in [P10, P90]", [one.costs_held for one in found]),
        ):
            reached = abs(float(np.mean(held)) - 0.8) <= 0.03
            print(f"{_line(name, held)}: {verdict(reached)} (80 +- 3 %)")
        promised = float(np.mean([one.on_time_promised for one in found]))
        kept = [one.on_time for one in found]
        off = float(np.mean(kept)) - promised
        print(f"{_line('on time', kept)}, promised {promised:.1%}: {verdict(abs(off) <= 0.05)} (0.05)")


def print_simulated() -> None:
    print(f"  {len(SIMULATED)} plans from 30 observations, {SIMULATIONS} simulations of each by the policy")
    print("    in [P10, P90], and the mean error; in brackets the planner's model in the same worlds")
    print(f"    {'trials, stages':16}{'finishes':>14}{'costs':>14}{'finish error':>19}{'cost error':>19}")
    began_s = time.process_time()
    rng = np.random.default_rng((SEED, 2))
    pairs = []
    for number, family in enumerate(families(np.random.default_rng(SEED))[: len(SIMULATED)]):
        seen = a_look(family, 30, number * PLANS // len(SIMULATED), rng)
        pairs.append(simulated(family, seen, number))
        trials, _, _, stages = SIMULATED[number]
        print(f"    {f'{trials}, {stages}':16}{_beside(*pairs[-1])}")
    played, modelled = (_average(side) for side in zip(*pairs, strict=True))
    print(f"    {'mean':16}{_beside(played, modelled)}  ({time.process_time() - began_s:.0f} s of CPU)")
    for name, off in (
        ("finishes held", played.finishes_held - modelled.finishes_held),
        ("costs held", played.costs_held - modelled.costs_held),
        ("mean finish", played.finish_error - modelled.finish_error),
        ("mean cost", played.cost_error - modelled.cost_error),
    ):
        print(f"    {name}, policy less model: {off:+.1%}: {verdict(abs(off) <= 0.03)} (3 %)")


def _average(matches: Sequence[Match]) -> Match:
    return Match(*(float(np.mean(column)) for column in zip(*map(astuple, matches), strict=True)))


def _beside(played: Match, modelled: Match) -> str:
    shares, errors = (
        "".join(
            f"{f'{getattr(played, name):{form}} ({getattr(modelled, name):{form}})':>{width}}"
            for name in names
        )
        for names, form, width in (
            (("finishes_held", "costs_held"), ".0%", 14),
            (("finish_error", "cost_error"), "+.1%", 19),
        )
    )
    return shares + errors


def main() -> None:
    print_modelled()
    print_simulated()


if __name__ == "__main__":
    main()
