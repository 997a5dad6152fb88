"""The nouns: resources, allocations, durations, seeds, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_job
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.errors import InputError, StrettoError
from stretto.core.job import Role, Work
from stretto.core.resources import TOLERANCE, Resources, total_of
from stretto.core.seeds import child_rng
from stretto.core.units import format_duration, format_usd, parse_duration_s

FIXED = settings(deadline=None, derandomize=True, max_examples=100)

amounts = st.integers(0, 1000).map(float)
resources = st.builds(Resources, amounts, amounts, amounts, amounts)


# --- resources


@FIXED
@given(resources, resources, st.integers(0, 9))
def test_resources_add_subtract_and_scale(a: Resources, b: Resources, times: int) -> None:
    assert a + b == b + a
    assert (a + b) - b == a
    assert total_of([a] * times) == a * times
    assert a.fits_in(a + b)
    assert a.fits_in(b) == all(need <= have for need, have in zip(a.amounts(), b.amounts(), strict=True))


def test_float_noise_does_not_decide_whether_something_fits() -> None:
    tenths = total_of([Resources(cpu=0.1)] * 3)
    assert tenths.cpu > 0.3
    assert tenths.fits_in(Resources(cpu=0.3))
    assert not Resources(cpu=0.3 + 3 * TOLERANCE).fits_in(Resources(cpu=0.3))


def test_dominant_share_is_the_largest_of_any_resource() -> None:
    total = Resources(gpu=4, cpu=40)
    assert Resources(gpu=1, cpu=5).dominant_share(total) == 0.25
    assert Resources(gpu=1, cpu=20).dominant_share(total) == 0.5
    assert Resources().dominant_share(total) == 0.0
    assert Resources(memory_gib=1).dominant_share(total) == float("inf")


# --- allocations


def test_allocations_count_their_tasks() -> None:
    job = make_job("a", demand=Resources(gpu=2, cpu=3), server=Role(demand=Resources(cpu=1)))
    allocation = Allocation((("x", 2), ("y", 1)), (("z", 4), ("y", 2)))
    assert (allocation.worker_count, allocation.server_count) == (3, 6)
    assert allocation.nodes == ("x", "y", "z")
    assert allocation.shape == (2, 1)
    assert allocation.gpus(job) == 6
    assert allocation.uses(job) == {
        "x": Resources(gpu=4, cpu=6),
        "y": Resources(gpu=2, cpu=5),
        "z": Resources(cpu=4),
    }


def test_nothing_is_nothing() -> None:
    assert not NOTHING
    assert on_nodes({"a": 0}) == NOTHING
    assert on_nodes({"a": 0, "b": 2}) == on_nodes([("b", 2)]) == Allocation((("b", 2),))


def test_totals() -> None:
    assert BatchChoice(16, 2).total(4) == 192
    assert Work(units_per_epoch=2.5, epochs=4).total_units == 10.0
    assert Work(units_per_epoch=2.5).total_units is None
    assert [node.id for node in gpu_nodes(3, 4)] == ["0", "1", "2"]
    assert sum(node.gpus for node in gpu_nodes(3, 4)) == 12


# --- durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("20m", 1200),
        ("1h30m", 5400),
        ("1.5h", 5400),
        (" 2H ", 7200),
        ("1d", 86400),
        ("1d2h3m4s", 93784),
        ("0", 0),
    ],
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "soon", "-5m", "5 minutes", "1h 30m x", "1,5h", "1e3", "inf", "nan", "m"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_duration_s(text, where="jobs.toml:3")
    assert repr(text) in caught.value.problem
    assert str(caught.value).startswith("jobs.toml:3: ")
    assert "20m" in caught.value.remedy


@pytest.mark.parametrize("text", ["1h30", "5m5"])
def test_a_number_without_a_unit_after_one_with_a_unit_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (725, "12m 05s"), (3599.6, "1h 00m"), (12000, "3h 20m")],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@FIXED
@given(st.integers(0, 10**6))
def test_what_is_shown_can_be_read_and_is_at_most_a_minute_off(seconds: int) -> None:
    read_s = parse_duration_s(format_duration(seconds).replace(" ", ""))
    assert 0 <= seconds - read_s < 60


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "$0.00"),
        (1234.5, "$1,234.50"),
        (0.0999, "$0.10"),
        (0.0994, "$0.099"),
        (0.06, "$0.06"),
        (0.00312, "$0.0031"),
        (1e-9, "$0.00"),
        (-0.5, "-$0.50"),
    ],
)
def test_money_as_people_read_it(usd: float, text: str) -> None:
    assert format_usd(usd) == text


# --- seeds


def test_streams_repeat_themselves() -> None:
    assert child_rng(1, "policy", "3").random(5).tolist() == child_rng(1, "policy", "3").random(5).tolist()


def test_streams_of_other_roots_purposes_and_keys_differ() -> None:
    keys = [
        (root, purpose, key) for root in (0, 1) for purpose in ("a", "b", "ab") for key in ("", "a", "b", "1")
    ]
    firsts = [child_rng(*key).random() for key in keys]
    assert len(set(firsts)) == len(keys)
    streams = np.array([child_rng(*key).random(500) for key in keys])
    correlations = np.corrcoef(streams) - np.eye(len(keys))
    assert np.abs(correlations).max() < 0.25


def test_purpose_and_key_are_kept_apart() -> None:
    assert child_rng(0, "ab", "c").random() != child_rng(0, "a", "bc").random()
    assert child_rng(1, "1a").random() != child_rng(11, "a").random()


# --- errors


def test_input_errors_say_where_what_and_the_remedy() -> None:
    error = InputError("gpus is 0.", where="jobs.toml", remedy="Give 1 or more.")
    assert str(error) == "jobs.toml: gpus is 0. Give 1 or more."
    assert str(InputError("gpus is 0.")) == "gpus is 0."
    assert isinstance(error, StrettoError)
