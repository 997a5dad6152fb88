"""HyperSched: rungs, admission and reallocation, each by hand, and the published claims H1 to H12."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import UNKNOWN
from stretto.control.instruct import check
from stretto.core.allocation import NOTHING, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.errors import InputError
from stretto.core.events import Decided, JobReported
from stretto.core.observations import Result
from stretto.core.seeds import child_rng
from stretto.journal.base import MemoryJournal
from stretto.planning.profile import Scaling
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.common import requested_batch
from stretto.policies.hypersched import HyperSched
from stretto.policies.hypersched_rules import GAIN, on_grid, resize_gain, time_needed_s
from stretto.policies.hypersched_rungs import Rungs, rung_epochs
from stretto.policies.hypersched_speed import believed_scaling, most_useful, startup_s
from stretto.policies.registry import make_policy
from stretto.search.study import Direction
from tuning_world import RESNET_50, Curve, Outcome, make_trial, run, steady, trial_id, tuning

PUBLISHED = Scaling(((1, 1.0), (2, 1.87), (4, 3.421), (8, 5.598)))
STUDY = tuning(trials=8, rungs=(2, 8, 32, 128), eta=4, max_epochs=200, epoch_s=35.0, deadline_s=10_000.0)


def shown(
    conditions: Tuning,
    number: int,
    values: Sequence[float | None] = (),
    *,
    gpus: int = 0,
    held_s: float = 0.0,
    start_s: float = 20.0,
    epoch_s: float = 35.0,
) -> JobView:
    """A trial that has shown these values and holds so many GPUs."""
    job = make_trial(conditions, number)
    return JobView(
        job=job,
        allocation=on_nodes({"0": gpus}) if gpus else NOTHING,
        batch=requested_batch(job, gpus) if gpus else None,
        age_s=0.0,
        attained_gpu_s=0.0,
        held_s=held_s,
        restarts=0,
        work_done=float(len(values)),
        epoch=len(values),
        results=tuple(Result(e, value, epoch_s, max(gpus, 1), 1) for e, value in enumerate(values, 1)),
        start_times_s=(start_s,) if values else (),
        belief=UNKNOWN,
    )


def ask(
    policy: HyperSched, *jobs: JobView, now_s: float = 0.0, memory: Memory = None, gpus: int = 8
) -> tuple[Decision, Memory]:
    view = ClusterView(now_s=now_s, nodes=gpu_nodes(1, gpus), jobs=jobs)
    decision, memory = policy.decide(view, memory, np.random.default_rng(0))
    check(view, decision)
    return decision, memory


def begun(policy: HyperSched, count: int, gpus: int = 8) -> Memory:
    """The memory of a study in which the first `count` trials were started."""
    return ask(policy, *(shown(policy.tuning, number) for number in range(count)), gpus=gpus)[1]


def counts(decision: Decision) -> dict[str, int]:
    return {trial: one.worker_count for trial, one in decision.allocations.items()}


def toy_curves(seed: int, trials: int, epochs: int) -> list[Curve]:
    """The family of the published ablation."""
    rng, k = child_rng(seed, "toy"), np.arange(1, epochs + 1)
    curves: list[Curve] = []
    for _ in range(trials):
        b0, b1, b2 = rng.exponential(0.1), rng.random(), rng.random()
        loss = 1 / (b0 * k / 100 + 0.1 * b1 + 0.5) + 0.01 * b2 + np.abs(rng.normal(0, 0.005, epochs))
        curves.append(((2 - loss) / 2).tolist())
    return curves


def cifar_curves(seed: int, trials: int) -> list[Curve]:
    """200 epochs of something like a classifier: many that learn nothing, few that learn well."""
    rng, k = child_rng(seed, "cifar"), np.arange(1, 201)
    curves: list[Curve] = []
    for _ in range(trials):
        top, tau = 0.1 + 0.85 * rng.beta(4, 1), 2.0 * 10 ** rng.uniform(0, 1)
        curves.append((0.1 + (top - 0.1) * (1 - (1 + k / tau) ** -0.8) + rng.normal(0, 0.003, 200)).tolist())
    return curves


def cifar_run(deadline_s: float, seed: int, **options: object) -> Outcome:
    study = tuning(
        trials=100,
        rungs=(2, 8, 32, 128),
        eta=4,
        max_epochs=200,
        epoch_s=35.0,
        start_s=60.0,
        scaling=RESNET_50,
        deadline_s=deadline_s,
    )
    policy = replace(HyperSched(tuning=study, published=True), **options)  # type: ignore[arg-type]
    return run(policy, study, cifar_curves(seed, 100), gpus=8)


TRUE_OR_FALSE = st.sampled_from(["true", "false"])
ASHA: dict[str, object] = {"retrospective": False, "admission": False, "share": "none"}
"""Without its three mechanisms HyperSched is asynchronous halving that promotes."""


class TestRungs:
    def test_h1_one_rung_more_than_asha(self) -> None:
        assert rung_epochs(STUDY.study) == (2, 8, 32, 128, 512)
        assert rung_epochs(replace(STUDY.study, rungs=(50,), max_epochs=200)) == (50, 200, 800)
        assert rung_epochs(replace(STUDY.study, rungs=())) == ()

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
        assert memory["admitting"] is starts
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
            assert memory["admitting"] is overhead

    def test_a_newcomer_that_can_be_fully_trained_is_let_in(self) -> None:
        policy = HyperSched(tuning=STUDY)
        job = shown(STUDY, 0, [0.5] * 50, gpus=1, held_s=5_000.0)
        for left_s, admitting in ((7001.0, True), (6999.0, False)):
            _, memory = ask(policy, job, now_s=10_000.0 - left_s, memory=begun(policy, 1))
            assert memory["admitting"] is admitting

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
        assert set(counts(decision)) == {f"trial-00{number}" for number in range(4)}
        assert not decision.stops
        assert "that no other trial can use" in decision.reasons["trial-002"].text
        literal = HyperSched(tuning=narrow, published=True)
        decision, _ = ask(literal, *jobs, now_s=9_000.0, memory=begun(literal, 2), gpus=6)
        assert set(counts(decision)) == {"trial-000"}
        assert len(decision.stops) == 7


class TestReallocation:
    def test_h4_uniform_is_3_3_2_with_extras_to_the_best_and_one_alone_gets_all(self) -> None:
        policy = HyperSched(tuning=STUDY, share="uniform", published=True, recharge=0)
        jobs = [shown(STUDY, n, [value], gpus=1) for n, value in enumerate((0.3, 0.1, 0.2))]
        assert counts(ask(policy, *jobs, memory=begun(policy, 3))[0]) == {
            "trial-000": 3,
            "trial-001": 2,
            "trial-002": 3,
        }
        assert counts(ask(policy, jobs[0], memory=begun(policy, 1))[0]) == {"trial-000": 8}

    def test_top_gives_what_is_left_to_the_best(self) -> None:
        policy = HyperSched(tuning=STUDY, share="top", recharge=0)
        jobs = [shown(STUDY, n, [value], gpus=1) for n, value in enumerate((0.3, 0.1, 0.2))]
        expected = {"trial-000": 6, "trial-001": 1, "trial-002": 1}
        assert counts(ask(policy, *jobs, memory=begun(policy, 3))[0]) == expected

    def test_none_gives_it_to_nobody(self) -> None:
        policy = HyperSched(tuning=STUDY, share="none", recharge=0)
        job = shown(STUDY, 0, [0.3], gpus=1)
        assert counts(ask(policy, job, memory=begun(policy, 1))[0]) == {"trial-000": 1}

    @pytest.mark.parametrize(("gpus", "share", "times"), [(4, 8, 3.05), (1, 2, 2.43)])
    def test_h5_a_resize_must_pay_its_restart(self, gpus: int, share: int, times: float) -> None:
        for factor, worth in ((1.01, True), (0.99, False)):
            left_s = times * 60.0 * factor
            speeds = PUBLISHED.speedup(gpus), PUBLISHED.speedup(share)
            assert (resize_gain(*speeds, left_s, 60.0) > GAIN) is worth

    def test_h5_in_a_decision(self) -> None:
        study = replace(STUDY, profile=replace(STUDY.profile, scaling=PUBLISHED))
        policy = HyperSched(tuning=study, published=True, recharge=0)
        job = shown(study, 0, [0.3], gpus=4, start_s=60.0)
        for left_s, gpus in ((184.0, 8), (182.0, 4)):
            decision, _ = ask(policy, job, now_s=10_000.0 - left_s, memory=begun(policy, 1))
            assert counts(decision) == {"trial-000": gpus}

    def test_h6_resizes_of_a_trial_are_six_results_apart_and_decreases_need_no_gain(self) -> None:
        since: dict[str, int] = {}
        gaps = []
        for event in cifar_run(1800.0, 3).events:
            if isinstance(event, JobReported):
                since[event.job_id] += 1
            for one in event.instructions if isinstance(event, Decided) else ():
                if one.action == "resize":
                    gaps.append(since[one.job_id])
                since[one.job_id] = 0
        assert gaps
        assert min(gaps) >= 6
        policy = HyperSched(tuning=STUDY, published=True, recharge=0)
        jobs = [shown(STUDY, 0, [0.3], gpus=6), shown(STUDY, 1, [0.1], gpus=1)]
        decision, _ = ask(policy, *jobs, now_s=9_999.0, memory=begun(policy, 2))
        assert counts(decision) == {"trial-000": 4, "trial-001": 1}

    def test_enough_gpus_must_be_free(self) -> None:
        policy = HyperSched(tuning=STUDY, published=True, recharge=0)
        jobs = [shown(STUDY, 0, [0.3], gpus=1), shown(STUDY, 1, [], gpus=6)]
        decision, _ = ask(policy, *jobs, memory=begun(policy, 2))
        assert counts(decision) == {"trial-000": 1, "trial-001": 6}

    def test_the_grid_holds_both_ways(self) -> None:
        assert [k for k in range(1, 9) if on_grid(k, 4)] == [1, 2, 3, 4, 8]
        assert all(on_grid(k, 0) for k in range(9))
        policy = HyperSched(tuning=STUDY, share="uniform", recharge=0, grid=2)
        jobs = [shown(STUDY, n, [value], gpus=1) for n, value in enumerate((0.3, 0.1, 0.2))]
        assert counts(ask(policy, *jobs, memory=begun(policy, 3))[0]) == {
            "trial-000": 1,
            "trial-001": 2,
            "trial-002": 1,
        }


class TestScaling:
    def test_what_was_seen_corrects_what_was_given(self) -> None:
        seen = {"1": [10.0, 10.0], "4": [5.0]}
        learned = believed_scaling("learned", RESNET_50, 8, seen)
        assert learned.speedup(1) == 1.0
        assert learned.speedup(4) == 2.0
        assert learned.speedup(8) == pytest.approx(5.6 * 2.0 / 3.42)
        assert learned.speedup(2) == pytest.approx(1.87 * math.sqrt(2.0 / 3.42))
        assert believed_scaling("learned", RESNET_50, 8, {}) is RESNET_50
        assert believed_scaling("given", RESNET_50, 8, seen) is RESNET_50
        assert believed_scaling("linear", RESNET_50, 8, seen).speedup(3) == pytest.approx(3.0)

    def test_nobody_gets_more_than_was_seen_to_help(self) -> None:
        learned = believed_scaling("learned", RESNET_50, 8, {"1": [10.0], "4": [4.0], "8": [5.0]})
        assert most_useful(learned, 8) == 4
        assert most_useful(RESNET_50, 6) == 6
        assert most_useful(Scaling(((1, 1.0), (2, 1.0), (4, 1.0))), 8) == 1

    def test_a_scaling_that_was_believed_wrongly_is_found_out(self) -> None:
        study = tuning(trials=1, rungs=(2,), max_epochs=100, start_s=2.0, deadline_s=80.0)
        truth = Scaling(((1, 1.0), (4, 2.0), (8, 1.0)))
        sizes = {}
        for scaling in ("given", "learned"):
            policy = make_policy("hypersched", options={"scaling": scaling}, tuning=study)
            outcome = run(policy, study, steady(0.5, epochs=100), gpus=8, scaling=truth)
            sizes[scaling] = outcome.changes[-1].gpus
        assert sizes["given"] == 8
        assert sizes["learned"] < 8


class TestClaims:
    @pytest.mark.parametrize("share", ["uniform", "top"])
    def test_h8_after_closing_the_pool_shrinks_to_one_with_all_gpus(self, share: str) -> None:
        outcome = cifar_run(1800.0, 0, share=share)
        closed_s = min(
            event.t_s
            for event in outcome.events
            if isinstance(event, Decided) and not event.memory["admitting"]
        )
        sizes = [len(held) for t_s, held in outcome.gpus() if t_s > closed_s]
        assert sizes == sorted(sizes, reverse=True)
        assert list(list(outcome.gpus())[-1][1].values()) == [8]

    def test_h9_h10_fewer_trials_than_asha_and_a_better_model_most_so_when_time_is_short(self) -> None:
        gains = []
        for deadline_s, expected in ((900.0, 14), (1800.0, 20)):
            ours = [cifar_run(deadline_s, seed) for seed in range(3)]
            theirs = [cifar_run(deadline_s, seed, **ASHA) for seed in range(3)]
            started = np.mean([len(one.started) for one in ours])
            assert started == pytest.approx(expected, rel=0.2)
            assert started <= 0.45 * np.mean([len(one.started) for one in theirs])
            gains.append(np.mean([a.best[1] - b.best[1] for a, b in zip(ours, theirs, strict=True)]))
        assert gains[0] > gains[1] > 0.0

    def test_h11_admission_brings_most_of_the_gain(self) -> None:
        def best(**options: object) -> float:
            return float(np.mean([cifar_run(900.0, seed, **options).best[1] for seed in range(4)]))

        ours, asha = best(), best(**ASHA)
        assert ours - best(admission=False) > 0.5 * (ours - asha)
        assert best(overhead=False) <= ours + 0.002
        assert best(scaling="linear") <= ours + 0.002

    def test_h12_nothing_happens_after_the_deadline(self) -> None:
        outcome = cifar_run(900.0, 1)
        assert outcome.end_s <= 900.0

    def test_a_pool_that_is_done_makes_way_for_new_trials(self) -> None:
        study = tuning(trials=100, rungs=(1, 4), eta=4, max_epochs=30, deadline_s=40.0)
        curves = toy_curves(0, 100, 30)
        ours = run(HyperSched(tuning=study), study, curves, gpus=8)
        published = run(HyperSched(tuning=study, published=True), study, curves, gpus=8)
        assert published.end_s < 40.0
        assert len(ours.started) > len(published.started)


class TestContract:
    def test_diverged_trials_are_stopped_counted_and_never_win(self) -> None:
        study = tuning(trials=3, rungs=(2,), eta=2, max_epochs=4)
        curves: list[Curve] = [[0.9, None], [math.inf], [0.1]]
        outcome = run(HyperSched(tuning=study), study, curves, gpus=3)
        assert outcome.epochs == {"trial-000": 2, "trial-001": 1, "trial-002": 4}
        assert outcome.stopped["trial-000"] == "It diverged: accuracy not a number at epoch 2."
        memory = [event.memory for event in outcome.events if isinstance(event, Decided)][-1]
        assert memory["rungs"][0]["scores"] == [0.1, None, None]

    @settings(deadline=None, max_examples=25, derandomize=True)
    @given(
        gpus=st.integers(1, 6),
        eta=st.integers(2, 4),
        seed=st.integers(0, 99),
        options=st.fixed_dictionaries(
            {
                "share": st.sampled_from(["none", "uniform", "top"]),
                "recharge": st.sampled_from(["0", "2"]),
                "retrospective": TRUE_OR_FALSE,
                "overhead": TRUE_OR_FALSE,
                "admission": TRUE_OR_FALSE,
                "published": TRUE_OR_FALSE,
            }
        ),
    )
    def test_h7_never_more_gpus_or_trials_than_there_are_and_memory_is_json(
        self, gpus: int, eta: int, seed: int, options: dict[str, str]
    ) -> None:
        study = tuning(trials=12, rungs=(1,), eta=eta, max_epochs=12, start_s=1.0, deadline_s=30.0)
        policy = make_policy("hypersched", options=options, tuning=study)
        rng = child_rng(seed, "bumpy")
        curves: list[Curve] = [
            [float(x) if x > 0.03 else None for x in rng.random(12)] for _ in range(study.study.trials)
        ]
        epoch_s = rng.uniform(0.5, 2.0, 12).tolist()
        outcome = run(policy, study, curves, gpus, epoch_s=epoch_s)
        assert outcome.most_gpus <= gpus
        assert outcome.most_trials <= gpus
        assert outcome.end_s <= 30.0
        for event in outcome.events:
            if isinstance(event, Decided):
                assert json.loads(json.dumps(event.memory, allow_nan=False)) == event.memory

    def test_a_run_cut_anywhere_resumes_to_the_same_events(self) -> None:
        study = tuning(
            trials=10, rungs=(1,), eta=2, max_epochs=10, start_s=0.5, scaling=RESNET_50, deadline_s=30.0
        )

        def events(journal: MemoryJournal) -> Sequence[object]:
            policy = HyperSched(tuning=study, recharge=1)
            return run(policy, study, toy_curves(1, 10, 10), gpus=3, journal=journal).events

        whole = events(MemoryJournal())
        for cut in range(1, len(whole), 7):
            journal = MemoryJournal()
            journal.append(whole[:cut])  # type: ignore[arg-type]
            assert events(journal) == whole, f"cut after {cut} events"

    def test_a_trial_that_lost_its_worker_starts_again_even_after_closing(self) -> None:
        policy = HyperSched(tuning=STUDY, published=True)
        job = shown(STUDY, 0, [0.5] * 8, gpus=1, held_s=300.0)
        _, memory = ask(policy, job, now_s=9_000.0, memory=begun(policy, 1))
        assert not memory["admitting"]
        decision, _ = ask(policy, shown(STUDY, 0, [0.5] * 8, held_s=300.0), now_s=9_001.0, memory=memory)
        assert counts(decision) == {"trial-000": 1}

    def test_fewer_gpus_than_trials_go_to_the_best(self) -> None:
        policy = HyperSched(tuning=STUDY)
        jobs = [shown(STUDY, n, [value], gpus=1) for n, value in enumerate((0.3, 0.1, 0.2))]
        decision, _ = ask(policy, *jobs, memory=begun(policy, 3), gpus=2)
        assert counts(decision) == {"trial-000": 1, "trial-002": 1}
        assert decision.reasons["trial-001"].text == "Only 2 GPUs are left."

    def test_jobs_that_are_no_trials_wait(self) -> None:
        stranger = replace(shown(STUDY, 1), job=replace(make_trial(STUDY, 1), study=None))
        decision, _ = ask(HyperSched(tuning=STUDY), shown(STUDY, 0), stranger)
        assert counts(decision) == {trial_id(0): 1}
        assert decision.reasons[trial_id(1)].text == "It is not a trial of the study toy."

    @pytest.mark.parametrize("option", ["recharge=-2", "grid=-1", "score_window=0", "share=some"])
    def test_options_are_checked(self, option: str) -> None:
        name, _, value = option.partition("=")
        with pytest.raises(InputError, match=f"hypersched.{name}={value} is not valid"):
            make_policy("hypersched", options={name: value}, tuning=STUDY)
