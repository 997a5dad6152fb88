"""Free GPUs by node: their counts, and the placements found in them."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.allocate.placements import FreeGpus, Placement

FIXED = settings(deadline=None, derandomize=True, max_examples=150)

node_gpus = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def fewest_nodes(free: list[int], blocked: list[bool], gpus: int, max_nodes: int) -> int | None:
    """By trying all sets of nodes; blocked ones take single-node jobs only."""
    for count in range(1, len(free) + 1):
        for nodes in combinations(range(len(free)), count):
            allowed = count == 1 or (count <= max_nodes and not any(blocked[node] for node in nodes))
            if allowed and all(free[node] for node in nodes) and sum(free[node] for node in nodes) >= gpus:
                return count
    return None


@FIXED
@given(st.data(), node_gpus, st.booleans(), st.integers(1, 4))
def test_books_and_finds_agree_with_brute_force(
    data: st.DataObject, gpus: list[int], avoid: bool, max_nodes: int
) -> None:
    free_gpus = FreeGpus(gpus, max_nodes=max_nodes, avoid_interference=avoid)
    placed: list[Placement] = []
    for _ in range(data.draw(st.integers(1, 8))):
        if len(placed) > 0 and data.draw(st.booleans()):
            free_gpus.give_back(placed.pop(data.draw(st.integers(0, len(placed) - 1))))
        free = [
            gpus[node] - sum(dict(placement).get(node, 0) for placement in placed)
            for node in range(len(gpus))
        ]
        spanned = [
            any(len(placement) > 1 and node in dict(placement) for placement in placed)
            for node in range(len(gpus))
        ]
        check_books(free_gpus, free, spanned)
        wanted = data.draw(st.integers(1, 8))
        found = free_gpus.find(wanted)
        blocked = [avoid and spans for spans in spanned]
        fewest = fewest_nodes(free, blocked, wanted, max_nodes)
        if found is None:
            assert fewest is None
            continue
        assert len(found) == fewest
        assert sum(count for _, count in found) == wanted
        assert list(found) == sorted(found)
        assert free_gpus.fits(found)
        assert all(0 < count <= free[node] for node, count in found)
        assert len(found) == 1 or not any(blocked[node] for node, _ in found)
        free_gpus.take(found)
        placed.append(found)


def check_books(free_gpus: FreeGpus, free: list[int], spanned: list[bool]) -> None:
    assert free_gpus.total == sum(free)
    assert free_gpus._free == free
    for buckets, kind in ((free_gpus._plain, False), (free_gpus._shared, True)):
        for count, bucket in enumerate(buckets):
            assert bucket == [
                node for node in range(len(free)) if free[node] == count and spanned[node] is kind
            ]


def test_a_single_node_job_goes_to_the_tightest_node() -> None:
    free_gpus = FreeGpus([4, 2, 3], max_nodes=4, avoid_interference=True)
    assert free_gpus.find(2) == ((1, 2),)
    assert free_gpus.find(3) == ((2, 3),)


def test_single_node_jobs_first_fill_nodes_that_host_a_spanning_one() -> None:
    free_gpus = FreeGpus([4, 2, 4], max_nodes=4, avoid_interference=True)
    free_gpus.take(((0, 2), (2, 4)))
    assert free_gpus.find(2) == ((0, 2),)


def test_two_spanning_jobs_share_a_node_only_where_interference_is_allowed() -> None:
    for avoid, expected in ((True, None), (False, ((0, 1), (1, 2)))):
        free_gpus = FreeGpus([4, 4], max_nodes=4, avoid_interference=avoid)
        free_gpus.take(((0, 3), (1, 2)))
        assert free_gpus.find(3) == expected
        assert free_gpus.fits(((0, 1), (1, 1))) is not avoid
        assert free_gpus.find(2) == ((1, 2),)


def test_the_last_node_of_a_spanning_job_is_the_tightest() -> None:
    free_gpus = FreeGpus([4, 4, 1], max_nodes=4, avoid_interference=True)
    assert free_gpus.find(5) == ((0, 4), (2, 1))


def test_no_job_spans_more_nodes_than_allowed() -> None:
    free_gpus = FreeGpus([2, 2, 2], max_nodes=2, avoid_interference=False)
    assert free_gpus.find(4) == ((0, 2), (1, 2))
    assert free_gpus.find(5) is None


@pytest.mark.parametrize("gpus", [[], [0], [0, 0]])
def test_a_board_without_gpus_has_no_room(gpus: list[int]) -> None:
    free_gpus = FreeGpus(gpus, max_nodes=4, avoid_interference=True)
    assert free_gpus.find(1) is None
    assert free_gpus.total == 0
