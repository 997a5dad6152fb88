"""Figure 3, first half: how far the planner's plans are from the best there is.

200 random small studies: two to four stages, easy and poor scaling, both billings, one or two instance types,
deadlines from tight to loose. Every combination of fair allocations is run over the same samples the planner
chose on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
from common import verdict

from stretto.planning.candidates import Objective, PlanPool, fair_options
from stretto.planning.improve import decrement
from stretto.planning.plan import Plan, StagePlan
from stretto.planning.planner import Search, prepare, search_as_published, search_thoroughly
from stretto.planning.profile import Latency, Profile, Scaling, Spread
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance
from stretto.search.study import Direction, Study, halving_stages

SEED = 20210426
STUDIES = 200
MOST_COMBINATIONS = 12_000
"""Larger studies are drawn again."""
EASY = Scaling(((1, 1.0), (2, 1.92), (4, 3.61), (8, 6.9)), spanning=0.05)
POOR = Scaling(((1, 1.0), (2, 1.6), (4, 2.3), (8, 2.9)), spanning=0.2)


def random_tuning(rng: np.random.Generator) -> Tuning:
    """A small study without limits."""
    eta, stages = int(rng.choice((2, 3, 4))), int(rng.integers(2, 5))
    last = int(rng.integers(1, 3)) if eta == 2 else 1
    steps = [int(rng.choice((1, 2, 4))) * eta**stage for stage in range(stages)]
    epochs = [sum(steps[: stage + 1]) for stage in range(stages)]
    study = Study(
        name="small",
        metric="loss",
        direction=Direction.MIN,
        trials=last * eta ** (stages - 1),
        rungs=tuple(epochs[:-1]),
        eta=eta,
        max_epochs=epochs[-1],
    )
    profile = Profile(
        latency=Latency(
            epoch_s=float(rng.uniform(20, 120)),
            trial_sd=float(rng.uniform(0, 0.25)),
            node_sd=float(rng.uniform(0, 0.1)),
            epoch_sd=float(rng.uniform(0, 0.15)),
        ),
        scaling=(EASY, POOR)[int(rng.integers(2))],
        start_s=float(rng.uniform(0, 30)),
        queue_s=Spread(float(rng.uniform(0, 60)), 10.0),
        init_s=Spread(float(rng.uniform(5, 90)), 8.0),
    )
    sizes = rng.choice((1, 2, 4, 8), size=int(rng.integers(1, 3)), replace=False)
    billing = Billing(
        per=(Per.INSTANCE, Per.FUNCTION)[int(rng.integers(2))],
        minimum_s=float(rng.choice((60.0, 600.0))),
        granularity_s=float(rng.choice((1.0, 60.0))),
        usd_per_gb=0.02,
        dataset_gb=float(rng.choice((0.0, 20.0))),
    )
    instances = tuple(_instance(rng, int(gpus)) for gpus in sizes)
    nodes = int(rng.integers(2, 9))
    return Tuning(study=study, profile=profile, instances=instances, max_nodes=nodes, billing=billing)


def _instance(rng: np.random.Generator, gpus: int) -> Instance:
    speed = float(rng.choice((1.0, 1.8)))
    usd = 3.06 * gpus * speed**0.8 * float(rng.uniform(0.9, 1.1))
    return Instance(name=f"gpu{gpus}", gpus=gpus, usd_per_hour=usd, speed=speed)


def all_options(tuning: Tuning) -> list[list[StagePlan]]:
    most = tuning.profile.scaling.most_gpus
    return [
        [
            option
            for instance in tuning.instances
            for option in fair_options(stage, instance, most, tuning.max_nodes)
        ]
        for stage in halving_stages(tuning.study)
    ]


def small_tuning(rng: np.random.Generator) -> Tuning:
    while True:
        tuning = random_tuning(rng)
        if 50 <= math.prod(len(options) for options in all_options(tuning)) <= MOST_COMBINATIONS:
            return tuning


def with_deadline(tuning: Tuning, rng: np.random.Generator) -> Tuning:
    """A deadline somewhere between what the fastest and what the cheapest fixed cluster can keep."""
    search = prepare(tuning, rng, Objective(Limits()))
    standings = [search.pool.judge(plan) for plan in search.statics]
    soonest_s = min(standing.due_s for standing in standings)
    cheapest_s = min(standings, key=lambda standing: standing.cost_usd).due_s
    deadline_s = soonest_s * (cheapest_s / soonest_s) ** float(rng.uniform(0.0, 1.0))
    return replace(tuning, limits=Limits(deadline_s=deadline_s * 1.01))


def from_every_static(search: Search) -> None:
    """The published greedy, from every fixed cluster that keeps the deadline."""
    for plan in search.statics:
        if search.pool.judge(plan).excess <= 0.0:
            decrement(plan, search.menus, search.pool)


PLANNERS: dict[str, Callable[[Search], None]] = {
    "search": search_thoroughly,
    "published": search_as_published,
    "published, every start": from_every_static,
}


def study_gaps(study: int) -> dict[str, float] | None:
    """By what share each planner's plan costs more than the best; None if nothing keeps the deadline.

    It may also cost less: by keeping a node idle rather than waiting for another, or, as fixed clusters do,
    by waves that fill their nodes.
    """
    rng = np.random.default_rng((SEED, study))
    tuning = with_deadline(small_tuning(rng), rng)
    search = prepare(tuning, rng, Objective(tuning.limits))
    everything = PlanPool(search.pool.execution, search.pool.objective)
    best = everything.judge(everything.best(Plan(stages) for stages in product(*all_options(tuning))))
    if best.excess > 0.0:
        return None
    gaps = {}
    for name, look in PLANNERS.items():
        own = replace(search, pool=PlanPool(search.pool.execution, search.pool.objective))
        look(own)
        found = own.pool.judge(own.pool.best(tuple(own.pool.seen)))
        gaps[name] = found.cost_usd / best.cost_usd - 1.0 if found.excess <= 0.0 else math.inf
    return gaps


def main() -> None:
    print(f"Figure 3: {STUDIES} random small studies (seed {SEED}) against every combination of allocations")
    begun_s = time.process_time()
    answers = [study_gaps(study) for study in range(STUDIES)]
    known = [answer for answer in answers if answer is not None]
    print(f"  {len(known)} have a plan that keeps the deadline; {time.process_time() - begun_s:.0f} s of CPU")
    print(f"  {'cost above the best':24}{'found':>7}{'mean':>8}{'p90':>8}{'worst':>8}")
    for name in PLANNERS:
        every = np.array([answer[name] for answer in known])
        found = np.maximum(every[np.isfinite(every)], 0.0)
        print(f"  {name:24}{len(found):7}{found.mean():8.2%}{np.quantile(found, 0.9):8.2%}{found.max():8.2%}")
    differences = np.array([answer["search"] for answer in known])
    cheaper = int((differences < -0.001).sum())
    print(f"  search costs less than all of them {cheaper} times, up to {-differences.min():.0%} (no gap)")
    gaps = np.maximum(differences, 0.0)
    print(f"  search, mean gap {gaps.mean():.2%}: {verdict(bool(gaps.mean() <= 0.01))} (1 %)")
    print(f"  search, worst gap {gaps.max():.2%}: {verdict(bool(gaps.max() <= 0.05))} (5 %)")


if __name__ == "__main__":
    main()
