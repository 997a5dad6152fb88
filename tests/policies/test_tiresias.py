"""Tiresias by hand: two queues, gangs dealt out in order, places with the most room."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_cluster, make_job, make_node, make_view
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.job import BatchLimits
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.tiresias import Tiresias

HOUR_GPU_S = 3600.0


def job(name: str, gpus: int, held: Allocation = NOTHING, served_h: float = 0.0) -> JobView:
    return make_view(make_job(name, gpus), held, attained_gpu_s=served_h * HOUR_GPU_S)


def decide(
    view: ClusterView, memory: Memory = None, policy: Tiresias | None = None
) -> tuple[Decision, Memory]:
    return (policy or Tiresias()).decide(view, memory, np.random.default_rng(0))


def running(decision: Decision) -> dict[str, int]:
    return {name: allocation.worker_count for name, allocation in decision.allocations.items()}


FOUR = [make_node("a", gpu=4)]


def test_first_come_first_served_within_the_upper_queue() -> None:
    decision, _ = decide(make_cluster(FOUR, [job("a", 2), job("b", 2), job("c", 2)]))
    assert running(decision) == {"a": 2, "b": 2}
    assert decision.reasons["c"].code is ReasonCode.WAITS


def test_one_that_does_not_fit_is_passed_over_and_later_ones_go_on() -> None:
    decision, _ = decide(make_cluster(FOUR, [job("a", 3), job("b", 2), job("c", 1)]))
    assert running(decision) == {"a": 3, "c": 1}


def test_a_job_falls_to_the_lower_queue_at_its_threshold() -> None:
    old, new = job("old", 4, on_nodes({"a": 4}), served_h=16.0), job("new", 4)
    decision, memory = decide(make_cluster(FOUR, [old, new]))
    assert memory == ["old"]
    assert running(decision) == {"new": 4}
    assert decision.reasons["old"].code is ReasonCode.PREEMPTED
    young = job("old", 4, on_nodes({"a": 4}), served_h=15.9)
    decision, memory = decide(make_cluster(FOUR, [young, new]))
    assert memory == []
    assert running(decision) == {"old": 4}


def test_the_lower_queue_is_served_in_the_order_of_the_falls() -> None:
    """First a and c fall together, in order of submission, then b; so b is last though submitted before c."""
    before = [job("a", 1, served_h=20), job("b", 1, served_h=1), job("c", 1, served_h=30)]
    _, memory = decide(make_cluster(FOUR, before))
    assert memory == ["a", "c"]
    after = [job("a", 2, served_h=20), job("b", 2, served_h=17), job("c", 2, served_h=30)]
    decision, memory = decide(make_cluster(FOUR, after), memory)
    assert memory == ["a", "c", "b"]
    assert running(decision) == {"a": 2, "c": 2}


def test_a_fallen_job_never_rises_and_a_gone_one_is_forgotten() -> None:
    view = make_cluster(FOUR, [job("a", 4, served_h=0.0), job("b", 4)])
    decision, memory = decide(view, ["gone", "a"])
    assert memory == ["a"]
    assert running(decision) == {"b": 4}


def test_starting_jobs_go_to_the_nodes_with_the_most_free_gpus() -> None:
    nodes = [make_node("a", gpu=2), make_node("b", gpu=4), make_node("c", gpu=3)]
    decision, _ = decide(make_cluster(nodes, [job("x", 1), job("y", 5)]))
    assert decision.allocations["x"].workers == (("b", 1),)
    assert decision.allocations["y"].workers == (("b", 3), ("c", 2))


def test_running_jobs_stay_where_they_are() -> None:
    nodes = [make_node("a", gpu=2), make_node("b", gpu=4)]
    held = on_nodes({"a": 1, "b": 1})
    decision, _ = decide(make_cluster(nodes, [job("new", 3), job("old", 2, held)]))
    assert decision.allocations["old"] is held
    assert decision.allocations["new"].workers == (("b", 3),)
    assert "old" not in decision.reasons


def test_a_job_that_may_not_be_preempted_comes_first() -> None:
    held = on_nodes({"a": 3})
    fixed = make_view(make_job("np", 3, preemptible=False), held, attained_gpu_s=100 * HOUR_GPU_S)
    decision, memory = decide(make_cluster(FOUR, [job("a", 4), job("b", 1), fixed]))
    assert memory == ["np"]
    assert running(decision) == {"np": 3, "b": 1}


def test_it_wakes_when_the_first_of_the_running_jobs_falls() -> None:
    """One GPU hour on four GPUs is a quarter of an hour for a; b has 6 / 2 = 3 hours left, and c waits."""
    nodes = [make_node("a", gpu=6)]
    view = make_cluster(
        nodes, [job("a", 4, served_h=15), job("b", 2, served_h=10), job("c", 1, served_h=15.99)]
    )
    decision, _ = decide(view)
    assert decision.wake_at_s == pytest.approx(900.0)
    fallen, _ = decide(make_cluster(nodes, [job("a", 4, served_h=17)]))
    assert fallen.wake_at_s is None


def test_the_threshold_is_an_option() -> None:
    view = make_cluster(FOUR, [job("a", 4, served_h=2), job("b", 4)])
    assert running(decide(view, policy=Tiresias(threshold_gpu_h=1.0))[0]) == {"b": 4}
    assert running(decide(view, policy=Tiresias(threshold_gpu_h=3.0))[0]) == {"a": 4}


def test_jobs_run_with_the_batch_they_asked_for() -> None:
    limits = BatchLimits(initial=100, requested=300, max=1000, per_gpu_min=1, per_gpu_max=80)
    decision, _ = decide(make_cluster(FOUR, [make_view(make_job("a", 2, batch=limits))]))
    assert decision.batches["a"] == BatchChoice(75, 1)


def test_a_job_that_holds_another_number_than_it_asked_for_is_given_its_own() -> None:
    """As in a snapshot of a cluster that another policy ran."""
    held = make_view(make_job("x", 2, least=1, most=4), on_nodes({"a": 1}))
    decision, _ = decide(make_cluster(FOUR, [held, job("y", 2)]))
    assert running(decision) == {"x": 2, "y": 2}
