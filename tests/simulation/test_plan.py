"""The answer of `plan` for programs: its shape, and that its numbers hang together."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import stretto
from stretto.cli.flags import parse_budget_usd
from stretto.core.units import format_duration, format_usd, parse_duration_s
from stretto.inputs.arguments import given_budget_usd, given_deadline_s
from stretto.planning.planner import LimitRule
from stretto.planning.tuning import Limits
from stretto.report.plan_text import plan_text
from stretto.simulation.plan import Planned, plan, plan_json
from stretto.simulation.studies import with_limits
from study_inputs import NO_LIMITS, SMALL_STUDY, edited, study_file

KEYS = {
    "feasible", "deadline_s", "budget_usd", "q", "cost_usd", "jct_s", "p_on_time", "p_in_budget", "stages",
    "static", "cheapest", "fastest", "frontier", "earliest", "instead", "prices", "epoch_s", "start_s",
    "doubts", "planning_s",
}  # fmt: skip
INSTEAD = {"more_time", "more_money", "more_of_both", "fewer_trials", "fewer_epochs", "fewer_of_both"}
STAGE_KEYS = {
    "stage", "first_epoch", "last_epoch", "trials", "gpus_per_trial", "at_once", "nodes", "instance",
}  # fmt: skip


def planned(text: str = SMALL_STUDY, **options: Any) -> Planned:
    return plan(study_file(text), **options)


def answer(text: str = SMALL_STUDY, **options: Any) -> dict[str, Any]:
    """As it arrives at a program that reads it."""
    found: dict[str, Any] = json.loads(json.dumps(plan_json(planned(text, **options)), allow_nan=False))
    return found


def limited(deadline: object = None, budget_usd: object = None) -> str:
    lines = [f"deadline = {deadline}"] if deadline else []
    lines += [f"budget_usd = {budget_usd}"] if budget_usd else []
    return edited(NO_LIMITS, ("q = 0.9", "\n".join([*lines, "q = 0.9"])))


def test_every_documented_field_is_there() -> None:
    found = answer()
    assert set(found) == KEYS
    assert found["feasible"] is True
    assert (found["deadline_s"], found["budget_usd"], found["q"]) == (2400.0, 30.0, 0.9)
    assert set(found["cost_usd"]) == set(found["jct_s"]) == {"mean", "p10", "p90"}
    assert all(set(stage) == STAGE_KEYS for stage in found["stages"])
    assert set(found["static"]) == {"nodes", "instance", "cost_usd", "jct_s"}
    points = [*found["frontier"], found["earliest"], found["cheapest"], found["fastest"]]
    assert all(set(point) == {"jct_s", "cost_usd"} for point in points)
    assert found["planning_s"] > 0
    assert found["instead"] is None
    assert found["prices"] == [{"instance": "p3.8xlarge", "gpus": 4, "usd_per_hour": 12.24}]
    assert found["epoch_s"] == pytest.approx(35.0)
    assert found["start_s"] > 0


def test_an_infeasible_study_has_no_chosen_plan() -> None:
    found = answer(limited(deadline=60))
    assert set(found) == KEYS
    assert found["feasible"] is False
    nothing = ("cost_usd", "jct_s", "p_on_time", "p_in_budget", "static")
    assert all(found[key] is None for key in nothing)
    assert found["stages"] == []
    assert found["earliest"]["jct_s"] > 60
    assert found["cheapest"]["cost_usd"] <= found["earliest"]["cost_usd"]
    assert found["frontier"]


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(st.none(), st.integers(60, 700)),
    st.one_of(st.none(), st.floats(0.05, 5.0)),
    st.sampled_from(["quantile", "mean"]),
)
@example(900, 4.0, "quantile")
@example(500, 6.0, "quantile")
@example(None, 2.0, "mean")
def test_whatever_is_offered_instead_can_be_planned(
    deadline: int | None, budget_usd: float | None, rule: LimitRule
) -> None:
    """Each offer, typed back as it is shown, and no offer asks for less than was given."""
    file = with_limits(study_file(NO_LIMITS), deadline_s=deadline, budget_usd=budget_usd)
    asked = plan(file, rule=rule)
    if asked.outcome.feasible:
        assert asked.nearest is None
        return
    assert asked.nearest is not None
    offers = dataclasses.asdict(asked.nearest)
    assert set(offers) == INSTEAD
    found = [getattr(asked.nearest, name) for name in INSTEAD if offers[name] is not None]
    assert found
    for offer in found:
        study, limits = asked.tuning.study, offer.limits
        assert offer.trials <= study.trials
        assert offer.max_epochs <= study.max_epochs
        as_shown = {
            "deadline_s": None
            if limits.deadline_s is None
            else parse_duration_s(format_duration(limits.deadline_s)),
            "budget_usd": None if limits.budget_usd is None else typed_usd(limits, asked.tuning.limits),
        }
        rungs = tuple(rung for rung in study.rungs if rung < offer.max_epochs)
        smaller = dataclasses.replace(study, trials=offer.trials, max_epochs=offer.max_epochs, rungs=rungs)
        tuning = dataclasses.replace(asked.tuning, study=smaller)
        again = plan(with_limits(dataclasses.replace(file, tuning=tuning), **as_shown), rule=rule)
        assert again.outcome.feasible, offer
    assert any(offers[name] for name in ("more_time", "more_money", "more_of_both"))


def typed_usd(limits: Limits, asked: Limits) -> float | None:
    """What was given stays as it was given; what is offered is typed as it is shown."""
    if limits.budget_usd is None or limits.budget_usd == asked.budget_usd:
        return limits.budget_usd
    return parse_budget_usd(format_usd(limits.budget_usd))


def test_a_study_that_cannot_begin_by_its_deadline_is_offered_more_time_only() -> None:
    found = answer(limited(deadline=5))["instead"]
    assert found["more_time"]["deadline_s"] > 5
    assert (
        found["fewer_trials"]
        is found["fewer_epochs"]
        is found["fewer_of_both"]
        is found["more_money"]
        is None
    )
    text = plan_text(planned(limited(deadline=5)).tuning, planned().outcome)
    assert "Counted with: p3.8xlarge $12.24/h (4 GPUs); an epoch takes 35 s on one GPU" in text


def test_stages_follow_the_rungs() -> None:
    stages = answer()["stages"]
    assert [stage["stage"] for stage in stages] == [1, 2, 3]
    assert [(stage["first_epoch"], stage["last_epoch"]) for stage in stages] == [(1, 4), (5, 12), (13, 28)]
    assert [stage["trials"] for stage in stages] == [8, 4, 2]
    for stage in stages:
        assert stage["instance"] == "p3.8xlarge"
        assert 1 <= stage["nodes"] <= 4
        assert 1 <= stage["at_once"] <= stage["trials"]
        assert stage["at_once"] * stage["gpus_per_trial"] <= 4 * stage["nodes"]


def test_numbers_hang_together() -> None:
    found = answer(limited(deadline=900))
    assert found["p_on_time"] >= found["q"]
    for key in ("cost_usd", "jct_s"):
        assert found[key]["p10"] < found[key]["mean"] < found[key]["p90"]
    assert found["jct_s"]["p90"] <= 900
    assert found["cheapest"]["cost_usd"] <= found["cost_usd"]["mean"] <= found["static"]["cost_usd"]
    assert found["fastest"]["jct_s"] <= found["jct_s"]["mean"] <= found["cheapest"]["jct_s"]
    costs = [point["cost_usd"] for point in found["frontier"]]
    assert costs == sorted(costs, reverse=True)
    shares = [doubt["share"] for doubt in found["doubts"]]
    assert shares == sorted(shares, reverse=True)


def test_more_time_is_never_dearer() -> None:
    costs = [answer(limited(deadline=seconds))["cost_usd"]["mean"] for seconds in (700, 900, 1200, 2400)]
    assert all(later <= sooner * 1.005 for sooner, later in pairwise(costs))
    assert costs[-1] < costs[0]


def test_a_budget_alone_asks_for_the_fastest() -> None:
    cheapest_usd = answer(NO_LIMITS)["cheapest"]["cost_usd"]
    found = [answer(limited(budget_usd=factor * cheapest_usd)) for factor in (1.1, 1.5, 10.0)]
    times_s = [one["jct_s"]["mean"] for one in found]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[-1] == pytest.approx(found[-1]["fastest"]["jct_s"], rel=0.01)
    assert all(one["p_in_budget"] >= 0.9 and one["p_on_time"] is None for one in found)


def test_both_limits_are_kept() -> None:
    found = answer(limited(deadline=900, budget_usd=10))
    assert found["p_on_time"] >= 0.9
    assert found["p_in_budget"] >= 0.9


def test_each_limit_can_be_the_one_that_is_too_tight() -> None:
    assert not answer(limited(deadline=900, budget_usd=1))["feasible"]
    assert not answer(limited(deadline=300, budget_usd=1000))["feasible"]


def test_without_limits_there_is_a_trade_off() -> None:
    found = answer(NO_LIMITS)
    assert found["feasible"] is True
    assert found["deadline_s"] is found["budget_usd"] is found["p_on_time"] is found["p_in_budget"] is None
    assert len(found["frontier"]) >= 3
    assert found["stages"]


def test_the_earliest_deadline_can_be_kept_and_none_before_it() -> None:
    file = study_file(SMALL_STUDY)
    due_s = plan_json(plan(with_limits(file, deadline_s=60.0)))["earliest"]["jct_s"]
    assert plan(with_limits(file, deadline_s=1.01 * due_s)).outcome.feasible
    assert not plan(with_limits(file, deadline_s=0.97 * due_s)).outcome.feasible


def test_the_rule_of_the_mean_takes_more_risk() -> None:
    text = limited(deadline=900)
    by_mean, by_quantile = answer(text, rule="mean"), answer(text)
    assert by_mean["jct_s"]["mean"] <= 900
    assert by_mean["cost_usd"]["mean"] <= by_quantile["cost_usd"]["mean"] * 1.005
    assert by_mean["earliest"]["jct_s"] < by_quantile["earliest"]["jct_s"]


def test_the_published_planner_is_not_better() -> None:
    published, thorough = answer(planner="published"), answer()
    assert published["feasible"]
    assert thorough["cost_usd"]["mean"] <= published["cost_usd"]["mean"] * 1.005
    assert published["frontier"] != thorough["frontier"], "it looks at other plans"


def test_the_seed_decides_the_answer() -> None:
    def without_time(seed: int) -> dict[str, Any]:
        return {**answer(seed=seed), "planning_s": 0.0}

    assert without_time(1) == without_time(1)
    assert without_time(1)["jct_s"] != without_time(2)["jct_s"]


def test_a_study_without_any_doubt_is_certain() -> None:
    text = edited(
        SMALL_STUDY,
        ("epoch_s = { mean = 35, sd = 3 }", "epoch_s = 35"),
        ("queue_s = { mean = 40, sd = 10 }", "queue_s = 40"),
        ("init_s = { mean = 30, sd = 8 }", "init_s = 30"),
    )
    found = answer(text)
    assert found["doubts"] == []
    assert found["p_on_time"] == 1.0
    assert found["jct_s"]["p10"] == pytest.approx(found["jct_s"]["p90"])


def test_a_free_cluster_costs_nothing() -> None:
    free = 'instance = [{ name = "ours", gpus = 4, usd_per_hour = 0 }]'
    found = answer(edited(SMALL_STUDY, ('instances = ["p3.8xlarge"]', free)))
    assert found["cost_usd"] == {"mean": 0.0, "p10": 0.0, "p90": 0.0}
    assert found["stages"][0]["instance"] == "ours"


def test_the_package_offers_what_users_need() -> None:
    assert set(stretto.__all__) >= {"plan", "read_study", "simulate_study"}
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
    with pytest.raises(AttributeError, match="'plans'"):
        _ = stretto.plans


@pytest.mark.processes
def test_importing_the_package_imports_little() -> None:
    code = "import sys, stretto; print(*sorted(m for m in sys.modules if m.startswith(('stretto', 'numpy'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["stretto"]


def test_limits_may_be_given_in_place_of_those_of_the_file() -> None:
    file = study_file(SMALL_STUDY)
    limits = stretto.plan(file, deadline="20m", budget_usd=math.inf).tuning.limits
    assert (limits.deadline_s, limits.budget_usd) == (1200.0, None)
    assert stretto.plan(file, deadline=1200, budget_usd=50).tuning.limits.budget_usd == 50.0


@pytest.mark.parametrize("deadline", ["18:00", -1, 0.0, math.nan, True, [1]])
def test_what_is_no_deadline_is_refused_with_what_is(deadline: Any) -> None:
    with pytest.raises(
        stretto.InputError, match=r"deadline: .*Give seconds, or a text such as 90s"
    ) as caught:
        given_deadline_s(deadline)
    assert "--" not in str(caught.value)
    assert (given_deadline_s("1h"), given_deadline_s(None)) == (3600.0, None)


@pytest.mark.parametrize("budget_usd", [0, -1.0, "70", math.nan])
def test_what_is_no_budget_is_refused_with_what_is(budget_usd: Any) -> None:
    with pytest.raises(stretto.InputError, match=r"budget_usd: .*Give US dollars"):
        given_budget_usd(budget_usd)
    assert given_budget_usd(70) == 70.0
