"""HyperSched resizes nobody for nothing: what its resizes must bring by the deadline."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypersched_world import STUDY, ask, begun, counts, shown
from stretto.core.decision import ReasonCode
from stretto.core.events import Decided
from stretto.core.seeds import child_rng
from stretto.planning.profile import Scaling
from stretto.planning.tuning import Tuning
from stretto.policies.hypersched.policy import HyperSched
from stretto.policies.hypersched.rules import (
    LEAST_GAIN,
    Payoff,
    believed_scaling,
    ends_more_epochs,
    startup_s,
)
from tuning_world import RESNET_50, Curve, run, tuning

FLAT = Scaling(((1, 1.0), (2, 1.05)))


def payoff(left_s: float, scaling: Scaling = RESNET_50) -> Payoff:
    return Payoff(scaling=scaling, left_s=left_s, startup_s=10.0, whole_epochs=True)


class TestWholeEpochs:
    @pytest.mark.parametrize(
        ("left_s", "more"),
        [(27.0, False), (29.0, True), (34.0, True), (36.0, False), (45.0, False), (47.0, True), (9.0, False)],
    )
    def test_only_epochs_that_end_by_the_deadline_count(self, left_s: float, more: bool) -> None:
        """35 s as it is; 18 s after a resize of 10 s."""
        assert ends_more_epochs(35.0, 18.0, left_s, 10.0) is more

    def test_one_that_ends_just_at_the_deadline_counts(self) -> None:
        assert ends_more_epochs(0.3, 0.1, 0.1 + 0.2 + 0.5, 0.5)
        assert not ends_more_epochs(0.1, 0.1, 0.7, 0.0)

    def test_without_a_deadline_the_faster_is_better(self) -> None:
        assert ends_more_epochs(35.0, 18.0, math.inf, 10.0)
        assert not ends_more_epochs(18.0, 35.0, math.inf, 10.0)

    def test_a_trial_that_stands_still_gains_by_one_epoch(self) -> None:
        assert payoff(45.0).is_worth(35.0, 0, 1)
        assert not payoff(44.0).is_worth(35.0, 0, 1)


class TestGrowing:
    @pytest.mark.parametrize(("left_s", "gpus"), [(14.3, 1), (14.5, 8), (36.0, 8)])
    def test_a_trial_that_could_end_no_more_epochs_stays_as_it_is(self, left_s: float, gpus: int) -> None:
        policy = HyperSched(tuning=STUDY, recharge=0)
        job = shown(STUDY, 0, [0.3], gpus=1, start_s=10.0)
        decision, _ = ask(policy, job, now_s=10_000.0 - left_s, memory=begun(policy, 1))
        assert counts(decision) == {"trial-000": gpus}
        reason = decision.reasons["trial-000"]
        assert reason.code is (ReasonCode.KEPT if gpus == 1 else ReasonCode.GREW)
        if gpus == 1:
            assert reason.text == (
                "Stays on 1 slot: with 8, after a resize of 10 s, "
                "it would complete no more epochs in the 14 s left."
            )

    def test_as_published_progress_counts_that_no_epoch_comes_of(self) -> None:
        policy = HyperSched(tuning=STUDY, published=True, recharge=0)
        job = shown(STUDY, 0, [0.3], gpus=1, start_s=10.0)
        decision, _ = ask(policy, job, now_s=10_000.0 - 14.3, memory=begun(policy, 1))
        assert counts(decision) == {"trial-000": 8}

    def test_too_little_to_gain_is_said_in_words_that_last(self) -> None:
        slow = replace(STUDY, profile=replace(STUDY.profile, scaling=FLAT))
        policy = HyperSched(tuning=slow, recharge=0)
        job, memory = shown(slow, 0, [0.3], gpus=1, start_s=0.25), begun(policy, 1)
        decision, memory = ask(policy, job, now_s=100.0, memory=memory)
        later, _ = ask(policy, shown(slow, 0, [0.3] * 2, gpus=1, start_s=0.25), now_s=135.0, memory=memory)
        assert later.reasons == decision.reasons
        assert decision.reasons["trial-000"].text == (
            "Stays on 1 slot: with 2, after a resize of 0.25 s, "
            "it would make less than 1.1 times the progress by the deadline."
        )

    def test_a_resize_that_was_never_seen_takes_as_long_as_the_profile_says(self) -> None:
        known = replace(STUDY, profile=replace(STUDY.profile, start_s=30.0))
        job = replace(shown(known, 0, [0.3], gpus=1), start_times_s=())
        for overhead, gpus in ((True, 1), (False, 8)):
            policy = HyperSched(tuning=known, recharge=0, overhead=overhead)
            decision, _ = ask(policy, job, now_s=9_966.0, memory=begun(policy, 1))
            assert counts(decision) == {"trial-000": gpus}


class TestGiving:
    @pytest.mark.parametrize(("left_s", "gives"), [(4_000.0, True), (60.0, True), (40.0, False)])
    def test_only_while_the_better_trial_gains_by_it_when_its_turn_comes(
        self, left_s: float, gives: bool
    ) -> None:
        """The better one must show a result first, 35 s from now, and be resized, which takes 20 s."""
        policy = HyperSched(tuning=STUDY, recharge=0)
        jobs = [shown(STUDY, 0, [0.5], gpus=2, epoch_s=17.5), shown(STUDY, 1, [0.1], gpus=1)]
        _, memory = ask(policy, *jobs, memory=begun(policy, 2), gpus=8)
        jobs = [shown(STUDY, 0, [0.5], gpus=1), shown(STUDY, 1, [0.1] * 2, gpus=7, epoch_s=5.0)]
        memory = {**memory, "live": {"trial-000": 0, "trial-001": 0}}
        decision, _ = ask(policy, *jobs, now_s=10_000.0 - left_s, memory=memory, gpus=8)
        assert counts(decision) == {"trial-000": 1, "trial-001": 1 if gives else 7}
        if not gives:
            assert decision.reasons["trial-001"].text == (
                "Stays on 7 slots: no other trial would get further with some of them by the deadline."
            )

    def test_what_is_of_no_use_is_given_up_for_those_who_wait(self) -> None:
        seen = {"4": [1.0], "8": [1.0]}
        for others, gpus in ((0, 8), (2, 1)):
            policy = HyperSched(tuning=STUDY, recharge=0)
            memory = {**begun(policy, 1), "speedups": seen, "live": {"trial-000": 0}}
            jobs = [
                shown(STUDY, 0, [0.5], gpus=8),
                *(shown(STUDY, number + 1) for number in range(others)),
            ]
            decision, _ = ask(policy, *jobs, now_s=100.0, memory=memory)
            assert counts(decision)["trial-000"] == gpus

    def test_who_gives_and_who_takes_may_do_so_at_once(self) -> None:
        policy = HyperSched(tuning=STUDY, recharge=0)
        jobs = [shown(STUDY, 0, [0.5], gpus=1), shown(STUDY, 1, [0.1], gpus=7, epoch_s=5.0)]
        decision, _ = ask(policy, *jobs, now_s=9_900.0, memory=begun(policy, 2))
        assert counts(decision) == {"trial-000": 7, "trial-001": 1}


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 999),
    gpus=st.integers(2, 8),
    start_s=st.sampled_from([0.05, 1.0, 6.0]),
    deadline_s=st.floats(15.0, 60.0),
    share=st.sampled_from(["uniform", "top"]),
    scaling=st.sampled_from([RESNET_50, FLAT, Scaling(((1, 1.0), (4, 4.0), (8, 2.0)))]),
)
def test_a_resize_is_asked_for_only_if_it_is_expected_to_gain(
    *, seed: int, gpus: int, start_s: float, deadline_s: float, share: str, scaling: Scaling
) -> None:
    study = tuning(
        trials=12,
        rungs=(1, 3),
        eta=3,
        max_epochs=40,
        start_s=start_s,
        deadline_s=deadline_s,
        scaling=RESNET_50,
    )
    rng = child_rng(seed, "payoff")
    curves: list[Curve] = rng.random((12, 40)).tolist()
    policy = replace(HyperSched(tuning=study, recharge=0), share=share)  # type: ignore[arg-type]
    epoch_s = rng.uniform(0.5, 5.0, 12).tolist()
    outcome = run(policy, study, curves, gpus, epoch_s=epoch_s, scaling=scaling)
    held: dict[str, int] = {}
    for event in outcome.events:
        if isinstance(event, Decided):
            for one in event.instructions:
                before, after = held.get(one.job_id, 0), one.allocation.worker_count
                if one.action == "resize":
                    _assert_gains(study, event, one.job_id, change=(before, after), gpus=gpus)
            held |= {one.job_id: one.allocation.worker_count for one in event.instructions}


def _assert_gains(study: Tuning, event: Decided, trial: str, *, change: tuple[int, int], gpus: int) -> None:
    """By what the policy knew: for the trial itself or, if it gives, for somebody else who had all GPUs."""
    before, after = change
    memory, left_s = event.memory, (study.limits.deadline_s or math.inf) - event.t_s
    scaling = believed_scaling("learned", study.profile.scaling, gpus, memory["speedups"])
    stall_s, shortest_s = startup_s(memory["starts_s"]), min(memory["singles_s"])
    single_s: float = median(memory["own_s"][trial])

    def epochs(time_s: float, count: int) -> int:
        return math.floor(time_s * scaling.speedup(count) / single_s + 1e-9)

    progress = scaling.speedup(after) * (left_s - stall_s) / (scaling.speedup(before) * left_s)
    gains = progress > LEAST_GAIN and epochs(left_s - stall_s, after) > epochs(left_s, before)
    fastest = max(scaling.speedup(count) for count in range(1, gpus + 1))
    another_may = left_s - stall_s >= shortest_s / fastest
    assert gains or (after < before and another_may)
