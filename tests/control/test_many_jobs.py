"""Thousands of jobs and trials: what a decision costs, and what it writes, does not grow with them."""

from __future__ import annotations

import dataclasses
import json
import sys
import tracemalloc
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from builders import make_job, make_node
from stretto.control.controller import Controller, Settings
from stretto.control.state import RunState
from stretto.core.cluster import Wish
from stretto.core.events import Decided, Event, JobFinished, JobReported, JobSubmitted, RunStarted
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.observations import Result
from stretto.core.source import Arrivals
from stretto.inputs.study import StudyFile, parse_study
from stretto.journal.base import Journal, MemoryJournal
from stretto.journal.codec import encode
from stretto.journal.sqlite import SqliteJournal
from stretto.models.resize import TimesSeen, expected_resize_cost
from stretto.policies.base import ClusterView, Memory, Policy
from stretto.policies.registry import make_policy
from stretto.runs.live_state import LiveState
from stretto.search.study import Direction, Study
from stretto.simulation.studies import simulate_study
from stretto.worlds.curves import FAMILIES

pytestmark = pytest.mark.slow

NODES = (make_node("local", gpu=2),)


class Instant:
    """A substrate on which every job is over a moment after it has started, the first to start first."""

    changes_batch_in_place = True

    def __init__(self) -> None:
        self._t_s = 0.0
        self._running = deque[str]()
        self.started: list[str] = []

    def now_s(self) -> float:
        return self._t_s

    def admit(self, job: Job) -> None:
        """Nothing is prepared."""

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            if one.action is Action.START:
                self._running.append(one.job_id)
                self.started.append(one.job_id)

    def provision(self, wish: Wish) -> None:
        """There is what there is."""

    def next_event(self, until_s: float) -> Event | None:
        if not self._running:
            self._t_s = max(self._t_s, until_s)
            return None
        self._t_s += 0.02
        return JobFinished(t_s=self._t_s, job_id=self._running.popleft())

    def recover(self, history: Iterable[Event]) -> None:
        """What ran is over."""

    def close(self) -> None:
        """Nothing is left."""


