"""The loop where time passes by itself: beats, being asked to stop, what comes after the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.control.controller import PATIENCE, Controller, Settings
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision, Reason, ReasonCode
from stretto.core.events import Event, JobFinished, JobNoted, JobReported, JobSubmitted
from stretto.core.job import Job
from stretto.core.source import Arrivals
from stretto.journal.base import MemoryJournal
from stretto.policies.base import ClusterView, Memory, Policy
from toy_world import Scripted, Watched, toy_job

BEAT_S = 2.0


def controller(
    policy: Policy,
    substrate: Scripted,
    jobs: Sequence[Job],
    *,
    journal: MemoryJournal | None = None,
    until_s: float = 1000.0,
    beat_s: float = BEAT_S,
    stop: Callable[[], bool] = lambda: False,
    on_turn: Callable[[Controller], None] | None = None,
) -> Controller:
    return Controller(
        policy=policy,
        substrate=substrate,
        journal=journal or MemoryJournal(),
        nodes=gpu_nodes(1, 4),
        arrivals=Arrivals(jobs),
        settings=Settings(until_s=until_s, beat_s=beat_s),
        stop=stop,
        on_turn=on_turn,
    )


def test_beats_change_no_decision() -> None:
    script = [JobFinished(t_s=90.0, job_id="a"), JobFinished(t_s=100.0, job_id="b")]
    found = []
    for beat_s in (float("inf"), BEAT_S, 7.3):
        policy, substrate = Watched(wake_after_s=25.0), Scripted(script)
        controller(policy, substrate, [toy_job("a"), toy_job("b", submit_s=13.5)], beat_s=beat_s).run()
        found.append((policy.times_s, substrate.summary))
    assert found[0] == found[1] == found[2]


def test_it_comes_round_in_every_beat() -> None:
    substrate = Scripted([JobFinished(t_s=21.0, job_id="a")])
    seen: list[float] = []
    controller(Watched(), substrate, [toy_job("a")], on_turn=lambda _: seen.append(substrate.now_s())).run()
    assert max(np.diff([0.0, *seen])) <= BEAT_S


def test_asked_to_stop_it_ends_within_a_beat_and_leaves_jobs_as_they_are() -> None:
    substrate = Scripted([JobFinished(t_s=500.0, job_id="a")])
    loop = controller(Watched(), substrate, [toy_job("a")], stop=lambda: substrate.now_s() >= 30.0)
    loop.run()
    assert 30.0 <= substrate.now_s() <= 30.0 + BEAT_S
    assert loop.state.jobs["a"].allocation


def test_what_comes_after_the_deadline_is_recorded_and_not_decided_on() -> None:
    late: list[Event] = [
        JobReported(t_s=55.0, job_id="a", work_done=1.0, epoch=1),
        JobNoted(t_s=56.0, job_id="a", text="left"),
    ]
    journal, policy = MemoryJournal(), Watched()
    loop = controller(policy, Scripted(late), [toy_job("a")], journal=journal, until_s=50.0)
    loop.run()
    decided = list(policy.times_s)
    loop.record_rest(60.0)
    assert list(journal.events())[-2:] == late
    assert policy.times_s == decided


@dataclass(frozen=True)
class Idle:
    """Starts nothing, ever."""

    name: str = "idle"
    interval_s: float = 10.0
    wakes_on: frozenset[str] = frozenset({JobSubmitted.kind})

    def decide(self, view: ClusterView, memory: Memory, rng: np.random.Generator) -> tuple[Decision, Memory]:
        del rng
        waits = Reason(ReasonCode.WAITS, "It does not please.")
        return Decision(allocations={}, reasons={job.id: waits for job in view.jobs}), memory


def test_a_run_in_which_nothing_starts_ends_before_its_deadline() -> None:
    substrate = Scripted()
    controller(Idle(), substrate, [toy_job("a")], until_s=1e6).run()
    assert substrate.now_s() <= (PATIENCE + 2) * Idle.interval_s


def test_such_a_run_can_be_asked_to_stop() -> None:
    substrate = Scripted()
    controller(Idle(), substrate, [toy_job("a")], stop=lambda: substrate.now_s() >= 35.0).run()
    assert substrate.now_s() <= 35.0 + BEAT_S
