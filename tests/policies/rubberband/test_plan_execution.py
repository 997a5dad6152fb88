"""RubberBand's executor, on plans by hand: what runs where and when, what is rented and given back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_cluster, make_job, make_view
from rubberband_world import (
    BEST_LAST,
    START_S,
    Script,
    SteadyCloud,
    assert_within_nodes,
    controller_for,
    execute,
    follow,
    nodes_at,
    placed,
    stage,
    study,
    two_stages,
)
from stretto.control.instruct import check
from stretto.core.allocation import NOTHING, on_nodes
from stretto.core.cluster import Node, Wish, gpu_nodes
from stretto.core.errors import InputError
from stretto.core.events import Decided, JobSubmitted, NodeReleased
from stretto.core.resources import Resources
from stretto.journal.base import MemoryJournal
from stretto.planning.forecast import HeldNode
from stretto.planning.profile import Scaling
from stretto.policies.registry import make_policy
from stretto.policies.rubberband.memory import PlanBasis, PlanState
from stretto.policies.rubberband.policy import RubberBand
from stretto.policies.rubberband.turn import note_work
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance
from tuning_world import Curve, steady, trial_id


def test_the_timeline_is_the_critical_path(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 1, 4, 2, 2), stage(2, 3, 2, 4, 2), stage(4, 7, 1, 4, 1)]]))
    outcome = execute(study(4, (1, 3), 7), BEST_LAST[:4])
    # Nodes at 50; 5 to start and an epoch of 10 / 2; then 5 + 2 x 10 / 4; then 4 x 10 / 4 where it is.
    assert outcome.starts[:4] == [(50.0, trial_id(number)) for number in range(4)]
    assert set(outcome.stopped) == {trial_id(number) for number in range(3)}
    assert [change.t_s for change in outcome.changes if change.action == "stop"] == [60.0, 60.0, 70.0]
    assert outcome.finished == [trial_id(3)]
    assert outcome.end_s == 50.0 + 10.0 + 10.0 + 10.0
    assert nodes_at(outcome.events) == [(50.0, 2), (70.0, 1)]
    assert_within_nodes(outcome.events)


@pytest.mark.parametrize(("due_s", "planned"), [(499.0, 0), (501.0, 1)])
def test_a_plan_agreed_on_is_followed_if_it_keeps_the_deadline(
    due_s: float, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions, rng = study(2, (), 2, deadline_s=500.0), np.random.default_rng(0)
    shown = Script([[stage(1, 2, 2, 2, 1)]], finish_s=due_s)(conditions, rng, planner="search", rule="mean")
    script = follow(monkeypatch, Script([[stage(1, 2, 2, 4, 2)]]))
    outcome = execute(conditions, BEST_LAST[:2], agreed=shown)
    assert len(script.asked) == planned
    assert nodes_at(outcome.events) == [(50.0, 1 + planned)]


def test_an_epoch_under_way_is_partly_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial on the later node ends at 101; if its epoch counted as not begun that would seem too late."""
    plan = [stage(1, 16, 2, 4, 2)]
    script = follow(monkeypatch, Script([plan, plan], finish_s=101.5))
    curves, cloud = steady(0.1, 0.2, epochs=16), SteadyCloud(late_s=6.0)
    outcome = execute(study(2, (), 16, deadline_s=102.0), curves, cloud=cloud, replan=0.15)
    assert outcome.end_s == 101.0
    assert len(script.asked) == 1


