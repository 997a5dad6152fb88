"""The loop: when it asks the policy, what it lets through, what it does with what happens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_cluster, make_node, make_view
from stretto.control.controller import PATIENCE, Controller, Settings
from stretto.control.instruct import instructions_for
from stretto.core.allocation import NOTHING, BatchChoice, on_nodes
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.errors import JournalError, PolicyError
from stretto.core.events import (
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLost,
    WorkerLost,
)
from stretto.core.instructions import Action
from stretto.core.job import Job
from stretto.core.resources import Resources
from stretto.core.source import Arrivals
from stretto.core.substrate import Substrate
from stretto.journal.base import Journal, MemoryJournal
from stretto.policies.base import Policy
from stretto.policies.pollux import Pollux
from stretto.policies.tiresias import Tiresias
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from toy_world import Scripted, ToyTruth, Watched, runs, says, toy_job, toy_workload

NEVER = Settings(until_s=10_000.0)


def drive(
    policy: Policy,
    substrate: Substrate,
    *jobs: Job,
    nodes: Sequence[Node] = gpu_nodes(1, 4),
    how: Settings = NEVER,
    journal: Journal | None = None,
) -> Controller:
    controller = Controller(
        policy=policy,
        substrate=substrate,
        journal=journal if journal is not None else MemoryJournal(),
        nodes=nodes,
        arrivals=Arrivals(jobs),
        settings=how,
    )
    controller.run()
    return controller


def ends(**finish_s: float) -> list[Event]:
    return [JobFinished(t_s=t_s, job_id=job_id) for job_id, t_s in finish_s.items()]


class TestWhen:
    def test_a_job_between_two_rounds_is_decided_about_at_once(self) -> None:
        policy, substrate = Watched(), Scripted(ends(a=90.0, b=100.0))
        drive(policy, substrate, toy_job("a"), toy_job("b", submit_s=13.5))
        assert policy.times_s == [0.0, 13.5, 60.0, 90.0]
        assert substrate.summary == [(0.0, "start", "a", ("0",)), (13.5, "start", "b", ("0",))]

    def test_with_rounds_decisions_fall_on_multiples_only(self) -> None:
        policy, substrate = Watched(wake_after_s=7.0), Scripted(ends(a=130.0, b=150.0))
        drive(policy, substrate, toy_job("a"), toy_job("b", submit_s=13.5), how=Settings(rounds=True))
        assert policy.times_s == [60.0, 120.0]
        assert substrate.summary == [(60.0, "start", "a", ("0",)), (60.0, "start", "b", ("0",))]

    def test_wake_at_is_honoured_and_replaced_by_the_next_decision(self) -> None:
        policy = Watched(wake_after_s=25.0)
        drive(policy, Scripted(ends(a=100.0)), toy_job("a"))
        assert policy.times_s == [0.0, 25.0, 50.0, 60.0, 85.0]

    def test_several_events_at_one_time_give_one_decision(self) -> None:
        policy = Watched()
        script = Scripted([*ends(a=20.0, b=20.0), JobFailed(t_s=20.0, job_id="c", error="no"), *ends(e=40.0)])
        jobs = [toy_job(name) for name in "abc"] + [toy_job("e", submit_s=20.0)]
        drive(policy, script, *jobs)
        assert policy.times_s == [0.0, 20.0]
        assert [job.id for job in policy.views[-1].jobs] == ["e"]

    def test_a_report_wakes_nobody(self) -> None:
        policy = Watched()
        report = JobReported(t_s=10.0, job_id="a", work_done=5.0, epoch=0)
        drive(policy, Scripted([report, *ends(a=70.0)]), toy_job("a"))
        assert policy.times_s == [0.0, 60.0]
        assert policy.views[-1].jobs[0].work_done == 5.0

    def test_nobody_is_asked_while_there_are_no_jobs(self) -> None:
        policy = Watched()
        drive(policy, Scripted(ends(a=10.0, b=605.0)), toy_job("a"), toy_job("b", submit_s=600.0))
        assert policy.times_s == [0.0, 600.0]

    @settings(max_examples=40, deadline=None)
    @given(
        interval_s=st.floats(3.0, 80.0),
        arrivals=st.lists(st.floats(0.0, 500.0), min_size=1, max_size=5),
        rounds=st.booleans(),
    )
    def test_an_interval_without_a_decision_is_one_without_jobs(
        self, interval_s: float, arrivals: list[float], rounds: bool
    ) -> None:
        jobs = [toy_job(f"j{i}", submit_s=at) for i, at in enumerate(arrivals)]
        end_s = {job.id: job.submit_s + 200.0 for job in jobs}
        policy = Watched(interval_s=interval_s)
        drive(policy, Scripted(ends(**end_s)), *jobs, nodes=gpu_nodes(2, 4), how=Settings(rounds=rounds))
        begin_s = min(arrivals)
        for before, after in itertools.pairwise([begin_s, *policy.times_s]):
            alive = all(
                any(job.submit_s <= t <= end_s[job.id] for job in jobs)
                for t in (before + 1e-6, (before + after) / 2, after)
            )
            gaps = sorted(end_s[job.id] for job in jobs if before < end_s[job.id] < after)
            assert after - before <= interval_s + 1e-6 or not alive or gaps
        if rounds:
            assert all(abs(t / interval_s - round(t / interval_s)) < 1e-6 for t in policy.times_s)
        else:
            assert {job.submit_s for job in jobs} <= set(policy.times_s)


class TestEnd:
    def test_until_ends_the_run(self) -> None:
        policy = Watched()
        controller = drive(policy, Scripted(), toy_job("a"), how=Settings(until_s=120.0))
        assert list(controller.state.jobs) == ["a"]
        assert controller.jobs_to_come == 0
        assert policy.times_s == [0.0, 60.0], "at the end there is nothing left to decide"

    def test_a_job_that_can_never_fit_leaves_the_run_stalled(self) -> None:
        policy, journal = Watched(), MemoryJournal()
        controller = drive(
            policy,
            Scripted(ends(a=30.0)),
            toy_job("a"),
            toy_job("big", 9),
            how=Settings(),
            journal=journal,
        )
        assert list(controller.state.jobs) == ["big"]
        assert len(policy.views) == 1 + PATIENCE
        reasons = [event.reasons for event in journal.events() if isinstance(event, Decided)]
        assert reasons[0]["big"].code is ReasonCode.WAITS
        assert reasons[-1] == {}, "a reason is recorded when it is news"

    def test_a_stalled_run_stays_stalled_when_resumed(self) -> None:
        journal = MemoryJournal()
        for _ in range(2):
            drive(Watched(), Scripted(), toy_job("big", 9), how=Settings(), journal=journal)
        assert sum(isinstance(event, Decided) for event in journal.events()) == PATIENCE

    def test_waiting_for_arrivals_is_not_stalling(self) -> None:
        policy = Watched()
        late = PATIENCE * 60.0 * 3
        controller = drive(
            policy,
            Scripted(ends(a=late + 10.0)),
            toy_job("big", 9),
            toy_job("a", submit_s=late),
            how=Settings(),
        )
        assert list(controller.state.jobs) == ["big"]
        assert any(job.id == "a" for view in policy.views for job in view.jobs)


class TestWhatHappens:
    def test_a_failed_job_leaves_and_its_room_is_used(self) -> None:
        substrate = Scripted([JobFailed(t_s=10.0, job_id="a", error="no"), *ends(b=20.0)])
        drive(Watched(), substrate, toy_job("a", 4), toy_job("b", 4))
        assert substrate.summary == [(0.0, "start", "a", ("0",)), (10.0, "start", "b", ("0",))]

    def test_a_new_node_is_used_at_once(self) -> None:
        substrate = Scripted([NodeAdded(t_s=10.0, node=make_node("new", gpu=4)), *ends(a=20.0, b=20.0)])
        drive(Watched(), substrate, toy_job("a", 4), toy_job("b", 4))
        assert substrate.summary == [(0.0, "start", "a", ("0",)), (10.0, "start", "b", ("new",))]

    def test_jobs_of_a_lost_node_start_elsewhere(self) -> None:
        policy, substrate = Watched(), Scripted([NodeLost(t_s=10.0, node_id="0"), *ends(a=50.0)])
        drive(policy, substrate, toy_job("a", 2), nodes=gpu_nodes(2, 4))
        assert substrate.summary == [(0.0, "start", "a", ("0",)), (10.0, "start", "a", ("1",))]
        after = policy.views[1]
        assert [node.id for node in after.nodes] == ["1"]
        assert not after.jobs[0].allocation
        assert after.jobs[0].batch is None
        assert after.jobs[0].attained_gpu_s == 20.0

    def test_a_job_that_lost_a_worker_is_started_again(self) -> None:
        policy = Watched()
        substrate = Scripted([WorkerLost(t_s=10.0, job_id="a", node="0"), *ends(a=50.0)])
        drive(policy, substrate, toy_job("a", 2))
        assert substrate.summary == [(0.0, "start", "a", ("0",)), (10.0, "start", "a", ("0",))]
        assert policy.views[1].jobs[0].batch is None

    @pytest.mark.parametrize("policy", [Watched(), Tiresias(), Pollux()], ids=["fifo", "tiresias", "pollux"])
    def test_nothing_new_goes_to_a_draining_node(self, policy: Policy) -> None:
        substrate = Scripted(
            [
                NodeDraining(t_s=10.0, node_id="0"),
                NodeLost(t_s=100.0, node_id="0"),
                NodeAdded(t_s=120.0, node=make_node("0", gpu=4)),
                *ends(a=200.0, b=200.0, c=210.0),
            ]
        )
        jobs = [toy_job("a", 4), toy_job("b", 1, submit_s=20.0), toy_job("c", 4, submit_s=130.0)]
        drive(policy, substrate, *jobs, nodes=gpu_nodes(2, 4))
        placed = [(t_s, nodes) for t_s, action, _, nodes in substrate.summary if action != "park"]
        assert placed[0] == (0.0, ("0",))
        assert all(nodes == ("1",) for t_s, nodes in placed if 10.0 < t_s < 120.0)
        assert any("0" in nodes for t_s, nodes in placed if t_s >= 120.0), "a node that came back is used"

    def test_a_job_that_may_not_be_preempted_can_stay_on_a_draining_node(self) -> None:
        job = replace(toy_job("a", 2), preemptible=False)
        substrate = Scripted([NodeDraining(t_s=10.0, node_id="0"), *ends(a=70.0)])
        drive(Tiresias(), substrate, job, nodes=gpu_nodes(2, 4))
        assert substrate.summary == [(0.0, "start", "a", ("0",))]


class TestContract:
    @pytest.mark.parametrize(
        ("decision", "words"),
        [
            (runs(a={"0": 2}, b={"0": 3}), "over-allocated"),
            (runs(a={"9": 2}), "not available"),
            (runs(a={"0": 1}), "it takes 2 to 2"),
            (replace(runs(a={"0": 2}), reasons={"b": says(ReasonCode.WAITS)}), "no reason"),
            (replace(runs(a={"0": 2}), batches={}), "batch size"),
            (replace(runs(a={"0": 2}, b={"0": 1}), wake_at_s=0.0), "future"),
        ],
    )
    def test_a_policy_that_breaks_it_is_told(self, decision: Decision, words: str) -> None:
        substrate, journal = Scripted(), MemoryJournal()
        jobs = toy_job("a", 2), toy_job("b", 1, most=4)
        if "b" not in decision.allocations:
            decision = replace(decision, reasons={**decision.reasons, "b": says(ReasonCode.WAITS)})
        with pytest.raises(PolicyError, match=words):
            drive(Watched(answer=lambda _: decision), substrate, *jobs, journal=journal)
        assert not substrate.told
        assert not any(isinstance(event, Decided) for event in journal.events())

    def test_the_reason_of_a_job_that_is_given_nothing_is_kept(self) -> None:
        journal = MemoryJournal()
        decision = Decision(allocations={"a": NOTHING}, reasons={"a": says(ReasonCode.WAITS)})
        drive(Watched(answer=lambda _: decision), Scripted(), toy_job("a"), how=Settings(), journal=journal)
        decided = next(event for event in journal.events() if isinstance(event, Decided))
        assert decided.reasons == decision.reasons


class DiskFullError(Exception):
    """The disk of the test is full."""


class FullJournal(MemoryJournal):
    """Takes so many events and no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def append(self, events: Sequence[Event]) -> None:
        if len(list(self.events())) + len(events) > self._room:
            raise DiskFullError
        super().append(events)


