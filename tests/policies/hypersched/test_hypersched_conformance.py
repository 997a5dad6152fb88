"""What HyperSched keeps to whatever the curves, the options and the cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_job, make_view
from hypersched_world import STUDY, ask, begun, counts, shown, toy_curves
from stretto.core.allocation import on_nodes
from stretto.core.errors import InputError
from stretto.core.events import Decided
from stretto.core.seeds import child_rng
from stretto.journal.base import MemoryJournal
from stretto.policies.base import Oracle, Policy
from stretto.policies.hypersched.policy import HyperSched
from stretto.policies.registry import make_policy
from stretto.testing.policies import PolicyConformance
from tuning_world import RESNET_50, Curve, run, tuning

TRUE_OR_FALSE = st.sampled_from(["true", "false"])


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
        assert memory["closed_for_s"] is not None
        decision, _ = ask(policy, shown(STUDY, 0, [0.5] * 8, held_s=300.0), now_s=9_001.0, memory=memory)
        assert counts(decision) == {"trial-000": 1}

    def test_fewer_gpus_than_trials_go_to_the_best(self) -> None:
        policy = HyperSched(tuning=STUDY)
        jobs = [shown(STUDY, n, [value], gpus=1) for n, value in enumerate((0.3, 0.1, 0.2))]
        decision, _ = ask(policy, *jobs, memory=begun(policy, 3), gpus=2)
        assert counts(decision) == {"trial-000": 1, "trial-002": 1}
        assert decision.reasons["trial-001"].text == "Only 2 slots are left."

    def test_a_job_that_is_no_trial_keeps_what_it_holds_and_trials_take_the_rest(self) -> None:
        other = make_view(make_job("other", 5), on_nodes({"0": 5}))
        waits = make_view(make_job("waits"))
        decision, _ = ask(HyperSched(tuning=STUDY), other, waits, *(shown(STUDY, n) for n in range(5)))
        assert counts(decision) == {"other": 5, "trial-000": 1, "trial-001": 1, "trial-002": 1}
        assert decision.allocations["other"] == other.allocation
        assert decision.reasons["waits"].text == "It is not a trial of the study toy."

    def test_gpus_of_others_are_not_shared_out(self) -> None:
        policy = HyperSched(tuning=STUDY, recharge=0)
        other = make_view(make_job("other", 5), on_nodes({"0": 5}))
        decision, _ = ask(policy, other, shown(STUDY, 0, [0.5], gpus=1), memory=begun(policy, 1))
        assert counts(decision) == {"other": 5, "trial-000": 3}

    @pytest.mark.parametrize("option", ["recharge=-2", "grid=-1", "score_window=0", "share=some"])
    def test_options_are_checked(self, option: str) -> None:
        name, _, value = option.partition("=")
        with pytest.raises(InputError, match=f"hypersched.{name}={value} is not valid"):
            make_policy("hypersched", options={name: value}, tuning=STUDY)


class TestConformance(PolicyConformance):
    """Among jobs that are no trials."""

    def policy(self, oracle: Oracle) -> Policy:
        del oracle
        return HyperSched(tuning=STUDY)

    def test_a_world_unlike_any_model_ends_every_job_and_repeats_itself(self) -> None:
        """Jobs that are no trials wait for good, and the run ends for want of anything to do."""
        events = self._simulate(seed=1)
        decided = [event for event in events if isinstance(event, Decided)]
        assert not any(event.instructions for event in decided)
        texts = {reason.text for event in decided for reason in event.reasons.values()}
        assert texts == {"It is not a trial of the study toy."}
        assert self._simulate(seed=1) == events
