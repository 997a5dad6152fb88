"""Measured tables: how they are read, and what is said between and beyond the measured points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.allocation import on_nodes
from stretto.core.errors import InputError
from stretto.core.job import Tier
from stretto.core.observations import NoiseSample
from stretto.worlds.applications import Applications
from stretto.worlds.measured import (
    LinearBetween,
    OutsideProfileError,
    Shape,
    SpeedPoint,
    SpeedTable,
    TableTruth,
    TrainingRun,
    falling,
    load_profiles,
    normal_shape,
)
from stretto.worlds.truth import StepTime

PLACEMENTS = "placement,local_bsz,step_time,sync_time\n"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
VALIDATION = "progress,iteration,metric,grad_sqr,grad_var\n"


def write_profile(folder: Path, name: str = "toy", gpu_type: str = "", step_s: float = 1.0) -> None:
    """Step time = step_s * (local_bsz / 10 + replicas + nodes), of which 0.5 * nodes is synchronisation."""
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    placements = "".join(
        f"{shape},{atomic},{step_s * (atomic / 10 + sum(map(int, shape)) + len(shape))},{0.5 * len(shape)}\n"
        for shape in ("1", "2", "4", "11", "12", "22", "44")
        for atomic in (10, 20, 40)
    )
    scalability = "".join(
        f"{nodes},{replicas},{atomic},{step_s * (atomic / 10 + replicas + nodes)},{0.5 * nodes}\n"
        for nodes, replicas in ((4, 4), (4, 16), (16, 16), (16, 64))
        for atomic in (10, 40)
    )
    (home / f"placements{gpu_type}.csv").write_text(PLACEMENTS + placements)
    (home / f"scalability{gpu_type}.csv").write_text(SCALABILITY + scalability)


def write_runs(folder: Path, name: str = "toy") -> None:
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "validation-20.csv").write_text(
        VALIDATION + "100,100,0.5,8,16\n200,200,0.7,4,16\n310,300,0.8,2,9\n"
    )
    (home / "validation-80.csv").write_text(VALIDATION + "101,30,0.4,4,32\n199,60,0.6,0,64\n")


@pytest.fixture
def profiles(tmp_path: Path) -> Applications:
    write_profile(tmp_path)
    write_runs(tmp_path)
    return load_profiles([tmp_path])


def test_limits_come_from_the_tables(profiles: Applications) -> None:
    toy = profiles.get("toy")
    assert (toy.initial_batch, toy.max_batch) == (20, 80)
    assert (toy.per_gpu_min, toy.per_gpu_max) == (10, 40)
    assert toy.tier is Tier.ADAPTIVE
    assert toy.truth.epochs == 2  # that of the shortest run


def test_progress_is_the_least_of_all_runs(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    assert [truth.units_at(epoch) for epoch in range(3)] == [0.0, 100.0, 199.0]
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            truth.units_at(wrong)


def test_gradient_statistics_are_linear_in_the_batch(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    assert truth.noise_at(20, 0) == NoiseSample(8.0, 16.0)
    assert truth.noise_at(80, 1) == NoiseSample(0.0, 64.0)
    assert truth.noise_at(35, 0) == NoiseSample(7.0, 20.0)
    for outside in (19, 81):
        with pytest.raises(OutsideProfileError, match=rf"batch size {outside}.*20 to 80"):
            truth.noise_at(outside, 0)
    with pytest.raises(IndexError):
        truth.noise_at(20, -1)


def test_loss_falls_even_where_the_metric_rises(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    assert truth.loss_at(1) == pytest.approx(0.5)
    assert truth.loss_at(2) == pytest.approx(0.3)
    assert falling((80.0, 90.0)) == (20.0, 10.0)
    assert falling((3.0, 2.0)) == (3.0, 2.0)


def test_measured_placement_is_linear_in_the_local_batch(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    assert truth.step_time(on_nodes({"a": 2, "b": 1}), 10) == pytest.approx((6.0, 1.0))
    assert truth.step_time(on_nodes({"a": 1, "b": 2}), 30) == pytest.approx((8.0, 1.0))
    assert truth.step_time(on_nodes({"x": 4}), 15) == pytest.approx((6.5, 0.5))


def test_a_measured_placement_does_not_look_at_its_neighbours() -> None:
    odd: dict[Shape, dict[int, StepTime]] = {
        (1,): {10: StepTime(1, 0), 20: StepTime(3, 0)},
        (2,): {10: StepTime(100, 0)},
    }
    table = SpeedTable("odd", odd, [])
    assert table.step_time((1,), 15) == StepTime(2.0, 0.0)
    with pytest.raises(OutsideProfileError, match="10 to 10 per GPU"):
        table.step_time((2,), 15)


def test_other_placements_are_interpolated_by_nodes_and_replicas(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    spread = on_nodes({str(i): 2 for i in range(8)})
    assert truth.step_time(spread, 20) == pytest.approx((2 + 16 + 8, 4.0))


def test_interpolation_uses_the_mean_of_placements_of_the_same_size() -> None:
    def row(step_s: float) -> dict[int, StepTime]:
        return {10: StepTime(step_s, 0.0), 20: StepTime(step_s, 0.0)}

    placements = {(1, 3): row(4.0), (2, 2): row(8.0), (1,): row(1.0), (2,): row(2.0)}
    corners = [SpeedPoint(4, 8, atomic, StepTime(9.0, 0.0)) for atomic in (10, 20)]
    table = SpeedTable("mean", placements, corners)
    halfway = table.step_time((2, 2, 2), 10).step_s  # between (2 nodes, 4 GPUs) and (4 nodes, 8 GPUs)
    assert halfway == pytest.approx((6.0 + 9.0) / 2)


def test_interpolation_is_that_of_scipy() -> None:
    from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415

    rng = np.random.default_rng(5)
    points = rng.integers(0, 20, size=(20, 3))
    values = rng.random((20, 2))
    ours, theirs = LinearBetween(points, values), LinearNDInterpolator(points, values)
    inside = 0
    for point in rng.integers(0, 20, size=(200, 3)):
        expected = theirs(point)[0]
        found = ours.at(point)
        if found is None:
            assert np.isnan(expected).all()
        else:
            inside += 1
            assert found == pytest.approx(expected)
    assert 30 < inside < 200
    assert all(ours.at(point) is not None for point in points)


def test_more_than_sixteen_nodes_count_as_sixteen(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    wide = on_nodes({str(i): 1 for i in range(20)})
    assert truth.step_time(wide, 10) == pytest.approx((1 + 20 + 16, 8.0))


@pytest.mark.parametrize(
    ("workers", "atomic"),
    [({"a": 4}, 9), ({"a": 4}, 41), ({"a": 8}, 20), ({str(i): 4 for i in range(17)}, 20)],
)
def test_outside_the_measured_range_is_an_error(
    profiles: Applications, workers: dict[str, int], atomic: int
) -> None:
    with pytest.raises(OutsideProfileError, match="toy does not tell the step time"):
        profiles.get("toy").truth.step_time(on_nodes(workers), atomic)


def test_too_few_points_to_interpolate_is_an_error() -> None:
    table = SpeedTable("flat", {(1,): {10: StepTime(1, 0)}}, [])
    with pytest.raises(OutsideProfileError):
        table.step_time((3,), 10)


def test_answers_are_remembered(profiles: Applications) -> None:
    truth = profiles.get("toy").truth
    first = truth.step_time(on_nodes({"a": 2, "b": 1}), 30)
    assert truth.step_time(on_nodes({"a": 2, "b": 1}), 30) is first
    assert truth.noise_at(35, 0) is truth.noise_at(35, 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_rotations_share_one_normal_shape(counts: list[int], turn: int) -> None:
    shape = tuple(counts)
    turned = shape[turn % len(shape) :] + shape[: turn % len(shape)]
    assert normal_shape(turned) == normal_shape(shape) <= shape


@given(st.integers(20, 80), st.integers(0, 1))
def test_noise_stays_between_its_neighbours(batch: int, epoch: int) -> None:
    runs = [
        TrainingRun(20, (1, 2), (1, 1), (8, 4), (16, 16)),
        TrainingRun(80, (1, 2), (1, 1), (4, 0), (32, 64)),
    ]
    truth = TableTruth("toy", SpeedTable("toy", {(1,): {10: StepTime(1, 0)}}, []), runs)
    noise = truth.noise_at(batch, epoch)
    assert runs[1].grad_sqr[epoch] <= noise.sqr <= runs[0].grad_sqr[epoch]
    assert runs[0].grad_var[epoch] <= noise.var <= runs[1].grad_var[epoch]


def test_folders_overlay_and_gpu_types_have_their_own_speed(tmp_path: Path) -> None:
    base, fast = tmp_path / "base", tmp_path / "fast"
    write_profile(base)
    write_runs(base)
    write_profile(fast, gpu_type="-rtx", step_s=0.5)
    one = on_nodes({"a": 1})
    slow = load_profiles([fast, base]).get("toy").truth.step_time(one, 10)
    quick = load_profiles([fast, base], "rtx").get("toy").truth.step_time(one, 10)
    assert slow.step_s == pytest.approx(2 * quick.step_s)
    write_profile(fast, step_s=0.25)
    first = load_profiles([fast, base]).get("toy").truth.step_time(one, 10)
    assert first.step_s == pytest.approx(slow.step_s / 4)


def test_names_of_the_catalogue_keep_their_rules(tmp_path: Path) -> None:
    for name in ("ncf", "yolov3"):
        write_profile(tmp_path, name)
        write_runs(tmp_path, name)
    profiles = load_profiles([tmp_path])
    assert (profiles.get("ncf").tier, profiles.get("ncf").max_workers) == (Tier.RIGID, 1)
    assert profiles.get("yolov3").per_gpu_max == 8


def test_incomplete_applications_are_named_when_asked_for(tmp_path: Path) -> None:
    write_profile(tmp_path)
    write_runs(tmp_path)
    write_runs(tmp_path, "half")
    profiles = load_profiles([tmp_path])
    with pytest.raises(InputError, match=r"'half' cannot be used: there is no placements\.csv"):
        profiles.get("half")
    with pytest.raises(InputError, match="no application with a complete profile"):
        load_profiles([tmp_path], "tpu")
    with pytest.raises(InputError, match="is not a folder"):
        load_profiles([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("placements.csv", PLACEMENTS + "1,10,0,0\n", r"placements\.csv:2: step_time '0' is not above 0"),
        ("placements.csv", PLACEMENTS + "1,10,1,2\n", r"placements\.csv:2: sync_time 2 exceeds step_time 1"),
        ("placements.csv", PLACEMENTS + "1x,10,1,0\n", r"placements\.csv:2: placement '1x'"),
        (
            "placements.csv",
            PLACEMENTS + "12,10,1,0\n21,10,1,0\n",
            r"placements\.csv:3: placement 21 .* twice",
        ),
        ("placements.csv", PLACEMENTS + "1,1.5,1,0\n", r"local_bsz '1\.5' is not a whole number"),
        ("scalability.csv", PLACEMENTS + "1,10,1,0\n", r"scalability\.csv:1: no column num_nodes, num_repl"),
        (
            "validation-20.csv",
            VALIDATION + "5,1,1,1,1\n4,2,1,1,1\n",
            r"validation-20\.csv:3: progress 4 is not",
        ),
        ("validation-20.csv", VALIDATION + "5,1,1,nan,1\n", "grad_sqr 'nan' is not a finite number"),
        ("validation-20.csv", VALIDATION + "5,1,1,-1,1\n", "grad_sqr '-1' is below 0"),
        ("validation-0.csv", VALIDATION + "5,1,1,1,1\n", "batch size 0"),
    ],
)
def test_bad_profiles_say_where(tmp_path: Path, file: str, content: str, message: str) -> None:
    write_profile(tmp_path)
    write_runs(tmp_path)
    (tmp_path / "toy" / file).write_text(content)
    with pytest.raises(InputError, match=message):
        load_profiles([tmp_path])
