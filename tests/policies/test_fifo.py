"""First in, first out; what the baselines share; and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import believing, make_cluster, make_job, make_node, make_view, steady_speed
from stretto.allocate.free import FreeCapacity, place_packed
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits, Job, Role, Tier
from stretto.core.resources import Resources
from stretto.policies.base import ClusterView, JobView, Policy
from stretto.policies.common import change, explain, requested_batch
from stretto.policies.drf import Drf
from stretto.policies.fifo import Fifo
from stretto.policies.gangs import GangSize, requested_gang, smallest_gang
from stretto.policies.srtf import Srtf
from stretto.policies.tetris import Tetris

POLICIES: tuple[Policy, ...] = (Fifo(), Fifo(backfill=True), Srtf(), Drf(), Tetris(), Tetris(eps=0.0))


def decide(policy: Policy, view: ClusterView) -> Decision:
    return policy.decide(view, None, np.random.default_rng(0))[0]


# First in, first out.


def test_the_head_of_the_line_blocks() -> None:
    jobs = [make_view(make_job("a", 3)), make_view(make_job("b", 2)), make_view(make_job("c", 1))]
    decision = decide(Fifo(), make_cluster(gpu_nodes(1, 4), jobs))
    assert decision.allocations == {"a": on_nodes({"0": 3})}
    assert decision.reasons["b"].code is ReasonCode.WAITS
    assert decision.reasons["b"].text == "Needs 2 workers together; free over all nodes: 1 slot."
    assert decision.reasons["c"].text == "Behind jobs that came first and do not fit yet."


def test_what_is_short_is_told_by_resource_where_there_are_several() -> None:
    needs = make_job("b", 2, demand=Resources(gpu=1, cpu=3))
    jobs = [make_view(make_job("a", 3)), make_view(needs)]
    decision = decide(Fifo(), make_cluster([make_node("0", gpu=4, cpu=8)], jobs))
    told = "Needs 2 workers together (2 GPU, 6 CPU); free over all nodes: 1 GPU, 8 CPU."
    assert decision.reasons["b"].text == told


def test_backfill_lets_later_jobs_past() -> None:
    jobs = [make_view(make_job("a", 3)), make_view(make_job("b", 2)), make_view(make_job("c", 1))]
    decision = decide(Fifo(backfill=True), make_cluster(gpu_nodes(1, 4), jobs))
    assert set(decision.allocations) == {"a", "c"}


def test_nobody_is_preempted_or_moved() -> None:
    late = make_view(make_job("late", 1), on_nodes({"0": 1}))
    decision = decide(Fifo(), make_cluster(gpu_nodes(1, 4), [make_view(make_job("early", 4)), late]))
    assert decision.allocations == {"late": late.allocation}
    assert "late" not in decision.reasons


def test_a_job_that_never_fits_does_not_block() -> None:
    jobs = [make_view(make_job("huge", 9)), make_view(make_job("small", 1))]
    decision = decide(Fifo(), make_cluster(gpu_nodes(2, 4), jobs))
    assert set(decision.allocations) == {"small"}
    assert "even on the empty cluster" in decision.reasons["huge"].text


def test_a_job_whose_node_is_gone_starts_again_elsewhere() -> None:
    job = make_view(make_job("a", 2), on_nodes({"lost": 2}))
    decision = decide(Fifo(), make_cluster(gpu_nodes(1, 4), [job]))
    assert decision.allocations == {"a": on_nodes({"0": 2})}
    assert decision.reasons["a"].code is ReasonCode.MOVED


# Batches and reasons.


@pytest.mark.parametrize(
    ("requested", "workers", "expected"),
    [
        (128, 1, BatchChoice(128, 0)),  # at the initial batch one pass is enough
        (256, 1, BatchChoice(128, 1)),  # alone above it: two passes
        (256, 2, BatchChoice(128, 0)),
        (1000, 3, BatchChoice(167, 1)),  # ceil(1000/3) = 334 in two passes of 167: 1002 in all
        (1024, 3, BatchChoice(170, 1)),  # ceil(1024/3) = 342, 171 a pass, but 3*2*171 = 1026 > 1024
        (1024, 1, BatchChoice(204, 4)),  # 1024/250 -> 5 passes of ceil(204.8), but 5*205 = 1025 > 1024
    ],
)
def test_requested_batch(requested: int, workers: int, expected: BatchChoice) -> None:
    limits = BatchLimits(initial=128, requested=requested, max=1024, per_gpu_min=1, per_gpu_max=250)
    choice = requested_batch(make_job("a", workers, batch=limits), workers)
    assert choice == expected
    assert choice.total(workers) <= limits.max


def test_more_workers_than_examples_is_refused() -> None:
    limits = BatchLimits(initial=2, requested=2, max=2, per_gpu_min=1, per_gpu_max=2)
    with pytest.raises(InputError, match="3 workers"):
        requested_batch(make_job("a", 3, batch=limits), 3)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (NOTHING, NOTHING, ReasonCode.WAITS),
        (NOTHING, on_nodes({"0": 1}), ReasonCode.STARTED),
        (on_nodes({"0": 1}), NOTHING, ReasonCode.PREEMPTED),
        (on_nodes({"0": 1}), on_nodes({"0": 1}), ReasonCode.KEPT),
        (on_nodes({"0": 1}), on_nodes({"1": 1}), ReasonCode.MOVED),
        (on_nodes({"0": 1}), on_nodes({"0": 2}), ReasonCode.GREW),
        (on_nodes({"0": 2}), on_nodes({"1": 1}), ReasonCode.SHRANK),
        (Allocation((("0", 1),), (("0", 2),)), Allocation((("0", 1),), (("0", 1),)), ReasonCode.SHRANK),
    ],
)
def test_codes(old: Allocation, new: Allocation, code: ReasonCode) -> None:
    assert change(old, new) is code


def test_explanations_may_be_given_by_id() -> None:
    kept = make_view(make_job("kept"), on_nodes({"0": 1}))
    view = make_cluster(gpu_nodes(1, 4), [kept, make_view(make_job("waits"))])
    reasons = explain(view, {"kept": kept.allocation}, {"waits": "Not yet."})
    assert {job_id: (reason.code, reason.text) for job_id, reason in reasons.items()} == {
        "waits": (ReasonCode.WAITS, "Not yet.")
    }


# Packing.


def test_one_node_the_tightest() -> None:
    free = FreeCapacity(gpu_nodes(3, 4))
    other = make_job("other", 2)
    free.take(other, on_nodes({"1": 2}))
    assert place_packed(make_job("a", 2), 2, 0, free) == on_nodes({"1": 2})
    assert place_packed(make_job("a", 3), 3, 0, free) == on_nodes({"0": 3})


def test_fewest_nodes_and_the_tightest_for_the_rest() -> None:
    nodes = [make_node("s", 2), make_node("m", 4), make_node("l", 8)]
    free = FreeCapacity(nodes)
    assert place_packed(make_job("a", 10), 10, 0, free) == on_nodes({"s": 2, "l": 8})
    assert place_packed(make_job("a", 11), 11, 0, free) == on_nodes({"m": 3, "l": 8})
    assert place_packed(make_job("a", 15), 15, 0, free) is None


def test_servers_go_where_they_leave_room_for_workers() -> None:
    """Filling the roomiest node with workers first would leave no ten CPUs for the server anywhere."""
    job = make_job("a", 3, demand=Resources(gpu=1, cpu=1), server=Role(demand=Resources(cpu=10)))
    nodes = [make_node("big", 4, 10), make_node("small", 2, 2), make_node("tiny", 1, 1)]
    expected = Allocation((("small", 2), ("tiny", 1)), (("big", 1),))
    assert place_packed(job, 3, 1, FreeCapacity(nodes)) == expected


def test_what_is_given_back_is_free_again() -> None:
    free = FreeCapacity(gpu_nodes(2, 4))
    job, allocation = make_job("a", 4), on_nodes({"0": 3, "1": 1})
    free.take(job, allocation)
    assert not free.fits("0", Resources(gpu=2))
    assert free.holds(job, on_nodes({"0": 1, "1": 3}))
    assert not free.holds(job, on_nodes({"nowhere": 1}))
    free.give_back(job, allocation)
    assert free.total() == Resources(gpu=8)


amount = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 3.0])
demands = st.builds(Resources, gpu=st.sampled_from([0.0, 1.0, 2.0]), cpu=amount, memory_gib=amount)
sizes = st.sampled_from([7.3, 8.0, 4.0, 16.0, 1.0, 0.0])
node_lists = st.lists(
    st.builds(Resources, gpu=st.sampled_from([4.0, 8.0, 2.0, 0.0]), cpu=sizes, memory_gib=sizes),
    min_size=1,
    max_size=5,
).map(lambda capacities: [Node(f"n{i}", capacity) for i, capacity in enumerate(capacities)])


@given(node_lists, demands, st.integers(1, 6))
def test_one_role_is_packed_whenever_it_fits_on_the_fewest_nodes(
    nodes: list[Node], demand: Resources, workers: int
) -> None:
    def room(node: Node) -> int:
        return max(count for count in range(workers + 1) if (demand * count).fits_in(node.capacity))

    rooms = sorted((room(node) for node in nodes), reverse=True)
    found = place_packed(make_job("a", workers, demand=demand), workers, 0, FreeCapacity(nodes))
    if sum(rooms) < workers:
        assert found is None
        return
    assert found is not None
    assert found.worker_count == workers
    fewest = next(k for k in range(1, len(rooms) + 1) if sum(rooms[:k]) >= workers)
    assert len(found.nodes) == fewest


@given(node_lists.map(lambda nodes: nodes[:3]), demands, demands, st.integers(1, 3), st.integers(1, 2))
@example(
    nodes=[
        Node("n0", Resources(gpu=4, cpu=7.3, memory_gib=1)),
        Node("n1", Resources(gpu=2, cpu=7.3, memory_gib=7.3)),
    ],
    worker=Resources(gpu=2),
    server=Resources(gpu=1, memory_gib=1),
    workers=2,
    servers=2,
)
@settings(max_examples=150)
def test_two_roles_are_packed_if_any_way_works(
    nodes: list[Node], worker: Resources, server: Resources, workers: int, servers: int
) -> None:
    job = make_job("a", workers, demand=worker, server=Role(demand=server))
    found = place_packed(job, workers, servers, FreeCapacity(nodes))
    if found is not None:
        assert (found.worker_count, found.server_count) == (workers, servers)
        assert FreeCapacity(nodes).holds(job, found)
        return
    places = range(len(nodes))
    for where in product(places, repeat=workers + servers):
        used = [Resources() for _ in nodes]
        for task, place in enumerate(where):
            used[place] += worker if task < workers else server
        assert not all(use.fits_in(node.capacity) for use, node in zip(used, nodes, strict=True))


# All policies.


@st.composite
def jobs(draw: st.DrawFn, job_id: str) -> Job:
    requested = draw(st.integers(1, 5))
    tier = draw(st.sampled_from(Tier))
    least, most = draw(st.integers(1, requested)), draw(st.integers(requested, 8))
    server = None
    if draw(st.booleans()):
        server = Role(demand=draw(demands), requested=draw(st.integers(1, 3)), max=3)
    return make_job(
        job_id,
        requested,
        demand=draw(demands),
        least=least,
        most=most,
        server=server,
        tier=tier,
        preemptible=draw(st.booleans()),
    )


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    """Nodes, and jobs of which some already run where an arbitrary earlier decision put them."""
    nodes = draw(node_lists)
    free = FreeCapacity(nodes)
    views: list[JobView] = []
    for i in range(draw(st.integers(1, 8))):
        job = draw(jobs(f"j{i}"))
        held = NOTHING
        if draw(st.integers(0, 3)):
            gang = smallest_gang(job)
            if job.tier is not Tier.RIGID:
                gang = GangSize(draw(st.integers(job.worker.min, job.worker.max)), gang.servers)
            held = place_packed(job, *gang, free) or NOTHING
            free.take(job, held)
        belief = believing(steady_speed(draw(st.sampled_from([0.1, 1.0]))))
        known = draw(st.booleans())
        views.append(make_view(job, held, belief=belief) if known else make_view(job, held))
    return make_cluster(nodes, views)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(view=clusters())
@settings(max_examples=80, deadline=None)
def test_every_decision_can_be_run_and_is_explained(policy: Policy, view: ClusterView) -> None:
    decision = decide(policy, view)
    assert decision == decide(policy, view)
    used = {node.id: Resources() for node in view.nodes}
    for job in view.jobs:
        allocation = decision.allocations.get(job.id, NOTHING)
        assert (job.id in decision.batches) == bool(allocation)
        for node_id, uses in allocation.uses(job.job).items():
            used[node_id] += uses
        code = change(job.allocation, allocation)
        if code is ReasonCode.KEPT:
            assert job.id not in decision.reasons
        else:
            assert decision.reasons[job.id].code is code
            assert decision.reasons[job.id].text
        if job.allocation and not job.job.preemptible:
            assert allocation == job.allocation
        if allocation:
            assert_whole(job.job, allocation)
            assert decision.batches[job.id] == requested_batch(job.job, allocation.worker_count)
    assert all(used[node.id].fits_in(node.capacity) for node in view.nodes)
    assert set(decision.allocations) <= {job.id for job in view.jobs}


def assert_whole(job: Job, allocation: Allocation) -> None:
    if job.tier is Tier.RIGID:
        assert allocation.worker_count == job.worker.requested
    else:
        assert job.worker.min <= allocation.worker_count <= job.worker.max
    assert bool(allocation.servers) == bool(job.server)
    if job.server:
        assert job.server.min <= allocation.server_count <= job.server.max


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != Fifo()], ids=repr)
@given(view=clusters())
@settings(max_examples=40, deadline=None)
def test_nothing_that_fits_is_left_waiting(policy: Policy, view: ClusterView) -> None:
    """Except under strict order of arrival, which waits on purpose."""
    decision = decide(policy, view)
    free = FreeCapacity(view.nodes)
    for job in view.jobs:
        free.take(job.job, decision.allocations.get(job.id, NOTHING))
    for job in view.jobs:
        if job.id not in decision.allocations:
            whole = isinstance(policy, Fifo | Srtf)
            gang = requested_gang(job.job) if whole else smallest_gang(job.job)
            assert place_packed(job.job, *gang, free) is None


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != Drf()], ids=repr)
@given(view=clusters())
@settings(max_examples=40, deadline=None)
def test_asked_again_nothing_changes(policy: Policy, view: ClusterView) -> None:
    """Dominant resource fairness fills anew each round: its own test says when that is stable."""
    first = decide(policy, view)
    held = [replace(job, allocation=first.allocations.get(job.id, NOTHING)) for job in view.jobs]
    assert decide(policy, replace(view, jobs=tuple(held))).allocations == first.allocations
