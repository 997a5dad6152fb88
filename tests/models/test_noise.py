"""Statistical efficiency: what a larger batch is worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.models.noise import PERFECTLY_SCALABLE, GradientNoise, gain

FIXED = settings(deadline=None, derandomize=True, max_examples=100)

noises = st.builds(GradientNoise, st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 4096))


@FIXED
@given(noises, st.floats(1.0, 256.0))
def test_p1_efficiency_is_phi_plus_m0_over_phi_plus_m(noise: GradientNoise, scale: float) -> None:
    batch, phi = scale * noise.initial_batch, noise.noise_scale
    efficiency = float(noise.efficiency(batch))
    assert efficiency == pytest.approx((phi + noise.initial_batch) / (phi + batch))
    assert 0 < efficiency <= 1 + 1e-12
    assert float(noise.efficiency(noise.initial_batch)) == pytest.approx(1.0)


@FIXED
@given(noises, st.floats(1.0, 100.0), st.floats(1.01, 2.0))
def test_a_larger_batch_gains_more_per_step_and_less_per_example(
    noise: GradientNoise, scale: float, factor: float
) -> None:
    small, large = scale * noise.initial_batch, factor * scale * noise.initial_batch
    assert float(noise.gain(small)) <= float(noise.gain(large)) * (1 + 1e-12)
    assert float(noise.gain(large)) <= factor * scale * (1 + 1e-12)
    assert float(noise.efficiency(large)) <= float(noise.efficiency(small)) * (1 + 1e-12)


@pytest.mark.parametrize(("batch", "efficiency"), [(128, 1.0), (512, 0.875), (1024, 0.75), (4096, 0.403846)])
def test_golden_efficiency(batch: int, efficiency: float) -> None:
    noise = GradientNoise(0.001, 0.02, 128)
    assert noise.noise_scale == pytest.approx(2560.0)
    assert float(noise.efficiency(batch)) == pytest.approx(efficiency, abs=1e-6)


def test_without_a_gradient_every_example_counts() -> None:
    silent = GradientNoise(PERFECTLY_SCALABLE.sqr, PERFECTLY_SCALABLE.var, 32)
    assert silent.noise_scale == float("inf")
    assert silent.efficiency(np.array([32, 64, 3200])).tolist() == [1.0, 1.0, 1.0]


def test_statistics_that_say_nothing_gain_nothing() -> None:
    assert gain(np.array([0.0]), np.array([0.0]), np.array([8.0])).tolist() == [1.0]
    assert float(GradientNoise(0.0, 0.0, 32).efficiency(256)) == pytest.approx(1 / 8)


def test_without_noise_a_larger_batch_is_wasted() -> None:
    assert float(GradientNoise(1.0, 0.0, 32).gain(320)) == 1.0
