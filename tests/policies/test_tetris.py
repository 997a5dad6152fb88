"""Tetris: scores by hand, growth to the requested size, and no taking back."""

from __future__ import annotations

import numpy as np
import pytest

from builders import believing, make_cluster, make_job, make_node, make_view, steady_speed
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.decision import Decision
from stretto.core.job import Role, Work
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView, JobView
from stretto.policies.tetris import Tetris


def decide(view: ClusterView, eps: float = 1.0) -> Decision:
    return Tetris(eps=eps).decide(view, None, np.random.default_rng(0))[0]


def task(job_id: str, cpu: float, memory_gib: float, left_s: float) -> JobView:
    """A job of one task with that many seconds to go, at a step a second."""
    job = make_job(
        job_id,
        demand=Resources(cpu=cpu, memory_gib=memory_gib),
        work=Work(units_per_epoch=left_s, epochs=1),
    )
    return make_view(job, belief=believing(steady_speed(1.0)))


def test_each_task_goes_where_it_fits_the_shape() -> None:
    """Alignments on the empty nodes x (8 CPU, 32 GiB) and y (16 CPU, 16 GiB), where free / capacity = 1:

    a (4 CPU, 4 GiB)    x: 4/8 + 4/32 = 0.625      y: 4/16 + 4/16 = 0.5
    b (2 CPU, 8 GiB)    x: 2/8 + 8/32 = 0.5        y: 2/16 + 8/16 = 0.625
    """
    nodes = [Node("x", Resources(cpu=8, memory_gib=32)), Node("y", Resources(cpu=16, memory_gib=16))]
    jobs = [task("b", 2, 8, 100), task("a", 4, 4, 100)]
    decision = decide(make_cluster(nodes, jobs), eps=0.0)
    assert decision.allocations == {"a": on_nodes({"x": 1}), "b": on_nodes({"y": 1})}
    assert "alignment 0.625 less 0" in decision.reasons["a"].text


def test_what_is_free_counts_not_only_what_there_is() -> None:
    """Node x has 2 of 8 CPUs and 30 of 32 GiB free, y 6 of 8 CPUs and 10 of 32 GiB.

    b (1 CPU, 8 GiB)    x: 1/8 * 2/8 + 8/32 * 30/32 = 0.2656     y: 1/8 * 6/8 + 8/32 * 10/32 = 0.1719
    c (2 CPU, 1 GiB)    x: 2/8 * 2/8 + 1/32 * 30/32 = 0.0918     y: 2/8 * 6/8 + 1/32 * 10/32 = 0.1973
    """
    nodes = [Node(node_id, Resources(cpu=8, memory_gib=32)) for node_id in ("x", "y")]
    on_x = make_view(make_job("p", demand=Resources(cpu=6, memory_gib=2)), on_nodes({"x": 1}))
    on_y = make_view(make_job("q", demand=Resources(cpu=2, memory_gib=22)), on_nodes({"y": 1}))
    jobs = [on_x, on_y, task("b", 1, 8, 100), task("c", 2, 1, 100)]
    decision = decide(make_cluster(nodes, jobs), eps=0.0)
    assert decision.allocations["b"] == on_nodes({"x": 1})
    assert decision.allocations["c"] == on_nodes({"y": 1})
    assert "alignment 0.266" in decision.reasons["b"].text
    assert "alignment 0.197" in decision.reasons["c"].text


@pytest.mark.parametrize(("eps", "winner"), [(0.0, "a"), (1.0, "b")])
def test_little_remaining_work_against_alignment(eps: float, winner: str) -> None:
    """One node of 4 CPU and 8 GiB holds a or b, not both.

                       alignment            remaining work      score at eps = 1, weight 1.625 / 950
    a (4 CPU, 6 GiB)   4/4 + 6/8 = 1.75     1000 * 1.75 = 1750   1.75 - 2.993 = -1.243
    b (2 CPU, 8 GiB)   2/4 + 8/8 = 1.5       100 * 1.5  =  150   1.5  - 0.257 =  1.243
    mean               1.625                              950
    """
    view = make_cluster([make_node("0", cpu=4, memory_gib=8)], [task("a", 4, 6, 1000), task("b", 2, 8, 100)])
    decision = decide(view, eps)
    assert set(decision.allocations) == {winner}
    if winner == "b":
        assert "alignment 1.5 less 0.257 for remaining work" in decision.reasons["b"].text


def test_a_job_nothing_is_known_of_counts_as_having_no_work_left() -> None:
    unknown = make_view(make_job("u", demand=Resources(cpu=2, memory_gib=8)))
    view = make_cluster([make_node("0", cpu=4, memory_gib=8)], [task("a", 4, 6, 1000), unknown])
    assert set(decide(view).allocations) == {"u"}


def test_growth_to_the_requested_size_and_no_further() -> None:
    running = make_view(make_job("e", 3, least=1, most=8), on_nodes({"0": 1}))
    decision = decide(make_cluster(gpu_nodes(2, 4), [running]))
    assert decision.allocations == {"e": on_nodes({"0": 3})}


def test_a_job_that_may_not_be_preempted_does_not_grow_once_it_runs() -> None:
    pinned = make_job("p", 3, least=1, most=8, preemptible=False)
    running = make_view(pinned, on_nodes({"0": 1}))
    assert decide(make_cluster(gpu_nodes(1, 4), [running])).allocations == {"p": running.allocation}
    starting = make_view(pinned)
    assert decide(make_cluster(gpu_nodes(1, 4), [starting])).allocations == {"p": on_nodes({"0": 3})}


def test_running_jobs_keep_at_least_what_they_have() -> None:
    running = make_view(make_job("e", 1, least=1, most=8), on_nodes({"0": 4}))
    decision = decide(make_cluster(gpu_nodes(1, 4), [running, make_view(make_job("new"))]))
    assert decision.allocations == {"e": running.allocation}
    assert decision.reasons["new"].text == "Needs 1 worker together, and less is free."


def test_a_rigid_gang_wider_than_a_node_is_packed_whole() -> None:
    jobs = [make_view(make_job("wide", 6)), make_view(make_job("wider", 6)), make_view(make_job("one"))]
    decision = decide(make_cluster(gpu_nodes(2, 4), jobs))
    assert decision.allocations["wide"].worker_count == 6
    assert set(decision.allocations) == {"wide", "one"}


def test_worker_and_server_may_be_on_different_nodes() -> None:
    server = Role(demand=Resources(cpu=8))
    job = make_view(make_job("a", demand=Resources(gpu=1, cpu=1), server=server))
    nodes = [make_node("cpus", cpu=8), make_node("gpus", gpu=4, cpu=4)]
    assert decide(make_cluster(nodes, [job])).allocations == {"a": Allocation((("gpus", 1),), (("cpus", 1),))}
