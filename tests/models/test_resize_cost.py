"""What a resize is expected to cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.models.resize import learn_resize_cost

times = st.lists(st.floats(0.0, 1e4), max_size=20)


def test_nothing_seen_is_the_default_with_its_spread() -> None:
    cost = learn_resize_cost([])
    assert cost.expected_s == 30.0
    assert cost.p90_s == pytest.approx(30.0 * (1 + 1.2816 * 0.3))
    assert cost.samples == 0
    assert learn_resize_cost([], default_s=10.0).expected_s == 10.0


def test_by_hand() -> None:
    # application = (30 + 60 + 90) / 3 = 60; expected = (2 * 60 + 20) / 3
    cost = learn_resize_cost([20.0], [60.0, 90.0])
    expected_s = 140.0 / 3
    application = (0.3**2 + (60 / expected_s - 1) ** 2 + (90 / expected_s - 1) ** 2) / 3
    variance = (2 * application + (20 / expected_s - 1) ** 2) / 3
    assert cost.expected_s == pytest.approx(expected_s)
    assert cost.p90_s == pytest.approx(expected_s * (1 + 1.2816 * variance**0.5))
    assert cost.samples == 3


def test_the_job_outweighs_its_application_and_that_the_default() -> None:
    assert learn_resize_cost([], [100.0] * 99).expected_s == pytest.approx(100.0, rel=0.01)
    own = learn_resize_cost([10.0] * 98, [100.0] * 99)
    assert own.expected_s == pytest.approx(10.0, rel=0.2)
    assert own.p90_s < 100.0


def test_p90_follows_the_spread_seen() -> None:
    steady = learn_resize_cost([30.0] * 40)
    wild = learn_resize_cost([10.0, 50.0] * 20)
    assert steady.expected_s == pytest.approx(wild.expected_s)
    assert steady.p90_s < 33.0
    assert wild.p90_s == pytest.approx(30.0 * (1 + 1.2816 * 2 / 3), rel=0.05)


@given(own=times, prior=times, default_s=st.floats(0.0, 1e3))
def test_expected_lies_among_what_was_seen_and_the_default(
    own: list[float], prior: list[float], default_s: float
) -> None:
    cost = learn_resize_cost(own, prior, default_s)
    known = [*own, *prior, default_s]
    assert min(known) - 1e-6 <= cost.expected_s <= max(known) + 1e-6
    assert cost.p90_s >= cost.expected_s
    assert cost.samples == len(own) + len(prior)


@given(own=st.lists(st.floats(0.1, 1e3), max_size=10), longer=st.floats(0.1, 1e3))
def test_seeing_a_longer_time_raises_the_expectation(own: list[float], longer: float) -> None:
    before = learn_resize_cost(own)
    after = learn_resize_cost([*own, before.expected_s + longer])
    assert after.expected_s > before.expected_s
