"""HyperSched's line for GPUs that its pool cannot use: whose claim comes first, and what each gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.policies.hypersched.turn import claim_order, share_spare

SCORES = {"fell": 0.9, "holds": 0.3, "runs": 0.5, "waits": 0.5, "zero": None}


@pytest.mark.parametrize(
    ("late", "line"),
    [
        (False, ["holds", "new-1", "new-2", "fell", "runs", "waits", "zero"]),
        (True, ["fell", "runs", "waits", "holds", "zero", "new-1", "new-2"]),
    ],
)
def test_late_the_better_metric_goes_first_and_until_then_what_the_rungs_say(
    *, late: bool, line: list[str]
) -> None:
    holding, new = ["elsewhere", "holds"], ["new-1", "new-2"]
    assert claim_order(SCORES, new, holding=holding, running={"runs"}, late=late) == line


def test_of_equals_the_one_that_runs_stays() -> None:
    for running in ("a", "b"):
        line = claim_order({"a": 0.5, "b": 0.5}, [], holding=[], running={running}, late=True)
        assert line[0] == running


def test_spare_gpus_go_to_the_first_and_who_gains_nothing_is_passed_over() -> None:
    line = ["first", "hopeless", "second", "third"]
    given = share_spare(line, 6, most=lambda _: 4, is_worth=lambda trial, _: trial != "hopeless")
    assert given == {"first": 4, "second": 2}
    assert share_spare(line, 0, most=lambda _: 4, is_worth=lambda *_: True) == {}
    assert share_spare(line, -3, most=lambda _: 4, is_worth=lambda *_: True) == {}


@given(
    spare=st.integers(-2, 12),
    most=st.lists(st.integers(1, 5), max_size=8),
    needs=st.lists(st.integers(1, 5), min_size=8, max_size=8),
)
def test_no_gpu_is_given_twice_or_kept_from_one_who_gains_by_it(
    spare: int, most: list[int], needs: list[int]
) -> None:
    line = [str(place) for place in range(len(most))]
    given = share_spare(
        line,
        spare,
        most=lambda trial: most[int(trial)],
        is_worth=lambda trial, gpus: gpus >= needs[int(trial)],
    )
    left = spare - sum(given.values())
    assert left >= min(spare, 0)
    assert all(0 < gpus <= most[int(trial)] for trial, gpus in given.items())
    passed_over = [place for place in range(len(most)) if str(place) not in given]
    assert all(min(most[place], left) < needs[place] for place in passed_over)