def test_the_published_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 trials of 2 GPUs on 4 nodes; 4 of 3 on 3, where node 4 goes and T8 moves to nodes 1 and 2."""
    follow(monkeypatch, Script([[stage(1, 4, 8, 2, 4), stage(5, 12, 4, 3, 3)]]))
    values = (0.8, 0.1, 0.2, 0.7, 0.3, 0.6, 0.4, 0.5)
    outcome = execute(study(8, (4,), 12), steady(*values, epochs=12))
    end_s = 50.0 + START_S + 4 * 5.0
    assert {trial: tasks for t_s, trial, tasks in placed(outcome.events) if t_s == end_s} == {
        "trial-000": (("four-1", 3),),
        "trial-007": (("four-1", 1), ("four-2", 2)),
        "trial-003": (("four-2", 2), ("four-3", 1)),
        "trial-005": (("four-3", 3),),
    }
    released = [event.node_id for event in outcome.events if isinstance(event, NodeReleased)]
    assert released[0] == "four-4"
    assert_within_nodes(outcome.events)


def test_trials_run_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 1, 1, at_once=2), stage(3, 4, 2, 2, 1)]]))
    outcome = execute(study(4, (2,), 4), BEST_LAST[:4], ahead=1)
    assert outcome.most_trials == 2
    wave_s = START_S + 20.0
    assert outcome.starts[:4] == [
        (50.0, "trial-000"),
        (50.0, "trial-001"),
        (50.0 + wave_s, "trial-002"),
        (50.0 + wave_s, "trial-003"),
    ]
    assert outcome.end_s == 50.0 + 2 * wave_s + START_S + 10.0
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]


def test_a_trial_starts_when_its_own_nodes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 8, 3, 4, 3)]]))
    outcome = execute(study(3, (), 8), BEST_LAST[:3], cloud=SteadyCloud(late_s=7.0))
    assert [t_s for t_s, _ in outcome.starts] == [50.0, 57.0, 64.0]
    assert outcome.end_s == 64.0 + START_S + 20.0


def test_a_growing_stage_waits_for_nodes_only_where_it_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow(monkeypatch, Script([[stage(1, 1, 2, 2, 1), stage(2, 31, 2, 4, 2)]]))
    outcome = execute(study(2, (1,), 31), steady(0.1, 0.2, epochs=3))
    first_end_s = 50.0 + START_S + 5.0
    later = [(t_s, trial) for t_s, trial, _ in placed(outcome.events) if t_s >= first_end_s]
    assert later == [(first_end_s, "trial-001"), (first_end_s + 50.0, "trial-000")]


def test_a_place_that_comes_free_before_a_node_comes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 1, 2, 2, 1), stage(2, 3, 2, 4, 2)]]))
    outcome = execute(study(2, (1,), 3), steady(0.1, 0.2, epochs=3))
    assert outcome.starts[-1] == (60.0 + START_S + 5.0, "trial-000")
    assert outcome.end_s == 80.0
    assert nodes_at(outcome.events) == [(50.0, 1)]  # the second is not needed any more


def test_diverged_trials_stop_at_once_and_never_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 1, 1, at_once=2), stage(3, 4, 2, 2, 1)]]))
    curves: list[Curve] = [[0.9, None, None, None], [0.1] * 4, [None] * 4, [None] * 4]
    outcome = execute(study(4, (2,), 4), curves)
    assert {trial for trial, why in outcome.stopped.items() if "not a finite number" in why} == {
        "trial-000",
        "trial-002",
        "trial-003",
    }
    assert outcome.epochs == {"trial-000": 2, "trial-001": 4, "trial-002": 1, "trial-003": 1}
    assert outcome.finished == ["trial-001"]


def test_when_all_diverge_the_study_ends_and_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 1, 1), stage(3, 4, 2, 2, 1)]]))
    outcome = execute(study(4, (2,), 4), [[None] * 4] * 4)
    assert outcome.end_s == 50.0 + START_S + 10.0
    last = outcome.events[-1]
    assert isinstance(last, Decided)
    assert last.wish == Wish((("four", 0),), ("four-1",))


def test_fewer_survivors_hold_fewer_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 1, 4, 4, 4), stage(2, 3, 3, 4, 3)]]))
    outcome = execute(study(4, (1,), 3), [[0.1] * 3, [0.2] * 3, [None] * 3, [None] * 3])
    end_s = 50.0 + START_S + 2.5
    assert nodes_at(outcome.events)[:2] == [(50.0, 4), (end_s, 2)]
    assert sorted(outcome.finished) == ["trial-000", "trial-001"]


def test_ties_go_to_the_first_and_more_trials_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow(monkeypatch, Script([[stage(1, 1, 4, 1, 1), stage(2, 2, 2, 2, 1)]]))
    outcome = execute(study(8, (1,), 2), steady(*[0.5] * 8, epochs=2), ahead=6)
    assert sorted(outcome.finished) == ["trial-000", "trial-001"]
    assert len(outcome.started) == 4
    assert "4 trials" in outcome.stopped["trial-004"]
    assert "Rank 3 of 4" in outcome.stopped["trial-002"]
    assert "trial-006" not in {event.job.id for event in outcome.events if isinstance(event, JobSubmitted)}


def test_nodes_that_finish_early_in_the_last_stage_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 2, 4, 2)]]))
    outcome = execute(study(2, (), 2), steady(0.1, 0.2, epochs=2), epoch_s=(10.0, 20.0))
    assert nodes_at(outcome.events) == [(50.0, 2), (60.0, 1)]
    assert outcome.end_s == 65.0


def test_nodes_that_are_simply_there_are_used_and_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    script = follow(monkeypatch, Script([[stage(1, 20, 4, 2, 2), stage(21, 22, 2, 2, 1)]]))
    there = [Node("own", Resources(gpu=4))]
    outcome = execute(study(4, (20,), 22), BEST_LAST[3::-1], nodes=[*there, Node("odd", Resources(gpu=3))])
    start = script.asked[0][1]
    assert start is not None
    assert start.nodes == (HeldNode("four", 0.0, free=True),), "one of another size is of no use"
    assert nodes_at(outcome.events) == [(50.0, 1), (50.0 + START_S + 100.0, 0)]
    assert outcome.starts[:2] == [(0.0, "trial-000"), (0.0, "trial-001")]
    released = [event.node_id for event in outcome.events if isinstance(event, NodeReleased)]
    assert "own" not in released


@pytest.mark.parametrize(
    ("places", "usd_per_gpu_h"),
    [({"rented": 2}, 2.0), ({"own": 2}, 0.5), ({"rented": 1, "own": 1}, 1.25), ({}, 2.0)],
)
@pytest.mark.parametrize("holds", [True, False])
def test_gpu_time_paid_by_use_has_the_price_of_the_node(
    places: dict[str, int], usd_per_gpu_h: float, *, holds: bool
) -> None:
    instance = Instance(name="four", gpus=4, usd_per_hour=8.0)
    mine = Instance(name="slots-4", gpus=4, usd_per_hour=2.0, own=True)
    conditions = replace(
        study(1, (), 4), instances=(instance,), billing=Billing(per=Per.FUNCTION), own=(mine,)
    )
    footing = PlanBasis(text="", made_s=0.0, finish_s=1.0, stretch=1.0, slowness=1.0)
    course = PlanState(stages=[stage(1, 4, 1, 2, 2)], footing=footing, quota=1, kept=["rented", "own"])
    course.held["rented"] = HeldNode("four", 0.0)
    course.was["a"] = {} if holds else places
    allocation = on_nodes(places) if holds else NOTHING
    for attained_gpu_s in (1800.0, 3600.0, 3600.0):
        note_work(conditions, course, [make_view(make_job("a"), allocation, attained_gpu_s=attained_gpu_s)])
    assert course.spent_usd == pytest.approx(usd_per_gpu_h)


def test_resumed_at_any_cut_it_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([two_stages(), [stage(5, 8, 2, 4, 2)]], finish_s=120.0))
    curves: list[Curve] = [[0.1] * 8, [0.2, None] * 4, [0.3] * 8, [0.4] * 8]
    conditions = study(4, (4,), 8)
    whole = MemoryJournal()
    controller_for(conditions, curves, whole, epoch_s=[20.0] * 4, replan=0.15).run()
    events = list(whole.events())
    for cut in range(1, len(events)):
        follow(monkeypatch, Script([two_stages(), [stage(5, 8, 2, 4, 2)]], finish_s=120.0))
        partial = MemoryJournal()
        partial.append(events[:cut])
        controller_for(conditions, curves, partial, epoch_s=[20.0] * 4, replan=0.15).run()
        assert list(partial.events()) == events, f"cut after {cut} events"
    memories = [event.memory for event in events if isinstance(event, Decided)]
    assert all(json.loads(json.dumps(memory, allow_nan=False)) == memory for memory in memories)


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_whatever_happens_trials_fit_and_the_best_are_trained_to_the_end(data: st.DataObject) -> None:
    trials = data.draw(st.integers(1, 7))
    stages, left, begin = [], trials, 0
    for last in data.draw(st.sampled_from(((2, 4), (1, 3, 4), (4,)))):
        at_once = data.draw(st.integers(1, left))
        gpus = data.draw(st.integers(1, 6)) if at_once == left else 1
        tight = -(-at_once * gpus // 4)
        stages.append(
            stage(begin + 1, last, left, gpus, tight + data.draw(st.integers(0, 1)), at_once=at_once)
        )
        begin, left = last, max(left // 2, 1)
    curves: list[Curve] = [
        [value if value < 0.9 else None] * 4
        for value in data.draw(st.lists(st.floats(0.0, 1.0), min_size=trials, max_size=trials))
    ]
    cloud = SteadyCloud(most=data.draw(st.integers(1, 5)), late_s=data.draw(st.sampled_from((0.0, 9.0))))
    rungs = tuple(part.last_epoch for part in stages[:-1])
    with pytest.MonkeyPatch.context() as patched:
        follow(patched, Script([stages]))
        outcome = execute(
            study(trials, rungs, 4),
            curves,
            cloud=cloud,
            ahead=data.draw(st.integers(1, 4)),
            epoch_s=data.draw(st.lists(st.floats(5.0, 20.0), min_size=trials, max_size=trials)),
        )
    assert_within_nodes(outcome.events)
    finite = sorted((-curve[0], number) for number, curve in enumerate(curves) if curve[0] is not None)
    best = {trial_id(number) for _, number in finite[: stages[-1].trials]}
    assert set(outcome.finished) == best


def test_decisions_that_change_nothing_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 10, 64, 1, 16), stage(11, 16, 32, 2, 16)]]))
    curves = [[number / 64] * 16 for number in range(64)]
    epoch_s = [10.0 + number / 100.0 for number in range(64)]
    outcome = execute(study(64, (10,), 16), curves, ahead=64, epoch_s=epoch_s)
    # The median is a decision that changes nothing: a result on the way through a stage.
    assert len(outcome.decision_s) > 500
    assert sorted(outcome.decision_s)[len(outcome.decision_s) // 2] < 100e-6


def test_the_registry_makes_it_and_refuses_nonsense() -> None:
    conditions = study(4, (1,), 3)
    made = make_policy("rubberband", options={"planner": "published", "replan": "0"}, tuning=conditions)
    assert made == RubberBand(tuning=conditions, planner="published", replan=0.0)
    for options in ({"replan": "-1"}, {"replan": "inf"}, {"planner": "guess"}, {"rule": "median"}):
        with pytest.raises(InputError):
            make_policy("rubberband", options=options, tuning=conditions)


def test_with_the_real_planner_a_study_ends_when_it_was_told() -> None:
    conditions = study(8, (2, 6), 14, deadline_s=400.0)
    poor = Scaling(((1, 1.0), (2, 1.6), (4, 2.4)))
    conditions = replace(conditions, profile=replace(conditions.profile, scaling=poor), max_nodes=4)
    outcome = execute(conditions, [[number / 8] * 14 for number in range(8)], replan=0.15, until_s=400.0)
    assert sorted(outcome.finished) == ["trial-006", "trial-007"]
    assert outcome.end_s <= 400.0
    assert_within_nodes(outcome.events)


def test_jobs_that_are_no_trials_are_left_alone() -> None:
    policy = RubberBand(tuning=study(4, (1,), 3))
    jobs = [make_view(make_job("runs"), on_nodes({"0": 1})), make_view(make_job("waits"))]
    view = make_cluster(gpu_nodes(1, 4), jobs)
    decision, memory = policy.decide(view, None, np.random.default_rng(0))
    check(view, decision)
    assert decision.allocations == {"runs": on_nodes({"0": 1})}
    assert "not a trial" in decision.reasons["waits"].text
    assert (decision.wish, memory) == (None, None)
