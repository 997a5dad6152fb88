"""Nodes that come and go, without any cluster: what is asked for, what is told, what is remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stretto.core.cluster import Node, Wish
from stretto.core.events import (
    Decided,
    Event,
    NodeAdded,
    NodeDraining,
    NodeLaunched,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunStarted,
)
from stretto.core.resources import Resources
from stretto.substrate.fleet.fleet import Fleet
from stretto.substrate.fleet.nodes import (
    FleetStep,
    LaunchFailure,
    LaunchNode,
    NodeKind,
    ReleaseNode,
    SeenNode,
)

FOUR = NodeKind("four", 4)


def seen(name: str, *, instance: str = "four", key: str = "", draining: bool = False) -> SeenNode:
    return SeenNode(key=key or f"key-{name}", name=name, slots=4, instance=instance, draining=draining)


def node(name: str, instance: str = "four") -> Node:
    return Node(name, Resources(gpu=4), instance)


def wish(count: int, *release: str) -> Wish:
    return Wish((("four", count),), release)


def fleet_with(*names: str) -> Fleet:
    """These nodes were wished for at 0 s and came at 10 s."""
    fleet = Fleet([FOUR])
    fleet.wish(wish(len(names)), 0.0)
    for name in names:
        fleet.began(name, 2.0)
    fleet.see([seen(name) for name in names], 10.0)
    return fleet


def kinds(step: FleetStep) -> list[str]:
    return [event.kind for event in step.events]


def decided(t_s: float, wished: Wish) -> Decided:
    return Decided(t_s=t_s, policy="test", instructions=(), reasons={}, memory=None, wish=wished)


def started(*nodes: Node) -> RunStarted:
    return RunStarted(t_s=0.0, identity={"policy": "test"}, nodes=nodes)


class TestGrowing:
    def test_delays_are_those_of_the_request_and_of_the_start(self) -> None:
        fleet = Fleet([FOUR])
        asked = fleet.wish(wish(1), 5.0)
        assert asked.orders == [LaunchNode("four-1", "four")]
        assert asked.events == []
        assert fleet.began("four-1", 12.0).events == [NodeLaunched(t_s=12.0, node=node("four-1"))]
        came = fleet.see([replace(seen("four-1"), slots=3)], 30.0)
        there = Node("four-1", Resources(gpu=3), "four")
        assert came.events == [NodeAdded(t_s=30.0, node=there, queue_s=7.0, init_s=18.0)]
        assert fleet.see([seen("four-1")], 31.0) == FleetStep()
        assert fleet.key_of("four-1") == "key-four-1"

    def test_a_node_that_is_there_before_word_of_its_start_is_launched_first(self) -> None:
        fleet = Fleet([FOUR])
        fleet.wish(wish(1), 0.0)
        assert kinds(fleet.see([seen("four-1")], 5.0)) == ["node-launched", "node-added"]
        assert fleet.began("four-1", 6.0) == FleetStep()

    def test_failures_are_told_together_and_nobody_asks_again_by_himself(self) -> None:
        fleet = Fleet([FOUR])
        fleet.wish(wish(3), 0.0)
        fleet.began("four-1", 1.0)
        fails = {f"four-{number}": LaunchFailure("no quota", f"{number}.log") for number in (1, 2)}
        step = fleet.failed({**fails, "four-9": LaunchFailure("never heard of")}, 2.0)
        assert step.orders == [ReleaseNode("four-1"), ReleaseNode("four-2")]
        assert step.events == [
            NodeReleased(t_s=2.0, node_id="four-1", never_came=True),
            NodeRefused(t_s=2.0, instance="four", count=2, why="no quota (log: 1.log)"),
        ]
        assert fleet.wish(wish(1), 3.0) == FleetStep()
        assert fleet.wish(wish(2), 4.0).orders == [LaunchNode("four-4", "four")]

    def test_what_does_not_come_in_time_is_taken_back(self) -> None:
        fleet = Fleet([FOUR], start_s=60.0)
        fleet.wish(wish(1), 0.0)
        assert fleet.see([], 59.0) == FleetStep()
        step = fleet.see([], 60.0)
        assert step.orders == [ReleaseNode("four-1")]
        (refused,) = step.events
        assert isinstance(refused, NodeRefused)
        assert "1m 00s after" in refused.why

    def test_what_was_begun_and_is_late_costs_nothing_but_what_is_taken_back_does(self) -> None:
        fleet = Fleet([FOUR], start_s=60.0)
        fleet.wish(wish(1), 0.0)
        fleet.began("four-1", 1.0)
        assert fleet.see([], 60.0).events[0] == NodeReleased(t_s=60.0, node_id="four-1", never_came=True)
        fleet.wish(wish(1), 70.0)
        fleet.began("four-2", 71.0)
        assert fleet.wish(wish(0), 80.0).events == [NodeReleased(t_s=80.0, node_id="four-2")]

    def test_a_node_that_comes_after_it_was_taken_back_is_let_go_of_again(self) -> None:
        fleet = Fleet([FOUR], start_s=60.0)
        fleet.wish(wish(1), 0.0)
        fleet.see([], 60.0)
        assert fleet.see([seen("four-1")], 70.0) == FleetStep([ReleaseNode("four-1", "key-four-1")])
        assert fleet.see([seen("four-1")], 71.0) == FleetStep()

    def test_a_fixed_cluster_refuses_and_a_kind_that_is_not_there_too(self) -> None:
        (told,) = Fleet().wish(wish(2), 0.0).events
        assert told == NodeRefused(t_s=0.0, instance="four", count=2, why="this cluster has fixed nodes")
        (told,) = Fleet([FOUR]).wish(Wish((("eight", 1),)), 0.0).events
        assert isinstance(told, NodeRefused)
        assert "nodes of four only" in told.why


class TestShrinking:
    def test_what_is_still_coming_goes_first_and_the_last_of_it(self) -> None:
        fleet = fleet_with("four-1")
        fleet.wish(wish(4), 20.0)
        fleet.began("four-2", 21.0)
        step = fleet.wish(wish(2), 22.0)
        assert step.orders == [ReleaseNode("four-3"), ReleaseNode("four-4")]
        assert step.events == []
        assert fleet.wish(wish(1), 23.0).events == [NodeReleased(t_s=23.0, node_id="four-2")]

    def test_a_node_is_given_back_by_name_and_not_met_again_while_it_lingers(self) -> None:
        fleet = fleet_with("four-1", "four-2")
        assert fleet.wish(wish(1, "four-1"), 19.0) == FleetStep(), "somebody is still there"
        step = fleet.release(["four-1"], 20.0)
        assert step == FleetStep(
            [ReleaseNode("four-1", "key-four-1")], [NodeReleased(t_s=20.0, node_id="four-1")]
        )
        both = [seen("four-1"), seen("four-2")]
        assert fleet.see(both, 21.0) == FleetStep()
        assert fleet.see(both[1:], 22.0) == FleetStep()
        assert fleet.key_of("four-1") is None

    def test_in_the_place_of_a_node_another_is_asked_for_once_it_is_given_back(self) -> None:
        fleet = fleet_with("four-1", "four-2")
        fleet.wish(wish(3), 20.0)
        assert fleet.wish(wish(3, "four-1"), 21.0) == FleetStep(), "nor is what is on the way taken back"
        assert fleet.release(["four-1"], 22.0).orders[1:] == [LaunchNode("four-4", "four")]

    def test_what_was_refused_is_not_asked_for_again_when_a_node_is_given_back(self) -> None:
        fleet = fleet_with("four-1", "four-2")
        assert fleet.wish(wish(3, "four-1"), 20.0).orders == [LaunchNode("four-3", "four")]
        fleet.failed({"four-3": LaunchFailure("full")}, 21.0)
        assert fleet.release(["four-1"], 22.0).orders[1:] == [LaunchNode("four-4", "four")], (
            "in its place only"
        )

    def test_everything_is_let_go_of_in_the_end_but_what_is_simply_there(self) -> None:
        fleet = Fleet([FOUR])
        assert fleet.begin([seen("own", instance="")]) == [node("own", "")]
        fleet.wish(wish(2), 0.0)
        fleet.see([seen("own", instance=""), seen("four-1")], 5.0)
        assert set(fleet.close()) == {ReleaseNode("four-1", "key-four-1"), ReleaseNode("four-2")}


class TestLosing:
    def test_a_node_that_vanishes_is_lost_and_must_be_wished_for_again(self) -> None:
        fleet = fleet_with("four-1", "four-2")
        step = fleet.see([seen("four-2")], 20.0)
        assert step == FleetStep(
            [ReleaseNode("four-1", "key-four-1")], [NodeLost(t_s=20.0, node_id="four-1")]
        )
        assert fleet.wish(wish(2), 21.0).orders == [LaunchNode("four-3", "four")]

    def test_a_node_that_drains_is_told_once_and_does_not_count_any_more(self) -> None:
        fleet = fleet_with("four-1")
        drains = [seen("four-1", draining=True)]
        assert fleet.see(drains, 20.0).events == [NodeDraining(t_s=20.0, node_id="four-1")]
        assert fleet.see(drains, 21.0) == FleetStep()
        assert fleet.wish(wish(1), 22.0).orders == [LaunchNode("four-2", "four")]
        assert kinds(fleet.see([], 23.0)) == ["node-lost"]
        assert fleet.wish(wish(1), 24.0) == FleetStep()

    def test_nodes_that_are_simply_there_come_and_go(self) -> None:
        fleet = Fleet()
        fleet.begin([seen("a", instance="")])
        step = fleet.see([seen("a", instance=""), seen("b", instance="strange")], 1.0)
        assert step == FleetStep([], [NodeAdded(t_s=1.0, node=node("b", ""))])
        assert fleet.see([seen("b", instance="strange")], 2.0) == FleetStep(
            [], [NodeLost(t_s=2.0, node_id="a")]
        )

    def test_what_came_and_went_since_the_start_was_looked_at_is_told(self) -> None:
        fleet = Fleet([FOUR])
        first = [node("a", ""), node("gone", "")]
        now = [seen("a", instance=""), seen("new", instance="")]
        assert fleet.begin(now, first) == first
        assert (fleet.key_of("a"), fleet.key_of("gone")) == ("key-a", "")
        assert fleet.see(now, 1.0).events == [
            NodeLost(t_s=1.0, node_id="gone"),
            NodeAdded(t_s=1.0, node=node("new", "")),
        ]
        assert fleet.see(now, 2.0) == FleetStep()

    @pytest.mark.parametrize("lost", ["four-1", "four-2"])
    def test_a_node_that_leaves_was_not_counted_on(self, lost: str) -> None:
        fleet = fleet_with("four-1", "four-2")
        fleet.wish(wish(2, "four-1"), 20.0)
        fleet.see([seen(name) for name in ("four-1", "four-2") if name != lost], 21.0)
        step = fleet.release(["four-1"], 22.0)
        # Two were wanted besides the first: one is there, or was and must be wished for again.
        assert [order for order in step.orders if isinstance(order, LaunchNode)] == [
            LaunchNode("four-3", "four")
        ]

    @pytest.mark.parametrize("adopts", [False, True])
    def test_a_node_that_is_given_up_is_released_and_not_met_again(self, adopts: bool) -> None:
        fleet = Fleet([FOUR], adopts=adopts)
        fleet.wish(wish(1), 0.0)
        here = [seen("four-1"), seen("own", instance="")]
        fleet.see(here, 1.0)
        assert fleet.give_up("four-1") == FleetStep([ReleaseNode("four-1", "key-four-1")]), (
            "its loss was told before"
        )
        assert fleet.give_up("own") == FleetStep()
        assert fleet.see(here, 2.0) == FleetStep()
        assert fleet.release([], 3.0) == FleetStep(), "whoever wants another must wish for it"
        assert fleet.wish(wish(1), 4.0).orders == [LaunchNode("four-2", "four")]
        assert fleet.close() == [ReleaseNode("four-2")]
        restarted = [seen("own", instance="", key="another life")]
        assert kinds(fleet.see(restarted, 5.0)) == ["node-added"]

    def test_another_life_of_a_node_is_another_node(self) -> None:
        fleet = Fleet()
        fleet.begin([seen("a", instance="", key="first")])
        assert kinds(fleet.see([seen("a", instance="", key="second")], 1.0)) == ["node-lost", "node-added"]

    def test_two_nodes_of_one_name_are_told_apart(self) -> None:
        fleet = Fleet()
        there = fleet.begin([seen("a", instance="", key="1111111"), seen("a", instance="", key="2222222")])
        assert [one.id for one in there] == ["a", "a-222222"]

    def test_nodes_of_our_kinds_that_others_launched_are_left_alone(self) -> None:
        fleet = Fleet([FOUR], prefix="mine-")
        asked = fleet.wish(wish(1), 0.0)
        assert asked.orders == [LaunchNode("mine-four-1", "four")]
        assert fleet.see([seen("yours-four-1"), seen("four-1"), seen("somebody")], 1.0) == FleetStep()


class TestAdopting:
    def test_nodes_without_names_go_to_those_who_wait_longest(self) -> None:
        fleet = Fleet([FOUR], adopts=True)
        fleet.wish(wish(2), 0.0)
        fleet.began("four-1", 0.0)
        fleet.began("four-2", 0.0)
        step = fleet.see([seen("n7")], 9.0)
        assert step.events == [NodeAdded(t_s=9.0, node=node("four-1"), queue_s=0.0, init_s=9.0)]
        assert fleet.key_of("four-1") == "key-n7"
        assert kinds(fleet.see([seen("n7"), seen("n8")], 12.0)) == ["node-added"]

    def test_nodes_that_nobody_wished_for_are_not_ours_until_somebody_does(self) -> None:
        fleet = Fleet([FOUR], adopts=True)
        assert fleet.begin([seen("n7")]) == []
        assert fleet.see([seen("n7")], 1.0) == FleetStep()
        step = fleet.wish(wish(1), 2.0)
        assert step.orders == [LaunchNode("four-1", "four")]
        assert kinds(step) == ["node-launched", "node-added"]
        fleet.wish(wish(0, "four-1"), 3.0)
        assert fleet.release(["four-1"], 3.0).orders == [ReleaseNode("four-1", "key-n7")]
        assert fleet.see([seen("n7")], 4.0) == FleetStep()
        assert fleet.see([], 5.0) == FleetStep()


class TestRecalling:
    def test_what_is_still_there_stays_and_what_is_not_is_lost(self) -> None:
        history: list[Event] = [
            started(node("own", "")),
            decided(0.0, wish(3)),
            *(NodeLaunched(t_s=1.0, node=node(f"four-{number}")) for number in (1, 2, 3)),
            NodeAdded(t_s=9.0, node=node("four-1"), init_s=8.0),
            NodeAdded(t_s=9.0, node=node("four-2"), init_s=8.0),
        ]
        fleet = Fleet([FOUR])
        alive = [seen("own", instance=""), seen("new", instance=""), seen("four-1"), seen("four-3")]
        assert fleet.see(alive, 99.0).orders == [], "nothing is left over before the record was read"
        step = fleet.recall(history, alive, 100.0)
        assert step.orders == [ReleaseNode("four-2", "")]
        assert step.events == [
            NodeLost(t_s=100.0, node_id="four-2"),
            NodeAdded(t_s=100.0, node=node("new", "")),
            NodeAdded(t_s=100.0, node=node("four-3")),
        ]
        assert fleet.wish(wish(2), 101.0) == FleetStep()

    def test_a_request_under_way_is_found_again_when_it_arrives(self) -> None:
        fleet = Fleet([FOUR], start_s=60.0)
        history: list[Event] = [decided(0.0, wish(1)), NodeLaunched(t_s=1.0, node=node("four-1"))]
        assert fleet.recall(history, [], 200.0) == FleetStep()
        (added,) = fleet.see([seen("four-1")], 230.0).events
        assert added == NodeAdded(t_s=230.0, node=node("four-1"), init_s=229.0)

    def test_a_request_under_way_has_time_again_to_arrive(self) -> None:
        fleet = Fleet([FOUR], start_s=60.0)
        fleet.recall([decided(0.0, wish(1)), NodeLaunched(t_s=1.0, node=node("four-1"))], [], 200.0)
        assert fleet.see([], 259.0) == FleetStep()
        assert kinds(fleet.see([], 260.0)) == ["node-released", "node-refused"]

    def test_the_last_wish_holds(self) -> None:
        history: list[Event] = [
            decided(0.0, wish(3)),
            *(NodeLaunched(t_s=1.0, node=node(f"four-{number}")) for number in (1, 2)),
            *(NodeAdded(t_s=5.0, node=node(f"four-{number}")) for number in (1, 2)),
            NodeRefused(t_s=6.0, instance="four", count=1, why="full"),
            NodeLost(t_s=7.0, node_id="four-2"),
            decided(8.0, wish(4, "four-1")),
            NodeLaunched(t_s=9.0, node=node("four-4")),
        ]
        fleet = Fleet([FOUR])
        step = fleet.recall(history, [seen("four-1")], 20.0)
        assert step.events == [NodeReleased(t_s=20.0, node_id="four-1")]
        # Four may have been asked for and not recorded, so names go on after those.
        assert step.orders == [
            ReleaseNode("four-1", "key-four-1"),
            *(LaunchNode(f"four-{number}", "four") for number in (9, 10, 11)),
        ]

    def test_launches_that_the_record_does_not_have_are_ended(self) -> None:
        """Of a controller that was killed before it wrote, and of releases that failed."""
        history: list[Event] = [
            decided(0.0, wish(2)),
            NodeLaunched(t_s=1.0, node=node("four-1")),
            NodeLaunched(t_s=1.0, node=node("four-2")),
            NodeAdded(t_s=5.0, node=node("four-1")),
            NodeLost(t_s=6.0, node_id="four-1"),
        ]
        names = [f"four-{number}" for number in (1, 2, 3, 4)]
        step = Fleet([FOUR]).recall(history, [seen("four-4")], 20.0, launched=names)
        assert step.orders == [
            ReleaseNode("four-4", "key-four-4"),
            ReleaseNode("four-1"),
            ReleaseNode("four-3"),
        ]

    @pytest.mark.parametrize("gone", [1, 2])
    def test_nodes_without_names_are_as_good_as_any_of_their_kind(self, gone: int) -> None:
        history: list[Event] = [decided(0.0, wish(2))]
        for name in ("four-1", "four-2"):
            history += [NodeLaunched(t_s=1.0, node=node(name)), NodeAdded(t_s=5.0, node=node(name))]
        fleet = Fleet([FOUR], adopts=True)
        step = fleet.recall(history, [seen("n7"), seen("n8")][gone:], 20.0)
        assert kinds(step) == ["node-lost"] * gone
        assert fleet.wish(wish(2 - gone), 21.0) == FleetStep()


class Weather(RuleBasedStateMachine):
    """A fleet in a cluster where anything may happen, and the books that are kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.t_s = 0.0
        self.fleet = Fleet([FOUR], start_s=50.0)
        self.ends: dict[str, int] = {}
        """How often each launch has ended: the node came, or it was let go of before."""
        self.costs: dict[str, bool] = {}
        """Whether each node that ever cost still does."""
        self.here: set[str] = set()
        self.draining: set[str] = set()
        self.alive: dict[str, SeenNode] = {}
        self.refused = 0

    def take(self, step: FleetStep) -> None:
        for order in step.orders:
            if isinstance(order, LaunchNode):
                assert order.name not in self.ends
                self.ends[order.name] = 0
            else:
                self.alive.pop(order.name, None)
                self.ends[order.name] += order.name not in self.here
        for event in step.events:
            self.note(event)

    def note(self, event: Event) -> None:
        match event:
            case NodeLaunched():
                assert event.node.id not in self.costs
                self.costs[event.node.id] = True
            case NodeAdded():
                assert self.costs[event.node.id]
                self.ends[event.node.id] += 1
                self.here.add(event.node.id)
            case NodeReleased() | NodeLost():
                assert self.costs[event.node_id]
                self.costs[event.node_id] = False
                self.here.discard(event.node_id)
            case NodeDraining():
                self.draining.add(event.node_id)
            case NodeRefused():
                self.refused += event.count
            case _:
                raise AssertionError(event)

    def on_the_way(self) -> list[str]:
        return [name for name, ends in self.ends.items() if not ends]

    @rule(count=st.integers(0, 4), data=st.data())
    def wishes(self, count: int, data: st.DataObject) -> None:
        free = sorted(self.here - self.draining)
        release = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        before = len(free) - len(release) + len(self.on_the_way())
        first = self.fleet.wish(wish(count, *release), self.t_s)
        assert not {order.name for order in first.orders} & self.here
        then = self.fleet.release(release, self.t_s)
        launches = [order for step in (first, then) for order in step.orders if isinstance(order, LaunchNode)]
        assert len(launches) == max(count - before, 0)
        self.take(first)
        self.take(then)
        assert not launches or not any(isinstance(order, ReleaseNode) for order in first.orders), (
            "no to and fro"
        )
        assert self.fleet.wish(wish(count, *release), self.t_s) == FleetStep()
        assert self.fleet.release(release, self.t_s) == FleetStep()

    @precondition(lambda self: self.on_the_way())
    @rule(data=st.data())
    def begins(self, data: st.DataObject) -> None:
        self.take(self.fleet.began(data.draw(st.sampled_from(self.on_the_way())), self.t_s))

    @precondition(lambda self: self.on_the_way())
    @rule(data=st.data())
    def fails(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.on_the_way()), unique=True, min_size=1))
        before = self.refused
        self.take(self.fleet.failed(dict.fromkeys(names, LaunchFailure("broken")), self.t_s))
        assert self.refused == before + len(names)

    @precondition(lambda self: self.on_the_way())
    @rule(data=st.data())
    def arrives(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.on_the_way()))
        self.alive[name] = seen(name)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), drains=st.booleans())
    def goes(self, data: st.DataObject, drains: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        if drains:
            self.alive[name] = replace(self.alive[name], draining=True)
        else:
            del self.alive[name]

    @rule(later_s=st.sampled_from((1.0, 20.0, 60.0)))
    def looks(self, later_s: float) -> None:
        self.t_s += later_s
        self.take(self.fleet.see(list(self.alive.values()), self.t_s))

    @invariant()
    def no_launch_ends_twice(self) -> None:
        assert all(ends <= 1 for ends in self.ends.values())
        assert {name for name, costs in self.costs.items() if costs} <= {*self.here, *self.on_the_way()}

    def teardown(self) -> None:
        release = tuple(sorted(self.here))
        self.take(self.fleet.wish(wish(0, *release), self.t_s))
        self.take(self.fleet.release(release, self.t_s))
        assert all(ends == 1 for ends in self.ends.values())
        assert not any(self.costs.values())


TestWeather = Weather.TestCase
TestWeather.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
