"""Packing trials so that nodes come free: the published example, and every small case by brute force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.allocate.repack import Packing, repack
from stretto.core.allocation import NOTHING, Allocation, on_nodes

Score = tuple[int, int, int]
"""Most nodes of a trial, trials on more than they must, trials that left their nodes."""


def score_of(
    held: Mapping[str, Allocation], new: Mapping[str, Allocation], gpus: int, per_node: int
) -> Score:
    spans = [len(new[trial].nodes) for trial in held]
    moved = sum(_moves(held[trial], new[trial]) for trial in held)
    return max(spans), sum(span > -(-gpus // per_node) for span in spans), moved


def _moves(old: Allocation, new: Allocation) -> bool:
    before, after = set(old.nodes), set(new.nodes)
    return bool(before) and not (before <= after or after <= before)


def nodes_needed(trials: int, gpus: int, per_node: int) -> int:
    return -(-trials * gpus // per_node)


def loads(packing: Packing) -> dict[str, int]:
    taken: dict[str, int] = {}
    for allocation in packing.allocations.values():
        for node, count in allocation.workers:
            taken[node] = taken.get(node, 0) + count
    return taken


def test_the_published_example() -> None:
    held = {"T1": on_nodes({"1": 2}), "T4": on_nodes({"2": 2})}
    held |= {"T6": on_nodes({"3": 2}), "T8": on_nodes({"4": 2})}
    packing = repack(["1", "2", "3", "4"], 4, held, gpus=3, keep=3)
    assert packing.released == ("4",)
    assert packing.allocations == {
        "T1": on_nodes({"1": 3}),
        "T8": on_nodes({"1": 1, "2": 2}),
        "T4": on_nodes({"2": 2, "3": 1}),
        "T6": on_nodes({"3": 3}),
    }


def test_a_first_stage_fills_nodes_in_order() -> None:
    held = {f"T{number}": NOTHING for number in range(1, 9)}
    packing = repack(["1", "2", "3", "4"], 4, held, gpus=2, keep=4)
    assert [allocation.workers for allocation in packing.allocations.values()] == [
        ((node, 2),) for node in ("1", "1", "2", "2", "3", "3", "4", "4")
    ]
    assert packing.released == ()


def test_nodes_that_are_empty_already_are_given_back_first() -> None:
    held = {"a": on_nodes({"2": 1}), "b": on_nodes({"4": 1})}
    packing = repack(["1", "2", "3", "4"], 2, held, gpus=2, keep=2)
    assert packing.released == ("1", "3")
    assert packing.allocations == {"a": on_nodes({"2": 2}), "b": on_nodes({"4": 2})}


def test_with_room_to_spare_nobody_spans() -> None:
    held = dict.fromkeys("abcd", NOTHING)
    packing = repack([str(node) for node in range(4)], 4, held, gpus=3, keep=4)
    assert {len(allocation.nodes) for allocation in packing.allocations.values()} == {1}


def test_a_trial_larger_than_a_node_takes_whole_ones_and_shares_the_last() -> None:
    packing = repack(["a", "b", "c"], 4, {"x": NOTHING, "y": NOTHING}, gpus=6, keep=3)
    assert packing.allocations == {"x": on_nodes({"a": 4, "c": 2}), "y": on_nodes({"b": 4, "c": 2})}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        repack(["a"], 4, {"x": NOTHING, "y": NOTHING}, gpus=3, keep=1)


Case = tuple[list[str], int, dict[str, Allocation], int, int]


@st.composite
def cases(draw: st.DrawFn, *, most_nodes: int = 4, most_trials: int = 4) -> Case:
    """Nodes, GPUs on each, what trials held, GPUs for each now, nodes to keep."""
    count = draw(st.integers(1, most_nodes))
    per_node = draw(st.integers(1, 4))
    nodes = [f"n{number}" for number in range(count)]
    gpus = draw(st.integers(1, min(6, count * per_node)))
    trials = draw(st.integers(1, min(most_trials, count * per_node // gpus)))
    keep = draw(st.integers(nodes_needed(trials, gpus, per_node), count))
    before = draw(st.integers(1, max(1, count * per_node // trials)))
    cells = draw(st.permutations([node for node in nodes for _ in range(per_node)]))
    if draw(st.booleans()):
        cells = sorted(cells)
    held = {}
    for number in range(trials):
        mine = sorted(cells[number * before : (number + 1) * before])
        known = draw(st.integers(0, 4)) > 0
        held[f"t{number}"] = on_nodes({node: mine.count(node) for node in mine}) if known else NOTHING
    return nodes, per_node, held, gpus, keep


@given(cases(most_nodes=8, most_trials=12))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_everybody_has_its_gpus_and_no_node_more_than_it_has(case: Case) -> None:
    nodes, per_node, held, gpus, keep = case
    packing = repack(nodes, per_node, held, gpus, keep)
    assert {allocation.worker_count for allocation in packing.allocations.values()} == {gpus}
    assert all(count <= per_node for count in loads(packing).values())
    assert len(packing.released) == len(nodes) - keep
    assert not set(loads(packing)) & set(packing.released)
    if keep == nodes_needed(len(held), gpus, per_node):
        assert set(loads(packing)) == set(nodes) - set(packing.released)
    most = max(len(allocation.nodes) for allocation in packing.allocations.values())
    assert most <= -(-gpus // per_node) + 1
    assert repack(nodes, per_node, held, gpus, keep) == packing


@given(cases())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_no_packing_is_better(case: Case) -> None:
    nodes, per_node, held, gpus, keep = case
    packing = repack(nodes, per_node, held, gpus, keep)
    found = score_of(held, packing.allocations, gpus, per_node)
    best = _best(nodes, per_node, held, gpus, keep)
    assert found[:2] == best[:2]
    assert best[2] <= found[2] <= best[2] + (gpus > per_node)


def _best(nodes: list[str], per_node: int, held: Mapping[str, Allocation], gpus: int, keep: int) -> Score:
    """The best score of all packings, by trying them."""
    best: Score = (99, 99, 99)
    names = list(held)
    needs = -(-gpus // per_node)

    def go_on(index: int, free: dict[str, int], so_far: Score) -> None:
        nonlocal best
        if so_far >= best:
            return
        if index == len(names):
            best = so_far
            return
        untouched = {node for node in nodes if free[node] == per_node}
        for option in _options(nodes, free, gpus):
            if len(untouched - set(option.nodes)) < len(nodes) - keep:
                continue
            left = free | {node: free[node] - count for node, count in option.workers}
            span = len(option.nodes)
            go_on(
                index + 1,
                left,
                (
                    max(so_far[0], span),
                    so_far[1] + (span > needs),
                    so_far[2] + _moves(held[names[index]], option),
                ),
            )

    go_on(0, dict.fromkeys(nodes, per_node), (0, 0, 0))
    return best


def _options(nodes: list[str], free: Mapping[str, int], gpus: int) -> Iterator[Allocation]:
    def spread(index: int, left: int) -> Iterator[tuple[tuple[str, int], ...]]:
        if left == 0:
            yield ()
        elif index < len(nodes):
            for count in range(min(left, free[nodes[index]]), -1, -1):
                for others in spread(index + 1, left - count):
                    yield ((nodes[index], count), *others) if count else others

    yield from (Allocation(workers) for workers in spread(0, gpus))
