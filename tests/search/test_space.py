"""Search spaces: what is drawn lies where it was asked for, and a slip is answered."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.errors import InputError
from stretto.search.space import ChoiceDimension, FloatDimension, IntDimension, Space, parse_space

WRITTEN = """
lr = { log = [1e-4, 1.0] }
width = { int = [16, 128] }
depth = { int = [1, 64], log = true }
dropout = { float = [0, 0.5] }
momentum = { choice = [0.9, 0.95] }
"""


def draws(space: Space, count: int = 2000) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    drawn = [dict(space.sample(rng)) for _ in range(count)]
    return {one.name: [config[one.name] for config in drawn] for one in space.dimensions}


class TestSample:
    def test_a_written_space_reads_as_meant(self) -> None:
        assert parse_space(tomllib.loads(WRITTEN), where="f").dimensions == (
            FloatDimension("lr", 1e-4, 1.0, log=True),
            IntDimension("width", 16, 128),
            IntDimension("depth", 1, 64, log=True),
            FloatDimension("dropout", 0.0, 0.5),
            ChoiceDimension("momentum", (0.9, 0.95)),
        )

    def test_each_kind_has_its_law(self) -> None:
        drawn = draws(parse_space(tomllib.loads(WRITTEN), where="f"))
        assert np.median(np.log10(drawn["lr"])) == pytest.approx(-2.0, abs=0.15)
        assert np.mean(drawn["dropout"]) == pytest.approx(0.25, abs=0.01)
        assert np.mean(drawn["width"]) == pytest.approx(72.0, abs=2.0)
        assert np.median(drawn["depth"]) == pytest.approx(6.0, abs=1.0)
        assert drawn["momentum"].count(0.9) == pytest.approx(1000, abs=100)

    def test_both_ends_of_whole_numbers_are_drawn(self) -> None:
        for log in (False, True):
            drawn = draws(Space((IntDimension("k", 2, 5, log),)))["k"]
            assert set(drawn) == {2, 3, 4, 5}
            assert all(type(value) is int for value in drawn)

    @settings(max_examples=60, deadline=None)
    @given(
        low=st.floats(1e-9, 1e9), factor=st.floats(1.0001, 1e9), seed=st.integers(0, 99), log=st.booleans()
    )
    def test_never_outside_the_bounds(self, low: float, factor: float, seed: int, log: bool) -> None:
        high = low * factor
        value = FloatDimension("x", low, high, log).sample(np.random.default_rng(seed))
        assert low <= value <= high
        first, last = math.ceil(low), math.ceil(low) + math.ceil(factor)
        assert first <= IntDimension("k", first, last, log).sample(np.random.default_rng(seed)) <= last


class TestRefused:
    @pytest.mark.parametrize(
        ("written", "words"),
        [
            ("lr = 0.1", "no kind"),
            ("lr = { uniform = [0, 1] }", "four kinds"),
            ("lr = { float = [0, 1], int = [0, 1] }", "four kinds"),
            ("lr = { float = [0, 1], log = true }", "four kinds"),
            ("lr = {}", "four kinds"),
            ("lr = { float = [1, 0] }", "do not ascend"),
            ("lr = { float = [1, 1] }", "choice"),
            ("lr = { float = [nan, 1] }", "finite"),
            ("lr = { float = [0, inf] }", "finite"),
            ("lr = { float = [-1e308, 1e308] }", "too far apart"),
            ("lr = { float = [0, true] }", "finite"),
            ("lr = { float = 3 }", "two finite numbers"),
            ("lr = { log = [0, 1] }", "above 0"),
            ("lr = { int = [0.5, 3] }", "whole"),
            ("lr = { int = [0, 3], log = true }", "1 or more"),
            ("lr = { int = [1, 3], log = 1 }", "neither true nor false"),
            ("lr = { int = [1, 99999999999999999] }", "finite"),
            ("lr = { choice = [] }", "no values"),
            ("lr = { choice = [1, 1.0] }", "twice"),
            ("lr = { choice = [nan] }", "cannot be a choice"),
            ("lr = { choice = [[1]] }", "cannot be a choice"),
        ],
    )
    def test_with_place_and_rule(self, written: str, words: str) -> None:
        with pytest.raises(InputError, match=words) as caught:
            parse_space(tomllib.loads(written), where="study.toml")
        assert caught.value.where == "study.toml: space.lr"
        assert caught.value.remedy
