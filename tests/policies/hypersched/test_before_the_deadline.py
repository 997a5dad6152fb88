"""HyperSched with the end in sight: GPUs go to whoever can still become the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypersched_world import STUDY, ask, begun, counts, shown
from stretto.core.allocation import on_nodes
from stretto.core.decision import ReasonCode
from stretto.core.events import Decided, JobFinished, JobReported
from stretto.core.job import Tier
from stretto.core.seeds import child_rng
from stretto.planning.profile import Scaling
from stretto.planning.tuning import Tuning
from stretto.policies.base import JobView, Memory
from stretto.policies.hypersched.memory import Rungs
from stretto.policies.hypersched.policy import HyperSched
from stretto.policies.hypersched.rules import startup_s
from tuning_world import Curve, Outcome, run, tuning

TWO = Scaling(((1, 1.0), (2, 1.9)))
PAIR = replace(STUDY, profile=replace(STUDY.profile, scaling=TWO))
"""Two slots, which one trial can use."""
RACE = tuning(trials=24, rungs=(1, 3, 9), eta=3, max_epochs=27, start_s=0.2, scaling=TWO, deadline_s=70.0)


def fallen_and_paused(newcomer: Sequence[float]) -> tuple[list[JobView], Memory]:
    """A newcomer at its second epoch, after a good trial that was paused at its eighth, and one untried."""
    policy = HyperSched(tuning=PAIR)
    first = [
        shown(PAIR, 0, [0.90] * 8, gpus=1, held_s=300.0),
        shown(PAIR, 1, [0.95] * 8, gpus=1, held_s=300.0),
    ]
    _, memory = ask(policy, *first, memory=begun(policy, 2, gpus=2), gpus=2)
    assert memory["live"].keys() == {"trial-001"}
    memory["live"] = {"trial-002": 1}
    good = shown(PAIR, 0, [0.90] * 8, held_s=300.0)
    return [good, shown(PAIR, 2, newcomer, gpus=2, epoch_s=18.4), shown(PAIR, 3)], memory


class TestDecisions:
    def test_a_fallen_newcomer_makes_way_for_a_better_trial_that_waits(self) -> None:
        jobs, memory = fallen_and_paused([0.11] * 2)
        decision, _ = ask(HyperSched(tuning=PAIR), *jobs, now_s=9_850.0, memory=memory, gpus=2)
        assert counts(decision) == {"trial-000": 2}
        assert decision.reasons["trial-002"].code is ReasonCode.PREEMPTED
        assert decision.reasons["trial-000"].text == (
            "A slot is free that no other trial can use, and no better trial waits: "
            "accuracy 0.9 after epoch 8, it trains in the 150 s left."
        )

    def test_it_stays_if_it_is_the_better_one(self) -> None:
        jobs, memory = fallen_and_paused([0.2, 0.91])
        decision, _ = ask(HyperSched(tuning=PAIR), *jobs, now_s=9_850.0, memory=memory, gpus=2)
        assert counts(decision) == {"trial-002": 2}
        assert decision.reasons["trial-000"].text == "Paused: better trials have the slots."

    def test_one_poor_epoch_is_no_reason_to_make_way(self) -> None:
        jobs, memory = fallen_and_paused([0.2, 0.91, 0.89])
        decision, _ = ask(HyperSched(tuning=PAIR), *jobs, now_s=9_850.0, memory=memory, gpus=2)
        assert counts(decision) == {"trial-002": 2}

    @pytest.mark.parametrize(("left_s", "runs"), [(39.0, "trial-000"), (38.0, "trial-002")])
    def test_nobody_makes_way_for_a_trial_that_could_not_end_another_epoch(
        self, left_s: float, runs: str
    ) -> None:
        """A start takes 20 s, and an epoch on two slots 35 / 1.9."""
        jobs, memory = fallen_and_paused([0.11] * 2)
        decision, _ = ask(HyperSched(tuning=PAIR), *jobs, now_s=10_000.0 - left_s, memory=memory, gpus=2)
        assert set(counts(decision)) == {runs}

    @pytest.mark.parametrize(("left_s", "runs"), [(336.0, "trial-000"), (334.0, "trial-002")])
    def test_nor_for_one_that_begins_anew_and_could_not_come_further_than_it_was(
        self, left_s: float, runs: str
    ) -> None:
        """Nine epochs of 35 s on one slot, after a start of 20 s."""
        (good, newcomer, _), memory = fallen_and_paused([0.11] * 2)
        rigid = [
            replace(job, job=replace(job.job, tier=Tier.RIGID, worker=replace(job.job.worker, max=1)))
            for job in (good, replace(newcomer, allocation=on_nodes({"0": 1})))
        ]
        decision, _ = ask(HyperSched(tuning=PAIR), *rigid, now_s=10_000.0 - left_s, memory=memory, gpus=1)
        assert counts(decision) == {runs: 1}

    @pytest.mark.parametrize(
        ("left_s", "slots"), [(168.0, {"trial-000": 1, "trial-003": 1}), (167.0, {"trial-000": 2})]
    )
    def test_new_trials_go_first_while_they_can_come_as_far_as_others_have(
        self, left_s: float, slots: dict[str, int]
    ) -> None:
        """The farthest has had eight epochs; on two slots they take 8 * 35 / 1.9 s, after a start of 20 s."""
        (good, _, untried), memory = fallen_and_paused([0.11] * 2)
        memory["live"] = {}
        decision, after = ask(
            HyperSched(tuning=PAIR), good, untried, now_s=10_000.0 - left_s, memory=memory, gpus=2
        )
        assert after["closed_for_s"] is not None
        assert counts(decision) == slots

    def test_it_starts_with_as_many_slots_as_it_can_take(self) -> None:
        (good, *_), memory = fallen_and_paused([0.11] * 2)
        memory["live"] = {}
        rigid = replace(good, job=replace(good.job, worker=replace(good.job.worker, max=1)))
        for job, gpus in ((good, 2), (rigid, 1)):
            decision, _ = ask(HyperSched(tuning=PAIR), job, now_s=9_850.0, memory=memory, gpus=2)
            assert counts(decision) == {"trial-000": gpus}

    def test_those_that_hold_their_own_keep_their_slots(self) -> None:
        jobs, memory = fallen_and_paused([0.11] * 2)
        memory["live"] = {"trial-001": 1}
        pool = shown(PAIR, 1, [0.95] * 9, gpus=2, held_s=310.0, epoch_s=18.4)
        decision, _ = ask(HyperSched(tuning=PAIR), jobs[0], pool, now_s=9_850.0, memory=memory, gpus=2)
        assert counts(decision) == {"trial-001": 2}


class TestStudies:
    def test_the_runner_up_goes_on_when_the_first_is_done_and_wins(self) -> None:
        late_bloomer = 2
        curves = [rising(0.90, 5.0), rising(0.95, 4.0), rising(0.97, 7.0), *([[0.1] * 27] * 21)]
        outcome = run(HyperSched(tuning=RACE), RACE, curves, gpus=2)
        assert outcome.best[0] == f"trial-{late_bloomer:03d}"
        poor = [trial for trial in outcome.epochs if trial > f"trial-{late_bloomer:03d}"]
        assert 27 not in [outcome.epochs[trial] for trial in poor]

    @settings(deadline=None, max_examples=30, derandomize=True)
    @given(seed=st.integers(0, 999), deadline_s=st.floats(25.0, 90.0), start_s=st.sampled_from([0.1, 1.0]))
    def test_late_no_fallen_trial_holds_slots_that_a_better_one_could_use(
        self, seed: int, deadline_s: float, start_s: float
    ) -> None:
        study = replace(
            RACE,
            limits=replace(RACE.limits, deadline_s=deadline_s),
            profile=replace(RACE.profile, start_s=start_s),
        )
        rng = child_rng(seed, "end")
        curves = [rising(rng.uniform(0.1, 1.0), rng.uniform(1.0, 15.0)) for _ in range(24)]
        outcome = run(HyperSched(tuning=study), study, curves, gpus=2)
        for left_s, memory, kept, paused in late_decisions(study, outcome):
            needed_s = startup_s(memory["starts_s"]) + 1.0 + 1e-6
            if kept and left_s >= needed_s:
                assert min(kept.values()) >= max(paused.values(), default=0.0)


def rising(top: float, tau: float) -> Curve:
    return [top * (1.0 - math.exp(-epoch / tau)) for epoch in range(1, 28)]


def late_decisions(
    study: Tuning, outcome: Outcome
) -> Iterator[tuple[float, Any, dict[str, float], dict[str, float]]]:
    """Time left, memory, and metrics: of fallen trials that keep their slots at a result, and of paused ones.

    At every decision when a newcomer could not come as far as the farthest trial has; epochs take 1 s.
    """
    newest: dict[str, float] = {}
    heard: set[str] = set()
    held: set[str] = set()
    done: set[str] = set()
    for event in outcome.events:
        if isinstance(event, JobReported):
            heard.add(event.job_id)
            newest[event.job_id] = event.results[-1].value or 0.0
        elif isinstance(event, JobFinished):
            done.add(event.job_id)
        elif isinstance(event, Decided):
            for one in event.instructions:
                (held.add if one.allocation else held.discard)(one.job_id)
            memory = event.memory
            left_s = (study.limits.deadline_s or 0.0) - event.t_s
            catch_up_s = startup_s(memory["starts_s"]) + memory["farthest"] / TWO.speedup(2)
            if memory["closed_for_s"] is not None and left_s < catch_up_s - 1e-6:
                rungs = Rungs.load(study.study, retrospective=True, memory=memory["rungs"])
                fallen = {trial for trial in heard & held - done if rungs.fallen_at(trial) is not None}
                paused = newest.keys() - held - done
                yield left_s, memory, {t: newest[t] for t in fallen}, {t: newest[t] for t in paused}
            heard.clear()
