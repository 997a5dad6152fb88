"""The built-in applications and the workloads made from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.allocation import on_nodes
from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.models.noise import GradientNoise
from stretto.worlds.applications import Application, builtin_catalogue
from stretto.worlds.synthetic import DEMO_MIX, MIX, demo_workload, synthetic_workload

APPLICATIONS = list(builtin_catalogue().entries.values())
by_name = pytest.mark.parametrize("app", APPLICATIONS, ids=lambda app: app.name)


def test_the_six_applications() -> None:
    assert sorted(builtin_catalogue().entries) == [
        "bert",
        "cifar10",
        "deepspeech2",
        "imagenet",
        "ncf",
        "yolov3",
    ]
    assert [app.name for app in APPLICATIONS if app.tier is not Tier.ADAPTIVE] == ["ncf"]


@by_name
def test_every_tuned_request_makes_a_job(app: Application) -> None:
    assert app.tuned
    for request in app.tuned:
        job = app.job("j", 0.0, request)
        assert job.worker.requested == request.workers <= job.worker.max
        assert job.batch.requested == request.batch
        assert job.work.total_units == pytest.approx(app.truth.units_at(app.truth.epochs))


@by_name
def test_progress_and_loss_run_from_start_to_end(app: Application) -> None:
    truth = app.truth
    units = [truth.units_at(epoch) for epoch in range(truth.epochs + 1)]
    assert units[0] == 0.0
    assert units == sorted(set(units))
    first, last = truth.loss_at(1), truth.loss_at(truth.epochs)
    assert first is not None
    assert last is not None
    assert 0 < last < first
    for outside in (0, truth.epochs + 1):
        with pytest.raises(IndexError):
            truth.loss_at(outside)


@by_name
def test_noise_grows_over_training(app: Application) -> None:
    for batch in (app.initial_batch, app.max_batch):
        first, last = (app.truth.noise_at(batch, epoch) for epoch in (0, app.truth.epochs - 1))
        assert first is not None
        assert last is not None
        assert 0 < first.var / first.sqr < last.var / last.sqr < float("inf")
    for outside in (-1, app.truth.epochs):
        with pytest.raises(IndexError):
            app.truth.noise_at(app.initial_batch, outside)


def test_noise_is_log_linear_in_the_batch() -> None:
    truth = builtin_catalogue().get("bert").truth

    def phi(batch: int) -> float:
        noise = truth.noise_at(batch, 0)
        assert noise is not None
        return GradientNoise(noise.sqr, noise.var, 12).noise_scale

    assert phi(12) == pytest.approx(423)
    assert phi(96) == pytest.approx(2210)
    assert phi(192) == pytest.approx((2210 * 11200) ** 0.5)
    assert phi(8) == phi(12)  # as the nearest curve


@given(st.sampled_from(APPLICATIONS), st.integers(1, 8), st.integers(1, 4), st.data())
def test_steps_take_time_and_synchronisation_is_a_part_of_it(
    app: Application, nodes: int, per_node: int, data: st.DataObject
) -> None:
    atomic = data.draw(st.integers(app.per_gpu_min, app.per_gpu_max))
    allocation = on_nodes({str(i): per_node for i in range(nodes)})
    step_s, sync_s = app.truth.step_time(allocation, atomic)
    assert 0 <= sync_s < step_s
    assert app.truth.step_time(allocation, atomic + 1).step_s > step_s


def test_jobs_beyond_the_limits_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"unknown application 'gpt'; the built-in catalogue has bert, cifar10"
    ):
        builtin_catalogue().get("gpt")


def test_synthetic_workloads_follow_the_seed() -> None:
    first, again, other = (synthetic_workload(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.jobs != other.jobs
    assert len(first.jobs) == 160
    assert len(first.truths) == 160


def test_synthetic_workloads_have_the_mix_and_the_shape_of_a_day() -> None:
    jobs = synthetic_workload(np.random.default_rng(3), jobs=4000, hours=8).jobs
    counts = Counter(job.application for job in jobs)
    for name, share in MIX:
        assert counts[name] / 4000 == pytest.approx(share, abs=0.03)
    per_hour, _ = np.histogram([job.submit_s for job in jobs], bins=8, range=(0, 8 * 3600))
    assert per_hour.sum() == 4000
    assert min(per_hour[3:5]) > 2 * max(per_hour[0], per_hour[7])


@given(st.integers(1, 30), st.floats(0.1, 100), st.integers(0, 99))
def test_synthetic_jobs_come_in_order_and_in_time(jobs: int, hours: float, seed: int) -> None:
    workload = synthetic_workload(np.random.default_rng(seed), jobs=jobs, hours=hours)
    times = [job.submit_s for job in workload.jobs]
    assert len(times) == jobs
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= hours * 3600 + 0.001


@pytest.mark.parametrize("options", [{"jobs": 0}, {"hours": 0.0}, {"hours": float("nan")}])
def test_empty_synthetic_workloads_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        synthetic_workload(np.random.default_rng(0), **options)


def test_the_demo_is_always_the_same() -> None:
    demo = demo_workload()
    assert demo == demo_workload()
    assert Counter(job.application for job in demo.jobs) == dict(DEMO_MIX)
    assert max(job.submit_s for job in demo.jobs) < 2 * 3600