class Groups(MemoryJournal):
    """Remembers what was written together."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Sequence[Event]] = []

    def append(self, events: Sequence[Event]) -> None:
        super().append(events)
        if events:
            self.groups.append(events)


class TestJournal:
    def test_nothing_is_done_that_was_not_journaled(self) -> None:
        jobs = [toy_job("a", 4), toy_job("b", 4, submit_s=30.0), toy_job("c", 1, submit_s=30.0)]
        script = ends(a=50.0, b=100.0, c=110.0)
        whole = MemoryJournal()
        drive(Watched(), Scripted(script), *jobs, journal=whole)
        for room in range(len(list(whole.events()))):
            substrate, journal = Scripted(script), FullJournal(room)
            with pytest.raises(DiskFullError):
                drive(Watched(), substrate, *jobs, journal=journal)
            events = list(journal.events())
            assert events == list(whole.events())[: len(events)]
            assert substrate.admitted == [e.job.id for e in events if isinstance(e, JobSubmitted)]
            decided = [one for e in events if isinstance(e, Decided) for one in e.instructions]
            assert [one for _, one in substrate.told] == decided

    def test_what_was_decided_on_is_written_with_the_decision(self) -> None:
        journal = Groups()
        drive(Watched(), Scripted(ends(a=50.0, b=100.0)), toy_job("a", 4), toy_job("b", 4), journal=journal)
        decided_on = [group for group in journal.groups if isinstance(group[0], JobFinished)]
        assert [[event.kind for event in group] for group in decided_on] == [
            [JobFinished.kind, Decided.kind],
            [JobFinished.kind],
        ]

    def test_what_happened_is_written_though_the_policy_fails(self) -> None:
        journal = MemoryJournal()
        answers = iter([runs(a={"0": 2}, b={"0": 2}), runs(a={"0": 2})])
        policy = Watched(interval_s=1000.0, answer=lambda _: next(answers))
        with pytest.raises(PolicyError):
            drive(policy, Scripted(ends(a=50.0)), toy_job("a", 2), toy_job("b", 2), journal=journal)
        assert [event.kind for event in journal.events()][-1] == JobFinished.kind

    @pytest.mark.parametrize(("rounds", "until_s"), [(False, math.inf), (True, math.inf), (False, 120.0)])
    def test_a_run_cut_anywhere_is_the_same_run_when_resumed(self, rounds: bool, until_s: float) -> None:
        jobs = [toy_job(f"j{i}", 1 + i % 3, submit_s=17.3 * i) for i in range(6)]
        workload = toy_workload(*jobs, truth=ToyTruth(step_s=0.73))
        physics = Physics(report_s=60.0 if rounds else 30.0)
        how = Settings(rounds=rounds, until_s=until_s)

        def policy() -> Policy:
            return Tiresias(threshold_gpu_h=0.02)

        whole = MemoryJournal()
        drive(policy(), SimSubstrate(workload.truth_of, physics=physics), *jobs, how=how, journal=whole)
        events = list(whole.events())
        assert sum(isinstance(event, JobFinished) for event in events) == len(jobs) or until_s < math.inf
        for cut in range(len(events) + 1):
            journal = MemoryJournal()
            journal.append(events[:cut])
            drive(policy(), SimSubstrate(workload.truth_of, physics=physics), *jobs, how=how, journal=journal)
            assert list(journal.events()) == events, f"cut after {cut} events"

    def test_a_journal_of_another_simulation_is_refused(self) -> None:
        job = toy_job("a")
        journal = MemoryJournal()
        fast = SimSubstrate(toy_workload(job).truth_of, physics=Physics())
        drive(Watched(), fast, job, how=Settings(until_s=90.0), journal=journal)
        slow = SimSubstrate(toy_workload(job, truth=ToyTruth(step_s=2.0)).truth_of, physics=Physics())
        with pytest.raises(JournalError, match="only the simulation that wrote it"):
            drive(Watched(), slow, job, journal=journal)
        with pytest.raises(JournalError, match="not in the workload"):
            drive(Watched(), SimSubstrate(toy_workload().truth_of, physics=Physics()), job, journal=journal)

    def test_every_decision_gets_random_numbers_of_its_own(self) -> None:
        drawn: list[float] = []

        class Drawing(Watched):
            def decide(self, view, memory, rng):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                drawn.append(float(rng.random()))
                return super().decide(view, memory, rng)

        for seed in (0, 0, 1):
            drive(Drawing(), Scripted(ends(a=100.0)), toy_job("a"), how=Settings(seed=seed))
        assert drawn[:2] == drawn[2:4]
        assert drawn[0] != drawn[1]
        assert drawn[4] != drawn[0]


class TestLateNode:
    def test_a_stalled_run_waits_for_what_may_still_come(self) -> None:
        later = NodeAdded(t_s=5000.0, node=Node("late", Resources(gpu=16)))
        substrate = Scripted([later, *ends(big=6000.0)])
        controller = drive(Watched(), substrate, toy_job("big", 9), how=Settings())
        assert not controller.state.jobs
        assert [(t_s, job) for t_s, _, job, _ in substrate.summary] == [(5000.0, "big")]


class TestIdentity:
    @pytest.mark.parametrize(
        ("policy", "how", "nodes", "said"),
        [
            (Tiresias(threshold_gpu_h=1.0), Settings(), gpu_nodes(1, 4), "threshold_gpu_h"),
            (Tiresias(interval_s=90.0), Settings(), gpu_nodes(1, 4), "interval_s"),
            (Tiresias(), Settings(seed=1), gpu_nodes(1, 4), "seed"),
            (Tiresias(), Settings(share_priors=True), gpu_nodes(1, 4), "priors"),
            (Tiresias(), Settings(), gpu_nodes(2, 4), "nodes"),
        ],
    )
    def test_another_run_is_not_continued(
        self, policy: Policy, how: Settings, nodes: Sequence[Node], said: str
    ) -> None:
        journal = MemoryJournal()
        drive(Tiresias(), Scripted(ends(a=30.0)), toy_job("a"), how=Settings(), journal=journal)
        with pytest.raises(JournalError, match=said):
            drive(policy, Scripted(), toy_job("a"), how=how, nodes=nodes, journal=journal)


def test_where_a_batch_does_not_change_in_place_another_one_is_a_resize() -> None:
    view = make_cluster([make_node("0", gpu=4)], [make_view(toy_job("a"), on_nodes({"0": 1}))])
    decision = Decision(allocations={"a": on_nodes({"0": 1})}, batches={"a": BatchChoice(7)})
    actions = [
        [one.action for one in instructions_for(view, decision, 1, batch_in_place=in_place)]
        for in_place in (True, False)
    ]
    assert actions == [[Action.SET_BATCH], [Action.RESIZE]]


class Flood(Scripted):
    """Job `a` reports without end, from its start on; every report takes a tenth of a millisecond."""

    reports = 0

    def next_event(self, until_s: float) -> Event | None:
        if not self.told or self._now_s > until_s:
            return super().next_event(until_s)
        self._now_s += 1e-4
        self.reports += 1
        return JobReported(t_s=self._now_s - 1e-4, job_id="a", work_done=float(self.reports), epoch=0)


class TestFlood:
    REAL = Settings(until_s=3.0, beat_s=0.2)

    def test_a_flood_of_reports_is_written_in_few_goes_and_ends_on_time(self) -> None:
        substrate, journal = Flood(), Groups()
        drive(Watched(), substrate, toy_job("a", 1), journal=journal, how=self.REAL)
        assert substrate.now_s() == pytest.approx(3.0, abs=0.3)
        assert substrate.reports > 20_000
        assert len(journal.groups) < 200
        assert max(len(group) for group in journal.groups) <= 1001

    def test_a_request_to_stop_is_seen_between_two_reports(self) -> None:
        substrate = Flood()
        controller = Controller(
            policy=Watched(),
            substrate=substrate,
            journal=MemoryJournal(),
            nodes=gpu_nodes(1, 4),
            arrivals=Arrivals([toy_job("a", 1)]),
            settings=self.REAL,
            stop=lambda: substrate.reports >= 50,
        )
        controller.run()
        assert substrate.reports == 50