class Looked:
    """A policy that counts the jobs it was shown."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.name, self.interval_s, self.wakes_on = inner.name, inner.interval_s, inner.wakes_on
        self.most = 0

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Any, Memory]:
        self.most = max(self.most, len(view.jobs))
        return self._inner.decide(view, memory, rng)


def run(policy: str, jobs: Sequence[Job], journal: Journal, *, alike: int) -> tuple[list[str], int]:
    """Who was started, in order, and how many jobs the policy was shown at most."""
    substrate, looked = Instant(), Looked(make_policy(policy, options={}, interval_s=10.0))
    Controller(
        policy=looked,
        substrate=substrate,
        journal=journal,
        nodes=NODES,
        arrivals=Arrivals(jobs),
        settings=Settings(share_priors=True, resize_s=5.0, beat_s=0.2, alike=alike),
    ).run()
    return substrate.started, looked.most


def many(count: int) -> list[Job]:
    """Jobs of two kinds, some of which come later; each has its own command."""
    kinds = (make_job("small"), make_job("large", 2))
    return [
        dataclasses.replace(
            kinds[number % 5 == 0],
            id=f"j{number:05d}",
            application=f"train.py --seed {number}",
            submit_s=0.5 * (number // 100),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("policy", ["fifo", "pollux", "srtf", "tiresias", "drf", "tetris"])
def test_jobs_that_are_not_shown_change_nothing(policy: str) -> None:
    whole, cut = MemoryJournal(), MemoryJournal()
    everybody, _ = run(policy, many(150), whole, alike=0)
    started, shown = run(policy, many(150), cut, alike=5)
    assert started == everybody
    assert len(started) == 150
    assert shown < 40
    assert waiting_reasons(cut).keys() == waiting_reasons(whole).keys(), "all who waited have a reason"


def waiting_reasons(journal: Journal) -> dict[str, str]:
    return {
        job_id: reason.text
        for event in journal.events()
        if isinstance(event, Decided)
        for job_id, reason in event.reasons.items()
        if reason.code == "waits"
    }


@pytest.mark.parametrize("policy", ["fifo", "pollux"])
def test_a_decision_writes_what_changed_however_many_wait(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(SqliteJournal(path, run="r")) as journal:
        jobs = [make_job(f"j{number:05d}") for number in range(600)]
        started, shown = run(policy, jobs, journal, alike=100)
        decided = [event for event in journal.events() if isinstance(event, Decided)]
    assert len(started) == 600
    assert shown <= 102
    assert max(len(event.reasons) for event in decided[3:]) < 10, "nobody's reason changes as others start"
    assert path.stat().st_size / len(started) < 2500


def test_jobs_of_an_application_of_which_something_was_seen_are_no_longer_like_others() -> None:
    state = RunState(share_priors=True, alike=2)
    state.apply(RunStarted(t_s=0.0, identity={"policy": "p"}, nodes=NODES))
    jobs = [
        dataclasses.replace(make_job(f"{application}{number}"), application=application)
        for number in range(8)
        for application in "ab"
    ]
    for job in jobs:
        state.apply(JobSubmitted(t_s=0.0, job=job))
    assert [job.id for job in state.view(1.0).jobs] == ["a0", "b0", "a1"]
    assert state.view(1.0).job_count == 16
    state.apply(JobReported(t_s=1.0, job_id="b0", work_done=1.0, epoch=1, resize_s=2.0))
    state.apply(JobFinished(t_s=2.0, job_id="b0"))
    assert [job.id for job in state.view(3.0).jobs] == ["a0", "a1", "b1", "a2", "b2", "b3"]


def test_what_was_said_of_a_job_that_is_over_is_forgotten() -> None:
    journal = MemoryJournal()
    run("fifo", many(20), journal, alike=5)
    state = RunState(alike=5)
    for event in journal.events():
        state.apply(event)
    assert not state.jobs
    kept = dataclasses.asdict(state)
    assert [kept[name] for name in ("_reasons", "_lines", "_in_line", "_apart")] == [{}] * 4


def test_start_times_are_learned_from_sums() -> None:
    rng = np.random.default_rng(0)
    own_s, prior_s = rng.uniform(1.0, 9.0, 5).tolist(), rng.uniform(2.0, 20.0, 300).tolist()
    own, prior = TimesSeen(), TimesSeen()
    for times, seen_s in ((own, own_s), (prior, prior_s)):
        for time_s in seen_s:
            times.add(time_s)
    found = expected_resize_cost(own, prior, 30.0)
    application = (30.0 + sum(prior_s)) / 301
    expected_s = (2.0 * application + sum(own_s)) / 7
    squared = [[(time_s / expected_s - 1.0) ** 2 for time_s in times] for times in (own_s, prior_s)]
    variance = (2.0 * (0.3**2 + sum(squared[1])) / 301 + sum(squared[0])) / 7
    assert found.expected_s == pytest.approx(expected_s)
    assert found.p90_s == pytest.approx(expected_s * (1.0 + 1.2816 * variance**0.5))


def test_the_best_trial_is_known_as_if_all_were_compared() -> None:
    study = Study(name="s", metric="loss", direction=Direction.MIN, rungs=(), trials=9, max_epochs=50, eta=3)
    board, rng = LiveState(study), np.random.default_rng(1)
    for number in range(9):
        job = dataclasses.replace(make_job(f"t{number}"), study="s")
        board.observe(JobSubmitted(t_s=0.0, job=job))
    for turn in range(300):
        trial = f"t{rng.integers(9)}"
        value = None if rng.random() < 0.2 else float(rng.integers(20))
        result = Result(turn, value, 1.0, 1, 1)
        board.observe(
            JobReported(t_s=float(turn), job_id=trial, work_done=1.0, epoch=turn, results=(result,))
        )
        shown = [line for line in board.jobs.values() if line.value is not None]
        best = max(shown, key=lambda line: study.score(board.best_value(line)), default=None)
        assert board.best() is best


def test_memory_is_written_as_what_changed() -> None:
    names = [f"trial-{number:04d}" for number in range(2000)]
    memory = {
        "begun": 2000,
        "rungs": [{"trials": names, "scores": [0.5] * 2000}],
        "passed": dict.fromkeys(names, 1),
    }
    after = {
        "begun": 2001,
        "rungs": [{"trials": [*names[:70], "new", *names[70:]], "scores": [0.25, *[0.5] * 2000]}],
        "passed": {**{name: 1 for name in names if name != "trial-0007"}, "new": 1},
    }
    decided = Decided(t_s=1.0, policy="asha", instructions=(), reasons={}, memory=after)
    text = encode(decided, memory)
    assert len(text) < 400
    assert len(encode(decided, after)) < len(text)
    assert json.loads(encode(decided))["memory"] == after


def tiny_study(trials: int) -> StudyFile:
    return parse_study(
        f"""
        [study]
        name = "tiny"
        metric = "accuracy"
        direction = "max"
        trials = {trials}
        [halving]
        rungs = [1]
        eta = 3
        max_epochs = 3
        [space]
        lr = {{ float = [0.0, 1.0] }}
        [machine]
        slots = 2
        [profile]
        epoch_s = 0.2
        speedup = {{ "1" = 1.0, "2" = 1.5 }}
        start_s = 0.5
        [world]
        curves = "builtin:resnet"
        """,
        Path("tiny.toml"),
    )


STUDY_POLICIES = ("random", "asha", "sha", "hyperband", "hypersched")


class Calls:
    """Counts the calls of functions, between one decision and the next."""

    def __init__(self) -> None:
        self.total = 0
        self.at_decisions = list[int]()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call":
            self.total += 1
            if frame.f_code.co_name == "_decide" and frame.f_code.co_filename.endswith("controller.py"):
                self.at_decisions.append(self.total)

    def per_decision(self, since: float, until: float) -> float:
        """The mean of the decisions of one part of the run."""
        counts = self.at_decisions
        first, last = int(since * len(counts)), int(until * len(counts)) - 1
        return (counts[last] - counts[first]) / (last - first)


@pytest.mark.parametrize("policy", ["random", "asha", "sha", "hyperband"])
def test_a_decision_costs_as_many_calls_however_many_trials_are_paused_or_over(policy: str) -> None:
    calls = Calls()
    sys.setprofile(calls)
    try:
        simulate_study(tiny_study(600), FAMILIES[0], policy)
    finally:
        sys.setprofile(None)
    assert calls.per_decision(0.55, 0.65) <= 1.25 * calls.per_decision(0.1, 0.2)


def test_a_decision_of_hypersched_costs_in_proportion_to_the_trials_that_wait() -> None:
    costs = list[float]()
    for trials in (100, 400):
        calls = Calls()
        sys.setprofile(calls)
        try:
            simulate_study(tiny_study(trials), FAMILIES[0], "hypersched", deadline=3.0 * trials)
        finally:
            sys.setprofile(None)
        costs.append(calls.per_decision(0.4, 0.6))
    assert costs[1] < 5.0 * costs[0]


@pytest.mark.parametrize("policy", STUDY_POLICIES)
def test_a_simulation_keeps_no_copy_of_the_memory_for_each_decision(policy: str) -> None:
    def most_bytes(trials: int) -> int:
        tracemalloc.start(1)
        try:
            simulate_study(tiny_study(trials), FAMILIES[0], policy)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    most_bytes(20)
    few, many_more = most_bytes(150), most_bytes(600)
    assert many_more < 5.0 * few, "four times the trials take four times the memory"
