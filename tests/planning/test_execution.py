"""The execution model against critical paths and bills computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning_cases import CLOUD, P3_8XLARGE, POOR, STEADY, executed, flat, rows, sha, tuned
from stretto.planning.draws import draw_study
from stretto.planning.execution import Execution, PlanRun
from stretto.planning.forecast import HeldNode, StudyProgress, stages_left
from stretto.planning.plan import Plan, pack, roomy_nodes, tight_nodes
from stretto.planning.profile import Latency, Profile
from stretto.planning.tuning import Tuning
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance
from stretto.search.study import halving_stages

PER_S = 12.24 / 3600.0
"""Price of a node."""
TWO_STAGES = sha(4, 2, 4)
"""Four trials for 2 epochs, one for 8 more."""


def finish_s(tuning: Tuning, plan: Plan) -> float:
    return float(executed(tuning).run(plan).finish_s[0])


def cost_usd(tuning: Tuning, plan: Plan) -> float:
    return float(executed(tuning).run(plan).cost_usd[0])


def test_r1_additive_rungs_give_the_slides_stages() -> None:
    first = halving_stages(sha(8, 4, 2))[:3]
    assert [(stage.first_epoch, stage.last_epoch, stage.trials) for stage in first] == [
        (1, 4, 8),
        (5, 12, 4),
        (13, 28, 2),
    ]
    assert len(halving_stages(sha(64, 4, 2))) == 7
    assert sha(64, 4, 2).max_epochs == 508


def test_r2_without_chance_the_finish_is_the_critical_path() -> None:
    tuning = tuned(TWO_STAGES, STEADY)
    first_s = 20 + 30 + 3 + 2 * 10
    assert finish_s(tuning, rows(TWO_STAGES, (1, 4, 1), (4, 1, 1))) == pytest.approx(
        first_s + 3 + 8 * 10 / 3.3
    )


def test_r2_a_stage_that_grows_waits_for_its_new_nodes() -> None:
    tuning = tuned(TWO_STAGES, STEADY)
    plan = rows(TWO_STAGES, (1, 4, 1), (8, 1, 2))
    assert finish_s(tuning, plan) == pytest.approx(73 + 20 + 30 + 3 + 80 / 4.8)


def test_r2_the_mean_over_chance_is_above_the_steady_path() -> None:
    lively = replace(STEADY, latency=Latency(epoch_s=10.0, trial_sd=0.2, node_sd=0.1, epoch_sd=0.1))
    plan = rows(TWO_STAGES, (1, 4, 1), (4, 1, 1))
    mean_s = executed(tuned(TWO_STAGES, lively), samples=4000).run(plan).finish_s.mean()
    assert mean_s > finish_s(tuned(TWO_STAGES, STEADY), plan) + 2.0


def test_only_trials_on_new_nodes_wait_for_them() -> None:
    study = sha(8, 1, 4)
    tuning = tuned(study, STEADY)
    stage = rows(study, (1, 8, 2), (4, 2, 2), (4, 1, 1)).stages[1]
    trains_s = 3 + 40 / 3.3
    even = draw_study(tuning, np.random.default_rng(0), 1)
    slow_kept = replace(even, nodes=np.array([[9.0, 1.0]]))
    assert Execution(tuning, even).stage(1, stage, 2).duration_s == pytest.approx(trains_s)
    assert Execution(tuning, even).stage(1, stage, 1).duration_s == pytest.approx(50 + trains_s)
    assert Execution(tuning, slow_kept).stage(1, stage, 1).duration_s == pytest.approx(3 + 9 * 40 / 3.3)


def test_waves_share_the_slots() -> None:
    tuning = tuned(sha(8, 1, 8), STEADY)
    plan = rows(sha(8, 1, 8), (1, 4, 1), (1, 1, 1))
    assert finish_s(tuning, plan) == pytest.approx(20 + 30 + 2 * (3 + 10) + 3 + 80)


def test_a_trial_that_spans_nodes_is_slower() -> None:
    study = sha(4, 1, 4)
    tight, roomy = rows(study, (3, 4, 3), (4, 1, 1)), rows(study, (3, 4, 4), (4, 1, 1))
    tuning = tuned(study, STEADY)
    lost_s = 10 / POOR.speedup(3, spans=True) - 10 / POOR.speedup(3)
    assert finish_s(tuning, tight) - finish_s(tuning, roomy) == pytest.approx(lost_s)


def test_a_faster_gpu_trains_faster() -> None:
    fast = replace(P3_8XLARGE, speed=2.0)
    plan = rows(TWO_STAGES, (1, 4, 1), (1, 1, 1))
    saved_s = finish_s(tuned(TWO_STAGES, STEADY), plan) - finish_s(
        tuned(TWO_STAGES, STEADY, instances=(fast,)), plan
    )
    assert saved_s == pytest.approx((20 + 80) / 2)


def test_nodes_are_paid_from_their_start_up_to_their_release() -> None:
    tuning = tuned(TWO_STAGES, STEADY, billing=Billing(minimum_s=0.0, granularity_s=0.001))
    plan = rows(TWO_STAGES, (1, 4, 1), (8, 1, 2))
    second_s = 20 + 30 + 3 + 80 / 4.8
    held_s = (73 - 20 + second_s) + (second_s - 20)
    assert cost_usd(tuning, plan) == pytest.approx(held_s * PER_S, rel=1e-4)


def test_another_instance_type_replaces_the_nodes() -> None:
    other = Instance(name="other", gpus=4, usd_per_hour=3.6)
    free = Billing(minimum_s=0.0, granularity_s=0.001)
    tuning = tuned(TWO_STAGES, STEADY, instances=(P3_8XLARGE, other), billing=free)
    first = rows(TWO_STAGES, (1, 4, 1), (4, 1, 1)).stages[0]
    last = rows(TWO_STAGES, (1, 4, 1), (4, 1, 1), instance="other").stages[1]
    second_s = 50 + 3 + 80 / 3.3
    assert finish_s(tuning, Plan((first, last))) == pytest.approx(73 + second_s)
    expected = 53 * PER_S + (second_s - 20) * 0.001
    assert cost_usd(tuning, Plan((first, last))) == pytest.approx(expected, rel=1e-4)


def test_r7_a_function_costs_no_more_than_the_instances_it_runs_on() -> None:
    study = sha(8, 2, 2)
    plan = rows(study, (2, 8, 4), (3, 4, 3), (4, 2, 2), (4, 1, 1))
    runs = {
        per: executed(tuned(study, CLOUD, billing=Billing(per=per)), samples=200).run(plan) for per in Per
    }
    assert np.all(runs[Per.FUNCTION].cost_usd <= runs[Per.INSTANCE].cost_usd)


def test_r7_stragglers_raise_only_the_instances_bill() -> None:
    study = sha(16, 2, 16)
    plan = rows(study, (1, 16, 4), (4, 1, 1))

    def mean_usd(trial_sd: float, per: Per) -> float:
        profile = replace(CLOUD, latency=Latency(epoch_s=35.0, trial_sd=trial_sd))
        billing = Billing(per=per, granularity_s=0.01, minimum_s=0.0)
        return float(
            executed(tuned(study, profile, billing=billing), samples=20_000).run(plan).cost_usd.mean()
        )

    assert mean_usd(0.3, Per.INSTANCE) > 1.05 * mean_usd(0.0, Per.INSTANCE)
    assert mean_usd(0.3, Per.FUNCTION) == pytest.approx(mean_usd(0.0, Per.FUNCTION), rel=0.02)


def test_r8_ten_seconds_cost_sixty() -> None:
    study = sha(1, 1, 2)
    brief = Profile(latency=Latency(epoch_s=10.0), scaling=POOR)
    assert cost_usd(tuned(study, brief), rows(study, (1, 1, 1))) == pytest.approx(60 * PER_S)


def test_every_new_node_is_given_the_data() -> None:
    data = Billing(usd_per_gb=0.1, dataset_gb=50.0)
    plan = rows(TWO_STAGES, (1, 4, 1), (8, 1, 2))
    extra = cost_usd(tuned(TWO_STAGES, STEADY, billing=data), plan) - cost_usd(
        tuned(TWO_STAGES, STEADY), plan
    )
    assert extra == pytest.approx(2 * 5.0)


def test_epochs_average_out_and_trials_do_not() -> None:
    study = sha(1, 100, 2)
    plan = rows(study, (1, 1, 1))
    for latency, expected in (
        (Latency(epoch_s=10.0, epoch_sd=0.3), 0.03),
        (Latency(epoch_s=10.0, trial_sd=0.3), 0.3),
        (Latency(epoch_s=10.0, node_sd=0.3), 0.3),
    ):
        times = (
            executed(tuned(study, Profile(latency=latency, scaling=POOR)), samples=20_000).run(plan).finish_s
        )
        assert times.std() / times.mean() == pytest.approx(expected, rel=0.05)


def test_starts_are_off_together_or_not_at_all() -> None:
    """Four trials one after the other: their starts do not average out."""
    study = flat(4, 5)
    sure_s, doubted_s = (
        executed(tuned(study, replace(STEADY, start_sd=sd)), samples=2000)
        .run(rows(study, (1, 1, 1)))
        .finish_s
        for sd in (0.0, 0.5)
    )
    starts_s = doubted_s - sure_s + 4 * STEADY.start_s
    assert np.ptp(sure_s) == 0.0
    assert starts_s.mean() == pytest.approx(4 * STEADY.start_s, rel=0.02)
    assert starts_s.std() == pytest.approx(0.5 * 4 * STEADY.start_s, rel=0.05)


def test_a_trial_keeps_its_speed_over_stages() -> None:
    """With one factor for both stages the finish varies as one factor does, not as a mean of two."""
    study = sha(2, 50, 2)
    profile = Profile(latency=Latency(epoch_s=10.0, trial_sd=0.2), scaling=POOR)
    plan = rows(study, (1, 2, 1), (1, 1, 1))
    execution = executed(tuned(study, profile), samples=20_000)
    last_s = execution.stage(1, plan.stages[1], 1).duration_s
    assert np.corrcoef(last_s, execution.run(plan).finish_s)[0, 1] > 0.9


def test_planning_from_the_middle_counts_what_is_left() -> None:
    held = (HeldNode(P3_8XLARGE.name, 20.0),)
    start = StudyProgress(stage=1, trials=1, epochs_done=3, nodes=held, elapsed_s=100.0, spent_usd=2.0)
    tuning = tuned(TWO_STAGES, STEADY)
    (stage,) = stages_left(TWO_STAGES, start)
    assert (stage.first_epoch, stage.last_epoch) == (6, 10)
    plan = Plan((replace(rows(TWO_STAGES, (1, 4, 1), (4, 1, 1)).stages[1], first_epoch=6),))
    run = executed(tuning, start=start).run(plan)
    left_s = 3 + 5 * 10 / 3.3
    assert run.finish_s[0] == pytest.approx(100 + left_s)
    assert run.cost_usd[0] == pytest.approx(2 + math.ceil(80 + left_s) * PER_S)


def test_nodes_that_are_simply_there_need_no_start_and_cost_nothing_without_a_price() -> None:
    free = HeldNode(P3_8XLARGE.name, 0.0, free=True)
    other = Instance(name="other", gpus=4, usd_per_hour=3.6)
    tuning = tuned(TWO_STAGES, STEADY, instances=(P3_8XLARGE, other))
    begin = StudyProgress(stage=0, trials=TWO_STAGES.trials)

    def run(plan: Plan, *nodes: HeldNode) -> PlanRun:
        return executed(tuning, start=replace(begin, nodes=nodes)).run(plan)

    grows = rows(TWO_STAGES, (1, 4, 1), (4, 1, 2))
    rented, one_free, both_free = run(grows), run(grows, free), run(grows, free, free)
    assert both_free.cost_usd[0] == 0.0, "also the one that the first stage has no use for"
    assert 0.0 < one_free.cost_usd[0] < rented.cost_usd[0]
    assert both_free.finish_s[0] == pytest.approx(rented.finish_s[0] - 50), "nobody waits for the first"
    shrinks = rows(TWO_STAGES, (1, 4, 2), (4, 1, 1))
    assert run(shrinks, free).cost_usd[0] == pytest.approx(60 * PER_S), "of two the rented one goes"
    elsewhere = Plan(tuple(replace(stage, instance="other") for stage in grows.stages))
    assert run(elsewhere, free).cost_usd[0] == run(elsewhere).cost_usd[0]
    assert run(elsewhere, replace(free, instance="other"), free).cost_usd[0] < run(elsewhere).cost_usd[0]


def own_nodes(*usd_per_hour: float) -> tuple[Instance, ...]:
    return tuple(Instance(name="own", gpus=4, usd_per_hour=usd, own=True) for usd in usd_per_hour)


def of_ones_own(count: int) -> StudyProgress:
    free = HeldNode(P3_8XLARGE.name, 0.0, free=True)
    return StudyProgress(stage=0, trials=TWO_STAGES.trials, nodes=(free,) * count)


@pytest.mark.parametrize("elapsed_s", [0.0, 500.0])
def test_nodes_of_ones_own_cost_from_start_to_end_whether_they_are_used_or_not(elapsed_s: float) -> None:
    data = Billing(usd_per_gb=0.1, dataset_gb=50.0)
    tuning = replace(tuned(TWO_STAGES, STEADY, billing=data), own=own_nodes(3.6, 7.2))
    plan = rows(TWO_STAGES, (1, 4, 1), (4, 1, 1))
    run = executed(tuning, start=replace(of_ones_own(2), elapsed_s=elapsed_s)).run(plan)
    finish_s = elapsed_s + 2 * 3 + 20 + 80 / 3.3
    assert run.finish_s[0] == pytest.approx(finish_s)
    assert run.cost_usd[0] == pytest.approx(2 * 5.0 + max(math.ceil(finish_s), 60) * 0.003)


def test_what_is_rented_beside_them_costs_as_ever() -> None:
    tuning, start = tuned(TWO_STAGES, STEADY), of_ones_own(1)
    plan = rows(TWO_STAGES, (1, 4, 2), (4, 1, 1))
    free, priced = (
        executed(one, start=start).run(plan) for one in (tuning, replace(tuning, own=own_nodes(3.6)))
    )
    assert priced.finish_s[0] == free.finish_s[0]
    own_usd = max(math.ceil(free.finish_s[0]), 60) * 0.001
    assert priced.cost_usd[0] - free.cost_usd[0] == pytest.approx(own_usd)


def test_gpu_time_on_nodes_of_ones_own_has_their_price() -> None:
    """Where it is paid by use; without a price it costs nothing."""
    by_use = Billing(per=Per.FUNCTION)
    plan = rows(TWO_STAGES, (1, 4, 1), (4, 1, 1))
    gpu_s = 4 * (3 + 20) + 4 * (3 + 80 / 3.3)
    tuning = tuned(TWO_STAGES, STEADY, billing=by_use)
    for own, usd_per_gpu_h in ((), 0.0), (own_nodes(3.6), 0.9):
        run = executed(replace(tuning, own=own), start=of_ones_own(1)).run(plan)
        assert run.cost_usd[0] == pytest.approx(gpu_s * usd_per_gpu_h / 3600)
    rented = executed(tuning).run(plan)
    assert rented.cost_usd[0] == pytest.approx(gpu_s * PER_S / 4)


def test_a_stay_that_began_before_is_charged_once() -> None:
    """Whole hours: what is left of the hour that has begun is free, and ends with the node."""
    other = Instance(name="other", gpus=4, usd_per_hour=3.6)
    by_the_hour = Billing(granularity_s=3600.0, minimum_s=3600.0)
    tuning = tuned(TWO_STAGES, STEADY, instances=(P3_8XLARGE, other), billing=by_the_hour)
    held = (HeldNode(P3_8XLARGE.name, 0.0), HeldNode(P3_8XLARGE.name, 500.0), HeldNode("other", 0.0))
    start = StudyProgress(stage=1, trials=1, nodes=held, elapsed_s=3500.0)
    plan = Plan(rows(TWO_STAGES, (1, 4, 1), (8, 1, 2)).stages[1:])
    assert 8 * 10 / 4.8 + 3 < 100
    assert executed(tuning, start=start).run(plan).cost_usd[0] == pytest.approx(2 * 12.24 + 3.6)
    late = replace(start, elapsed_s=3590.0)
    assert executed(tuning, start=late).run(plan).cost_usd[0] == pytest.approx(3 * 12.24 + 3.6)


def test_in_the_last_stage_a_node_is_paid_until_its_own_last_trial_ends() -> None:
    study = flat(3, 10)
    tuning = tuned(study, STEADY, billing=Billing(minimum_s=0.0, granularity_s=0.001))
    even = draw_study(tuning, np.random.default_rng(0), 1)
    execution = Execution(tuning, replace(even, trials=np.array([[1.0, 2.0, 3.0]])))
    each = execution.run(rows(study, (4, 3, 3)))
    alone_s = [30 + 3 + factor * 100 / 3.3 for factor in (1, 2, 3)]
    assert each.finish_s[0] == pytest.approx(20 + alone_s[2])
    assert each.cost_usd[0] == pytest.approx(sum(alone_s) * PER_S, rel=1e-4)
    together = execution.run(rows(study, (4, 3, 3)), to_the_end=True)
    assert together.cost_usd[0] == pytest.approx(3 * alone_s[2] * PER_S, rel=1e-4)
    # In waves: the second trial ends long before the third, which follows the first.
    waves = execution.run(rows(study, (4, 2, 2)))
    held_s = (alone_s[0] + alone_s[2] - 30) + alone_s[1]
    assert waves.cost_usd[0] == pytest.approx(held_s * PER_S, rel=1e-4)
    # Nodes that lie idle go as soon as the last trial has begun.
    idle = execution.run(rows(study, (4, 3, 5)))
    assert idle.cost_usd[0] - each.cost_usd[0] == pytest.approx(2 * 30 * PER_S, rel=1e-4)


def test_a_node_is_held_for_the_trial_that_spans_it() -> None:
    """Of three trials on two nodes one lies on both: a node that was kept waits with it for the new one."""
    study = flat(3, 10)
    tuning = tuned(study, STEADY, billing=Billing(minimum_s=0.0, granularity_s=0.001))
    held = HeldNode(P3_8XLARGE.name, 0.0)
    start = StudyProgress(stage=0, trials=3, nodes=(held,))
    assert pack(2, 3, 2, 3).nodes_of == ((0,), (0, 1), (1,))
    three = replace(P3_8XLARGE, gpus=3)
    run = executed(replace(tuning, instances=(three,)), start=start).run(rows(study, (2, 3, 2)))
    end_s = 50 + 3 + 100 / POOR.speedup(2, spans=True)
    assert run.finish_s[0] == pytest.approx(end_s)
    assert run.cost_usd[0] == pytest.approx((end_s + end_s - 20) * PER_S, rel=1e-4)


def test_known_trials_are_not_guessed() -> None:
    study = sha(1, 10, 2)
    profile = replace(STEADY, latency=Latency(epoch_s=10.0, trial_sd=0.5))
    start = StudyProgress(stage=0, trials=1, trial_factors=(1.5,))
    run = executed(tuned(study, profile), samples=50, start=start).run(rows(study, (1, 1, 1)))
    assert run.finish_s == pytest.approx(np.full(50, 50 + 3 + 150))


@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 8), st.integers(0, 3))
def test_packing_gives_every_trial_its_gpus(gpus: int, at_once: int, size: int, spare: int) -> None:
    tight, roomy = tight_nodes(gpus, at_once, size), roomy_nodes(gpus, at_once, size)
    assert tight <= roomy
    packing = pack(gpus, at_once, tight + spare, size)
    needed = math.ceil(gpus / size)
    assert len(packing.nodes_of) == at_once
    for mine, spans in zip(packing.nodes_of, packing.spans, strict=True):
        assert len(set(mine)) == len(mine) >= needed
        assert spans == (len(mine) > needed)
        assert set(mine) <= set(range(tight + spare))
    assert not any(pack(gpus, at_once, roomy, size).spans)


def test_on_the_fewest_nodes_two_trials_share_the_gaps() -> None:
    assert pack(3, 4, 3, 4).spans == (False, True, True, False)
    assert pack(6, 2, 3, 4).nodes_of == ((0, 2), (1, 2))
