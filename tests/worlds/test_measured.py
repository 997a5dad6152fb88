"""Against the published measurements, where they are at hand."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest

from stretto.core.allocation import Allocation, on_nodes
from stretto.models.noise import GradientNoise
from stretto.worlds.applications import Application, Applications, Configuration, builtin_catalogue
from stretto.worlds.measured import load_profiles
from stretto.worlds.workload_files import load_workload

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("STRETTO_DATA", ROOT.parent / "shared" / "data"))
POLLUX, SIA = DATA / "pollux", DATA / "sia"

pytestmark = pytest.mark.skipif(
    not (POLLUX / "traces").is_dir(), reason=f"no measurements at {DATA} (set STRETTO_DATA)"
)

PUBLISHED_S = {
    ("bert", 6): 3056,
    ("bert", 8): 2480,
    ("bert", 12): 1589,
    ("bert", 16): 1335,
    ("cifar10", 6): 854,
    ("cifar10", 8): 826,
    ("cifar10", 12): 573,
    ("cifar10", 16): 449,
    ("deepspeech2", 6): 4153,
    ("deepspeech2", 8): 3501,
    ("deepspeech2", 12): 2573,
    ("imagenet", 24): 31396,
    ("imagenet", 32): 26207,
    ("imagenet", 48): 18880,
    ("ncf", 1): 33,
    ("yolov3", 4): 12870,
}
"""Completion times of the tuned requests, alone on nodes of four GPUs: iterations times step time."""


@pytest.fixture(scope="module")
def profiles() -> Applications:
    return load_profiles([POLLUX / "traces"])


def packed(workers: int) -> Allocation:
    return on_nodes({str(i): min(4, workers - 4 * i) for i in range(math.ceil(workers / 4))})


def passes_of(app: Application, request: Configuration) -> tuple[int, int]:
    """Passes per step, and examples per GPU and pass, rounded up."""
    local = math.ceil(request.batch / request.workers)
    passes = math.ceil(local / app.per_gpu_max)
    return passes, math.ceil(local / passes)


def step_s(app: Application, workers: int, passes: int, atomic: int) -> float:
    time = app.truth.step_time(packed(workers), atomic)
    return time.step_s + (passes - 1) * (time.step_s - time.sync_s)


def completion_s(app: Application, request: Configuration) -> float:
    passes, atomic = passes_of(app, request)
    atomic = min(atomic, app.max_batch // (request.workers * passes))
    batch = request.workers * passes * atomic
    one_step_s = step_s(app, request.workers, passes, atomic)
    total_s = 0.0
    for epoch in range(app.truth.epochs):
        noise = app.truth.noise_at(batch, epoch)
        assert noise is not None
        gain = float(GradientNoise(noise.sqr, noise.var, app.initial_batch).gain(batch))
        total_s += (app.truth.units_at(epoch + 1) - app.truth.units_at(epoch)) * one_step_s / gain
    return total_s


tuned = pytest.mark.parametrize(
    ("name", "request_"),
    [(app.name, request) for app in builtin_catalogue().entries.values() for request in app.tuned],
)


@tuned
def test_step_times_give_the_published_completion_times(
    profiles: Applications, name: str, request_: Configuration
) -> None:
    app = profiles.get(name)
    one_step_s = step_s(app, request_.workers, *passes_of(app, request_))
    with (POLLUX / "traces" / name / f"validation-{request_.batch}.csv").open() as file:
        iterations = int(list(csv.DictReader(file))[-1]["iteration"])
    assert iterations * one_step_s == pytest.approx(PUBLISHED_S[name, request_.workers], rel=0.005, abs=0.5)


@tuned
def test_the_catalogue_is_near_the_tables(profiles: Applications, name: str, request_: Configuration) -> None:
    measured = completion_s(profiles.get(name), request_)
    assert completion_s(builtin_catalogue().get(name), request_) == pytest.approx(measured, rel=0.17)


def test_the_catalogue_has_the_limits_of_the_tables(profiles: Applications) -> None:
    assert sorted(profiles.entries) == sorted(builtin_catalogue().entries)
    for name, ours in builtin_catalogue().entries.items():
        app = profiles.get(name)
        assert (ours.initial_batch, ours.max_batch) == (app.initial_batch, app.max_batch)
        assert (ours.per_gpu_min, ours.per_gpu_max) == (app.per_gpu_min, app.per_gpu_max)
        assert ours.truth.epochs == app.truth.epochs
        assert ours.truth.units_at(ours.truth.epochs) == pytest.approx(
            app.truth.units_at(app.truth.epochs), 1e-4
        )


def test_a_measured_placement_is_what_the_table_says(profiles: Applications) -> None:
    truth = profiles.get("cifar10").truth
    assert truth.step_time(on_nodes({"0": 1}), 32).step_s == pytest.approx(0.0427886962890625)
    noise = profiles.get("bert").truth.noise_at(12, 0)
    assert noise is not None
    assert noise.var / noise.sqr * 12 == pytest.approx(423, rel=0.01)


def test_every_even_spread_on_sixteen_nodes_of_four_is_covered(profiles: Applications) -> None:
    for app in profiles.entries.values():
        for workers in range(1, 65):
            for nodes in range(math.ceil(workers / 4), min(16, workers) + 1):
                spread = on_nodes({str(i): workers // nodes + (i < workers % nodes) for i in range(nodes)})
                for atomic in (app.per_gpu_min, app.per_gpu_max):
                    if app.initial_batch <= workers * atomic <= app.max_batch:
                        assert app.truth.step_time(spread, atomic).step_s > 0


def test_every_workload_file_is_read(profiles: Applications) -> None:
    files = sorted(POLLUX.glob("workloads*/*.csv")) + sorted(SIA.glob("workloads/**/*.csv"))
    assert files
    for file in files:
        workload = load_workload(file, profiles, np.random.default_rng(0))
        with file.open() as lines:
            assert len(workload.jobs) == sum(1 for _ in lines) - 1


@pytest.mark.skipif(not (SIA / "traces").is_dir(), reason=f"no measurements at {SIA}")
@pytest.mark.parametrize("gpu_type", ["rtx", "dgx", "dgx-ext"])
def test_other_gpu_types_overlay_the_first(gpu_type: str) -> None:
    profiles = load_profiles([SIA / "traces", POLLUX / "traces"], gpu_type)
    assert sorted(profiles.entries) == sorted(builtin_catalogue().entries)
    assert profiles.get("bert").truth.step_time(on_nodes({"0": 1}), 4).step_s < 0.4


def test_the_published_log_is_read() -> None:
    log = POLLUX / "philly_dev.csv.gz"
    if not log.is_file():
        pytest.skip(f"no log at {log}")
    workload = load_workload(log, builtin_catalogue(), np.random.default_rng(0))
    assert len(workload.jobs) > 20_000
    assert any("shorter than 60 s" in note for note in workload.notes)
