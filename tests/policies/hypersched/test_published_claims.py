"""What HyperSched claims of whole studies: H8 to H12, against the real `asha`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hypersched_world import STUDY, ask, begun, cifar_asha, cifar_run, counts, shown, toy_curves
from stretto.core.events import Decided
from stretto.policies.hypersched.policy import HyperSched
from tuning_world import run, tuning

pytestmark = pytest.mark.slow


class TestClaims:
    @pytest.mark.parametrize("share", ["uniform", "top"])
    def test_h8_after_closing_the_pool_shrinks_to_one_with_all_gpus(self, share: str) -> None:
        outcome = cifar_run(1800.0, 0, share=share)
        closed_s = min(
            event.t_s
            for event in outcome.events
            if isinstance(event, Decided) and event.memory["closed_for_s"] is not None
        )
        sizes = [len(held) for t_s, held in outcome.gpus() if t_s > closed_s]
        assert sizes == sorted(sizes, reverse=True)
        assert list(list(outcome.gpus())[-1][1].values()) == [8]

    def test_h9_h10_fewer_trials_than_asha_and_a_better_model_most_so_when_time_is_short(self) -> None:
        gains = []
        for deadline_s, expected, seeds in ((900.0, 14, 4), (1800.0, 20, 4), (3600.0, 33, 3)):
            ours = [cifar_run(deadline_s, seed) for seed in range(seeds)]
            theirs = [cifar_asha(deadline_s, seed) for seed in range(seeds)]
            started = np.mean([len(one.started) for one in ours])
            assert started == pytest.approx(expected, rel=0.2)
            assert started <= 0.45 * np.mean([len(one.started) for one in theirs])
            gains.append(np.mean([a.best[1] - b.best[1] for a, b in zip(ours, theirs, strict=True)]))
        assert gains[0] == max(gains)
        assert min(gains) > 0.0

    def test_h11_admission_brings_most_of_the_gain(self) -> None:
        def best(**options: Any) -> float:
            return float(np.mean([cifar_run(900.0, seed, **options).best[1] for seed in range(4)]))

        ours, asha = best(), np.mean([cifar_asha(900.0, seed).best[1] for seed in range(4)])
        assert ours - best(admission=False) > 0.5 * (ours - asha)
        assert best(overhead=False) <= ours + 0.002
        assert best(scaling="linear") <= ours + 0.002

    @pytest.mark.parametrize("published", [True, False])
    def test_h12_every_trial_has_ended_or_is_cut_at_the_deadline(self, *, published: bool) -> None:
        outcome = cifar_run(900.0, 1, published=published)
        assert outcome.end_s <= 900.0
        *_, (_, holding) = outcome.gpus()
        assert holding
        paused = set(outcome.started) - {*holding, *outcome.stopped, *outcome.finished}
        assert not (published and paused)

    @pytest.mark.parametrize("published", [True, False])
    def test_h12_at_the_deadline_and_after_it_nothing_is_changed(self, *, published: bool) -> None:
        late = cifar_run(900.0, 1, published=published, until_s=1800.0)
        assert late.end_s > 900.0
        assert max(change.t_s for change in late.changes) < 900.0
        policy = HyperSched(tuning=STUDY, published=published, admission=False, recharge=0)
        jobs = [shown(STUDY, 0, [0.5] * 2, gpus=1), shown(STUDY, 1, [0.1] * 2, gpus=1), shown(STUDY, 2)]
        memory = begun(policy, 2)
        for now_s, changes in ((9_900.0, True), (10_000.0, False), (10_001.0, False)):
            decision, _ = ask(policy, *jobs, now_s=now_s, memory=memory)
            assert (counts(decision) != {"trial-000": 1, "trial-001": 1}) is changes
            assert not decision.stops

    def test_a_pool_that_is_done_makes_way_for_new_trials(self) -> None:
        study = tuning(trials=100, rungs=(1, 4), eta=4, max_epochs=30, deadline_s=40.0)
        curves = toy_curves(0, 100, 30)
        ours = run(HyperSched(tuning=study), study, curves, gpus=8)
        published = run(HyperSched(tuning=study, published=True), study, curves, gpus=8)
        assert published.end_s < 40.0
        assert len(ours.started) > len(published.started)
