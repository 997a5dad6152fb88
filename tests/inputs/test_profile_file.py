"""Profiles as files, and what is believed after a probe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.core.observations import SpeedSample
from stretto.core.seeds import child_rng
from stretto.inputs.profile import (
    PACE_SD,
    START_SD,
    MachineProfile,
    MeasuredProfile,
    TimedEpoch,
    believe,
    fit_errors,
    fit_speed,
    profile_json,
    read_profile,
    write_profile,
)
from stretto.inputs.study import parse_study
from stretto.simulation.plan import plan


def epoch(config: int, workers: int, epoch_s: float, *, first: bool = False) -> TimedEpoch:
    return TimedEpoch(config=config, workers=workers, epoch_s=epoch_s, first=first)


MEASURED = MeasuredProfile(
    what="train.py:train",
    slots=2,
    measured_s=30.0,
    configs=({"lr": 0.1}, {"lr": 0.3, "name": "x"}),
    epochs=(
        epoch(0, 1, 3.0, first=True),
        epoch(0, 1, 2.0),
        epoch(0, 1, 2.2),
        epoch(1, 1, 4.0),
        epoch(0, 2, 1.4),
    ),
    speeds=(SpeedSample(1, 1, 0, 64, 0.02, 0.0), SpeedSample(1, 2, 0, 32, 0.014, 0.003)),
    warm_up_s=7.0,
    starts_s=(0.4, 0.6),
    resizes_s=(0.5,),
    examples=1000,
    speed=fit_speed((SpeedSample(1, 1, 0, 64, 0.02, 0.0),)),
    not_measured=("a thing",),
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    write_profile(path, MEASURED)
    assert read_profile(path) == MEASURED
    assert [one.name for one in path.parent.iterdir()] == ["profile.json"]


def test_speed_up_compares_the_same_configuration() -> None:
    assert dict(MEASURED.scaling.points) == pytest.approx({1: 1.0, 2: 2.1 / 1.4})
    fresh = replace(MEASURED, epochs=MEASURED.epochs[:4])
    assert fresh.speedup(2) == pytest.approx((64 / 0.014) / (64 / 0.02)), "by steps where no epoch was timed"
    assert fresh.speedup(4) is None


LONE = replace(MEASURED, speeds=(), epochs=tuple(replace(one, lone=True) for one in MEASURED.epochs[:4]))


def test_epochs_of_a_worker_alone_are_believed_where_there_are_no_others() -> None:
    assert LONE.only_lone
    assert not MEASURED.only_lone
    assert LONE.epoch_times_s(1, 0) == [2.0, 2.2]
    assert LONE.lone_epoch == 1.0
    beside = replace(LONE, epochs=tuple(replace(one, lone=False) for one in LONE.epochs))
    alone_s, among_s = (believe(one).latency.draw(child_rng(1, "x"), 2000).epoch_s for one in (LONE, beside))
    assert alone_s.mean() == pytest.approx(among_s.mean(), rel=0.05)
    assert alone_s.std() > 1.1 * among_s.std(), "what neighbours cost is not known"


def test_some_profiles_say_nothing_of_epochs() -> None:
    assert MEASURED.tells_epochs
    steps = replace(MEASURED, epochs=())
    assert steps.tells_epochs
    assert not replace(steps, examples=None).tells_epochs
    assert not replace(steps, speeds=()).tells_epochs


def test_a_start_costs_what_its_first_epoch_takes_longer() -> None:
    assert MEASURED.first_epoch_extra_s == pytest.approx(3.0 - 2.1)
    assert MEASURED.start_s == pytest.approx(0.5 + 0.9)
    assert replace(MEASURED, starts_s=()).start_s == 7.0
    assert replace(MEASURED, starts_s=(), warm_up_s=None).start_s == 30.0


def test_one_slow_start_does_not_make_all_of_them_slow() -> None:
    measured = replace(MEASURED, starts_s=(0.4, 0.5, 9.0), lone_starts_s=(9.0, 0.2, 0.3))
    assert measured.start_s == pytest.approx(0.5 + measured.first_epoch_extra_s)
    assert measured.lone_start_s == pytest.approx(0.3 + measured.first_epoch_extra_s)


def test_several_workers_have_a_start_of_their_own() -> None:
    measured = replace(MEASURED, resizes_s=(0.9,), gang_starts_s=(1.1, 1.0))
    assert measured.gang_start_s == pytest.approx(1.0 + measured.first_epoch_extra_s)
    assert replace(measured, resizes_s=(), gang_starts_s=()).gang_start_s == measured.start_s
    believed = believe(measured)
    assert isinstance(believed, MachineProfile)
    assert believed.start_s_at(2, workers=2) == measured.gang_start_s


def test_starts_that_differ_are_doubted_more() -> None:
    doubts = [
        replace(MEASURED, starts_s=starts_s).start_sd
        for starts_s in ((0.5,) * 20, (0.5,) * 4, (0.1, 0.9) * 2, (0.5,))
    ]
    assert doubts[0] == doubts[1] == START_SD
    assert doubts[1] < doubts[2]
    assert doubts[1] < doubts[3], "one start tells little"


def test_idle_neighbours_slow_nobody_down() -> None:
    lone = TimedEpoch(config=0, workers=1, epoch_s=9.0, first=False, lone=True)
    believed = believe(replace(MEASURED, epochs=(*MEASURED.epochs, lone), lone_starts_s=(9.0,)))
    assert isinstance(believed, MachineProfile)
    assert (believed.lone_epoch, believed.lone_start_s) == (1.0, believed.start_s)


def test_a_worker_alone_is_compared_with_itself_among_others() -> None:
    lone = [TimedEpoch(config=0, workers=1, epoch_s=one, first=False, lone=True) for one in (1.6, 1.8)]
    measured = replace(MEASURED, epochs=(*MEASURED.epochs, *lone), lone_starts_s=(0.1, 0.3))
    assert measured.lone_epoch == pytest.approx(1.7 / 2.1)
    assert measured.lone_start_s == pytest.approx(0.2 + measured.first_epoch_extra_s)
    assert measured.epoch_times_s(1) == MEASURED.epoch_times_s(1), "plans count with busy neighbours"
    believed = believe(measured)
    assert isinstance(believed, MachineProfile)
    assert measured.lone_epoch < believed.epoch_factor(1) < 1.0, "part of it may be chance"
    assert believed.start_s_at(1) == measured.lone_start_s
    assert not isinstance(believe(measured, same_machine=False), MachineProfile)
    assert (MEASURED.lone_epoch, MEASURED.lone_start_s) == (1.0, MEASURED.start_s)


def test_no_number_of_epochs_tells_how_fast_the_machine_will_be_tomorrow() -> None:
    steady = tuple(epoch(config, 1, 2.0) for config in (0, 1) for _ in range(200))
    drawn = believe(replace(MEASURED, epochs=steady)).latency.draw(child_rng(0, "draws"), 2000).epoch_s
    assert drawn.mean() == pytest.approx(2.0, rel=0.1)
    assert drawn.std() / drawn.mean() >= PACE_SD


def test_a_profile_from_before_lone_workers_were_timed_is_read(tmp_path: Path) -> None:
    fields = profile_json(MEASURED)
    del fields["lone_starts_s"], fields["gang_starts_s"], fields["check"]
    for one in fields["epochs"]:
        del one["lone"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(fields))
    assert read_profile(path) == MEASURED


def test_fewer_epochs_leave_more_in_doubt() -> None:
    many = replace(
        MEASURED,
        configs=tuple({"n": n} for n in range(8)),
        epochs=tuple(epoch(n, 1, 2.0 + 0.01 * (n % 3) + 0.01 * k) for n in range(8) for k in range(3)),
    )
    few = replace(many, configs=many.configs[:1], epochs=many.epochs[:1])

    def width(measured: MeasuredProfile) -> float:
        drawn = believe(measured).latency.draw(child_rng(0, "test"), 1000)
        return float(drawn.epoch_s.std() / drawn.epoch_s.mean())

    assert width(few) > 3 * width(many)
    assert believe(many).latency.epoch_s == pytest.approx(2.02, rel=0.02)
    assert believe(few).latency.trial_sd > 3 * believe(many).latency.trial_sd


def test_slots_of_one_machine_are_alike_and_other_machines_are_not() -> None:
    assert believe(MEASURED).latency.node_sd == 0.0
    assert believe(MEASURED, same_machine=False).latency.node_sd > 0.0


def test_the_same_profile_is_believed_the_same() -> None:
    assert believe(MEASURED).latency.epoch_s == believe(MEASURED).latency.epoch_s


def test_without_a_whole_epoch_steps_and_examples_say_how_long_one_is() -> None:
    parts = replace(MEASURED, epochs=())
    assert believe(parts).latency.epoch_s == pytest.approx(1000 * 0.02 / 64, rel=0.2)
    with pytest.raises(InputError, match="no epoch and no step"):
        believe(replace(parts, examples=None))


def test_errors_of_the_fit_are_told_for_each_point_and_when_left_out() -> None:
    sizes = (16, 32, 64, 128, 256)
    exact = [SpeedSample(1, 1, 0, size, 0.002 + 1e-4 * size, 0.0) for size in sizes]
    for one in fit_errors(exact):
        assert abs(one.residual) < 0.02
        assert one.left_out is not None
        assert abs(one.left_out) < 0.05
    assert [one.left_out for one in fit_errors(exact[:2])] == [None, None]
    assert fit_errors(()) == ()


SPOILED: dict[str, dict[str, Any]] = {
    "format": {"format": "other"},
    "version": {"version": 2},
    "negative": {"epochs": [{"config": 0, "workers": 1, "epoch_s": -1.0, "first": False}]},
    "nan": {"starts_s": [float("nan")]},
    "config": {"epochs": [{"config": 7, "workers": 1, "epoch_s": 1.0, "first": False}]},
    "type": {"slots": "two"},
    "zero": {"slots": 0},
    "examples": {"examples": 0},
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_what_is_no_profile_is_refused_with_a_remedy(tmp_path: Path, spoiled: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile_json(MEASURED), **SPOILED[spoiled], "check": None}))
    with pytest.raises(InputError, match=r"profile\.json: .*stretto profile"):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00"])
def test_files_that_hold_something_else_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_profile(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_profile(tmp_path / "none.json")


times = st.floats(1e-3, 1e4)


@given(
    st.lists(
        st.builds(
            TimedEpoch,
            config=st.integers(0, 1),
            workers=st.sampled_from([1, 2, 4]),
            epoch_s=times,
            first=st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_was_timed_can_be_believed(epochs: list[TimedEpoch]) -> None:
    measured = replace(MEASURED, epochs=tuple(epochs), speeds=())
    scaling = measured.scaling
    assert scaling.points[0] == (1, 1.0)
    assert all(speed > 0 for _, speed in scaling.points)
    assert measured.start_s >= 0.0


STUDY = """
[study]
name = "digits"
metric = "accuracy"
direction = "max"
trials = 8
[halving]
rungs = [2, 4]
eta = 2
max_epochs = 8
[space]
lr = { log = [1e-4, 1.0] }
[machine]
slots = 2
usd_per_slot_hour = 1.0
[profile]
file = "profile.json"
"""


def test_a_plan_leaves_room_for_what_a_probe_did_not_show(tmp_path: Path) -> None:
    def width(measured: MeasuredProfile) -> float:
        write_profile(tmp_path / "profile.json", measured)
        chosen = plan(parse_study(STUDY, tmp_path / "study.toml")).outcome.cheapest.finish_s
        return (chosen.p90 - chosen.p10) / chosen.mean

    many = replace(
        MEASURED,
        configs=tuple({"n": n} for n in range(8)),
        epochs=tuple(epoch(n, 1, 2.0 + 0.02 * k) for n in range(8) for k in range(3)),
        speeds=(),
    )
    assert width(replace(many, configs=many.configs[:1], epochs=many.epochs[:2])) > 2 * width(many)
