"""Numbers of GPUs become places, and whoever need not move stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.allocate.placements import place_counts
from stretto.core.allocation import Allocation, on_nodes
from stretto.core.cluster import gpu_nodes


@given(data=st.data())
def test_counts_that_fit_find_a_place_and_the_unchanged_stay(data: st.DataObject) -> None:
    nodes = gpu_nodes(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)))
    held = draw_held(data, sum(node.gpus for node in nodes))
    before = place_counts(nodes, {}, held)
    wanted = draw_held(data, sum(node.gpus for node in nodes))
    after = place_counts(nodes, before, wanted)
    assert {job: allocation.worker_count for job, allocation in after.items()} == wanted
    for node in nodes:
        assert sum(dict(allocation.workers).get(node.id, 0) for allocation in after.values()) <= node.gpus
    for job, count in wanted.items():
        old = before.get(job, Allocation())
        if old.worker_count == count:
            assert after[job] == old
        elif count < old.worker_count:
            assert all(workers <= dict(old.workers)[node] for node, workers in after[job].workers)


def draw_held(data: st.DataObject, gpus: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for job in data.draw(st.lists(st.sampled_from("abcdefgh"), unique=True)):
        left = gpus - sum(counts.values())
        if left:
            counts[job] = data.draw(st.integers(1, left))
    return counts


def test_a_job_grows_on_its_own_node_if_it_can() -> None:
    nodes = gpu_nodes(2, 4)
    held = {"a": on_nodes({"1": 2})}
    assert place_counts(nodes, held, {"a": 4}) == {"a": on_nodes({"1": 4})}


def test_a_newcomer_takes_the_tightest_node_and_spans_only_if_it_must() -> None:
    nodes = gpu_nodes(2, 4)
    held = {"a": on_nodes({"0": 3})}
    assert place_counts(nodes, held, {"a": 3, "b": 1})["b"] == on_nodes({"0": 1})
    assert place_counts(nodes, held, {"a": 3, "b": 5})["b"] == on_nodes({"0": 1, "1": 4})


def test_a_job_on_a_node_that_is_gone_moves() -> None:
    held = {"a": on_nodes({"gone": 2})}
    assert place_counts(gpu_nodes(1, 4), held, {"a": 2}) == {"a": on_nodes({"0": 2})}
