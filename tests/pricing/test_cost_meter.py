"""What a run cost, computed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_job
from stretto.core.allocation import NOTHING, BatchChoice, on_nodes
from stretto.core.cluster import Node
from stretto.core.errors import InputError
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobSubmitted,
    NodeAdded,
    NodeLaunched,
    NodeLost,
    NodeReleased,
    RunPaused,
    RunResumed,
    RunStarted,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.resources import Resources
from stretto.journal.folds.cost import BudgetCap, CostMeter
from stretto.pricing.billing import Billing, Per
from stretto.pricing.instances import Instance

FOUR = Instance(name="four", gpus=4, usd_per_hour=36.0)
"""A cent a second, a quarter of it for each GPU."""
ONE = Instance(name="one", gpus=1, usd_per_hour=18.0)
FUNCTION = Billing(per=Per.FUNCTION)


def node(node_id: str, instance: Instance = FOUR) -> Node:
    return Node(node_id, Resources(gpu=instance.gpus), instance.name)


def start(*nodes: Node) -> RunStarted:
    return RunStarted(t_s=0.0, identity={"policy": "p"}, nodes=nodes)


def told(t_s: float, action: Action, job: str, workers: dict[str, int] | None = None) -> Decided:
    allocation = on_nodes(workers) if workers else NOTHING
    one = Instruction(1, action, job, allocation, BatchChoice(1))
    return Decided(t_s=t_s, policy="p", instructions=(one,), reasons={}, memory=None)


def cost(events: Iterable[Event], until_s: float, billing: Billing | None = None) -> float:
    meter = CostMeter([FOUR, ONE], billing or Billing())
    for event in events:
        meter.observe(event)
    return meter.cost_usd(until_s)


class TestPerInstance:
    def test_a_node_whose_launch_failed_costs_nothing_not_even_the_least_or_its_data(self) -> None:
        events: list[Event] = [start(), NodeLaunched(t_s=5.0, node=node("a"))]
        billing = Billing(usd_per_gb=1.0, dataset_gb=2.0)
        failed = NodeReleased(t_s=8.0, node_id="a", never_came=True)
        assert cost([*events, failed], 100.0, billing) == 0.0
        assert cost([*events, replace(failed, never_came=False)], 100.0, billing) == pytest.approx(2.6)

    def test_r8_held_ten_seconds_costs_sixty(self) -> None:
        events: list[Event] = [
            start(),
            NodeAdded(t_s=100.0, node=node("a")),
            NodeReleased(t_s=110.0, node_id="a"),
        ]
        assert cost(events, 500.0) == pytest.approx(0.60)

    def test_starting_up_is_paid_for_and_queueing_is_not(self) -> None:
        added = NodeAdded(t_s=100.0, node=node("a"), queue_s=40.0, init_s=30.0)
        assert cost([start(), added, NodeReleased(t_s=200.0, node_id="a")], 999.0) == pytest.approx(1.30)

    def test_nodes_that_are_there_cost_from_the_start(self) -> None:
        assert cost([start(node("a"), node("b", ONE))], 100.0) == pytest.approx(1.0 + 0.5)

    def test_a_lost_node_is_paid_for_until_then(self) -> None:
        assert cost([start(node("a")), NodeLost(t_s=70.0, node_id="a")], 100.0) == pytest.approx(0.70)

    def test_a_node_of_the_same_name_is_paid_for_twice(self) -> None:
        events: list[Event] = [
            start(node("a")),
            NodeLost(t_s=70.0, node_id="a"),
            NodeAdded(t_s=100.0, node=node("a")),
        ]
        assert cost(events, 180.0) == pytest.approx(1.50)

    def test_time_is_charged_in_steps(self) -> None:
        billing = Billing(granularity_s=3600.0, minimum_s=0.0)
        assert cost([start(node("a"))], 3601.0, billing) == pytest.approx(72.0)

    @pytest.mark.parametrize("billing", [Billing(), FUNCTION])
    def test_time_between_sessions_costs_nothing(self, billing: Billing) -> None:
        events: list[Event] = [
            start(node("a")),
            JobSubmitted(t_s=0.0, job=make_job("j", 4)),
            told(0.0, Action.START, "j", {"a": 4}),
            RunPaused(t_s=100.0),
        ]
        resumed = [*events, RunResumed(t_s=1100.0, down_s=1000.0)]
        assert cost(resumed, 1100.0, billing) == cost(events, 100.0, billing) == pytest.approx(1.0)
        assert cost(resumed, 1150.0, billing) == pytest.approx(1.5)

    @pytest.mark.parametrize("before", [[], [RunPaused(t_s=50.0), RunResumed(t_s=100.0, down_s=0.0)]])
    def test_after_a_kill_rented_nodes_were_paid_for(self, before: list[Event]) -> None:
        """A dollar until the kill, ten until somebody came."""
        events = [start(node("a")), *before, RunResumed(t_s=1100.0, down_s=1000.0)]
        assert cost(events, 1100.0) == pytest.approx(11.0)

    def test_ones_own_nodes_cost_nothing_while_a_killed_run_is_down(self) -> None:
        meter = CostMeter([replace(FOUR, own=True)], Billing())
        for event in (start(node("a")), RunResumed(t_s=1100.0, down_s=1000.0)):
            meter.observe(event)
        assert meter.cost_usd(1100.0) == pytest.approx(1.0)

    def test_a_budget_holds_though_the_run_was_killed(self) -> None:
        cap = BudgetCap(CostMeter([FOUR], Billing()), 5.0)
        cap.observe(start(node("a")))
        assert 0.0 < cap.ends_s() < 500.0
        cap.observe(RunResumed(t_s=1100.0, down_s=1000.0))
        assert cap.ends_s() == 1100.0

    def test_nodes_that_nobody_rents_cost_nothing(self) -> None:
        assert cost([start(Node("mine", Resources(gpu=8)))], 1e6) == 0.0

    def test_what_trials_do_makes_no_difference(self) -> None:
        events: list[Event] = [
            start(node("a")),
            JobSubmitted(t_s=0.0, job=make_job("j")),
            told(0.0, Action.START, "j", {"a": 1}),
        ]
        assert cost(events, 100.0) == pytest.approx(1.0)

    def test_data_is_paid_for_every_node(self) -> None:
        billing = Billing(usd_per_gb=0.02, dataset_gb=150.0)
        events: list[Event] = [
            start(node("a")),
            NodeAdded(t_s=0.0, node=node("b")),
            NodeReleased(t_s=100.0, node_id="b"),
        ]
        assert cost(events, 100.0, billing) == pytest.approx(2.0 + 2 * 3.0)
        assert cost(events, 100.0, replace(billing, per=Per.FUNCTION)) == pytest.approx(2 * 3.0)


class TestPerFunction:
    def test_gpu_time_by_hand(self) -> None:
        """2 GPUs for 10 s, then 4 on two nodes for 20 s, a pause, then 1 dear GPU for 5 s."""
        events: list[Event] = [
            start(node("a"), node("b"), node("dear", ONE)),
            JobSubmitted(t_s=0.0, job=make_job("j", 2)),
            told(10.0, Action.START, "j", {"a": 2}),
            told(20.0, Action.RESIZE, "j", {"a": 3, "b": 1}),
            told(30.0, Action.SET_BATCH, "j", {"a": 3, "b": 1}),
            told(40.0, Action.PARK, "j"),
            told(90.0, Action.START, "j", {"dear": 1}),
        ]
        by_hand = 0.0025 * (2 * 10 + 4 * 20) + 0.005 * 5
        assert cost(events, 95.0, FUNCTION) == pytest.approx(by_hand)
        assert cost([*events, told(95.0, Action.STOP, "j")], 500.0, FUNCTION) == pytest.approx(by_hand)

    @pytest.mark.parametrize(
        "end",
        [
            JobFinished(t_s=20.0, job_id="j"),
            JobFailed(t_s=20.0, job_id="j", error="no"),
            WorkerLost(t_s=20.0, job_id="j", node="a"),
            NodeLost(t_s=20.0, node_id="a"),
        ],
    )
    def test_nothing_is_paid_after_the_end(self, end: Event) -> None:
        events: list[Event] = [
            start(node("a"), node("b")),
            JobSubmitted(t_s=0.0, job=make_job("j", 2)),
            told(10.0, Action.START, "j", {"a": 1, "b": 1}),
            end,
        ]
        assert cost(events, 500.0, FUNCTION) == pytest.approx(0.0025 * 2 * 10)

    @given(
        begins=st.lists(st.floats(0.0, 300.0), min_size=1, max_size=4),
        until_s=st.floats(300.0, 1000.0),
    )
    def test_r7_it_never_costs_more_than_the_nodes(self, begins: list[float], until_s: float) -> None:
        jobs: list[Event] = [JobSubmitted(t_s=0.0, job=make_job(str(i))) for i in range(len(begins))]
        starts = [told(t_s, Action.START, str(i), {"a": 1}) for i, t_s in enumerate(sorted(begins))]
        events: list[Event] = [start(node("a")), *jobs, *starts]
        assert cost(events, until_s, FUNCTION) <= cost(events, until_s) + 1e-12


class TestRefused:
    def test_a_node_without_a_price(self) -> None:
        with pytest.raises(InputError, match="no price"):
            cost([start(Node("a", Resources(gpu=1), "unheard-of"))], 1.0)

    def test_a_time_that_is_past(self) -> None:
        with pytest.raises(ValueError, match="the run is at 70"):
            cost([start(node("a")), NodeLost(t_s=70.0, node_id="a")], 60.0)
