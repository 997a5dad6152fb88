"""RubberBand when nodes are refused: it goes on with what is here, says so, and wishes again later."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rubberband_world import (
    BEST_LAST,
    INIT_S,
    QUEUE_S,
    START_S,
    Mishaps,
    MoodyCloud,
    Script,
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
from stretto.cli.live import PlainLines
from stretto.core.cluster import Node, Wish
from stretto.core.events import Decided, Event, NodeAdded, NodeLost, NodeRefused
from stretto.core.resources import Resources
from stretto.journal.base import MemoryJournal
from stretto.planning.profile import Scaling, Spread
from stretto.policies.rubberband.drift import with_seen_delays
from stretto.policies.rubberband.memory import PlanState
from stretto.policies.rubberband.turn import again_at_s, on_fewer
from stretto.runs.explain import StoryLine, cluster_lines
from stretto.substrate.sim.substrate import SimSubstrate
from tuning_world import Outcome


def wishes(outcome: Outcome) -> list[tuple[float, int]]:
    return [
        (event.t_s, event.wish.nodes[0][1])
        for event in outcome.events
        if isinstance(event, Decided) and event.wish is not None
    ]


def reasons(events: Sequence[Event]) -> list[str]:
    return [
        reason.text for event in events if isinstance(event, Decided) for reason in event.reasons.values()
    ]


def test_it_goes_on_with_the_nodes_that_come_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 4, 4), stage(3, 4, 2, 4, 2)]]))
    outcome = execute(study(4, (2,), 4), BEST_LAST[:4], cloud=MoodyCloud(gives=(2,)))
    first = [(t_s, dict(tasks)) for t_s, _, tasks in placed(outcome.events)][:4]
    # Linear scaling: two GPUs for each of the four at once are as fast as turns of four, and start once.
    assert [(t_s, sum(tasks.values())) for t_s, tasks in first] == [(50.0, 2)] * 4
    assert outcome.end_s == 50.0 + (START_S + 10.0) + (START_S + 5.0)
    assert any(
        "2 of 4 nodes were refused (the cloud had 2 of 4); the stage continues on 2." in text
        for text in reasons(outcome.events)
    )
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]
    assert wishes(outcome)[0] == (0.0, 4)
    assert_within_nodes(outcome.events)


def test_what_was_refused_is_wished_for_again_in_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 2, 2), stage(3, 40, 2, 4, 2)]]))
    outcome = execute(study(4, (2,), 40), BEST_LAST[:4], cloud=MoodyCloud(gives=(1,)))
    end_s = 50.0 + START_S + 20.0
    assert nodes_at(outcome.events)[:2] == [(50.0, 1), (end_s + QUEUE_S + INIT_S, 2)]
    assert (0.0, 2) in wishes(outcome)
    assert (end_s, 2) in wishes(outcome)


def test_trials_that_run_are_not_disturbed_for_a_node_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow(monkeypatch, Script([[stage(1, 4, 4, 1, 2)]]))
    own = [Node("own", Resources(gpu=4))]
    outcome = execute(study(4, (), 4), BEST_LAST[:4], cloud=MoodyCloud(gives=(0,)), nodes=own)
    assert [(t_s, tasks) for t_s, _, tasks in placed(outcome.events)] == [(0.0, (("own", 1),))] * 4
    assert len(outcome.finished) == 4


def test_where_everything_is_refused_it_asks_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([two_stages()]))
    outcome = execute(study(4, (4,), 8), BEST_LAST[:4], cloud=MoodyCloud(gives=(0,) * 9))
    refused = [event.t_s for event in outcome.events if isinstance(event, NodeRefused)]
    pauses_s = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert refused == [sum(pauses_s[:times]) for times in range(9)]
    assert [t_s for t_s, count in wishes(outcome) if count][:10] == [*refused, sum(pauses_s)]
    assert outcome.starts[0] == (sum(pauses_s) + 50.0, "trial-000")
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]
    told = [text for text in reasons(outcome.events) if "refused" in text]
    assert told[0] == (
        "Stage 1 of 2: 1 of 1 nodes were refused (the cloud had 0 of 1); they are requested again at 5s."
    )
    assert "(the cloud had 0 of 1), 9 times in a row; they are requested again at 20m 15s." in told[-1]


def test_a_node_that_came_makes_it_hopeful_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Mishaps):
        mishap = NodeLost(t_s=100.0, node_id="four-1")

    follow(monkeypatch, Script([two_stages()]))
    cloud = MoodyCloud(gives=(0, 0, 0, 1, 0, 0))
    outcome = execute(study(4, (4,), 8), BEST_LAST[:4], cloud=cloud, substrate=Lost)
    refused = [event.t_s for event in outcome.events if isinstance(event, NodeRefused)]
    assert refused == [0.0, 5.0, 15.0, 100.0, 105.0]
    assert [t_s for t_s, count in wishes(outcome) if count][:7] == [0.0, 5.0, 15.0, 35.0, 100.0, 105.0, 115.0]
    assert sorted(outcome.finished) == ["trial-002", "trial-003"]


def test_where_nodes_are_refused_one_by_one_the_whole_stage_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OneByOne(SimSubstrate):
        """Of the first wish, the four nodes are refused one after the other."""

        def provision(self, wish: Wish) -> None:
            if self._now_s or not dict(wish.nodes)["four"]:
                super().provision(wish)
            elif not self._ready:
                self._ready.extend(
                    NodeRefused(t_s=0.0, instance="four", count=1, why="full") for _ in range(4)
                )

    follow(monkeypatch, Script([[stage(1, 2, 4, 4, 4), stage(3, 4, 2, 4, 2)]]))
    outcome = execute(study(4, (2,), 4), BEST_LAST[:4], substrate=OneByOne)
    assert (5.0, 4) in wishes(outcome)
    assert (55.0, 4) in nodes_at(outcome.events)


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e5), st.integers(1, 5000), st.none() | st.floats(0.0, 2e6))
def test_the_next_try_lies_ahead_and_before_the_deadline_where_it_can(
    refused_s: float, later_s: float, times: int, deadline_s: float | None
) -> None:
    now_s = refused_s + later_s
    at_s = again_at_s(refused_s, now_s, times, deadline_s)
    assert now_s + 5.0 <= at_s <= now_s + 300.0
    if deadline_s is not None and deadline_s - now_s > 10.0:
        assert at_s < deadline_s


def test_what_was_remembered_before_tries_were_counted_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([two_stages()]))
    outcome = execute(study(4, (4,), 8), BEST_LAST[:4])
    memory = next(event.memory for event in outcome.events if isinstance(event, Decided) and event.memory)
    unknown = {"in_vain", "whole"}
    known = {name: value for name, value in memory["course"].items() if name not in unknown}
    course = msgspec.convert(known, PlanState)
    assert (course.in_vain, course.whole) == (0, None)
    assert msgspec.convert(msgspec.to_builtins(course), PlanState) == course


def test_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    follow(monkeypatch, Script([[stage(1, 2, 4, 4, 4), stage(3, 4, 2, 4, 2)]]))
    outcome = execute(study(4, (2,), 4), BEST_LAST[:4], cloud=MoodyCloud(gives=(2,)))
    assert StoryLine(0.0, "four", "2 refused", "the cloud had 2 of 4") in list(cluster_lines(outcome.events))
    console = Console(file=io.StringIO(), width=200)
    lines = PlainLines(console, outcome.conditions.study)
    lines.tick(0.0)
    for event in outcome.events:
        lines.observe(event)
    assert isinstance(console.file, io.StringIO)
    assert "2 of four will not come: the cloud had 2 of 4" in console.file.getvalue()


def test_a_run_with_refusals_resumed_at_any_cut_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions, cloud = study(4, (4,), 8), MoodyCloud(gives=(0, 1))
    plan = [stage(1, 4, 4, 2, 2), stage(5, 8, 2, 4, 2)]
    follow(monkeypatch, Script([plan]))
    whole = MemoryJournal()
    controller_for(conditions, BEST_LAST[:4], whole, cloud=cloud).run()
    events = list(whole.events())
    for cut in range(1, len(events)):
        follow(monkeypatch, Script([plan]))
        partial = MemoryJournal()
        partial.append(events[:cut])
        controller_for(conditions, BEST_LAST[:4], partial, cloud=cloud).run()
        assert list(partial.events()) == events, f"cut after {cut} events"


def test_on_fewer_nodes_trials_share_or_take_turns_whichever_ends_first() -> None:
    conditions, planned = study(4, (), 8), stage(1, 8, 4, 4, 4)
    shared = on_fewer(conditions, planned, 4, 1, 1.0)
    assert (shared.gpus_per_trial, shared.at_once, shared.nodes, shared.trials) == (1, 4, 1, 4)
    steep = Scaling(((1, 1.0), (2, 1.5), (4, 9.0)))  # better than linear: few at a time
    conditions = replace(conditions, profile=replace(conditions.profile, scaling=steep))
    in_turns = on_fewer(conditions, planned, 4, 1, 1.0)
    assert (in_turns.gpus_per_trial, in_turns.at_once) == (4, 1)


class TestDelays:
    """The delays of nodes that came count for the next plan."""

    @staticmethod
    def came(t_s: float, queue_s: float, init_s: float) -> NodeAdded:
        return NodeAdded(
            t_s=t_s, node=Node("four-1", Resources(gpu=4), "four"), queue_s=queue_s, init_s=init_s
        )

    def test_what_was_believed_counts_as_one_more_observation(self) -> None:
        conditions = study(4, (), 8)
        arrivals = [self.came(160.0, 90.0, 50.0), self.came(190.0, 90.0, 80.0)]
        profile = with_seen_delays(conditions, arrivals).profile
        # One request of two nodes: one waiting time, two starts.
        assert profile.queue_s.mean == pytest.approx((QUEUE_S + 90.0) / 2)
        assert profile.queue_s.sd == pytest.approx(30.0)
        assert profile.init_s.mean == pytest.approx((INIT_S + 50.0 + 80.0) / 3)
        assert profile.init_s.sd == pytest.approx(np.std([INIT_S, 50.0, 80.0]))

    def test_nothing_believed_counts_for_nothing_and_nodes_that_were_there_tell_nothing(self) -> None:
        conditions = study(4, (), 8)
        there = [self.came(0.0, 0.0, 0.0)]
        assert with_seen_delays(conditions, there) is conditions
        unknown = replace(conditions, profile=replace(conditions.profile, queue_s=Spread(0.0)))
        seen = with_seen_delays(unknown, [*there, self.came(60.0, 10.0, 50.0)]).profile
        assert (seen.queue_s.mean, seen.queue_s.sd) == (10.0, 0.0)

    def test_a_plan_made_on_the_way_knows_how_long_nodes_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        script = follow(monkeypatch, Script([two_stages(), [stage(5, 8, 2, 4, 2)]], finish_s=120.0))
        conditions = study(4, (4,), 8)
        believed = replace(conditions.profile, init_s=Spread(INIT_S / 2))
        execute(replace(conditions, profile=believed), BEST_LAST[:4], epoch_s=[20.0] * 4, replan=0.15)
        (first, _), (again, start) = script.asked
        assert start is not None
        assert first.profile.init_s.mean == INIT_S / 2
        assert again.profile.init_s.mean == pytest.approx(0.75 * INIT_S)
