"""HyperSched's reallocation and what it believes of scaling: H4 to H6 of its published claims."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hypersched_world import STUDY, ask, begun, cifar_curves, cifar_run, cifar_study, counts, shown
from stretto.core.events import Decided, JobReported
from stretto.core.observations import Result
from stretto.core.seeds import child_rng
from stretto.planning.profile import Scaling
from stretto.policies.base import JobView
from stretto.policies.hypersched.policy import HyperSched
from stretto.policies.hypersched.rules import LEAST_GAIN, believed_scaling, most_useful, on_grid, resize_gain
from stretto.policies.registry import make_policy
from tuning_world import RESNET_50, run, steady, tuning

PUBLISHED = Scaling(((1, 1.0), (2, 1.87), (4, 3.421), (8, 5.598)))


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
            assert (resize_gain(*speeds, left_s, 60.0) > LEAST_GAIN) is worth

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

    @pytest.mark.parametrize(
        ("speedup", "said"),
        [
            (1.0, "1 slot instead of 2: the rest is for trial-001."),
            (0.5, "1 slot instead of 2 makes 2.00 times the progress in the 9999 s left."),
        ],
    )
    def test_a_trial_that_shrinks_is_told_for_whom_or_that_it_gains(self, speedup: float, said: str) -> None:
        scaling = Scaling(((1, 1.0), (2, speedup)))
        study = replace(STUDY, profile=replace(STUDY.profile, scaling=scaling))
        policy = HyperSched(tuning=study, recharge=0)
        jobs = [shown(study, 0, [0.9], gpus=2, start_s=0.0), shown(study, 1)]
        decision, _ = ask(policy, *jobs, now_s=1.0, memory=begun(policy, 1, gpus=2), gpus=2)
        assert counts(decision) == {"trial-000": 1}
        assert decision.reasons["trial-000"].text == said

    @pytest.mark.parametrize("left_s", [60.0, 59.0, 0.0, -10.0])
    def test_a_restart_that_takes_all_the_time_left_gains_nothing(self, left_s: float) -> None:
        assert resize_gain(1.0, 8.0, left_s, 60.0) == 0.0
        assert resize_gain(1.0, 8.0, min(left_s, 0.0), 0.0) == 0.0
        assert resize_gain(1.0, 8.0, math.inf, 60.0) == 8.0

    def test_shares_are_rounded_down_to_the_grid(self) -> None:
        assert [on_grid(k, 4) for k in range(10)] == [0, 1, 2, 3, 4, 4, 4, 4, 8, 8]
        assert [on_grid(k, 0) for k in range(9)] == list(range(9))
        policy = HyperSched(tuning=STUDY, share="uniform", recharge=0, grid=2)
        jobs = [shown(STUDY, n, [value], gpus=1) for n, value in enumerate((0.3, 0.1, 0.2))]
        assert counts(ask(policy, *jobs, memory=begun(policy, 3))[0]) == {
            "trial-000": 2,
            "trial-001": 2,
            "trial-002": 2,
        }
        best = HyperSched(tuning=STUDY, share="top", recharge=0, grid=4)
        assert counts(ask(best, *jobs, memory=begun(best, 3))[0]) == {
            "trial-000": 4,
            "trial-001": 1,
            "trial-002": 3,
        }

    def test_fewer_gpus_are_shared_out_on_the_grid_too(self) -> None:
        policy = HyperSched(tuning=STUDY, grid=4)
        jobs = [shown(STUDY, 0, [0.3], gpus=4), shown(STUDY, 1, [0.1], gpus=4)]
        decision, _ = ask(policy, *jobs, memory=begun(policy, 2), gpus=7)
        assert counts(decision) == {"trial-000": 4, "trial-001": 3}


class TestScaling:
    def test_what_was_seen_corrects_what_was_given(self) -> None:
        seen = {"4": [1.5, 2.0, 2.1]}
        learned = believed_scaling("learned", RESNET_50, 8, seen)
        assert learned.speedup(1) == 1.0
        assert learned.speedup(4) == 2.0
        assert learned.speedup(8) == pytest.approx(5.6 * 2.0 / 3.42)
        assert learned.speedup(2) == pytest.approx(1.87 * math.sqrt(2.0 / 3.42))
        assert believed_scaling("learned", RESNET_50, 8, {}) is RESNET_50
        assert believed_scaling("given", RESNET_50, 8, seen) is RESNET_50
        assert believed_scaling("linear", RESNET_50, 8, seen).speedup(3) == pytest.approx(3.0)

    def test_nobody_gets_more_than_was_seen_to_help(self) -> None:
        learned = believed_scaling("learned", RESNET_50, 8, {"4": [2.5], "8": [2.0]})
        assert most_useful(learned, 8) == 4
        assert most_useful(RESNET_50, 6) == 6
        assert most_useful(Scaling(((1, 1.0), (2, 1.0), (4, 1.0))), 8) == 1

    def test_a_slow_trial_is_not_mistaken_for_poor_scaling(self) -> None:
        """Only epochs of one trial on different GPUs tell how it scales."""
        policy = HyperSched(tuning=replace(STUDY, profile=replace(STUDY.profile, scaling=RESNET_50)))
        slow, unknown = _epochs(0, {1: (56.0, 57.0), 4: (56.0 / 3.42,)}), _epochs(1, {4: (1.0,)})
        others = [shown(policy.tuning, number, [0.1, 0.1], gpus=1) for number in (2, 3)]
        _, memory = ask(policy, slow, unknown, *others, memory=begun(policy, 4), gpus=16)
        assert memory["speedups"] == {"4": [pytest.approx(56.5 / 56.0 * 3.42)]}
        assert memory["own_s"]["trial-000"] == [56.0, 57.0]

    def test_where_the_profile_is_right_and_trials_differ_in_speed_there_is_nothing_to_learn(self) -> None:
        study = cifar_study(1800.0)
        epoch_s = child_rng(0, "speed").uniform(15.0, 60.0, 100).tolist()
        changes = [
            run(
                HyperSched(tuning=study, scaling=scaling), study, cifar_curves(0, 100), 8, epoch_s=epoch_s
            ).changes
            for scaling in ("given", "learned")
        ]
        assert changes[0] == changes[1]

    def test_what_is_kept_of_epoch_times_is_bounded_and_goes_with_the_trial(self) -> None:
        study = tuning(trials=4, rungs=(30,), max_epochs=60, scaling=RESNET_50)
        outcome = run(HyperSched(tuning=study), study, steady(1, 2, 3, 4, epochs=60), gpus=6)
        memories = [event.memory for event in outcome.events if isinstance(event, Decided)]
        assert max(len(times) for one in memories for times in one["own_s"].values()) == 5
        assert max(len(seen) for one in memories for seen in one["speedups"].values()) == 16
        assert set(memories[-1]["own_s"]) < set(outcome.started)

    def test_a_scaling_that_was_believed_wrongly_is_found_out(self) -> None:
        study = tuning(trials=1, rungs=(2,), max_epochs=100, start_s=2.0, deadline_s=80.0)
        truth = Scaling(((1, 1.0), (4, 2.0), (8, 0.5)))
        sizes = {}
        for scaling in ("given", "learned"):
            policy = make_policy("hypersched", options={"scaling": scaling}, tuning=study)
            outcome = run(policy, study, steady(0.5, epochs=100), gpus=8, scaling=truth)
            sizes[scaling] = outcome.changes[-1].gpus
        assert sizes["given"] == 8
        assert sizes["learned"] < 8


def _epochs(number: int, times_s: dict[int, tuple[float, ...]]) -> JobView:
    """A trial whose epochs took so long, by number of GPUs, of which it holds the last."""
    pairs = [(gpus, epoch_s) for gpus, some in times_s.items() for epoch_s in some]
    job = shown(STUDY, number, [0.5] * len(pairs), gpus=pairs[-1][0])
    return replace(job, results=tuple(Result(e, 0.5, s, gpus, 1) for e, (gpus, s) in enumerate(pairs, 1)))
