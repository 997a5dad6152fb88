"""RubberBand's executor when things are not as planned: slow epochs, nodes that do not come or are lost."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from rubberband_world import (
    BEST_LAST,
    INIT_S,
    QUEUE_S,
    START_S,
    Mishaps,
    Script,
    SteadyCloud,
    assert_within_nodes,
    execute,
    follow,
    nodes_at,
    placed,
    stage,
    study,
    two_stages,
)
from stretto.core.events import Decided, JobFailed, NodeDraining
from stretto.planning.forecast import HeldNode
from stretto.planning.planner import LimitRule
from stretto.policies.rubberband.drift import make_plan
from tuning_world import steady


def test_where_no_plan_keeps_the_limits_it_takes_the_earliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 2, 2, 1)]], feasible=False))
    outcome = execute(study(2, (), 2, deadline_s=500.0), steady(0.1, 0.2, epochs=2))
    texts = [
        reason.text
        for event in outcome.events
        if isinstance(event, Decided)
        for reason in event.reasons.values()
    ]
    assert any("No plan ends by 8m 20s with probability 0.9" in text for text in texts)
    assert len(outcome.finished) == 2


def test_it_says_which_promise_a_plan_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = study(2, (), 2, deadline_s=500.0)
    follow(monkeypatch, Script([[stage(1, 2, 2, 2, 1)]]))
    texts = {
        rule: make_plan(conditions, np.random.default_rng(0), "search", rule)[1].text
        for rule in get_args(LimitRule)
    }
    assert "that ends by 8m 20s with probability 0.9 takes" in texts["quantile"]
    assert "that ends by 8m 20s on average takes" in texts["mean"]


def test_it_plans_again_when_epochs_take_longer_than_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_s = 50.0 + (START_S + 40.0) + (START_S + 20.0)
    script = follow(monkeypatch, Script([two_stages(), [stage(5, 8, 2, 4, 2)]], finish_s=steady_s))
    outcome = execute(study(4, (4,), 8), BEST_LAST[:4], epoch_s=[20.0] * 4, replan=0.15)
    (_, first), (seen, start) = script.asked
    assert first is None
    assert start is not None
    assert (start.stage, start.trials, start.epochs_done) == (1, 2, 0)
    assert start.nodes == (HeldNode("four", 50.0 - INIT_S),)
    assert start.elapsed_s == 50.0 + START_S + 80.0
    assert start.spent_usd == 0.0
    assert start.trial_factors == (1.0, 1.0)
    assert seen.profile.latency.epoch_s == pytest.approx(20.0)
    wishes = [event.wish for event in outcome.events if isinstance(event, Decided) and event.wish]
    assert [wish.nodes for wish in wishes[:2]] == [(("four", 1),), (("four", 2),)]
    assert outcome.results["trial-003"][-1].workers == 4


def test_when_it_plans_again_only_nodes_that_are_gone_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner charges the whole stay of those that are here, so that no minimum is paid twice."""
    last = stage(5, 8, 1, 4, 1)
    later = [stage(3, 4, 2, 2, 1), last]
    script = follow(monkeypatch, Script([[stage(1, 2, 4, 2, 2), *later], later, [last]]))
    execute(study(4, (2, 4), 8), BEST_LAST[:4], epoch_s=[20.0] * 4, replan=0.15)
    _, first, second = (start for _, start in script.asked)
    assert first is not None
    assert second is not None
    kept = HeldNode("four", 50.0 - INIT_S)
    assert (first.elapsed_s, first.nodes, first.spent_usd) == (75.0, (kept, kept), 0.0)
    assert second.nodes == (kept,)
    assert second.spent_usd == pytest.approx(4.0 * 60.0 / 3600.0)  # 45 s, of which at least 60 are charged


