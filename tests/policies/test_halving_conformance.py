"""What all policies of the halving family keep to, whatever the curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builders import make_cluster, make_job, make_node, make_view
from stretto.control.instruct import check
from stretto.core.allocation import NOTHING, on_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.events import Decided, JobSubmitted
from stretto.core.observations import Result
from stretto.journal.base import MemoryJournal
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView, Memory, Oracle, Policy
from stretto.policies.registry import make_policy
from stretto.testing.policies import PolicyConformance
from tuning_world import Curve, Outcome, make_trial, run, steady, tuning

POLICIES: dict[str, dict[str, str]] = {
    "sha": {},
    "sha uniform": {"share": "uniform"},
    "sha sized": {"sized": "true", "share": "top"},
    "asha": {},
    "asha stop": {"variant": "stop"},
    "asha uniform": {"share": "uniform"},
    "asha top": {"share": "top"},
    "hyperband": {},
    "hyperband uniform": {"share": "uniform"},
    "random": {},
    "random top": {"share": "top"},
}
"""Options by the policy's name and a word."""

each_policy = pytest.mark.parametrize("words", POLICIES)

STUDY = tuning(trials=12, rungs=(1, 3), eta=2, max_epochs=6, start_s=0.5, deadline_s=40.0)


def policy_of(words: str, conditions: Tuning = STUDY) -> Policy:
    return make_policy(words.split(maxsplit=1)[0], options=POLICIES[words], tuning=conditions)


def bumpy(trials: int, seed: int) -> list[Curve]:
    """Curves that rise, cross, and sometimes cease to be numbers."""
    rng = np.random.default_rng(seed)
    curves: list[Curve] = []
    for _ in range(trials):
        values: list[float | None] = [float(v) for v in np.cumsum(rng.normal(0.1, 0.1, 6))]
        if rng.random() < 0.2:
            values[int(rng.integers(6)) :] = [None]
        curves.append(values)
    return curves


def bumpy_run(words: str, seed: int, gpus: int, journal: MemoryJournal | None = None) -> Outcome:
    rng = np.random.default_rng(seed)
    return run(
        policy_of(words),
        STUDY,
        bumpy(12, seed),
        gpus,
        ahead=int(rng.integers(1, gpus + 1)),
        epoch_s=[float(s) for s in rng.uniform(0.5, 2.0, 12)],
        until_s=1e6,
        journal=journal,
    )


@each_policy
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 9))
def test_gpus_are_never_exceeded_and_every_trial_comes_to_an_end(words: str, seed: int, gpus: int) -> None:
    outcome = bumpy_run(words, seed, gpus)
    assert outcome.most_gpus <= gpus
    assert outcome.most_trials <= gpus
    shares = POLICIES[words].get("share", "none") != "none"
    assert shares or all(change.gpus <= 1 for change in outcome.changes)
    submitted = {event.job.id for event in outcome.events if isinstance(event, JobSubmitted)}
    assert {*outcome.finished, *outcome.stopped} == submitted
    diverged = {trial for trial, shown in outcome.results.items() if shown[-1].value is None}
    for trial in diverged - set(outcome.finished):
        assert "not a number" in outcome.stopped[trial]
        assert sum(result.value is None for result in outcome.results[trial]) == 1


@each_policy
def test_the_same_study_runs_the_same_again(words: str) -> None:
    assert bumpy_run(words, 3, 4) == bumpy_run(words, 3, 4)


@each_policy
def test_a_run_cut_anywhere_resumes_to_the_same_events(words: str) -> None:
    events = bumpy_run(words, 5, 3).events
    for cut in range(1, len(events), 19):
        journal = MemoryJournal()
        journal.append(events[:cut])
        assert bumpy_run(words, 5, 3, journal).events == events


@dataclass(frozen=True, kw_only=True)
class ShownAll:
    """Another policy, which is shown paused trials among all others."""

    inner: Policy
    interval_s: float = 60.0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def wakes_on(self) -> frozenset[str]:
        return self.inner.wakes_on

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        assert not view.paused
        return self.inner.decide(view, memory, rng)


@each_policy
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 5))
def test_paused_trials_that_are_only_looked_up_change_nothing(words: str, seed: int, gpus: int) -> None:
    conditions = tuning(trials=40, rungs=(1, 3), max_epochs=6, start_s=0.5, deadline_s=90.0)
    epoch_s = [float(s) for s in np.random.default_rng(seed).uniform(0.5, 2.0, 40)]
    looked_up, shown = (
        run(policy, conditions, bumpy(40, seed), gpus, ahead=gpus, epoch_s=epoch_s, until_s=1e6).events[1:]
        for policy in (policy_of(words, conditions), ShownAll(inner=policy_of(words, conditions)))
    )
    assert looked_up == shown


@dataclass(frozen=True, kw_only=True)
class Forgetful:
    """Asks another policy twice, and remembers only what JSON can hold."""

    inner: Policy
    interval_s: float = 60.0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def wakes_on(self) -> frozenset[str]:
        return self.inner.wakes_on

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        before = deepcopy(memory)
        decision, after = self.inner.decide(view, memory, rng)
        assert self.inner.decide(view, memory, rng) == (decision, after)
        assert memory == before
        read = json.loads(json.dumps(after, allow_nan=False))
        assert read == after
        return decision, read


