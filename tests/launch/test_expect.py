"""What is expected of a study on this machine: how busy it is, and the time that loading code takes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.resources import Resources
from stretto.core.units import HOUR_S, format_duration
from stretto.inputs.cluster import MachineSpec, slots_offer
from stretto.inputs.profile import MachineProfile
from stretto.inputs.study import parse_study, read_outline, tuning_on
from stretto.launch.expect import (
    UNKNOWN,
    Expectation,
    after_loading,
    carried_out,
    check_pays_an_epoch,
    expect,
    until,
    with_own,
)
from stretto.planning.learning import LatencyPosterior
from stretto.planning.plan import Plan
from stretto.planning.profile import Estimate, Latency, LatencyDraws, Profile, Scaling
from stretto.planning.tuning import Limits, Tuning
from stretto.policies.registry import make_policy
from stretto.report.plan_text import LEFT_OUT, plan_text
from stretto.report.run_text import expectation_text
from stretto.runs.results import plan_tables
from stretto.simulation.plan import BEGIN_S
from tune_world import STUDY, write_study

USD_PER_H = 3.6
TEXT = STUDY.replace("slots = 2", f"slots = 2\nusd_per_slot_hour = {USD_PER_H}")
BUSY = MachineProfile(
    latency=Latency(epoch_s=10.0, trial_sd=0.1, epoch_sd=0.1),
    scaling=Scaling(((1, 1.0), (2, 1.2))),
    start_s=2.0,
    slots=2,
    lone_epoch=1.0,
    lone_start_s=2.0,
    gang_start_s=2.0,
)
QUICK_ALONE = replace(BUSY, lone_epoch=0.5, lone_start_s=1.0)


def tuning_of(profile: Profile, deadline_s: float | None = None) -> Tuning:
    tuning = parse_study(TEXT, Path("study.toml")).tuning
    return replace(tuning, profile=profile, limits=Limits(deadline_s=deadline_s))


def plan_of(tuning: Tuning) -> Plan:
    expectation = expected("rubberband", tuning)
    assert expectation.planned is not None
    return expectation.planned.outcome.followed(tuning.limits).plan


def expected(
    policy: str, tuning: Tuning, *own: Node, machine: MachineSpec | None = None, loading_s: float = 0.0
) -> Expectation:
    outline = read_outline(write_study(Path(), TEXT))
    there = tuning_on(slots_offer(2, outline.machine), outline, tuning.profile, tuning.limits, elastic=True)
    with_all = with_own(there, own, machine or outline.machine)
    chosen = make_policy(policy, tuning=with_all)
    return expect(outline, with_all, chosen, policy_name=policy, options={}, nodes=own, loading_s=loading_s)


@pytest.mark.parametrize("usd_per_slot_hour", [0.0, 1.8])
def test_nodes_that_are_simply_there_are_counted_on_and_paid_for_to_the_end(usd_per_slot_hour: float) -> None:
    tuning = tuning_of(BUSY, 600.0)
    machine = MachineSpec(usd_per_slot_hour=usd_per_slot_hour)
    both = expected("rubberband", tuning, *(Node(name, Resources(gpu=1)) for name in "ab"), machine=machine)
    assert both.cost_usd is not None
    assert both.finish_s is not None
    usd_per_s = 2 * usd_per_slot_hour / HOUR_S
    assert both.first_usd_per_s == pytest.approx(usd_per_s)
    assert both.cost_usd.mean == pytest.approx(usd_per_s * both.finish_s.mean, abs=usd_per_s)
    rented = expected("rubberband", tuning).cost_usd
    assert rented is not None
    assert rented.mean > 0


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_slots(plan: Plan, slots: int) -> Plan:
    """One trial at a time, on so many slots."""
    stages = (replace(stage, at_once=1, gpus_per_trial=slots, nodes=slots) for stage in plan.stages)
    return Plan(tuple(stages))


def test_a_plan_of_one_slot_goes_as_fast_as_a_worker_alone() -> None:
    plan = with_slots(plan_of(tuning_of(BUSY)), 1)
    usual, alone = (
        carried_out(tuning_of(profile), plan, np.random.default_rng(0)) for profile in (BUSY, QUICK_ALONE)
    )
    assert alone.finish_s == pytest.approx(usual.finish_s / 2)
    assert alone.cost_usd.mean() == pytest.approx(usual.cost_usd.mean() / 2, rel=0.02)


def test_a_plan_that_fills_the_machine_goes_at_the_usual_speed() -> None:
    plan = with_slots(plan_of(tuning_of(BUSY)), 2)
    usual, busy = (
        carried_out(tuning_of(profile), plan, np.random.default_rng(0)) for profile in (BUSY, QUICK_ALONE)
    )
    assert busy.finish_s == pytest.approx(usual.finish_s)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_between_one_and_all_slots_it_goes_evenly(slots: int) -> None:
    profile = replace(QUICK_ALONE, slots=slots)
    factors = [profile.epoch_factor(busy) for busy in range(1, slots + 1)]
    starts_s = [profile.start_s_at(busy) for busy in range(1, slots + 1)]
    assert (factors[-1], starts_s[-1]) == (1.0, 2.0)
    assert np.diff(factors) == pytest.approx(0.5 / max(slots - 1, 1))
    assert np.diff(starts_s) == pytest.approx(1.0 / max(slots - 1, 1))


def test_a_plan_of_gangs_pays_for_their_starts() -> None:
    plan, dear = with_slots(plan_of(tuning_of(BUSY)), 2), replace(BUSY, gang_start_s=5.0)
    usual, gangs = (
        carried_out(tuning_of(profile), plan, np.random.default_rng(0)) for profile in (BUSY, dear)
    )
    starts = sum(stage.trials for stage in plan.stages)
    assert gangs.finish_s - usual.finish_s == pytest.approx(3.0 * starts)


@pytest.mark.parametrize("policy", ["rubberband", "random"])
def test_doubt_that_all_trials_share_widens_the_forecast(policy: str) -> None:
    sure = replace(BUSY, latency=Latency(epoch_s=10.0))
    draws = np.random.default_rng(0).lognormal(np.log(10.0), 0.2, 2000)
    none = np.zeros(2000)
    doubted = replace(sure, latency=LatencyPosterior(LatencyDraws(draws, none, none, none)), start_sd=0.5)
    for profile, width in ((sure, 0.0), (doubted, 2 * 1.28 * 0.2)):
        finish_s = expected(policy, tuning_of(profile)).finish_s
        assert finish_s is not None
        assert (finish_s.p90 - finish_s.p10) / finish_s.mean == pytest.approx(width, abs=0.15)


def test_a_plan_keeps_its_deadline_also_after_the_time_that_planning_took() -> None:
    """At any deadline, so also where the cheaper plan just keeps it, and would not a moment later."""
    cheapest = expected("rubberband", tuning_of(BUSY)).planned
    assert cheapest is not None
    edge_s = cheapest.outcome.cheapest.due_s
    for deadline_s in (edge_s + 1e-6, edge_s + BEGIN_S, edge_s + 10.0):
        planned = expected("rubberband", tuning_of(BUSY, deadline_s)).planned
        assert planned is not None
        chosen = planned.outcome.chosen
        assert chosen is not None
        assert chosen.due_s <= deadline_s - BEGIN_S


def test_loading_is_paid_for_by_a_plan_with_the_slots_it_holds_first() -> None:
    tuning = tuning_of(BUSY, deadline_s=2000.0)
    assert plan_of(tuning).stages[0].nodes == 1, "there is time enough for the cheapest"
    before = expected("rubberband", tuning)
    after = after_loading(before, 60.0, 2000.0)
    assert before.finish_s is not None
    assert after.finish_s is not None
    assert before.cost_usd is not None
    assert after.cost_usd is not None
    assert after.finish_s.mean == pytest.approx(before.finish_s.mean + 60.0)
    assert after.cost_usd.mean == pytest.approx(before.cost_usd.mean + 60.0 * USD_PER_H / HOUR_S)


def test_loading_is_paid_for_with_all_slots_where_all_are_held() -> None:
    before = expected("asha", tuning_of(BUSY))
    after = after_loading(before, 60.0, None)
    assert before.cost_usd is not None
    assert after.cost_usd is not None
    assert after.cost_usd.mean == pytest.approx(before.cost_usd.mean + 60.0 * 2 * USD_PER_H / HOUR_S)


@pytest.mark.parametrize("policy", ["asha", "hypersched"])
def test_nothing_is_trained_while_code_is_loaded(policy: str) -> None:
    epochs = []
    for loading_s in (0.0, 40.0, 60.0, 90.0):
        found = after_loading(expected(policy, tuning_of(BUSY, 60.0), loading_s=loading_s), loading_s, 60.0)
        assert found.epochs is not None
        assert found.finish_s is not None
        assert found.finish_s.mean == pytest.approx(60.0, rel=0.01)
        epochs.append(found.epochs.mean)
    assert epochs[0] > epochs[1] > 0
    assert epochs[2:] == [0.0, 0.0]


def test_what_a_budget_must_keep_for_stopping_is_not_trained_with() -> None:
    """One that pays for 60 s of two slots: less 20 s of loading and the 2 s that a start takes."""
    tuning = tuning_of(BUSY)
    budget_usd = 60.0 * 2 * USD_PER_H / HOUR_S
    limited = replace(tuning, limits=Limits(budget_usd=budget_usd))
    found = after_loading(expected("asha", limited, loading_s=20.0), 20.0, None)
    until_then = expected("asha", tuning_of(BUSY, 37.0))
    assert found.epochs == until_then.epochs
    assert found.kept_usd == pytest.approx(2.0 * 2 * USD_PER_H / HOUR_S)
    assert found.cost_usd is not None
    assert found.cost_usd.mean <= budget_usd - found.kept_usd
    most = until(after_loading(found, 200.0, None), None, budget_usd)
    assert most.finish_s == Estimate(60.0, 60.0, 60.0)
    assert most.cost_usd == Estimate(budget_usd, budget_usd, budget_usd)
    dear = replace(found, kept_usd=0.25)
    assert expectation_text(limited, "asha", dear).endswith(" $0.25 of the budget is kept for stopping.\n")


@pytest.mark.parametrize(("rents", "needed_s"), [(False, 2 * (5.0 + 2.0 + 10.0 / 1.2 + 2.0)), (True, 10.0)])
def test_a_budget_must_pay_for_an_epoch(needed_s: float, *, rents: bool) -> None:
    """On all slots with loading, start and stop; where slots are rented, an epoch on one."""
    for factor, refused in ((0.99, True), (1.01, False)):
        limits = Limits(budget_usd=factor * needed_s * USD_PER_H / HOUR_S)
        outline = read_outline(write_study(Path(), TEXT))
        tuning = tuning_on(slots_offer(2, outline.machine), outline, BUSY, limits, elastic=True)
        told = pytest.raises(InputError, match="does not pay for one epoch") if refused else nullcontext()
        with told:
            check_pays_an_epoch(tuning, 5.0, rents=rents)


@given(st.floats(1.0, 1e4), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0.01, 1e3))
def test_loading_adds_to_doubt_and_never_passes_the_deadline(
    mean_s: float, below: float, above: float, loading_s: float
) -> None:
    finish_s = Estimate(mean_s, mean_s * (1 - below), mean_s * (1 + above))
    cost_usd = Estimate(*(0.002 * one for one in (finish_s.mean, finish_s.p10, finish_s.p90)))
    before = Expectation(finish_s=finish_s, cost_usd=cost_usd, epochs=None, first_usd_per_s=0.002)
    free = after_loading(before, loading_s, None)
    assert free.finish_s is not None
    assert free.finish_s.p90 - free.finish_s.p10 >= finish_s.p90 - finish_s.p10
    assert free.finish_s.p10 <= free.finish_s.mean <= free.finish_s.p90
    deadline_s = 1.2 * mean_s
    ended = after_loading(before, loading_s, deadline_s)
    assert ended.finish_s is not None
    assert ended.finish_s.p90 <= deadline_s
    assert ended.cost_usd is not None
    assert ended.cost_usd.p90 <= 0.002 * (deadline_s + 1.0), "nothing is paid for after it"


def test_a_run_that_its_deadline_ends_is_not_expected_to_go_on() -> None:
    finish_s, cost_usd = Estimate(30.0, 20.0, 31.0), Estimate(0.06, 0.04, 0.062)
    before = Expectation(finish_s=finish_s, cost_usd=cost_usd, epochs=None, first_usd_per_s=0.002)
    after = until(before, 28.0)
    assert after.finish_s == Estimate(28.0, 20.0, 28.0)
    assert after.cost_usd is not None
    assert after.cost_usd.mean == pytest.approx(0.056)
    assert after.cost_usd.p10 == 0.04
    assert until(before, None) == before


def test_nodes_that_are_rented_are_paid_for_though_none_is_held_from_the_start() -> None:
    finish_s, cost_usd = Estimate(30.0, 20.0, 31.0), Estimate(0.06, 0.04, 0.062)
    before = Expectation(finish_s=finish_s, cost_usd=cost_usd, epochs=None)
    assert until(before, 28.0).cost_usd == cost_usd
    assert after_loading(before, 5.0, 28.0).cost_usd == cost_usd


def test_what_is_announced_is_what_is_compared_later() -> None:
    """A plan alone leaves out that code is loaded: what is expected of the run is said beside it."""
    for tuning in (
        tuning_of(BUSY),
        replace(tuning_of(BUSY), instances=slots_offer(2, MachineSpec()).instances),
    ):
        found = after_loading(expected("rubberband", tuning), 30.0, 2000.0)
        said = expectation_text(tuning, "rubberband", found)
        assert found.finish_s is not None
        mean, low, high = map(format_duration, (found.finish_s.mean, found.finish_s.p10, found.finish_s.p90))
        assert "Expected of the run, with 30s to load the training code: done after" in said
        assert f"done after {mean}, {low} to {high}; epochs in all: " in said
        quick = after_loading(expected("rubberband", tuning), 0.3, 2000.0)
        assert "Expected of the run: done after" in expectation_text(tuning, "rubberband", quick)
        kept = plan_tables(found)
        assert kept["finish_s"] == asdict(found.finish_s)
        assert LEFT_OUT not in said
    assert "; cost: $" in expectation_text(
        tuning_of(BUSY), "rubberband", expected("rubberband", tuning_of(BUSY))
    )


def test_a_plan_for_where_the_training_was_measured_says_what_it_leaves_out() -> None:
    planned = expected("rubberband", tuning_of(BUSY)).planned
    assert planned is not None
    assert LEFT_OUT in plan_text(planned.tuning, planned.outcome)
    known = replace(planned.tuning, profile=Profile(latency=BUSY.latency, scaling=BUSY.scaling))
    assert LEFT_OUT not in plan_text(known, planned.outcome)


def test_without_loading_nothing_changes() -> None:
    before = Expectation(finish_s=Estimate(1.0, 1.0, 1.0), cost_usd=Estimate(0.0, 0.0, 0.0), epochs=None)
    assert after_loading(before, 0.0, None) is before


def test_simulations_that_take_too_long_are_given_up() -> None:
    outline = read_outline(write_study(Path(), TEXT))
    tuning = tuning_of(BUSY, 600.0)
    asha = make_policy("asha", tuning=tuning)
    assert expect(outline, tuning, asha, policy_name="asha", options={}).finish_s is not None
    assert expect(outline, tuning, asha, policy_name="asha", options={}, within_s=0.0) == UNKNOWN
