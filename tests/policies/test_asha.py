"""Asynchronous halving and random search, in studies small enough to follow by hand."""

from __future__ import annotations

import pytest

from stretto.core.events import Decided
from stretto.policies.asha import Asha
from stretto.policies.random_search import RandomSearch
from stretto.policies.registry import make_policy
from tuning_world import Change, Curve, Outcome, run, steady, trial_id, tuning


def starts_of(*starts: tuple[float, int]) -> list[tuple[float, str]]:
    return [(t_s, trial_id(number)) for t_s, number in starts]


def texts(outcome: Outcome, trial: str) -> list[str]:
    """Every reason recorded for a trial."""
    decisions = (event for event in outcome.events if isinstance(event, Decided))
    return [event.reasons[trial].text for event in decisions if trial in event.reasons]


def test_a_free_gpu_resumes_the_promotable_before_it_starts_the_new() -> None:
    study = tuning(trials=4, rungs=(1, 2), max_epochs=4)
    outcome = run(Asha(tuning=study), study, steady(0.4, 0.3, 0.2, 0.1, epochs=4), gpus=1)
    assert outcome.starts == starts_of((0, 0), (1, 1), (2, 0), (3, 2), (4, 3), (5, 1), (6, 0))
    assert outcome.epochs == {"trial-000": 4, "trial-001": 2, "trial-002": 1, "trial-003": 1}
    assert outcome.end_s == 8.0
    assert "With accuracy 0.4 rank 1 of 1 at epoch 1; the best 0 are promoted." in texts(outcome, "trial-000")
    assert "Now rank 1 of 2 at epoch 1; the best 1 are promoted." in texts(outcome, "trial-000")


def test_a_trial_among_the_best_goes_on_without_a_pause() -> None:
    study = tuning(trials=4, rungs=(1,), max_epochs=3, start_s=10.0)
    outcome = run(Asha(tuning=study), study, steady(0.1, 0.2, 0.3, 0.4, epochs=3), gpus=1)
    assert outcome.epochs == {"trial-000": 1, "trial-001": 3, "trial-002": 3, "trial-003": 3}
    assert len(outcome.starts) == 4


def test_results_at_one_time_are_recorded_before_any_is_judged_and_ties_go_by_id() -> None:
    study = tuning(trials=4, rungs=(1,), max_epochs=2)
    outcome = run(Asha(tuning=study), study, steady(0.5, 0.5, 0.5, 0.5, epochs=2), gpus=4)
    assert outcome.epochs == {"trial-000": 2, "trial-001": 2, "trial-002": 1, "trial-003": 1}


def test_a_paused_trial_is_stopped_once_nothing_can_lift_it() -> None:
    study = tuning(trials=4, rungs=(1,), max_epochs=2)
    outcome = run(Asha(tuning=study), study, steady(0.1, 0.2, 0.3, 0.4, epochs=2), gpus=1)
    assert "at most 2 can still be promoted" in outcome.stopped["trial-000"]


def test_a_study_ends_when_the_source_ends_early() -> None:
    study = tuning(trials=100, rungs=(1,), max_epochs=2)
    outcome = run(Asha(tuning=study), study, steady(0.3, 0.2, 0.1, epochs=2), gpus=2)
    assert outcome.epochs == {"trial-000": 2, "trial-001": 1, "trial-002": 1}
    assert set(outcome.stopped) == {"trial-001", "trial-002"}
    assert "No trial is left" in outcome.stopped["trial-002"]


def test_the_stopping_variant_compares_with_the_quantile_and_resumes_nobody() -> None:
    study = tuning(trials=5, rungs=(1, 2), max_epochs=4)
    policy = make_policy("asha", options={"variant": "stop"}, tuning=study)
    outcome = run(policy, study, steady(0.1, 0.5, 0.3, 0.2, 0.4, epochs=4), gpus=2)
    assert outcome.starts == starts_of((0, 0), (0, 1), (1, 2), (3, 3), (4, 4))
    assert list(outcome.epochs.values()) == [1, 4, 2, 1, 4]
    assert outcome.stopped == {
        "trial-000": "At epoch 1 with accuracy 0.1; the cut-off is accuracy 0.3.",
        "trial-002": "At epoch 2 with accuracy 0.3; the cut-off is accuracy 0.4.",
        "trial-003": "At epoch 1 with accuracy 0.2; the cut-off is accuracy 0.25.",
    }


@pytest.mark.parametrize("variant", ["promote", "stop"])
def test_a_trial_that_diverges_is_stopped_at_once_and_never_wins(variant: str) -> None:
    study = tuning(trials=3, rungs=(2,), max_epochs=4)
    policy = make_policy("asha", options={"variant": variant}, tuning=study)
    curves: list[Curve] = [[0.9, None], [None], [0.1]]
    outcome = run(policy, study, curves, gpus=3)
    assert outcome.epochs == {"trial-000": 2, "trial-001": 1, "trial-002": 4}
    assert outcome.stopped["trial-000"] == "Its metric is not a number after epoch 2."
    assert outcome.stopped["trial-001"] == "Its metric is not a number after epoch 1."


def test_random_search_trains_every_trial_to_the_end_first_come_first_served() -> None:
    study = tuning(trials=5, rungs=(1, 2), max_epochs=4)
    curves: list[Curve] = [[0.1], [0.5], [None], [0.2], [0.4]]
    outcome = run(RandomSearch(tuning=study), study, curves, gpus=2, epoch_s=[1.0, 2.0, 1.0, 1.0, 1.0])
    assert outcome.starts == starts_of((0, 0), (0, 1), (4, 2), (5, 3), (8, 4))
    assert list(outcome.epochs.values()) == [4, 4, 1, 4, 4]
    assert all(change.gpus == 1 for change in outcome.changes if change.action == "start")


@pytest.mark.parametrize(
    ("share", "first", "second", "end_s"), [("none", 1, 1, 12.0), ("uniform", 2, 2, 4.5), ("top", 3, 1, 5.25)]
)
def test_a_running_trial_takes_what_others_left_at_its_next_result(
    share: str, first: int, second: int, end_s: float
) -> None:
    study = tuning(trials=2, rungs=(), max_epochs=4)
    policy = make_policy("random", options={"share": share}, tuning=study)
    outcome = run(policy, study, steady(0.1, 0.2, epochs=4), gpus=4, epoch_s=[1.0, 3.0])
    starts = [Change(0.0, "start", "trial-000", first), Change(0.0, "start", "trial-001", second)]
    grows = [] if share == "none" else [Change(3.0, "resize", "trial-001", 4)]
    assert outcome.changes == starts + grows
    assert outcome.end_s == pytest.approx(end_s)


def test_trials_still_to_be_drawn_keep_their_share() -> None:
    study = tuning(trials=4, rungs=(), max_epochs=2)
    policy = RandomSearch(tuning=study, share="uniform")
    outcome = run(policy, study, steady(0.1, 0.2, 0.3, 0.4, epochs=2), gpus=8, ahead=1)
    assert [change.gpus for change in outcome.changes] == [2, 2, 2, 2]
    assert outcome.end_s == 1.0


def test_shared_gpus_come_back_for_a_promoted_trial() -> None:
    study = tuning(trials=5, rungs=(1, 2), max_epochs=4)
    curves = steady(0.1, 0.5, 0.3, 0.2, 0.4, epochs=4)
    alone = run(Asha(tuning=study), study, curves, gpus=2)
    shared = run(Asha(tuning=study, share="uniform"), study, curves, gpus=2)
    assert shared.epochs == alone.epochs
    assert (alone.end_s, shared.end_s) == (6.0, 5.0)
