"""Rungs: recorded once, ranked with ties by id, and what is not a number never goes on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.observations import Result
from stretto.search.halving import (
    Halving,
    Rung,
    finite_score,
    hopeless,
    open_halving,
    promotable,
    score_at,
)
from stretto.search.study import Direction
from tuning_world import tuning

STUDY = tuning(trials=8, rungs=(1, 2), max_epochs=4).study
LOSS = tuning(trials=8, rungs=(1, 2), max_epochs=4, direction=Direction.MIN).study

SCORES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=12)


def rung_of(*scores: float | None) -> Rung:
    """Trials a, b, c, .. with these scores."""
    rung = Rung()
    for trial, score in zip("abcdefghijklmnop", scores, strict=False):
        rung = rung.add(trial, score)
    return rung


def shown(epoch: int, value: float | None) -> Result:
    return Result(epoch=epoch, value=value, epoch_s=1.0, workers=1, nodes=1)


def test_the_best_come_first_ties_go_by_id_and_no_number_is_last() -> None:
    rung = rung_of(0.1, None, 0.5, 0.5, 0.3)
    assert rung.trials == ["c", "d", "e", "a", "b"]
    assert rung.scores == [0.5, 0.5, 0.3, 0.1, None]
    assert [rung.rank(trial) for trial in "abcde"] == [4, 5, 1, 2, 3]
    assert rung.score("e") == 0.3


def test_a_score_is_recorded_once() -> None:
    rung = rung_of(0.1, 0.2)
    assert rung.add("a", 0.9) == rung


@pytest.mark.parametrize(("came", "eta", "on"), [(1, 2, 0), (2, 2, 1), (3, 2, 1), (7, 4, 1), (8, 4, 2)])
def test_one_in_eta_goes_on_rounded_down(came: int, eta: int, on: int) -> None:
    assert len(rung_of(*([0.5] * came)).going_on(eta)) == on


def test_what_is_not_a_number_never_goes_on() -> None:
    assert rung_of(None, None, 0.1, None).going_on(2) == ["c"]
    assert rung_of(None, None).best(2) == []


def test_the_cutoff_is_the_quantile_between_neighbours() -> None:
    assert rung_of(0.7).cutoff(4) is None
    assert rung_of(0.0, 1.0).cutoff(4) == pytest.approx(0.75)
    assert rung_of(0.1, 0.2, 0.3, 0.4, 0.5).cutoff(4) == pytest.approx(0.4)
    assert rung_of(0.4, None).cutoff(2) == 0.4
    assert rung_of(None, None).cutoff(2) is None


@given(scores=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12), eta=st.integers(2, 5))
def test_the_cutoff_agrees_with_numpy(scores: list[float], eta: int) -> None:
    expected = float(np.quantile(scores, 1.0 - 1.0 / eta))
    assert rung_of(*scores).cutoff(eta) == pytest.approx(expected, abs=1e-6)


@given(scores=SCORES, eta=st.integers(2, 4))
def test_who_goes_on_is_no_worse_than_who_does_not_and_json_keeps_all(
    scores: list[float | None], eta: int
) -> None:
    rung = rung_of(*scores)
    on = rung.going_on(eta)
    assert len(on) <= len(rung) // eta
    worst_on = min((rung.score(trial) or 0.0 for trial in on), default=math.inf)
    for trial in rung.trials:
        score = rung.score(trial)
        if trial not in on and score is not None:
            assert score <= worst_on or len(rung) < eta
    assert Rung.from_memory(json.loads(json.dumps(rung.to_memory(), allow_nan=False))) == rung


def test_the_score_is_of_the_first_result_at_or_past_the_rung() -> None:
    results = [shown(2, 0.2), shown(4, 0.4), shown(8, None)]
    assert score_at(STUDY, results, 1) == 0.2
    assert score_at(STUDY, results, 3) == 0.4
    assert score_at(STUDY, results, 4) == 0.4
    assert score_at(STUDY, results, 5) is None
    assert score_at(STUDY, results, 9) is None
    assert score_at(LOSS, results, 4) == -0.4


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_only_finite_numbers_are_scores(value: float | None) -> None:
    assert finite_score(STUDY, value) is None
    assert finite_score(LOSS, value) is None


def test_the_promotable_come_from_the_highest_rung_first() -> None:
    rungs = [rung_of(0.9, 0.8, 0.7, 0.6), rung_of(0.9, 0.8)]
    assert promotable(rungs, {"b": 0, "a": 1, "c": 0}, 2) == ["a", "b"]
    assert promotable(rungs, {"b": 1, "c": 0}, 2) == []


def test_a_paused_trial_is_hopeless_once_nobody_can_lift_it() -> None:
    rungs = [rung_of(0.9, 0.8, 0.7), Rung()]
    paused = {"b": 0, "c": 0}
    passed = {"a": 1, "b": 1, "c": 1}
    assert hopeless(rungs, paused, passed, to_come=3, eta=2) == {}
    assert hopeless(rungs, paused, passed, to_come=2, eta=2) == {"c": 2}
    assert hopeless(rungs, paused, {**passed, "d": 0}, to_come=0, eta=2) == {"c": 2}
    assert hopeless(rungs, paused, passed, to_come=0, eta=2) == {"b": 1, "c": 1}


def test_a_stage_gives_way_to_the_best_half() -> None:
    halving = open_halving([1, 3, 7], 4)
    assert not halving.is_full
    for trial in "abcd":
        halving = halving.join(trial)
    assert halving.is_full
    halving = halving.record("c", 0.3).record("a", 0.1)
    assert halving.racing == ["b", "d"]
    assert halving.lost(2) == []
    halving = halving.record("d", 0.4)
    assert halving.lost(2) == ["a"]
    after = halving.record("b", None).next_stage(2)
    assert (after.rungs, after.size, after.members) == ([3, 7], 2, ["d", "c"])
    last = after.record("c", 0.5).record("d", 0.5).next_stage(2)
    assert (last.rungs, last.members) == ((), ["c"]), "one alone has nobody to be compared with"
    assert Halving.from_memory(json.loads(json.dumps(halving.to_memory()))) == halving


def test_nobody_goes_on_from_a_stage_without_numbers() -> None:
    halving = open_halving((1,), 2).join("a").join("b").record("a", None).record("b", None)
    assert halving.next_stage(2).members == []
    assert open_halving((1, 2), 1).rungs == ()
