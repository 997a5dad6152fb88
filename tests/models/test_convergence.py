"""The loss curve, when it converges, and how sure the prediction is."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from stretto.core.job import Convergence
from stretto.core.observations import LossPoint
from stretto.core.seeds import child_rng
from stretto.models.convergence import (
    ConvergenceFit,
    LossCurve,
    converged_at,
    fit_convergence,
    without_spikes,
)
from stretto.models.speed import Floats

STOP = Convergence(threshold=0.005, patience=5)
MAX_EPOCHS = 1000
EPOCHS = np.arange(1.0, MAX_EPOCHS + 1)


def points(losses: Floats) -> list[LossPoint]:
    return [LossPoint(epoch, loss) for epoch, loss in enumerate(losses.tolist(), start=1)]


def fit(losses: Floats) -> ConvergenceFit:
    fitted = fit_convergence(points(losses))
    assert fitted is not None
    return fitted


def curve_of(c: float, floor: float) -> LossCurve:
    """1 at epoch 1, with its pole at epoch -c."""
    a = (1 - floor) * (1 + c)
    return LossCurve(1 / a, c / a, floor)


def random_curve(rng: np.random.Generator, largest_c: float) -> Floats:
    """Losses that end between 0.05 and 0.4; the larger c, the later they bend."""
    return curve_of(rng.uniform(0.0, largest_c), rng.uniform(0.05, 0.4)).loss(EPOCHS)


def observed(rng: np.random.Generator, curve: Floats, progress: float, noise: float) -> tuple[Floats, int]:
    """Losses up to a share of the way to convergence, with noise and 2 % spikes; and where it converges."""
    end = converged_at(curve, STOP, MAX_EPOCHS)
    assert end is not None
    seen = curve[: max(3, int(progress * end))]
    seen = seen * (1 + noise * rng.standard_normal(seen.size))
    spikes = np.where(rng.random(seen.size) < 0.02, rng.uniform(1.3, 2.0, seen.size), 1.0)
    return seen * spikes, end


def test_converged_at_counts_consecutive_small_falls() -> None:
    stop = Convergence(threshold=0.1, patience=2)
    #          epoch   1    2    3     4     5     6
    losses = np.array([2.0, 1.5, 1.4, 1.0, 0.95, 0.90])
    # relative falls        .25  .05   .20  .025  .025
    assert converged_at(losses, stop, 100) == 6
    assert converged_at(losses, stop, 5) is None
    assert converged_at(losses[:5], stop, 100) is None
    assert converged_at(losses, Convergence(threshold=0.1, patience=1), 100) == 3


def test_converged_at_reads_a_rise_as_no_fall_and_a_missing_loss_as_no_news() -> None:
    stop = Convergence(threshold=0.1, patience=2)
    assert converged_at([1.0, 1.2, 1.1], stop, 100) == 3
    assert converged_at([1.0, 0.99, float("nan"), 0.97, 0.96], stop, 100) is None
    assert converged_at([1.0, 0.99, float("nan"), 0.97, 0.96, 0.95], stop, 100) == 6
    assert converged_at([], stop, 100) is None


@given(
    c=st.floats(0.0, 40.0),
    floor=st.floats(0.0, 0.9),
    threshold=st.floats(1e-4, 0.2),
    patience=st.integers(1, 10),
)
def test_the_closed_form_agrees_with_counting(
    c: float, floor: float, threshold: float, patience: int
) -> None:
    curve, stop = curve_of(c, floor), Convergence(threshold=threshold, patience=patience)
    counted = converged_at(curve.loss(EPOCHS), stop, MAX_EPOCHS)
    assert counted is not None
    # A fall that equals the threshold may round either way.
    assert abs(curve.converged_epoch(stop) - counted) <= 1
    just_off = Convergence(threshold=threshold * (1 + 1e-6), patience=patience)
    assert counted in {curve.converged_epoch(stop), curve.converged_epoch(just_off)}


@given(
    c=st.floats(0.0, 40.0),
    floor=st.floats(0.0, 0.9),
    scale=st.floats(1e-3, 1e3),
    count=st.integers(6, 60),
)
@settings(max_examples=60, deadline=None)
def test_without_noise_the_curve_comes_back(c: float, floor: float, scale: float, count: int) -> None:
    curve = curve_of(c, floor).loss(EPOCHS)
    fitted = fit(scale * curve[:count])
    assert fitted.loss(EPOCHS[:count]) == pytest.approx(scale * curve[:count], rel=1e-4)
    assert min(fitted.b0, fitted.b1, fitted.b2) >= 0.0
    assert fitted.scale == pytest.approx(scale, rel=1e-4)
    interval = fitted.epochs_to_converge(STOP, MAX_EPOCHS)
    end = converged_at(curve, STOP, MAX_EPOCHS)
    assert end is not None
    assert interval.low <= interval.expected <= interval.high
    assert interval.low - 1 <= end <= interval.high + 1


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_no_other_curve_has_a_smaller_relative_error(floor: float) -> None:
    rng = child_rng(0, "optimal", f"{floor}")
    epochs = EPOCHS[:15]
    for c in (0.5, 3.0, 12.0):
        losses = curve_of(c, floor).loss(epochs) * (1 + 0.05 * rng.standard_normal(epochs.size))
        cleaned = without_spikes(losses)
        by_c = [
            nnls(np.column_stack([1 / (epochs + other), np.ones(15)]) / cleaned[:, None], np.ones(15))[1]
            for other in [0.0, *np.geomspace(0.01, 1500.0, 400)]
        ]
        error = np.linalg.norm(fit(losses).loss(epochs) / cleaned - 1)
        assert error <= min(by_c) * (1 + 1e-6)


@pytest.mark.parametrize("progress", [0.4, 0.6, 0.8])
def test_without_noise_the_epoch_of_convergence_is_exact(progress: float) -> None:
    rng = child_rng(0, "exact")
    for _ in range(20):
        curve = random_curve(rng, 10.0)
        end = converged_at(curve, STOP, MAX_EPOCHS)
        assert end is not None
        predicted = fit(curve[: int(progress * end)]).epochs_to_converge(STOP, MAX_EPOCHS)
        assert abs(predicted.expected - end) <= 1


@pytest.mark.parametrize("progress", [0.4, 0.6, 0.8])
def test_o3_convergence_is_predicted_within_ten_percent_from_noisy_losses(progress: float) -> None:
    rng = child_rng(0, "o3")
    errors = []
    for _ in range(100):
        losses, end = observed(rng, random_curve(rng, 5.0), progress, noise=0.03)
        errors.append(abs(fit(losses).epochs_to_converge(STOP, MAX_EPOCHS).expected / end - 1))
    assert np.mean(errors) <= 0.10


def coverage(noise: float, progress: float) -> float:
    """How often the interval holds the true epoch of convergence."""
    rng = child_rng(0, "coverage", f"{noise} {progress}")
    held = []
    for _ in range(100):
        losses, end = observed(rng, random_curve(rng, 20.0), progress, noise)
        interval = fit(losses).epochs_to_converge(STOP, MAX_EPOCHS)
        held.append(interval.low <= end <= interval.high)
    return float(np.mean(held))


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
@pytest.mark.parametrize("progress", [0.4, 0.8])
def test_the_interval_holds_the_truth_in_about_four_cases_of_five(noise: float, progress: float) -> None:
    assert 0.70 <= coverage(noise, progress) <= 0.95


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
def test_from_three_or_four_losses_the_interval_errs_on_the_wide_side(noise: float) -> None:
    assert coverage(noise, 0.1) >= 0.85


def test_the_interval_narrows_as_losses_arrive() -> None:
    rng = child_rng(0, "narrows")
    losses = random_curve(rng, 10.0) * (1 + 0.02 * rng.standard_normal(MAX_EPOCHS))
    widths = []
    for count in (4, 8, 16, 32):
        interval = fit(losses[:count]).epochs_to_converge(STOP, MAX_EPOCHS)
        widths.append(interval.high - interval.low)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 3 * max(widths[-1], 1)


def test_a_prediction_beyond_the_limit_is_the_limit() -> None:
    slow = fit(LossCurve(0.02, 1.0, 0.0).loss(EPOCHS[:5]))
    assert slow.epochs_to_converge(Convergence(threshold=1e-6, patience=3), 50).expected == 50


def test_a_flat_curve_has_converged() -> None:
    flat = fit(np.full(8, 0.7))
    assert flat.loss(100) == pytest.approx(0.7)
    assert flat.epochs_to_converge(STOP, MAX_EPOCHS).expected == 1 + STOP.patience


def test_a_rising_loss_is_fitted_as_flat() -> None:
    rising = fit(np.linspace(0.5, 0.9, 10))
    assert rising.b0 == 0.0
    assert rising.epochs_to_converge(STOP, MAX_EPOCHS).expected == 1 + STOP.patience


def test_too_few_usable_losses_give_no_fit() -> None:
    assert fit_convergence([]) is None
    two = [LossPoint(1, 1.0), LossPoint(2, 0.8)]
    assert fit_convergence(two) is None
    unusable = [LossPoint(3, None), LossPoint(4, float("nan")), LossPoint(5, float("inf")), LossPoint(2, 0.7)]
    assert fit_convergence([*two, *unusable]) is None
    assert fit_convergence([*two, *unusable, LossPoint(6, 0.5)]) is not None


def test_missing_losses_and_the_order_of_reports_change_nothing_else() -> None:
    losses = points(random_curve(child_rng(0, "order"), 10.0)[:20])
    shuffled = [losses[i] for i in child_rng(0, "shuffle").permutation(20)]
    assert fit_convergence([*shuffled, LossPoint(7, None), LossPoint(21, None)]) == fit_convergence(losses)


def test_epochs_may_count_from_zero() -> None:
    curve = LossCurve(0.3, 0.8, 0.2).loss(np.arange(20))
    fitted = fit_convergence([LossPoint(epoch, loss) for epoch, loss in enumerate(curve.tolist())])
    assert fitted is not None
    assert fitted.loss(np.arange(20)) == pytest.approx(curve, rel=1e-4)


def test_a_spike_is_replaced_by_its_neighbours_mean_and_a_falling_curve_is_left_alone() -> None:
    falling = 1.0 / np.arange(1, 21)
    assert without_spikes(falling) == pytest.approx(falling, abs=0)
    spiked = falling.copy()
    spiked[9] = 3.0
    cleaned = without_spikes(spiked)
    assert cleaned[9] == pytest.approx(np.mean(falling[[6, 7, 8, 10, 11, 12]]))
    assert np.delete(cleaned, 9) == pytest.approx(np.delete(falling, 9), abs=0)


def test_a_spike_moves_the_prediction_little() -> None:
    curve = random_curve(child_rng(0, "spike"), 10.0)[:20]
    spiked = curve.copy()
    spiked[11] *= 2.0
    clean, dirty = (fit(losses).epochs_to_converge(STOP, MAX_EPOCHS).expected for losses in (curve, spiked))
    assert abs(clean - dirty) <= 2


def test_a_refit_takes_about_a_millisecond() -> None:
    rng = child_rng(0, "speed")
    losses = points(random_curve(rng, 10.0)[:50] * (1 + 0.02 * rng.standard_normal(50)))
    fit_convergence(losses)
    taken = []
    for _ in range(20):
        start = time.process_time()
        fit_convergence(losses)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.005
