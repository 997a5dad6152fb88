"""Speed of jobs with parameter servers: the formulas, the fit, and what it says about itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.observations import SpeedSample
from stretto.core.seeds import child_rng
from stretto.models.parameter_server import ServerSpeed, ServerSpeedFit, fit_server_speed

BATCH = 128
SYNC = ServerSpeed(thetas=(0.02, 0.3, 0.15, 0.02, 0.015), synchronous=True, total_batch=BATCH)
ASYNC = ServerSpeed(thetas=(0.6, 0.15, 0.02, 0.015), synchronous=False, total_batch=BATCH)
RESNET = ServerSpeed(thetas=(2.2 / BATCH, 0.2, 0.25, 0.01, 0.01), synchronous=True, total_batch=BATCH)
"""Like ResNet-50 as published: of 20 containers, 8 workers and 12 servers are fastest."""
RESNET_ASYNC = ServerSpeed(thetas=(0.5, 0.25, 0.01, 0.01), synchronous=False, total_batch=BATCH)
SERVERS, WORKERS = (axis.ravel() for axis in np.meshgrid(np.arange(1, 17), np.arange(1, 17)))


def sample(truth: ServerSpeed, servers: int, workers: int, noise: float = 0.0) -> SpeedSample:
    step_s = (1.0 + noise) / float(truth.steps_per_s(servers, workers))
    return SpeedSample(
        nodes=1, workers=workers, servers=servers, atomic=BATCH // workers, step_s=step_s, sync_s=0.0
    )


def fit(
    truth: ServerSpeed, configurations: list[tuple[int, int]], noises: list[float] | None = None
) -> ServerSpeedFit:
    noises = noises or [0.0] * len(configurations)
    samples = [sample(truth, p, w, noise) for (p, w), noise in zip(configurations, noises, strict=True)]
    fitted = fit_server_speed(samples, synchronous=truth.synchronous, total_batch=BATCH)
    assert fitted is not None
    return fitted


def grid_error(fitted: ServerSpeedFit, truth: ServerSpeed) -> float:
    """Mean relative error of the speed over 16 x 16 configurations."""
    return float(
        np.mean(np.abs(fitted.model.steps_per_s(SERVERS, WORKERS) / truth.steps_per_s(SERVERS, WORKERS) - 1))
    )


def test_the_formulas_by_hand() -> None:
    # p = 2, w = 4: M/w = 32, w/p = 2
    assert 1 / SYNC.steps_per_s(2, 4) == pytest.approx(0.02 * 32 + 0.3 + 0.15 * 2 + 0.02 * 4 + 0.015 * 2)
    assert 4 / ASYNC.steps_per_s(2, 4) == pytest.approx(0.6 + 0.15 * 2 + 0.02 * 4 + 0.015 * 2)


def test_arrays_broadcast_and_a_job_without_tasks_stands_still() -> None:
    table = SYNC.steps_per_s(np.arange(4)[:, None], np.arange(3))
    assert table.shape == (4, 3)
    assert not table[0].any()
    assert not table[:, 0].any()
    assert table[3, 2] == SYNC.steps_per_s(3, 2)


positive = st.floats(0.01, 1.0)


@given(thetas=st.tuples(positive, positive, positive, positive, positive), synchronous=st.booleans())
@settings(max_examples=60, deadline=None)
def test_o1_exact_samples_off_the_diagonal_give_the_thetas_back(
    thetas: tuple[float, ...], synchronous: bool
) -> None:
    truth = ServerSpeed(
        thetas=thetas if synchronous else thetas[1:], synchronous=synchronous, total_batch=BATCH
    )
    configurations = (
        [(1, 1), (1, 4), (4, 1), (3, 8), (8, 5)] if synchronous else [(1, 1), (1, 4), (4, 1), (3, 8)]
    )
    fitted = fit(truth, configurations)
    assert fitted.identified
    assert not fitted.warning
    assert fitted.model.thetas == pytest.approx(truth.thetas, rel=1e-6)
    assert fitted.relative_error < 1e-9


def test_o1_a_term_that_is_not_there_gets_zero() -> None:
    truth = ServerSpeed(thetas=(0.02, 0.0, 0.15, 0.0, 0.01), synchronous=True, total_batch=BATCH)
    fitted = fit(truth, [(1, 1), (1, 4), (4, 1), (3, 8), (8, 5), (2, 6)])
    assert fitted.model.thetas == pytest.approx(truth.thetas, abs=1e-9)
    assert min(fitted.model.thetas) >= 0.0


def noisy_fits(truth: ServerSpeed, *, diagonal: bool) -> list[ServerSpeedFit]:
    """Fits to 10 configurations each, with 5 % noise."""
    rng = child_rng(0, "o2")
    fits = []
    for _ in range(40):
        noises = (0.05 * rng.standard_normal(10)).tolist()
        chosen = 17 * rng.choice(16, 10, replace=False) if diagonal else rng.choice(256, 10, replace=False)
        fits.append(fit(truth, [(int(SERVERS[i]), int(WORKERS[i])) for i in chosen], noises))
    return fits


@pytest.mark.parametrize("truth", [SYNC, ASYNC, RESNET, RESNET_ASYNC])
def test_o2_ten_noisy_samples_predict_the_grid(truth: ServerSpeed) -> None:
    fits = noisy_fits(truth, diagonal=False)
    assert np.mean([grid_error(fitted, truth) for fitted in fits]) <= 0.05
    assert all(fitted.identified for fitted in fits)


@pytest.mark.parametrize("truth", [RESNET, RESNET_ASYNC])
def test_o2_diagonal_samples_mislead_and_say_so(truth: ServerSpeed) -> None:
    # How far they mislead depends on the job: little where exchanging gradients is a small part.
    fits = noisy_fits(truth, diagonal=True)
    assert np.mean([grid_error(fitted, truth) for fitted in fits]) >= 0.15
    assert not any(fitted.identified for fitted in fits)


@pytest.mark.parametrize("ratio", [1, 2])
def test_o2_one_worker_server_ratio_is_flagged_with_what_it_hides_and_the_remedy(ratio: int) -> None:
    fitted = fit(SYNC, [(n, ratio * n) for n in range(1, 11)])
    assert not fitted.identified
    assert "constant and workers per server; workers and servers" in fitted.warning
    assert "batch per worker" not in fitted.warning
    assert "other worker:server ratios" in fitted.warning
    # What was sampled is still explained, and the ratio sampled still predicted.
    assert fitted.relative_error < 1e-9
    assert fitted.model.steps_per_s(20, ratio * 20) == pytest.approx(SYNC.steps_per_s(20, ratio * 20))


@pytest.mark.parametrize(("truth", "terms"), [(SYNC, 5), (ASYNC, 4)], ids=["sync", "async"])
def test_too_few_configurations_are_fitted_but_flagged(truth: ServerSpeed, terms: int) -> None:
    configurations = [(1, 1), (1, 4), (4, 1), (3, 8), (8, 5)]
    for count in range(1, terms):
        few = fit(truth, configurations[:count])
        assert not few.identified
        assert f"{count} configuration(s)" in few.warning
        assert few.relative_error < 0.02
    assert fit(truth, configurations[:terms]).identified


def test_repeating_a_configuration_identifies_nothing_more() -> None:
    assert not fit(ASYNC, [(1, 1), (1, 4), (1, 4), (4, 1), (4, 1)]).identified


def test_no_sample_of_a_parameter_server_job_gives_no_fit() -> None:
    all_reduce = SpeedSample(nodes=1, workers=4, servers=0, atomic=32, step_s=0.5, sync_s=0.1)
    assert fit_server_speed([], synchronous=True, total_batch=BATCH) is None
    assert fit_server_speed([all_reduce], synchronous=True, total_batch=BATCH) is None


def test_measured_speeds_stand_and_the_model_fills_in() -> None:
    configurations = [(1, 1), (1, 4), (4, 1), (3, 8), (8, 5), (2, 2)]
    fitted = fit(SYNC, configurations, [0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
    assert fitted.relative_error > 0.01
    table = fitted.steps_per_s(np.arange(1, 9)[:, None], np.arange(1, 9))
    model = fitted.model.steps_per_s(np.arange(1, 9)[:, None], np.arange(1, 9))
    assert table[2, 7] == pytest.approx(SYNC.steps_per_s(3, 8) / 0.9)
    assert table[2, 7] == fitted.steps_per_s(3, 8) == fitted.measured[3, 8]
    assert np.sum(table != model) == len(configurations)


def test_a_configuration_run_twice_counts_with_its_mean_time() -> None:
    samples = [sample(SYNC, 2, 4, noise) for noise in (-0.2, 0.2)]
    fitted = fit_server_speed(samples, synchronous=True, total_batch=BATCH)
    assert fitted is not None
    assert fitted.steps_per_s(2, 4) == pytest.approx(SYNC.steps_per_s(2, 4))


def test_the_order_of_samples_does_not_matter() -> None:
    configurations = [(1, 1), (1, 4), (4, 1), (3, 8), (8, 5), (2, 2)]
    assert fit(SYNC, configurations) == fit(SYNC, configurations[::-1])


def test_o10_twenty_containers_have_an_interior_optimum() -> None:
    workers = np.arange(1, 20)
    speed = RESNET.steps_per_s(20 - workers, workers)
    assert workers[speed.argmax()] == 8
    assert (np.diff(speed)[:7] > 0).all()
    assert (np.diff(speed)[7:] < 0).all()


@given(thetas=st.tuples(positive, positive, positive, positive, positive))
def test_o10_at_one_server_per_worker_speed_rises_then_falls(thetas: tuple[float, ...]) -> None:
    speed = ServerSpeed(thetas=thetas, synchronous=True, total_batch=BATCH)
    peak = float(np.sqrt(thetas[0] * BATCH / (thetas[3] + thetas[4])))
    counts = np.arange(1, 200)
    change = np.diff(speed.steps_per_s(counts, counts))
    assert (change[counts[1:] <= peak] > 0).all()
    assert (change[counts[:-1] >= peak] < 0).all()
