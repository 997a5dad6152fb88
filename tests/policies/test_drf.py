"""Dominant resource fairness: the textbook example, bundles, and who stays where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_cluster, make_job, make_node, make_view
from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.job import Role
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView
from stretto.policies.drf import Drf


def decide(view: ClusterView) -> Decision:
    return Drf().decide(view, None, np.random.default_rng(0))[0]


def counts(decision: Decision) -> dict[str, int]:
    return {job_id: allocation.worker_count for job_id, allocation in decision.allocations.items()}


def test_nine_cpus_and_eighteen_gib() -> None:
    """A takes 1 CPU and 4 GiB a task, B 3 CPU and 1 GiB.

    Shares grow by 4/18 = 2/9 (A, memory) and 3/9 (B, CPU): A 2/9, B 3/9, A 4/9, B 6/9, A 6/9. Then all nine
    CPUs (3 + 6) and 14 GiB (12 + 2) are used.
    """
    a = make_job("a", 1, demand=Resources(cpu=1, memory_gib=4), most=20)
    b = make_job("b", 1, demand=Resources(cpu=3, memory_gib=1), most=20)
    view = make_cluster([make_node("0", cpu=9, memory_gib=18)], [make_view(a), make_view(b)])
    decision = decide(view)
    assert counts(decision) == {"a": 3, "b": 2}
    assert decision.reasons["a"].text == (
        "Its dominant share goes from 0.0% to 66.7% with 3 workers, the smallest share first."
    )


def test_a_job_that_needs_little_does_not_hold_the_others_back() -> None:
    """A has its maximum of 1 GPU; b and c share the other seven, the earlier one gets the odd one."""
    jobs = [make_job("a"), make_job("b", most=8), make_job("c", most=8)]
    decision = decide(make_cluster(gpu_nodes(2, 4), [make_view(job) for job in jobs]))
    assert counts(decision) == {"a": 1, "b": 4, "c": 3}


def test_rigid_gangs_come_whole_or_not_at_all() -> None:
    """r, s and e start at share 0, in this order; s does not fit and e takes what is left of its maximum."""
    jobs = [make_job("r", 6), make_job("s", 4), make_job("e", most=8)]
    decision = decide(make_cluster(gpu_nodes(2, 4), [make_view(job) for job in jobs]))
    assert counts(decision) == {"r": 6, "e": 2}
    assert decision.reasons["s"].text == "Needs 4 workers together, and less is free."


def test_bundles_of_parameter_server_jobs() -> None:
    """First the smallest gang of 2 workers and 1 server; nine CPUs hold three pairs more."""
    server = Role(demand=Resources(cpu=1), min=1, max=10)
    job = make_job("a", 2, demand=Resources(gpu=1, cpu=1), least=2, most=10, server=server)
    decision = decide(make_cluster([make_node("0", gpu=8, cpu=9)], [make_view(job)]))
    assert decision.allocations == {"a": Allocation((("0", 5),), (("0", 4),))}


def test_a_job_with_its_servers_at_the_maximum_gets_workers_only() -> None:
    server = Role(demand=Resources(cpu=1), min=1, max=2)
    job = make_job("a", 1, demand=Resources(gpu=1), most=4, server=server)
    decision = decide(make_cluster([make_node("0", gpu=8, cpu=9)], [make_view(job)]))
    assert decision.allocations == {"a": Allocation((("0", 4),), (("0", 2),))}


def test_a_job_that_may_not_be_preempted_keeps_exactly_what_it_has() -> None:
    pinned = make_view(make_job("pinned", most=8, preemptible=False), on_nodes({"0": 3}))
    decision = decide(make_cluster(gpu_nodes(1, 4), [pinned, make_view(make_job("new", most=8))]))
    assert decision.allocations == {"pinned": on_nodes({"0": 3}), "new": on_nodes({"0": 1})}


def test_unchanged_jobs_stay_where_they_are() -> None:
    """D leaves; b takes its two GPUs in the other node and a, at its maximum, is not touched."""
    a = make_view(make_job("a", 2, least=1, most=2), on_nodes({"0": 1, "1": 1}))
    b = make_view(make_job("b", most=6), on_nodes({"0": 2, "1": 2}))
    decision = decide(make_cluster(gpu_nodes(2, 4), [a, b]))
    assert decision.allocations == {"a": a.allocation, "b": on_nodes({"0": 3, "1": 3})}
    assert set(decision.reasons) == {"b"}
    assert decision.reasons["b"].code is ReasonCode.GREW


def test_a_new_job_gets_its_gang_out_of_larger_shares() -> None:
    old = make_view(make_job("old", most=8), on_nodes({"0": 4, "1": 4}))
    new = make_view(make_job("new", 4))
    decision = decide(make_cluster(gpu_nodes(2, 4), [old, new]))
    assert counts(decision) == {"old": 4, "new": 4}
    assert {len(allocation.nodes) for allocation in decision.allocations.values()} == {1}


def test_large_tasks_are_packed_before_small_ones() -> None:
    """Two tasks of 3 GPUs need a node each; two of 1 GPU then share what is left of the larger."""
    a = make_job("a", most=2)
    b = make_job("b", demand=Resources(gpu=3), most=3)
    decision = decide(make_cluster([make_node("0", 5), make_node("1", 4)], [make_view(a), make_view(b)]))
    assert decision.allocations == {"a": on_nodes({"0": 2}), "b": on_nodes({"0": 1, "1": 1})}


def test_running_tasks_are_granted_where_they_run() -> None:
    """A second task of b would fit if a were spread over both nodes, but a runs on node 0 and stays."""
    a = make_view(make_job("a", most=2), on_nodes({"0": 2}))
    b = make_view(make_job("b", demand=Resources(gpu=2), most=2))
    decision = decide(make_cluster(gpu_nodes(2, 3), [a, b]))
    assert decision.allocations == {"a": on_nodes({"0": 2}), "b": on_nodes({"1": 1})}


def test_places_of_the_filling_stand_where_packing_afresh_has_no_room() -> None:
    """A takes 2 GPUs a task, b 3. The filling: a on node 0, b on node 1, a on 0, b nowhere, a on 1.

    Packed afresh b would come first, to the tighter node 0, and only two tasks of a would fit beside it.
    """
    a = make_job("a", demand=Resources(gpu=2), most=4)
    b = make_job("b", demand=Resources(gpu=3), most=4)
    decision = decide(make_cluster([make_node("0", 4), make_node("1", 5)], [make_view(a), make_view(b)]))
    assert decision.allocations == {"a": on_nodes({"0": 2, "1": 1}), "b": on_nodes({"1": 1})}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_with_gpus_only_it_is_fair_and_stable(
    bounds: list[tuple[int, int]], nodes: int, per_node: int
) -> None:
    jobs = [make_view(make_job(f"j{i}", least, most=least + more)) for i, (least, more) in enumerate(bounds)]
    view = make_cluster(gpu_nodes(nodes, per_node), jobs)
    decision = decide(view)
    got = counts(decision)
    left = view.total_gpus - sum(got.values())
    for job in jobs:
        have, role = got.get(job.id, 0), job.job.worker
        if have == 0:
            assert left < role.min
        elif have < role.max:
            assert left == 0
            # Nobody got a worker beyond its smallest gang while this job had less.
            richer = [other for other in jobs if got.get(other.id, 0) > other.job.worker.min]
            assert all(got[other.id] <= have + 1 for other in richer)
    held = [replace(job, allocation=decision.allocations.get(job.id, NOTHING)) for job in jobs]
    again = decide(replace(view, jobs=tuple(held)))
    assert again.allocations == decision.allocations