def test_small_drift_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steady_s = 50.0 + (START_S + 40.0) + (START_S + 20.0)
    script = follow(monkeypatch, Script([two_stages()], finish_s=steady_s))
    execute(study(4, (4,), 8), BEST_LAST[:4], epoch_s=[10.5] * 4, replan=0.15)
    execute(study(4, (4,), 8), BEST_LAST[:4], epoch_s=[20.0] * 4, replan=0.0)
    assert [start for _, start in script.asked] == [None, None]


def test_within_a_stage_it_plans_again_only_to_meet_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steady_s = 50.0 + START_S + 80.0
    plans = [[stage(1, 8, 2, 1, 1)], [stage(4, 8, 2, 4, 2)]]
    script = follow(monkeypatch, Script(plans, finish_s=steady_s))
    outcome = execute(
        study(2, (), 8, deadline_s=400.0), steady(0.1, 0.2, epochs=8), epoch_s=[30.0] * 2, replan=0.15
    )
    assert len(script.asked) == 1
    assert outcome.most_gpus == 2

    script = follow(monkeypatch, Script(plans, finish_s=steady_s))
    outcome = execute(
        study(2, (), 8, deadline_s=230.0), steady(0.1, 0.2, epochs=8), epoch_s=[30.0] * 2, replan=0.15
    )
    assert len(script.asked) == 2
    start = script.asked[1][1]
    assert start is not None
    assert (start.stage, start.trials, start.epochs_done) == (0, 2, 1)
    assert outcome.most_gpus == 8
    assert len(outcome.finished) == 2
    assert_within_nodes(outcome.events)


def test_where_nodes_never_come_it_makes_do_with_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 1, 8, 2)]]))
    outcome = execute(study(1, (), 2), steady(0.1, epochs=2), cloud=SteadyCloud(late_s=9999.0))
    patience_s = 60.0 + 2 * (QUEUE_S + INIT_S)
    assert outcome.starts == [(patience_s, "trial-000")]
    assert outcome.most_gpus == 4
    assert outcome.finished == ["trial-000"]


def test_trials_whose_nodes_do_not_come_take_the_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 4, 4), stage(3, 4, 2, 4, 2)]]))
    outcome = execute(study(4, (2,), 4), BEST_LAST[:4], cloud=SteadyCloud(most=2))
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]
    assert_within_nodes(outcome.events)


def test_a_lost_node_is_replaced_and_its_trials_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 4, 4, 2, 2), stage(5, 6, 2, 4, 2)]]))
    outcome = execute(study(4, (4,), 6), BEST_LAST[:4], substrate=Mishaps)
    again = [(t_s, trial, tasks) for t_s, trial, tasks in placed(outcome.events) if 50.0 < t_s < 97.0]
    # Those whose node was lost take the places of the others, who are through at 75 s.
    assert [(t_s, trial) for t_s, trial, _ in again] == [(75.0, "trial-002"), (75.0, "trial-003")]
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]
    assert max(count for _, count in nodes_at(outcome.events)) == 2
    assert_within_nodes(outcome.events)


def test_a_trial_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Mishaps):
        mishap = JobFailed(t_s=58.0, job_id="trial-003", error="out of memory")

    follow(monkeypatch, Script([[stage(1, 4, 4, 2, 2), stage(5, 6, 2, 4, 2)]]))
    outcome = execute(study(4, (4,), 6), BEST_LAST[:4], substrate=Failing)
    assert sorted(outcome.finished) == ["trial-001", "trial-002"]


def test_trials_on_a_node_that_drains_end_the_stage_there_and_do_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Draining(Mishaps):
        mishap = NodeDraining(t_s=58.0, node_id="four-2")

    follow(monkeypatch, Script([[stage(1, 4, 4, 2, 2), stage(5, 6, 2, 4, 2)]]))
    outcome = execute(study(4, (4,), 6), BEST_LAST[:4], substrate=Draining)
    assert {change.t_s for change in outcome.changes if change.action == "stop"} == {75.0}
    later = [tasks for t_s, _, tasks in placed(outcome.events) if t_s > 58.0]
    assert all("four-2" not in dict(tasks) for tasks in later)
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]
