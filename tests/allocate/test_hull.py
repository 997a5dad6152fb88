"""The hull walk against every possible answer of small menus."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.allocate.hull import Choice, hull_walk, upper_hull

FIXED = settings(deadline=None, derandomize=True, max_examples=150)

values = st.integers(-50, 50).map(float)
choices = st.lists(st.tuples(st.integers(0, 8), values), min_size=1, max_size=7)


@st.composite
def menus(draw: st.DrawFn) -> tuple[list[list[Choice]], int]:
    """Menus that all offer nothing as well, and a capacity."""
    drawn = draw(st.lists(st.lists(st.tuples(st.integers(1, 6), values), max_size=4), min_size=1, max_size=4))
    return [[(0, draw(values)), *menu] for menu in drawn], draw(st.integers(0, 14))


def brute_force(menus: list[list[Choice]], capacity: int) -> float:
    return max(
        sum(value for _, value in picks)
        for picks in product(*menus)
        if sum(gpus for gpus, _ in picks) <= capacity
    )


@FIXED
@given(menus())
def test_the_walk_is_feasible_and_between_its_bounds(instance: tuple[list[list[Choice]], int]) -> None:
    offers, capacity = instance
    walk, best = hull_walk(offers, capacity), brute_force(offers, capacity)
    picks = [menu[index] for menu, index in zip(offers, walk.chosen, strict=True)]
    assert sum(gpus for gpus, _ in picks) <= capacity
    assert walk.value == pytest.approx(sum(value for _, value in picks))
    assert walk.value <= best + 1e-9
    assert best <= walk.bound + 1e-9


@FIXED
@given(menus())
def test_the_gap_is_less_than_the_step_that_did_not_fit(instance: tuple[list[list[Choice]], int]) -> None:
    offers, capacity = instance
    walk = hull_walk(offers, capacity)
    best, highest_step = brute_force(offers, capacity), 0.0
    for menu in offers:
        hull = upper_hull(menu)
        highest_step = max([highest_step, *(menu[b][1] - menu[a][1] for a, b in pairwise(hull))])
    assert best - walk.value <= highest_step + 1e-9


def test_the_walk_is_optimal_where_its_last_step_fits_exactly() -> None:
    rng, exact = np.random.default_rng(0), 0
    for _ in range(200):
        offers = [
            [(0, 0.0), *((int(gpus), float(rng.integers(1, 40))) for gpus in rng.integers(1, 5, size=3))]
            for _ in range(3)
        ]
        for capacity in range(13):
            walk = hull_walk(offers, capacity)
            if walk.bound == walk.value:
                exact += 1
                assert walk.value == brute_force(offers, capacity)
    assert exact > 500


def test_unit_steps_of_falling_gain_are_shared_out_exactly() -> None:
    concave = [[(size, 10.0 * size**power) for size in range(5)] for power in (0.3, 0.5, 0.9)]
    for capacity in range(13):
        walk = hull_walk(concave, capacity)
        assert walk.value == pytest.approx(brute_force(concave, capacity)) == walk.bound


def test_a_small_step_is_taken_after_one_that_does_not_fit() -> None:
    walk = hull_walk([[(0, 0.0), (3, 30.0)], [(0, 0.0), (1, 1.0)]], 2)
    assert walk.chosen == [0, 1]
    assert walk.value == 1.0
    assert walk.bound == 20.0


def test_ties_go_to_the_earlier_job() -> None:
    menu = [(0, 0.0), (2, 4.0)]
    assert hull_walk([menu, menu, menu], 4).chosen == [1, 1, 0]


def test_room_for_everything_takes_the_best_of_everything() -> None:
    walk = hull_walk([[(0, 0.0), (1, 5.0), (4, 3.0)], [(0, -2.0), (3, -1.0)]], 100)
    assert walk.chosen == [1, 1]
    assert walk.value == walk.bound == 4.0


@FIXED
@given(choices)
def test_the_hull_rises_ever_more_slowly_and_covers_everything(menu: list[Choice]) -> None:
    hull = [menu[index] for index in upper_hull(menu)]
    smallest = min(gpus for gpus, _ in menu)
    assert hull[0] == (smallest, max(value for gpus, value in menu if gpus == smallest))
    assert hull[-1][1] == max(value for _, value in menu)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull)]
    assert all(gpus > 0 and value > 0 for gpus, value in steps)
    slopes = [value / gpus for gpus, value in steps]
    assert all(a > b for a, b in pairwise(slopes))
    gpus_on_hull, values_on_hull = zip(*hull, strict=True)
    for gpus, value in menu:
        assert value <= np.interp(gpus, gpus_on_hull, values_on_hull) + 1e-9
