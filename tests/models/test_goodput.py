"""Goodput, and the batch size that maximises it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.core.allocation import BatchChoice
from stretto.core.job import BatchLimits, Tier
from stretto.core.observations import NoiseSample
from stretto.models import goodput
from stretto.models.batch import split_batch
from stretto.models.goodput import GoodputTable, JobModel
from stretto.models.noise import GradientNoise
from stretto.models.speed import AllReduceSpeed

FIXED = settings(deadline=None, derandomize=True, max_examples=80)

GOLDEN = JobModel(
    AllReduceSpeed(0.1, 0.01, 0.5, 0.02, 0.05, 0.005, 1.6),
    NoiseSample(0.001, 0.02),
    BatchLimits(initial=128, requested=128, max=4096, per_gpu_min=32, per_gpu_max=256),
)


def best(model: JobModel, nodes: int, workers: int) -> tuple[float, BatchChoice]:
    found = GoodputTable([model]).best(np.array([0]), np.array([nodes]), np.array([workers]))
    return float(found.goodput[0]), found.choice(0)


@st.composite
def models(draw: st.DrawFn) -> JobModel:
    times = st.floats(1e-3, 1.0)
    low = draw(st.integers(1, 16))
    high = draw(st.integers(2 * low, 16 * low))
    initial = draw(st.integers(low, high))
    limits = BatchLimits(
        initial=initial,
        requested=initial,
        max=initial * draw(st.integers(1, 64)),
        per_gpu_min=low,
        per_gpu_max=high,
    )
    speed = draw(st.builds(AllReduceSpeed, *[times] * 6, st.floats(1.0, 10.0)))
    return JobModel(speed, NoiseSample(draw(st.floats(1e-3, 1e3)), draw(st.floats(1e-3, 1e3))), limits)


@pytest.mark.parametrize(
    ("nodes", "workers", "batch", "expected"),
    [
        (1, 1, BatchChoice(128), 92.753623),
        (1, 2, BatchChoice(64), 171.538358),
        (1, 4, BatchChoice(128), 323.300520),
        (2, 8, BatchChoice(128), 477.423397),
        (4, 16, BatchChoice(128, 1), 536.362951),
    ],
)
def test_golden_goodput(nodes: int, workers: int, batch: BatchChoice, expected: float) -> None:
    assert GoodputTable([GOLDEN]).at(0, nodes, workers, batch) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("nodes", "workers", "expected", "atomic"),
    [
        (1, 1, 92.7536, 128),
        (1, 2, 176.6237, 121),
        (1, 4, 329.2299, 87),
        (2, 8, 477.4875, 125),
        (4, 16, 707.9063, 106),
        (8, 32, 880.2973, 97),
    ],
)
def test_golden_best_batches(nodes: int, workers: int, expected: float, atomic: int) -> None:
    value, choice = best(GOLDEN, nodes, workers)
    assert value == pytest.approx(expected, abs=1e-4)
    assert choice == BatchChoice(atomic)


def test_golden_best_batch_without_accumulation() -> None:
    value, choice = best(replace(GOLDEN, batch=replace(GOLDEN.batch, accumulation=False)), 1, 1)
    assert value == pytest.approx(93.0102, abs=1e-4)
    assert choice == BatchChoice(159)


@FIXED
@given(models(), st.integers(1, 3), st.integers(0, 20))
def test_p4_the_best_batch_is_never_below_the_initial_one(model: JobModel, nodes: int, more: int) -> None:
    workers = nodes + more
    value, choice = best(model, nodes, workers)
    if value == 0:
        return
    limits, total = model.batch, choice.total(workers)
    assert total >= limits.initial
    assert limits.per_gpu_min <= choice.atomic <= limits.per_gpu_max
    # Rounding a worker's share up to whole examples is all that can exceed the largest total.
    assert total - limits.max < workers * (choice.accumulation + 1)
    noise = GradientNoise(model.noise.sqr, model.noise.var, limits.initial)
    examples_per_s = float(model.speed.throughput(nodes, workers, choice.atomic, choice.accumulation))
    assert value == pytest.approx(examples_per_s * float(noise.efficiency(total)))


@FIXED
@given(models(), st.integers(1, 3), st.integers(0, 12))
def test_the_best_batch_is_no_worse_than_the_ends_of_the_range(
    model: JobModel, nodes: int, more: int
) -> None:
    workers = nodes + more
    table, limits = GoodputTable([model]), model.batch
    value, _ = best(model, nodes, workers)
    lowest = max(limits.initial, limits.per_gpu_min * workers)
    assume(lowest <= limits.max)
    for total in (lowest, limits.max):
        choice = split_batch(limits, total, workers)
        inside = limits.per_gpu_min <= choice.atomic <= limits.per_gpu_max
        if inside and choice.total(workers) == total:
            assert value >= table.at(0, nodes, workers, choice) * (1 - 1e-9)


@FIXED
@given(models(), st.integers(1, 3), st.integers(0, 12), st.floats(1.5, 100.0))
def test_p5_the_best_batch_grows_with_the_noise_scale(
    model: JobModel, nodes: int, more: int, factor: float
) -> None:
    workers = nodes + more
    noisier = replace(model, noise=NoiseSample(model.noise.sqr, model.noise.var * factor))
    (low, small), (high, large) = best(model, nodes, workers), best(noisier, nodes, workers)
    if low > 0 and high > 0:
        assert large.total(workers) >= small.total(workers)


@FIXED
@given(models())
def test_p6_speedup_over_one_gpu_is_1_at_one_gpu(model: JobModel) -> None:
    workers = np.array([1, 1, 2])
    ones = np.ones_like(workers)
    found = GoodputTable([model]).best(0 * ones, ones, workers).goodput
    assert found[0] > 0
    assert found[1] / found[0] == 1.0


def test_one_worker_above_its_initial_batch_accumulates() -> None:
    hungry = replace(GOLDEN, noise=NoiseSample(0.0, 1.0), speed=AllReduceSpeed(1.0, 1e-4, 1, 0, 1, 0, 1.0))
    _, alone = best(hungry, 1, 1)
    assert alone.total(1) > 128
    assert alone.accumulation >= 1
    assert alone.atomic <= 256


def test_a_fixed_batch_is_split_and_not_changed() -> None:
    elastic = replace(GOLDEN, tier=Tier.ELASTIC, batch=replace(GOLDEN.batch, requested=1000))
    for workers in (1, 2, 3, 5, 8, 16):
        value, choice = best(elastic, 1, workers)
        assert value > 0
        assert 1000 <= choice.total(workers) < 1000 + workers * (choice.accumulation + 1)


def test_too_many_workers_have_no_batch() -> None:
    assert best(GOLDEN, 32, 128)[0] > 0
    assert best(GOLDEN, 33, 129)[0] == 0.0


def test_tables_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    job, workers = rng.integers(0, 2, 50), rng.integers(1, 40, 50)
    table = GoodputTable([GOLDEN, replace(GOLDEN, tier=Tier.ELASTIC)])
    whole = table.best(job, np.minimum(workers, 3), workers)
    monkeypatch.setattr(goodput, "CHUNK", 7)
    parts = table.best(job, np.minimum(workers, 3), workers)
    assert (whole.goodput == parts.goodput).all()
    assert (whole.atomic == parts.atomic).all()
    assert (whole.accumulation == parts.accumulation).all()


# --- splitting a given total


@FIXED
@given(models(), st.integers(1, 64), st.integers(1, 32))
def test_a_split_batch_is_at_least_the_total_and_never_above_the_largest(
    model: JobModel, factor: int, workers: int
) -> None:
    limits = model.batch
    total = min(limits.initial * factor, limits.max)
    if workers > total:
        return
    choice = split_batch(limits, total, workers)
    passes = choice.accumulation + 1
    assert choice.total(workers) <= limits.max
    assert choice.atomic <= limits.per_gpu_max
    assert choice.total(workers) >= min(total, limits.max - workers * passes + 1)
    if workers == 1 and total > limits.initial:
        assert passes >= 2
