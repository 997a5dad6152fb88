"""Synchronous halving and Hyperband, in studies small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.core.cluster import Node, gpu_nodes
from stretto.core.errors import InputError
from stretto.core.resources import Resources
from stretto.policies.hyperband import Hyperband, brackets_of
from stretto.policies.registry import make_policy
from stretto.policies.sha import Sha, believed_s, fitting_trials
from stretto.search.study import Direction
from tuning_world import Change, Curve, run, steady, trial_id, tuning


def epochs_of(*epochs: int) -> dict[str, int]:
    return {trial_id(number): epoch for number, epoch in enumerate(epochs)}


def test_the_best_half_goes_on_at_every_rung_without_being_restarted() -> None:
    study = tuning(trials=8, rungs=(1, 3), max_epochs=7, start_s=5.0)
    curves = steady(0.1, 0.8, 0.3, 0.6, 0.5, 0.4, 0.7, 0.2, epochs=7)
    outcome = run(Sha(tuning=study), study, curves, gpus=8)
    assert outcome.epochs == epochs_of(1, 7, 1, 3, 3, 1, 7, 1)
    assert len(outcome.starts) == 8
    assert not [change for change in outcome.changes if change.action in {"park", "resize"}]
    assert outcome.finished == ["trial-001", "trial-006"]
    assert outcome.end_s == 12.0
    assert outcome.stopped["trial-007"] == "Rank 7 of 8 at epoch 1 with accuracy 0.2; 4 of 8 are promoted."


def test_more_trials_than_gpus_take_turns() -> None:
    study = tuning(trials=5, rungs=(1, 2), max_epochs=4)
    outcome = run(Sha(tuning=study), study, steady(0.1, 0.5, 0.3, 0.2, 0.4, epochs=4), gpus=2)
    turns = [(0.0, 0), (0.0, 1), (1.0, 2), (1.0, 3), (2.0, 4), (3.0, 1)]
    assert outcome.starts == [(t_s, trial_id(number)) for t_s, number in turns]
    assert outcome.epochs == epochs_of(1, 4, 1, 1, 2)
    assert outcome.end_s == 6.0


def test_who_cannot_be_among_the_best_any_more_is_stopped_before_the_stage_ends() -> None:
    study = tuning(trials=4, rungs=(1,), max_epochs=2)
    outcome = run(Sha(tuning=study), study, steady(0.1, 0.2, 0.3, 0.4, epochs=2), gpus=1)
    stops = [(change.t_s, change.trial) for change in outcome.changes if change.action == "stop"]
    assert stops == [(3.0, "trial-000"), (4.0, "trial-001")]


def test_ties_go_by_id() -> None:
    study = tuning(trials=4, rungs=(1, 2), max_epochs=4)
    outcome = run(Sha(tuning=study), study, steady(0.5, 0.5, 0.5, 0.5, epochs=4), gpus=4)
    assert outcome.epochs == epochs_of(4, 2, 1, 1)


def test_a_loss_is_better_when_it_is_lower() -> None:
    study = tuning(trials=2, rungs=(1,), max_epochs=2, direction=Direction.MIN)
    outcome = run(Sha(tuning=study), study, steady(0.5, 0.2, epochs=2), gpus=2)
    assert outcome.epochs == epochs_of(1, 2)
    assert "loss 0.5" in outcome.stopped["trial-000"]


def test_a_trial_that_diverges_is_stopped_at_once_and_counts_as_worst() -> None:
    study = tuning(trials=4, rungs=(3,), max_epochs=6)
    curves: list[Curve] = [[0.9, None], [0.2], [0.1], [0.3]]
    outcome = run(Sha(tuning=study), study, curves, gpus=4)
    assert outcome.epochs == epochs_of(2, 6, 3, 6)
    assert outcome.stopped["trial-000"] == "Its metric is not a number after epoch 2."


def test_a_study_in_which_everything_diverges_ends() -> None:
    study = tuning(trials=4, rungs=(1, 2), max_epochs=4)
    outcome = run(Sha(tuning=study), study, [[None]] * 4, gpus=2)
    assert outcome.epochs == epochs_of(1, 1, 1, 1)
    assert len(outcome.stopped) == 4


def test_a_source_with_fewer_trials_than_the_study_wants_does_not_hold_up_the_stage() -> None:
    study = tuning(trials=10, rungs=(1,), max_epochs=2)
    outcome = run(Sha(tuning=study), study, steady(0.1, 0.2, 0.3, 0.4, epochs=2), gpus=2)
    assert outcome.epochs == epochs_of(1, 1, 2, 2)


@pytest.mark.parametrize(("share", "first", "then"), [("uniform", 2, 4), ("top", 5, 7)])
def test_gpus_that_a_stage_leaves_free_are_shared_when_it_begins(share: str, first: int, then: int) -> None:
    study = tuning(trials=4, rungs=(2,), max_epochs=6)
    policy = make_policy("sha", options={"share": share}, tuning=study)
    for ahead in (8, 1):  # trials that have yet to be drawn keep their GPUs
        outcome = run(policy, study, steady(0.4, 0.3, 0.2, 0.1, epochs=6), gpus=8, ahead=ahead)
        assert outcome.changes[0] == Change(0.0, "start", "trial-000", first)
        assert outcome.most_gpus == 8
        resizes = [change for change in outcome.changes if change.action != "stop" and change.t_s > 0]
        if share == "uniform":
            assert resizes == [Change(1.0, "resize", trial_id(number), then) for number in (0, 1)]
            assert outcome.end_s == 2.0
        else:
            assert resizes[-1].gpus == then


def test_the_study_is_cut_to_what_is_believed_to_fit() -> None:
    study = tuning(trials=16, rungs=(1, 3), max_epochs=7, deadline_s=20.0)
    assert believed_s(study, 13, 2, "none") == 21.0
    assert believed_s(study, 12, 2, "none") == 20.0
    outcome = run(Sha(tuning=study, sized=True), study, steady(*[0.5] * 16, epochs=7), gpus=2, until_s=100.0)
    assert len(outcome.started) == 12
    assert outcome.end_s == 20.0
    assert "limited to 12 trials" in outcome.stopped["trial-012"]


def test_starts_and_shared_gpus_count_in_what_fits() -> None:
    slow = tuning(trials=16, rungs=(1, 3), max_epochs=7, start_s=1.0, deadline_s=20.0)
    assert believed_s(slow, 4, 4, "none") == 2.0 + 3.0 + 5.0
    assert believed_s(slow, 4, 4, "uniform") == 2.0 + 2.0 + 2.0
    assert fitting_trials(slow, gpu_nodes(1, 1), 0.0, "none") == 4
    assert fitting_trials(slow, gpu_nodes(1, 1), 15.0, "none") == 1
    quick = replace(slow, instances=(replace(slow.instances[0], speed=2.0),))
    rented = [Node("a", Resources(gpu=1), slow.instances[0].name)]
    assert fitting_trials(quick, rented, 0.0, "none") > 4


def test_sizing_needs_a_deadline() -> None:
    with pytest.raises(InputError, match="needs a deadline"):
        Sha(tuning=tuning(trials=4, rungs=(1,), max_epochs=2), sized=True)


def test_brackets_begin_when_those_before_leave_gpus_free_and_come_round_again() -> None:
    study = tuning(trials=26, rungs=(1, 3), eta=3, max_epochs=9)
    assert [bracket.trials for bracket in brackets_of(study.study)] == [9, 5, 3]
    curves = steady(*(0.01 * (number % 17) for number in range(26)), epochs=9)
    outcome = run(Hyperband(tuning=study), study, curves, gpus=9)
    compared_early = [1, 1, 1, 1, 1, 1, 3, 3, 9]
    compared_later = [3, 3, 3, 3, 9]
    never_compared = [9, 9, 9]
    assert list(outcome.epochs.values()) == compared_early + compared_later + never_compared + compared_early
    assert [trial for t_s, trial in outcome.starts if t_s == 1.0] == [trial_id(i) for i in range(9, 15)]


def test_survivors_of_an_older_bracket_go_before_new_trials() -> None:
    study = tuning(trials=17, rungs=(1, 3), eta=3, max_epochs=9)
    curves = steady(*(0.01 * number for number in range(17)), epochs=9)
    outcome = run(Hyperband(tuning=study), study, curves, gpus=2)
    assert outcome.started == [trial_id(number) for number in range(17)]
    assert [trial for t_s, trial in outcome.starts if t_s == 4.0] == ["trial-008", "trial-009"]
    assert [trial for t_s, trial in outcome.starts if t_s == 7.0] == ["trial-006", "trial-007"]
    assert [trial for t_s, trial in outcome.starts if t_s == 9.0] == ["trial-008", "trial-010"]


def test_a_small_study_has_all_brackets_in_proportion() -> None:
    study = tuning(trials=8, rungs=(1, 3), eta=3, max_epochs=9).study
    assert sum(bracket.trials for bracket in brackets_of(study)) == 8
    assert len(brackets_of(study)) == 3


def test_hyperband_shares_gpus_once_no_trial_is_left_to_start() -> None:
    study = tuning(trials=4, rungs=(1,), max_epochs=4)
    curves = steady(0.1, 0.2, 0.3, 0.4, epochs=4)
    outcome = run(Hyperband(tuning=study, share="uniform"), study, curves, gpus=4)
    assert outcome.epochs == epochs_of(1, 4, 4, 4)
    assert Change(1.0, "resize", "trial-001", 2) in outcome.changes
