"""The all-reduce speed model: golden vectors, the limits of its formula, and the fit."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.observations import SpeedSample
from stretto.models.speed import (
    MAX_OVERLAP,
    NETWORK_PENALTY,
    TINY,
    AllReduceSpeed,
    _Data,
    _start_and_bounds,
    fit_all_reduce,
    p_norm,
)

FIXED = settings(deadline=None, derandomize=True, max_examples=60)

GOLDEN = AllReduceSpeed(0.1, 0.01, 0.5, 0.02, 0.05, 0.005, 1.6)

times = st.floats(1e-4, 10.0)
speeds = st.builds(AllReduceSpeed, times, times, times, times, times, times, st.floats(1.0, MAX_OVERLAP))


def sample(nodes: int, workers: int, atomic: int, pass_s: float, step_s: float) -> SpeedSample:
    return SpeedSample(nodes, workers, 0, atomic, step_s, step_s - pass_s)


def measured(truth: AllReduceSpeed, nodes: int, workers: int, atomic: int) -> SpeedSample:
    """A noise-free sample of a job that behaves as `truth`."""
    pass_s = float(truth.pass_s(atomic))
    return sample(nodes, workers, atomic, pass_s, float(truth.step_s(nodes, workers, atomic)))


@pytest.mark.parametrize(
    ("configuration", "examples_per_s"),
    [
        ((1, 1, 128, 0), 92.753623),
        ((1, 2, 64, 0), 171.538358),
        ((1, 4, 128, 0), 369.486309),
        ((2, 8, 128, 0), 636.564529),
        ((4, 16, 128, 1), 1328.136832),
    ],
)
def test_golden_throughput(configuration: tuple[int, int, int, int], examples_per_s: float) -> None:
    assert float(GOLDEN.throughput(*configuration)) == pytest.approx(examples_per_s, abs=1e-6)


def test_arrays_give_what_numbers_give() -> None:
    nodes, workers, atomic = np.array([1, 1, 2]), np.array([1, 4, 8]), np.array([32, 64, 128])
    together = GOLDEN.step_s(nodes, workers, atomic, np.array([0, 1, 2]))
    alone = [
        float(GOLDEN.step_s(n, k, m, s)) for n, k, m, s in zip(nodes, workers, atomic, (0, 1, 2), strict=True)
    ]
    assert together.tolist() == alone


@FIXED
@given(speeds, st.integers(1, 4), st.integers(2, 64), st.integers(1, 512))
def test_p2_gamma_1_adds_and_gamma_10_is_nearly_the_maximum(
    speed: AllReduceSpeed, nodes: int, workers: int, atomic: int
) -> None:
    def step_s(gamma: float) -> float:
        return float(replace(speed, gamma=gamma).step_s(nodes, workers, atomic))

    compute, sync = float(speed.pass_s(atomic)), float(speed.sync_s(nodes, workers))
    assert step_s(1.0) == pytest.approx(compute + sync)
    assert (
        max(compute, sync) <= step_s(MAX_OVERLAP) <= max(compute, sync) * 2 ** (1 / MAX_OVERLAP) * (1 + 1e-12)
    )
    assert 2 ** (1 / MAX_OVERLAP) < 1.072


@FIXED
@given(st.floats(1e-8, 1e8), st.floats(1e-8, 1e8), st.floats(1.0, MAX_OVERLAP))
def test_p_norm_is_the_formula_and_does_not_overflow(a: float, b: float, p: float) -> None:
    norm = float(p_norm(np.array(a), np.array(b), p))
    assert norm == pytest.approx(float(p_norm(np.array(b), np.array(a), p)))
    assert max(a, b) <= norm <= (a + b) * (1 + 1e-12)
    assert norm**p == pytest.approx(a**p + b**p, rel=1e-9)


@FIXED
@given(speeds, st.integers(1, 4), st.integers(1, 64), st.integers(1, 512), st.integers(0, 5))
def test_accumulation_adds_whole_passes(
    speed: AllReduceSpeed, nodes: int, workers: int, atomic: int, accumulation: int
) -> None:
    extra = float(speed.step_s(nodes, workers, atomic, accumulation) - speed.step_s(nodes, workers, atomic))
    assert extra == pytest.approx(accumulation * float(speed.pass_s(atomic)), rel=1e-6)


def test_synchronisation_by_case() -> None:
    assert float(GOLDEN.sync_s(1, 1)) == TINY
    assert float(GOLDEN.sync_s(1, 2)) == 0.05
    assert float(GOLDEN.sync_s(1, 4)) == pytest.approx(0.05 + 2 * 0.005)
    assert float(GOLDEN.sync_s(2, 2)) == 0.5
    assert float(GOLDEN.sync_s(2, 8)) == pytest.approx(0.5 + 6 * 0.02)


# --- the fit


def test_golden_prior_of_one_row() -> None:
    fitted = fit_all_reduce([sample(1, 1, 128, 0.2, 0.2)])
    assert fitted.parameters() == pytest.approx((0.1, 7.8125e-4, 1.1e-8, 1.1e-8, 1e-8, 1e-8, 1.0), rel=1e-3)
    assert fitted.floor_c == 0.0


def test_golden_prior_of_two_rows() -> None:
    fitted = fit_all_reduce([sample(1, 1, 128, 0.2, 0.2), sample(1, 2, 128, 0.2, 0.25)])
    assert fitted.alpha_r == pytest.approx(0.0566, abs=1e-4)
    assert fitted.alpha_n == pytest.approx(0.0623, abs=1e-4)
    assert fitted.gamma == pytest.approx(1.05, abs=0.01)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit_all_reduce([])


rows = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 12), st.sampled_from([16, 32, 64, 128]), times, times),
    min_size=1,
    max_size=8,
).map(lambda drawn: [sample(n, n + more, m, pass_s, pass_s + sync_s) for n, more, m, pass_s, sync_s in drawn])


moderate = st.floats(0.01, 1.0)
"""Of one order of magnitude, or differences of the loss would drown in its rounding."""


@FIXED
@given(rows, st.builds(AllReduceSpeed, *[moderate] * 6, st.floats(1.01, MAX_OVERLAP - 0.01), moderate))
def test_gradient_is_that_of_finite_differences(samples: list[SpeedSample], speed: AllReduceSpeed) -> None:
    data, theta = _Data.of(samples), np.array(astuple(speed))
    _, gradient = data.loss_and_gradient(theta)
    for index in range(8):
        step = np.zeros(8)
        step[index] = 1e-5 * theta[index]
        up, down = data.loss_and_gradient(theta + step)[0], data.loss_and_gradient(theta - step)[0]
        numeric = (up - down) / (2 * step[index])
        # In units of a relative change of the parameter, so that all eight compare alike.
        assert gradient[index] * theta[index] == pytest.approx(numeric * theta[index], rel=1e-4, abs=1e-6)


def pinned(samples: list[SpeedSample]) -> dict[int, float]:
    _, bounds = _start_and_bounds(_Data.of(samples))
    return {index: low for index, (low, high) in enumerate(bounds) if low == high}


def test_one_batch_size_pins_the_constant_to_half_a_pass() -> None:
    assert pinned([sample(1, 1, 32, 0.2, 0.2), sample(1, 1, 32, 0.4, 0.4)])[0] == pytest.approx(0.15)
    assert 0 not in pinned([sample(1, 1, 32, 0.2, 0.2), sample(1, 1, 64, 0.4, 0.4)])
    one = fit_all_reduce([sample(1, 1, 32, 0.2, 0.2)])
    assert one.alpha_c == pytest.approx(32 * one.beta_c, rel=1e-3)


def test_no_second_node_pins_the_network() -> None:
    local = [sample(1, 1, 32, 0.2, 0.2), sample(1, 4, 64, 0.3, 0.4)]
    assert pinned(local) == {2: TINY, 3: TINY}
    assert pinned([*local, sample(2, 4, 64, 0.3, 0.6)]) == {}


def test_no_second_worker_in_a_node_pins_the_node() -> None:
    assert pinned([sample(1, 1, 32, 0.2, 0.2), sample(2, 4, 64, 0.3, 0.6)]) == {4: TINY, 5: TINY}


def test_no_third_worker_pins_what_further_workers_add() -> None:
    pairs = [sample(1, 2, 32, 0.2, 0.3), sample(2, 2, 64, 0.3, 0.6)]
    assert pinned(pairs) == {3: TINY, 5: TINY}
    assert pinned([*pairs, sample(1, 3, 64, 0.3, 0.6)]) == {}


def test_an_unseen_network_is_a_tenth_slower_than_a_node() -> None:
    truth = AllReduceSpeed(0.05, 0.002, 0.3, 0.02, 0.06, 0.01, 1.5)
    fitted = fit_all_reduce([measured(truth, 1, k, m) for k in (1, 2, 3, 4) for m in (32, 64, 128)])
    assert fitted.alpha_n == pytest.approx(NETWORK_PENALTY * fitted.alpha_r)
    assert fitted.beta_n == pytest.approx(NETWORK_PENALTY * fitted.beta_r)
    seen = fit_all_reduce([measured(truth, n, k, 64) for n, k in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 8))])
    assert seen.alpha_n > 2 * seen.alpha_r


TRUTHS = [
    AllReduceSpeed(0.01866, 6.798e-4, 0.09152, 0.002525, 0.0154, 1e-4, 1.277),
    AllReduceSpeed(0.3111, 0.02384, 0.4871, 0.009818, 0.08394, 0.00137, 1.413),
    AllReduceSpeed(0.1719, 0.05861, 1.386, 0.009431, 0.2842, 0.009618, 1.902),
    AllReduceSpeed(0.1871, 0.02538, 0.7491, 0.01071, 0.1283, 0.01744, 1.108),
    AllReduceSpeed(0.06417, 0.00448, 0.2994, 0.006638, 0.02649, 5.4e-4, 2.470),
]


@pytest.mark.parametrize("truth", TRUTHS, ids=["cifar10", "deepspeech2", "bert", "yolov3", "imagenet"])
def test_rich_samples_give_the_truth_back(truth: AllReduceSpeed) -> None:
    placements = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 8), (4, 16), (8, 32)]
    batches = [8, 16, 32, 64, 128]
    fitted = fit_all_reduce([measured(truth, n, k, m) for (n, k), m in product(placements, batches)])
    errors = [
        abs(float(fitted.step_s(n, k, m)) / float(truth.step_s(n, k, m)) - 1.0)
        for (n, k), m in product([*placements, (3, 12), (6, 20)], [12, 48, 96, 256])
    ]
    assert max(errors) < 0.02
    assert np.mean(errors) < 0.01


@settings(FIXED, max_examples=25)
@given(rows)
def test_overlap_stays_between_1_and_10_and_times_positive(samples: list[SpeedSample]) -> None:
    fitted = fit_all_reduce(samples)
    assert 1.0 <= fitted.gamma <= MAX_OVERLAP
    assert all(TINY <= value < np.inf for value in astuple(fitted)[:6])


# --- the floor

LAUNCH_BOUND = AllReduceSpeed(0.0022, 4.13e-5, TINY, TINY, TINY, TINY, 1.0, floor_c=0.0095)


def test_without_a_floor_a_pass_is_a_line() -> None:
    sizes = np.array([1, 7, 128, 5000])
    assert GOLDEN.pass_s(sizes).tolist() == (0.1 + 0.01 * sizes).tolist()


def test_small_passes_take_the_floor_and_large_ones_the_line() -> None:
    assert float(LAUNCH_BOUND.pass_s(8)) == pytest.approx(0.0095, rel=1e-3)
    assert float(LAUNCH_BOUND.pass_s(2048)) == pytest.approx(0.0022 + 4.13e-5 * 2048, rel=1e-3)


def test_a_floor_is_found_and_holds_between_and_beyond_the_sizes_seen() -> None:
    random = np.random.default_rng(0)
    seen = [
        replace(one, step_s=one.step_s * random.normal(1.0, 0.01))
        for one in (measured(LAUNCH_BOUND, 1, 1, m) for m in (128, 256, 384, 512, 768, 1024))
    ]
    fitted = fit_all_reduce(seen)
    assert fitted.floor_c == pytest.approx(0.0095, rel=0.05)
    for atomic in (32, 192, 320, 448, 640, 896, 1280):
        assert float(fitted.pass_s(atomic)) == pytest.approx(float(LAUNCH_BOUND.pass_s(atomic)), rel=0.03)


def test_few_sizes_or_a_line_give_no_floor() -> None:
    assert fit_all_reduce([measured(LAUNCH_BOUND, 1, 1, m) for m in (64, 128, 512)]).floor_c == 0.0
    random = np.random.default_rng(1)
    line = [
        replace(one, step_s=one.step_s * random.normal(1.0, 0.05))
        for one in (measured(TRUTHS[0], 1, 1, m) for m in (16, 32, 64, 128, 256, 512))
    ]
    assert fit_all_reduce(line).floor_c == 0.0
