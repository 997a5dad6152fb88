"""The placement theorem: claims O7 and O8; who stays, who shrinks, who waits."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_job, make_node
from stretto.allocate.even_spread import JobToPlace, place_all, spread_evenly, spread_or_pack
from stretto.allocate.free import FreeCapacity
from stretto.core.allocation import NOTHING, Allocation
from stretto.core.job import Job, Role
from stretto.core.resources import Resources

SLOT = Resources(cpu=1)


def served(job_id: str = "a", worker: Resources = SLOT, server: Resources = SLOT) -> Job:
    return make_job(job_id, 1, demand=worker, most=16, server=Role(demand=server, max=16))


def cluster(*cpus: float) -> FreeCapacity:
    return FreeCapacity([make_node(str(i), cpu=cpu) for i, cpu in enumerate(cpus)])


def per_node(allocation: Allocation) -> list[tuple[int, int]]:
    workers, servers = dict(allocation.workers), dict(allocation.servers)
    return [(workers.get(node, 0), servers.get(node, 0)) for node in allocation.nodes]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 6), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_o7_even_and_on_the_fewest_nodes(workers: int, servers: int, slots: int, nodes: int) -> None:
    allocation = spread_evenly(served(), workers, servers, cluster(*[slots] * nodes))
    fewest = -(-(workers + servers) // slots)
    if allocation is None:
        assert fewest > min(nodes, max(workers, servers))
        return
    counts = per_node(allocation)
    for role in zip(*counts, strict=True):
        assert max(role) - min(role) <= 1
    assert len(counts) == fewest
    assert max(map(sum, counts)) <= slots


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [one for one in product(range(total + 1), repeat=parts) if sum(one) == total]


def own_links(workers: tuple[int, ...], servers: tuple[int, ...]) -> float:
    """Most model sizes that cross nodes for any one task, each with a link of its own."""
    w, p = sum(workers), sum(servers)
    of_workers = [(p - here) / p for here, some in zip(servers, workers, strict=True) if some]
    of_servers = [(w - here) / p for here, some in zip(workers, servers, strict=True) if some]
    return max(of_workers + of_servers)


def shared_links(workers: tuple[int, ...], servers: tuple[int, ...]) -> float:
    """Most model sizes through the one link of any node, in and out together over two."""
    w, p = sum(workers), sum(servers)
    return max(
        (here_w * (p - here_p) + here_p * (w - here_w)) / p
        for here_w, here_p in zip(workers, servers, strict=True)
    )


def padded(counts: list[tuple[int, int]], nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = counts + [(0, 0)] * (nodes - len(counts))
    return tuple(w for w, _ in full), tuple(p for _, p in full)


@pytest.mark.parametrize(
    ("workers", "servers", "slots"), [(2, 2, 2), (4, 4, 4), (4, 2, 3), (3, 3, 4), (2, 4, 3)]
)
def test_o7_nothing_crosses_less_if_every_task_has_its_own_link(
    workers: int, servers: int, slots: int
) -> None:
    nodes = 4
    allocation = spread_evenly(served(), workers, servers, cluster(*[slots] * nodes))
    assert allocation is not None
    best = min(
        own_links(ws, ps)
        for ws, ps in product(compositions(workers, nodes), compositions(servers, nodes))
        if all(w + p <= slots for w, p in zip(ws, ps, strict=True))
    )
    assert own_links(*padded(per_node(allocation), nodes)) == pytest.approx(best)


def test_o8_with_links_shared_by_a_node_it_is_not_the_best() -> None:
    allocation = spread_evenly(served(), 4, 4, cluster(4, 4, 4, 4))
    assert allocation is not None
    assert per_node(allocation) == [(2, 2), (2, 2)]
    assert shared_links((2, 2), (2, 2)) == 2.0
    assert shared_links((1, 1, 1, 1), (1, 1, 1, 1)) == 1.5


def test_nodes_by_all_they_have_free_not_by_one_resource() -> None:
    """Node 0 has most CPUs and no GPU; the worker needs one."""
    free = FreeCapacity([make_node("0", cpu=32), make_node("1", gpu=2, cpu=8)])
    allocation = spread_evenly(served(worker=Resources(gpu=1, cpu=2)), 2, 2, free)
    assert allocation == Allocation((("1", 2),), (("1", 2),))


def test_a_job_without_gpus_leaves_free_gpus_to_others() -> None:
    free = FreeCapacity([make_node("0", gpu=2, cpu=4), make_node("1", cpu=8)])
    assert spread_evenly(served(), 1, 1, free) == Allocation((("1", 1),), (("1", 1),))


def test_where_no_even_placement_exists_the_job_is_packed() -> None:
    free = FreeCapacity([make_node("cpus", cpu=8), make_node("gpus", gpu=4, cpu=4)])
    job = served(worker=Resources(gpu=1, cpu=1), server=Resources(cpu=4))
    assert spread_evenly(job, 4, 2, free) is None
    placed = spread_or_pack(job, 4, 2, free)
    assert placed == Allocation((("gpus", 4),), (("cpus", 2),))


def seat(job_id: str, wanted: tuple[int, int], held: Allocation = NOTHING) -> JobToPlace:
    return JobToPlace(job=served(job_id), wanted=wanted, least=(1, 1), held=held)


def test_unchanged_jobs_stay_where_they_are() -> None:
    there = Allocation((("1", 1),), (("0", 1),))
    placed = place_all([seat("a", (1, 1), there), seat("b", (2, 2))], cluster(4, 4), spread_or_pack)
    assert placed["a"] == there
    assert per_node(placed["b"]) == [(1, 1), (1, 1)]


def test_a_job_whose_node_is_gone_is_placed_anew() -> None:
    gone = Allocation((("9", 1),), (("9", 1),))
    assert place_all([seat("a", (1, 1), gone)], cluster(4), spread_or_pack) == {
        "a": Allocation((("0", 1),), (("0", 1),))
    }


def test_everybody_has_its_least_before_large_jobs_take_what_is_left() -> None:
    placed = place_all([seat("large", (4, 4)), seat("small", (1, 1))], cluster(6), spread_or_pack)
    assert per_node(placed["small"]) == [(1, 1)]
    assert per_node(placed["large"]) == [(2, 2)]


def test_a_running_job_that_cannot_grow_is_not_moved() -> None:
    held = Allocation((("0", 2),), (("0", 2),))
    placed = place_all([seat("a", (4, 4), held)], cluster(4), spread_or_pack)
    assert placed == {"a": held}


def test_who_does_not_fit_waits_and_who_is_in_the_way_moves() -> None:
    assert place_all([seat("a", (1, 1)), seat("b", (1, 1))], cluster(3), spread_or_pack).keys() == {"a"}
    # Two jobs, half a node each on either node, leave no node with room for a task of two CPUs.
    job = served("new", worker=Resources(cpu=2), server=Resources())
    new = JobToPlace(job=job, wanted=(1, 1), least=(1, 1), held=NOTHING)
    halves = [seat(f"half-{i}", (1, 1), Allocation((("0", 1),), (("1", 1),))) for i in range(2)]
    free = cluster(3, 3)
    placed = place_all([*halves, new], free, spread_or_pack)
    assert placed.keys() == {"half-0", "half-1", "new"}
    assert free.total() == Resources()


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_never_more_than_there_is_nor_less_than_the_least(
    wanted: list[tuple[int, int]], cpus: list[int]
) -> None:
    seats = [seat(str(i), counts) for i, counts in enumerate(wanted)]
    free, left = cluster(*cpus), cluster(*cpus)
    placed = place_all(seats, free, spread_or_pack)
    for one in seats:
        allocation = placed.get(one.job.id)
        if allocation is not None:
            assert left.holds(one.job, allocation)
            left.take(one.job, allocation)
            assert 1 <= allocation.worker_count <= one.wanted[0]
            assert 1 <= allocation.server_count <= one.wanted[1]
    assert (left.rows == free.rows).all()
