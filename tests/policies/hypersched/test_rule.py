"""HyperSched's rungs and its admission, each by hand: H1 to H3 of its published claims."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hypersched_world import STUDY, ask, begun, counts, shown
from stretto.core.decision import ReasonCode
from stretto.planning.profile import Scaling
from stretto.policies.hypersched.memory import Rungs, rung_epochs
from stretto.policies.hypersched.policy import HyperSched
from stretto.policies.hypersched.rules import startup_s, time_needed_s
from stretto.search.study import Direction
from tuning_world import run, steady, tuning


class TestRungs:
    def test_h1_one_rung_more_than_asha(self) -> None:
        assert rung_epochs(STUDY.study) == (2, 8, 32, 128, 512)
        assert rung_epochs(replace(STUDY.study, rungs=(50,), max_epochs=200)) == (50, 200, 800)
        assert rung_epochs(replace(STUDY.study, rungs=())) == ()

    def test_rungs_are_those_of_the_study_however_they_are_spaced(self) -> None:
        assert rung_epochs(replace(STUDY.study, rungs=(4, 12, 28), eta=2, max_epochs=40)) == (4, 12, 28, 56)
        assert rung_epochs(replace(STUDY.study, rungs=(3, 50), max_epochs=100)) == (3, 50, 200)
        study = tuning(trials=2, rungs=(1, 3), eta=4, max_epochs=5)
        parting = [[0.5, 0.5, 0.1, 0.1, 0.1], [0.5, 0.5, 0.8, 0.8, 0.8]]
        outcome = run(HyperSched(tuning=study, published=True), study, parting, gpus=2)
        assert outcome.epochs == {"trial-000": 3, "trial-001": 5}

    def test_h2_cutoff_is_the_percentile_of_at_least_two_and_records_stay(self) -> None:
        rungs = Rungs.load(STUDY.study, retrospective=True, memory=None)
        rungs.record("a", 2, 0.5)
        assert rungs.cutoff(0) is None
        assert rungs.fallen_at("a") is None
        scores = {"a": 0.5, "b": 0.1, "c": 0.3, "d": 0.9, "e": 0.2}
        for trial, score in scores.items():
            rungs.record(trial, 2, score)
        assert rungs.cutoff(0) == pytest.approx(np.percentile(list(scores.values()), 75))
        rungs.record("b", 3, 1.0)
        assert rungs.rungs[0].score("b") == 0.1
        assert [rungs.fallen_at(trial) for trial in "abcde"] == [None, 0, 0, None, 0]

    def test_h2_a_better_cohort_pauses_a_trial_that_passed_and_a_worse_one_brings_it_back(self) -> None:
        rungs = Rungs.load(STUDY.study, retrospective=True, memory=None)
        for trial, score in {"a": 0.5, "b": 0.1}.items():
            rungs.record(trial, 2, score)
        rungs.record("a", 8, 0.6)
        assert rungs.fallen_at("a") is None
        rungs.record("c", 2, 0.7)
        assert rungs.fallen_at("a") == 0
        assert rungs.holding() == ["c"]
        for number in range(3):
            rungs.record(f"poor-{number}", 2, 0.05)
        assert rungs.fallen_at("a") is None
        assert rungs.holding() == ["a", "c"]

    def test_without_looking_back_only_the_last_rung_counts_and_it_takes_eta_trials(self) -> None:
        rungs = Rungs.load(STUDY.study, retrospective=False, memory=None)
        for trial, score in {"a": 0.5, "b": 0.1, "c": 0.2}.items():
            rungs.record(trial, 2, score)
            assert rungs.fallen_at(trial) == 0
        rungs.record("d", 2, 0.3)
        assert rungs.holding() == ["a"]
        rungs.record("a", 8, 0.6)
        assert rungs.fallen_at("a") == 1

    def test_the_last_trial_goes_on_and_those_that_fell_return_to_idle_gpus(self) -> None:
        study = tuning(trials=2, rungs=(1, 2), eta=2, max_epochs=4, deadline_s=100.0)
        crossing = [[0.9, 0.1, 0.2, 0.3], [0.1, 0.9, 0.9, 0.9]]
        ours = run(HyperSched(tuning=study, share="none"), study, crossing, gpus=2)
        assert ours.epochs == {"trial-000": 4, "trial-001": 4}
        literal = run(HyperSched(tuning=study, share="none", published=True), study, crossing, gpus=2)
        assert sum(literal.epochs.values()) < 8

    def test_paused_in_the_course_of_a_study_and_resumed(self) -> None:
        policy = HyperSched(tuning=STUDY, recharge=5)
        memory = begun(policy, 2)
        first = [shown(STUDY, 0, [0.5, 0.5], gpus=1), shown(STUDY, 1, [0.4], gpus=1)]
        decision, memory = ask(policy, *first, memory=memory)
        assert counts(decision) == {"trial-000": 1, "trial-001": 1}
        second = [shown(STUDY, 0, [0.5, 0.5], gpus=1), shown(STUDY, 1, [0.4, 0.9], gpus=1)]
        decision, memory = ask(policy, *second, memory=memory)
        assert counts(decision) == {"trial-000": 1, "trial-001": 1}
        third = [shown(STUDY, 0, [0.5, 0.5, 0.5], gpus=1), second[1]]
        decision, memory = ask(policy, *third, memory=memory)
        assert counts(decision) == {"trial-001": 1}
        assert decision.reasons["trial-000"].code is ReasonCode.PREEMPTED
        assert "accuracy 0.5 at epoch 2, where the cut-off is accuracy 0.8 (2 trials)" in (
            decision.reasons["trial-000"].text
        )
        poor = [shown(STUDY, number, [0.1, 0.1], gpus=1) for number in range(2, 5)]
        decision, memory = ask(policy, shown(STUDY, 0, [0.5] * 3), second[1], *poor, memory=memory)
        assert counts(decision) == {"trial-000": 1, "trial-001": 1}

    def test_scores_may_be_means_of_the_last_results(self) -> None:
        policy = HyperSched(tuning=STUDY, score_window=2)
        jobs = [shown(STUDY, 0, [0.0, 1.0], gpus=1), shown(STUDY, 1, [0.6, 0.6], gpus=1)]
        _, memory = ask(policy, *jobs, memory=begun(policy, 2))
        assert memory["rungs"][0]["scores"] == [0.6, 0.5]

    def test_less_may_be_better(self) -> None:
        study = tuning(trials=2, rungs=(1,), eta=2, max_epochs=3, direction=Direction.MIN)
        outcome = run(HyperSched(tuning=study, published=True), study, steady(3.0, 1.0, epochs=3), gpus=2)
        assert outcome.epochs == {"trial-000": 1, "trial-001": 3}

    @pytest.mark.parametrize(("direction", "side"), [(Direction.MIN, "below"), (Direction.MAX, "above")])
    def test_what_a_paused_trial_waits_for_is_on_the_better_side(
        self, direction: Direction, side: str
    ) -> None:
        study = replace(STUDY, study=replace(STUDY.study, direction=direction))
        policy, sign = HyperSched(tuning=study), 1.0 if direction is Direction.MAX else -1.0
        pair = [
            shown(study, number, [sign * value] * 2, gpus=gpus)
            for number, (value, gpus) in enumerate(((0.1, 0), (0.9, 1)))
        ]
        memory = begun(policy, 2)
        del memory["live"]["trial-000"]
        text = ask(policy, *pair, memory=memory, gpus=1)[0].reasons["trial-000"].text
        assert text == f"Paused until it is at or {side} its cut-offs and a slot is free."

    @pytest.mark.parametrize(("max_epochs", "runs"), [(8, {"trial-000", "trial-001"}), (9, {"trial-001"})])
    def test_a_trial_that_has_shown_its_last_epoch_is_not_paused(
        self, max_epochs: int, runs: set[str]
    ) -> None:
        """It is about to end by itself; what it showed counts at its rung."""
        study = replace(STUDY, study=replace(STUDY.study, max_epochs=max_epochs))
        policy = HyperSched(tuning=study)
        jobs = [shown(study, 0, [0.90] * 8, gpus=1), shown(study, 1, [0.95] * 8, gpus=1)]
        decision, memory = ask(policy, *jobs, memory=begun(policy, 2, gpus=2), gpus=2)
        assert set(decision.allocations) == runs
        assert memory["rungs"][1]["scores"] == [0.95, 0.90]


class TestAdmission:
    def test_h3_the_threshold(self) -> None:
        assert time_needed_s(4, longest_s=300.0, startup_s=20.0, full_training_s=7000.0) == 1120.0
        assert time_needed_s(4, longest_s=3000.0, startup_s=20.0, full_training_s=7000.0) == 7000.0

    @pytest.mark.parametrize(("left_s", "starts"), [(1121.0, True), (1119.0, False)])
    def test_h3_starts_above_it_and_stops_what_waits_and_is_paused_below(
        self, left_s: float, starts: bool
    ) -> None:
        policy = HyperSched(tuning=STUDY, published=True)
        jobs = [
            shown(STUDY, 0, [0.5] * 8, gpus=1, held_s=300.0),
            shown(STUDY, 1, [0.1] * 2, gpus=1, held_s=90.0),
            shown(STUDY, 2),
        ]
        decision, memory = ask(policy, *jobs, now_s=10_000.0 - left_s, memory=begun(policy, 2))
        assert counts(decision) == ({"trial-000": 1, "trial-002": 1} if starts else {"trial-000": 1})
        assert decision.stops == (frozenset() if starts else {"trial-001", "trial-002"})
        assert (memory["closed_for_s"] is None) is starts
        if not starts:
            assert "In the 1119 s left" in decision.reasons["trial-002"].text
            later = ask(policy, jobs[0], shown(STUDY, 3), now_s=9_999.0, memory=memory)[0]
            assert later.stops == {"trial-003"}

    def test_set_up_counts_at_its_90th_percentile_and_can_be_left_out(self) -> None:
        assert startup_s([]) == 0.0
        assert startup_s([10.0, 20.0, 30.0]) == pytest.approx(28.0)
        job = shown(STUDY, 0, [0.5] * 8, gpus=1, held_s=300.0)
        for overhead in (True, False):
            policy = HyperSched(tuning=STUDY, published=True, overhead=overhead)
            _, memory = ask(policy, job, now_s=10_000.0 - 1150.0, memory=begun(policy, 1))
            assert (memory["closed_for_s"] is None) is overhead

    def test_a_newcomer_that_can_be_fully_trained_is_let_in(self) -> None:
        policy = HyperSched(tuning=STUDY)
        job = shown(STUDY, 0, [0.5] * 50, gpus=1, held_s=5_000.0)
        for left_s, admitting in ((7001.0, True), (6999.0, False)):
            _, memory = ask(policy, job, now_s=10_000.0 - left_s, memory=begun(policy, 1))
            assert (memory["closed_for_s"] is None) is admitting

    def test_a_later_deadline_opens_the_door_again(self) -> None:
        policy = HyperSched(tuning=STUDY, published=True)
        job = shown(STUDY, 0, [0.5] * 8, gpus=1, held_s=300.0)
        _, closed = ask(policy, job, now_s=9_000.0, memory=begun(policy, 1))
        assert closed["closed_for_s"] == 10_000.0
        for deadline_s in (20_000.0, None):
            longer = replace(STUDY, limits=replace(STUDY.limits, deadline_s=deadline_s))
            extended = HyperSched(tuning=longer, published=True)
            decision, memory = ask(extended, job, shown(STUDY, 1), now_s=9_001.0, memory=closed)
            assert memory["closed_for_s"] is None
            assert counts(decision)["trial-001"] == 1

    def test_who_is_outside_when_it_closes_waits_for_a_later_deadline(self) -> None:
        jobs = [
            *(shown(STUDY, number, [0.5] * 8, gpus=1, held_s=300.0) for number in range(2)),
            *(shown(STUDY, number, [0.1] * 2) for number in range(2, 8)),
        ]
        begun_all = begun(HyperSched(tuning=STUDY), 8)
        policy = HyperSched(tuning=STUDY)
        decision, memory = ask(policy, *jobs, now_s=9_000.0, memory=begun_all, gpus=2)
        assert memory["closed_for_s"] == 10_000.0
        assert not decision.stops

    def test_without_admission_or_deadline_trials_start_to_the_end(self) -> None:
        jobs = [shown(STUDY, 0, [0.5] * 8, gpus=1, held_s=300.0), shown(STUDY, 1)]
        policy = HyperSched(tuning=STUDY, admission=False)
        assert "trial-001" in counts(ask(policy, *jobs, now_s=9_999.0, memory=begun(policy, 1))[0])
        endless = tuning(trials=4, rungs=(1, 2), max_epochs=4)
        assert run(HyperSched(tuning=endless), endless, steady(1, 2, 3, 4, epochs=4), gpus=2).finished

    def test_gpus_that_the_pool_cannot_use_go_on_with_others(self) -> None:
        narrow = replace(STUDY, profile=replace(STUDY.profile, scaling=Scaling(((1, 1.0), (2, 1.5)))))
        policy = HyperSched(tuning=narrow)
        jobs = [
            shown(narrow, 0, [0.5] * 8, gpus=1, held_s=300.0),
            shown(narrow, 1, [0.1] * 2, gpus=1, held_s=90.0),
            *(shown(narrow, number) for number in range(2, 8)),
        ]
        decision, _ = ask(policy, *jobs, now_s=9_000.0, memory=begun(policy, 2), gpus=6)
        assert counts(decision) == {f"trial-00{number}": 1 for number in (0, 2, 3, 4, 5)}
        assert not decision.stops
        assert "that no other trial can use" in decision.reasons["trial-002"].text
        literal = HyperSched(tuning=narrow, published=True)
        decision, _ = ask(literal, *jobs, now_s=9_000.0, memory=begun(literal, 2), gpus=6)
        assert set(counts(decision)) == {"trial-000"}
        assert len(decision.stops) == 7
