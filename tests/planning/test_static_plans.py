"""What plans are compared with: fixed clusters, naive elastic ones, and the same plan with more time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning_cases import CLOUD, LINEAR, POOR, executed, planned, rows, sha, tuned
from stretto.planning.candidates import Objective, PlanPool, naive_elastic_plans
from stretto.planning.profile import Scaling
from stretto.planning.tuning import Limits
from stretto.search.study import halving_stages

SMALL = sha(16, 4, 4)


@pytest.mark.parametrize("deadline_s", [1200.0, 2000.0, 3000.0])
def test_the_best_fixed_cluster_need_not_divide_the_trials(deadline_s: float) -> None:
    """Of 13 trials no equal share fits between one GPU and 13; people run 4, 8 or 12 of them at once."""
    study = sha(13, 4, 4)
    tuning = tuned(study, deadline_s=deadline_s, max_nodes=8)
    outcome = planned(tuning)
    assert outcome.static is not None
    assert outcome.chosen is not None
    assert outcome.chosen.cost_usd.mean <= outcome.static.cost_usd.mean
    assert outcome.cheapest.cost_usd.mean <= outcome.static.cost_usd.mean
    pool = PlanPool(executed(tuning, samples=500), Objective(tuning.limits), fixed=True)
    by_hand = [
        rows(study, *((max(gpus // trials, 1), min(gpus, trials), gpus // 4) for trials in (13, 3, 1)))
        for gpus in range(4, 33, 4)
    ]
    on_time = [pool.judge(plan).cost_usd for plan in by_hand if pool.judge(plan).excess <= 0.0]
    assert outcome.static.cost_usd.mean <= 1.02 * min(on_time)


def test_the_best_fixed_cluster_is_held_to_the_end() -> None:
    """As a plan it would give nodes back while the last trials run; a fixed cluster does not."""
    one_node_at_most = Scaling(((1, 1.0), (2, 1.87), (4, 3.3)))
    tuning = tuned(SMALL, replace(CLOUD, scaling=one_node_at_most), deadline_s=1500.0)
    static = planned(tuning).static
    assert static is not None
    execution = executed(tuning, samples=1000)
    held, given_back = (execution.run(static.plan, to_the_end=end).cost_usd.mean() for end in (True, False))
    assert static.cost_usd.mean == pytest.approx(held, rel=0.01)
    assert given_back < 0.9 * held


def saving(scaling: Scaling, deadline_s: float) -> float:
    outcome = planned(tuned(SMALL, replace(CLOUD, scaling=scaling), deadline_s=deadline_s))
    assert outcome.chosen is not None
    assert outcome.static is not None
    return outcome.static.cost_usd.mean / outcome.chosen.cost_usd.mean


def test_r9_poor_scaling_and_a_tight_deadline_are_where_elasticity_pays() -> None:
    assert max(saving(POOR, deadline_s) for deadline_s in (1000.0, 1100.0, 1300.0)) >= 1.3


def test_r9_near_linear_scaling_leaves_little_to_gain() -> None:
    savings = [saving(LINEAR, deadline_s) for deadline_s in (900.0, 1400.0, 2700.0, 5400.0)]
    assert max(savings) <= 1.1


def test_a_naive_elastic_plan_gives_every_trial_the_same_to_the_end() -> None:
    tuning = tuned(SMALL)
    plans = list(naive_elastic_plans(tuning, halving_stages(SMALL)))
    assert [plan.stages[0].gpus_per_trial for plan in plans] == [1, 2, 3, 4]
    assert [stage.nodes for stage in plans[1].stages] == [8, 2, 1]
    for plan in plans:
        assert len({stage.gpus_per_trial for stage in plan.stages}) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_an_hour_more_saves_what_planning_for_it_finds(seed: int) -> None:
    scaling = Scaling(((1, 1.0), (2, 1.87), (4, 3.42), (8, 5.6)))
    tuning = tuned(sha(64, 4, 2), replace(CLOUD, scaling=scaling, start_s=60.0))
    now, later = (
        planned(replace(tuning, limits=Limits(deadline_s=deadline_s)), seed=seed)
        for deadline_s in (10_800.0, 14_400.0)
    )
    claimed = now.cheapest_by(14_400.0)
    assert claimed is not None
    assert later.chosen is not None
    assert claimed.cost_usd.mean == pytest.approx(later.chosen.cost_usd.mean, rel=0.002)
