"""Figure 3, second half: what elasticity saves, over scaling profiles, dataset sizes and deadlines.

SHA(64, r=4, eta=2) on up to 16 nodes of 8 GPUs at $32.77 an hour. A fixed cluster, a naive elastic one (every
trial has the same number of GPUs to the end) and the planned one: each the cheapest that keeps the deadline
with probability 0.9. Deadlines are multiples of the earliest one that a fixed cluster can keep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from common import verdict

from stretto.planning.candidates import (
    Objective,
    PlanPool,
    by_end,
    menus_of,
    naive_elastic_plans,
    static_plans,
)
from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution
from stretto.planning.forecast import stages_left
from stretto.planning.plan import Plan
from stretto.planning.planner import plan_study
from stretto.planning.profile import Latency, Profile, Scaling, Spread
from stretto.planning.tuning import Limits, Tuning
from stretto.pricing.billing import Billing
from stretto.pricing.instances import Instance
from stretto.search.halving import halving_epochs, make_rungs
from stretto.search.study import Direction, Study

SEED = 7
SAMPLES = 2000
"""The samples on which the costs of all three are measured."""
# Iterations a second at a fixed global batch on 1, 2, 4, .. A100 GPUs relative to one, as measured for
# ElasticFlow (throughputs_A100: bert at batch 128, the others at 256).
SCALINGS = {
    "bert": Scaling(((1, 1.0), (2, 1.59), (4, 2.36), (8, 2.80), (16, 3.01)), spanning=0.1),
    "gpt2": Scaling(((1, 1.0), (2, 1.70), (4, 2.79), (8, 3.82), (16, 4.36), (32, 4.60)), spanning=0.1),
    "resnet50": Scaling(((1, 1.0), (2, 1.87), (4, 3.36), (8, 5.63), (16, 8.22), (32, 9.67)), spanning=0.1),
    "vgg16": Scaling(((1, 1.0), (2, 1.92), (4, 3.53), (8, 6.09), (16, 9.61), (32, 12.46)), spanning=0.1),
}
DATASETS = {"small": (35.0, 2.0), "large": (350.0, 150.0)}
"""Seconds of an epoch, and gigabytes that every new node receives."""
TIGHTNESS = (1.05, 1.15, 1.25, 1.5, 2.5, 5.0)
A100_8 = Instance(name="8xA100", gpus=8, usd_per_hour=32.77)


def sha(trials: int, min_epochs: int, eta: int) -> Study:
    max_epochs = halving_epochs(trials, min_epochs=min_epochs, eta=eta)
    return Study(
        name="grid",
        metric="accuracy",
        direction=Direction.MAX,
        trials=trials,
        rungs=make_rungs("additive", min_epochs=min_epochs, eta=eta, max_epochs=max_epochs),
        eta=eta,
        max_epochs=max_epochs,
    )


def grid_tuning(scaling: str, dataset: str) -> Tuning:
    epoch_s, dataset_gb = DATASETS[dataset]
    return Tuning(
        study=sha(64, 4, 2),
        profile=Profile(
            latency=Latency(epoch_s=epoch_s, trial_sd=0.1, node_sd=0.03, epoch_sd=0.05),
            scaling=SCALINGS[scaling],
            start_s=10.0,
            queue_s=Spread(40.0, 10.0),
            init_s=Spread(30.0, 8.0),
        ),
        instances=(A100_8,),
        max_nodes=16,
        billing=Billing(usd_per_gb=0.01, dataset_gb=dataset_gb),
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """Mean cost of the cheapest plan of each kind; infinite where none keeps the deadline."""

    fixed: float
    naive: float
    planned: float


def earliest_fixed_s(tuning: Tuning) -> float:
    """The earliest deadline a fixed cluster can keep."""
    pool = _pool(tuning)
    return pool.judge(pool.best(fixed_plans(tuning, pool.execution), by_end)).due_s


def costs(tuning: Tuning, deadline_s: float) -> Costs:
    limited = replace(tuning, limits=Limits(deadline_s=deadline_s))
    pool = _pool(limited)
    fixed = PlanPool(pool.execution, pool.objective, fixed=True)
    chosen = plan_study(limited, np.random.default_rng(SEED)).chosen
    return Costs(
        fixed=_least(fixed, fixed_plans(limited, pool.execution)),
        naive=_least(pool, naive_elastic_plans(limited, stages_left(limited.study, None))),
        planned=pool.judge(chosen.plan).cost_usd if chosen else math.inf,
    )


def fixed_plans(tuning: Tuning, execution: Execution) -> list[Plan]:
    return list(static_plans(menus_of(tuning, stages_left(tuning.study, None), execution), tuning))


def _pool(tuning: Tuning) -> PlanPool:
    execution = Execution(tuning, draw_study(tuning, np.random.default_rng(SEED + 1), SAMPLES))
    return PlanPool(execution, Objective(tuning.limits))


def _least(pool: PlanPool, plans: Iterable[Plan]) -> float:
    standings = (pool.judge(plan) for plan in plans)
    return min((one.cost_usd for one in standings if one.excess <= 0.0), default=math.inf)


def _usd(value: float) -> str:
    return f"{value:9.2f}" if math.isfinite(value) else f"{'none':>9}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table."""

    scaling: str
    tightness: float
    saving: float


def cells() -> Iterator[Cell]:
    """Every combination, printed as it comes."""
    print(f"  {'scaling':9} {'data':6} {'deadline':>16} {'fixed':>9}{'naive':>9}{'planned':>9}  saving")
    for scaling, dataset in product(SCALINGS, DATASETS):
        tuning = grid_tuning(scaling, dataset)
        earliest_s = earliest_fixed_s(tuning)
        for tightness in TIGHTNESS:
            found = costs(tuning, tightness * earliest_s)
            saving = found.fixed / found.planned
            deadline = f"{tightness * earliest_s / 3600:7.2f} h x{tightness:<5g}"
            print(
                f"  {scaling:9} {dataset:6} {deadline:>16} "
                f"{_usd(found.fixed)}{_usd(found.naive)}{_usd(found.planned)}  {saving:5.2f}"
            )
            yield Cell(scaling, tightness, saving)


def main() -> None:
    print(
        "Figure 3: cost in USD of a fixed, a naive elastic and the planned cluster; saving = fixed / planned"
    )
    began_s = time.process_time()
    table = list(cells())
    savings = np.array([cell.saving for cell in table])
    quantiles = np.quantile(savings, (0.0, 0.25, 0.5, 0.75, 1.0))
    print(f"  {len(savings)} cells, {time.process_time() - began_s:.0f} s of CPU")
    print("  savings, least to greatest by quarters: " + " ".join(f"{value:.2f}" for value in quantiles))
    shares = ", ".join(f"{least:g}x: {(savings >= least).mean():.0%}" for least in (1.1, 1.3, 1.5, 2.0))
    print(f"  cells that save at least {shares}")
    for scaling in SCALINGS:
        own = [cell for cell in table if cell.scaling == scaling]
        halved = [cell.tightness for cell in own if cell.saving >= 2.0]
        takes = f"2x up to x{max(halved):g} of the earliest deadline" if halved else "2x at no deadline"
        most_gpus = SCALINGS[scaling].points[-1]
        print(
            f"  {scaling:9} {most_gpus[1]:.1f}-fold speed on {most_gpus[0]} GPUs: "
            f"at most {max(cell.saving for cell in own):.2f}x; {takes}"
        )
    print(f"  the paper's 2x: {verdict(bool(savings.max() >= 2.0))} (poor scaling and a tight deadline)")


if __name__ == "__main__":
    main()