@each_policy
def test_memory_is_json_and_questions_change_nothing(words: str) -> None:
    curves = bumpy(12, 7)
    plain = run(policy_of(words), STUDY, curves, 4)
    again = run(Forgetful(inner=policy_of(words)), STUDY, curves, 4)
    assert [e for e in again.events if e.kind != "run-started"] == [
        e for e in plain.events if e.kind != "run-started"
    ]


@each_policy
def test_what_nobody_waited_for_is_answered_without_thinking(words: str) -> None:
    """Between rungs and with no GPU to give away, memory is not even copied."""
    study = replace(STUDY, study=replace(STUDY.study, rungs=(5,), trials=2))
    outcome = run(policy_of(words, study), study, steady(0.1, 0.2, epochs=6), gpus=2)
    memories = {event.t_s: event.memory for event in outcome.events if isinstance(event, Decided)}
    assert memories[1.5] is memories[2.5] is memories[3.5]


def trial_view(number: int, node: str | None, values: Mapping[int, float] | None = None) -> JobView:
    """A trial on a GPU of a node, or waiting, that has shown these values by epoch."""
    results = tuple(Result(epoch, value, 1.0, 1, 1) for epoch, value in (values or {}).items())
    job = make_view(
        make_trial(STUDY, number),
        on_nodes({node: 1}) if node else NOTHING,
        epoch=max(values or {0: 0.0}),
    )
    return replace(job, results=results)


@each_policy
def test_a_trial_whose_node_is_lost_goes_before_new_ones(words: str) -> None:
    policy, rng = policy_of(words), np.random.default_rng(0)
    nodes = [make_node("a", gpu=1), make_node("b", gpu=1)]
    view = make_cluster(nodes, [trial_view(number, None) for number in range(4)])
    decision, memory = policy.decide(view, None, rng)
    check(view, decision)
    assert set(decision.allocations) == {"trial-000", "trial-001"}
    where = {trial: allocation.nodes[0] for trial, allocation in decision.allocations.items()}
    kept = min(where, key=lambda trial: where[trial])
    lost = max(where, key=lambda trial: where[trial])

    def later(number: int, *, held: bool) -> JobView:
        trial = f"trial-{number:03d}"
        return trial_view(number, where.get(trial) if held or trial == kept else None)

    view = make_cluster(nodes[:1], [later(number, held=False) for number in range(4)])
    decision, memory = policy.decide(view, memory, rng)
    check(view, decision)
    assert set(decision.allocations) == {kept}
    view = make_cluster(nodes, [later(number, held=False) for number in range(4)])
    decision, memory = policy.decide(view, memory, rng)
    check(view, decision)
    assert set(decision.allocations) == {kept, lost}
    assert decision.reasons[lost].code is ReasonCode.STARTED


@each_policy
def test_a_cluster_that_shrinks_pauses_what_does_not_fit(words: str) -> None:
    policy, rng = policy_of(words), np.random.default_rng(0)
    nodes = [make_node("a", gpu=1), make_node("b", gpu=1)]
    view = make_cluster(nodes, [trial_view(number, None) for number in range(2)])
    decision, memory = policy.decide(view, None, rng)
    held = [trial_view(number, decision.allocations[f"trial-{number:03d}"].nodes[0]) for number in range(2)]
    view = make_cluster(nodes[:1], held)  # the other node drains
    decision, memory = policy.decide(view, memory, rng)
    check(view, decision)
    assert len(decision.allocations) == 1


@each_policy
def test_a_job_that_is_no_trial_keeps_what_it_holds_and_trials_take_the_rest(words: str) -> None:
    other = make_view(make_job("other"), on_nodes({"a": 1}))
    waits = make_view(make_job("waits"))
    nodes = [make_node("a", gpu=3)]
    view = make_cluster(nodes, [other, waits, *(trial_view(number, None) for number in range(4))])
    decision, _ = policy_of(words).decide(view, None, np.random.default_rng(0))
    check(view, decision)
    assert set(decision.allocations) == {"other", "trial-000", "trial-001"}
    assert decision.allocations["other"] == other.allocation
    assert "not a trial of the study toy" in decision.reasons["waits"].text


def suite(words: str) -> type[PolicyConformance]:
    class Suite(PolicyConformance):
        def policy(self, oracle: Oracle) -> Policy:
            del oracle
            return policy_of(words)

        def test_a_world_unlike_any_model_ends_every_job_and_repeats_itself(self) -> None:
            """Jobs that are no trials wait for good, and the run ends for want of anything to do."""
            events = self._simulate(seed=1)
            decided = [event for event in events if isinstance(event, Decided)]
            assert not any(event.instructions for event in decided)
            texts = {reason.text for event in decided for reason in event.reasons.values()}
            assert texts == {"It is not a trial of the study toy."}
            assert self._simulate(seed=1) == events

    return Suite


class TestSynchronous(suite("hyperband uniform")):  # type: ignore[misc]
    """`hyperband`, and the turn it shares with `sha`, among jobs that are no trials."""


class TestAsynchronous(suite("asha uniform")):  # type: ignore[misc]
    """`asha`, and the turn it shares with `random`, among jobs that are no trials."""
