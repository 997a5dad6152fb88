"""The state of a run is a fold over its journal, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import pytest

from builders import make_node
from stretto.control.controller import Controller, Settings
from stretto.control.state import RunState
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Wish, gpu_nodes
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobRetried,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    NodeLost,
    NodeRefused,
    NodeReleased,
    RunResumed,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.observations import LossPoint, NoiseSample, Result, SpeedSample
from stretto.core.source import Arrivals
from stretto.journal.base import MemoryJournal
from stretto.models.belief import StatedBelief
from stretto.models.resize import DEFAULT_RESIZE_S, ResizeCost
from stretto.policies.base import JobView
from stretto.policies.tiresias import Tiresias
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from toy_world import ToyTruth, Watched, toy_job, toy_workload

HERE = on_nodes({"0": 2})
BATCH = BatchChoice(64)
NO_BELIEF = StatedBelief(resize=ResizeCost(0.0, 0.0, 0))


def submitted(job_id: str, *, workers: int = 2, t_s: float = 0.0, application: str = "app") -> JobSubmitted:
    return JobSubmitted(
        t_s=t_s, job=replace(toy_job(job_id, workers, submit_s=t_s, most=8), application=application)
    )


def decided(t_s: float, *told: tuple[Action, str, Allocation], first: int = 1) -> Decided:
    return Decided(
        t_s=t_s,
        policy="test",
        instructions=tuple(
            Instruction(first + i, action, job_id, allocation, BATCH)
            for i, (action, job_id, allocation) in enumerate(told)
        ),
        reasons={},
        memory={"asked": t_s},
    )


def fold(events: Iterable[Event], *, share_priors: bool = False) -> RunState:
    state = RunState(share_priors=share_priors)
    for event in events:
        state.apply(event)
    return state


def job_at(state: RunState, now_s: float, job_id: str = "a") -> JobView:
    return next(job for job in state.view(now_s).jobs if job.id == job_id)


def facts(state: RunState, now_s: float) -> object:
    """Everything a policy could see, with beliefs as what they are based on."""
    view = state.view(now_s)
    seen = [
        (replace(job, belief=NO_BELIEF), deepcopy(state.jobs[job.id].observed), job.belief.resize)
        for job in view.jobs
    ]
    return (view.nodes, seen, state.memory, state.wake_at_s, state.decisions, state.instructions)


class TestReplay:
    def test_the_fold_of_every_prefix_is_the_state_at_that_time(self) -> None:
        """Each time the live loop asks its policy, a fold of the journal so far sees the same."""
        jobs = [toy_job(f"j{i}", 1 + i % 4, submit_s=23.1 * i) for i in range(8)]
        truths = toy_workload(*jobs, truth=ToyTruth(step_s=0.6, noise=NoiseSample(1.0, 3.0))).truths
        journal = MemoryJournal()
        seen: list[tuple[int, float, object]] = []

        def look(controller: Controller) -> None:
            now_s = substrate.now_s()
            seen.append((len(list(journal.events())), now_s, facts(controller.state, now_s)))

        substrate = SimSubstrate(lambda job: truths[job.id], physics=Physics(noise=0.1))
        Controller(
            policy=Watched(inner=Tiresias(threshold_gpu_h=0.02)),
            substrate=substrate,
            journal=journal,
            nodes=gpu_nodes(1, 4),
            arrivals=Arrivals(jobs),
            settings=Settings(share_priors=True),
            on_turn=look,
        ).run()
        events = list(journal.events())
        assert len(seen) > 20
        for length, now_s, live in seen:
            assert facts(fold(events[:length], share_priors=True), now_s) == live


class TestService:
    def test_attained_service_by_hand(self) -> None:
        events: list[Event] = [submitted("a"), decided(10.0, (Action.START, "a", HERE))]
        assert job_at(fold(events), 15.0).attained_gpu_s == 2 * 5.0
        events.append(decided(20.0, (Action.RESIZE, "a", on_nodes({"0": 2, "1": 3})), first=2))
        assert job_at(fold(events), 24.0).attained_gpu_s == 2 * 10.0 + 5 * 4.0
        events.append(decided(30.0, (Action.PARK, "a", NOTHING), first=3))
        state = fold(events)
        assert job_at(state, 99.0).attained_gpu_s == 2 * 10.0 + 5 * 10.0
        assert job_at(state, 99.0).age_s == 99.0
        assert state.instructions == 3
        assert state.memory == {"asked": 30.0}

    def test_the_age_of_an_epoch_counts_from_when_the_job_trains(self) -> None:
        started = JobReported(t_s=17.0, job_id="a", work_done=0.1, epoch=0, resize_s=4.0)
        result = JobReported(
            t_s=30.0, job_id="a", work_done=1.0, epoch=1, results=(Result(1, 0.5, 16.0, 2, 1),)
        )
        events: list[Event] = [submitted("a"), decided(10.0, (Action.START, "a", HERE))]
        assert (job_at(fold(events), 15.0).start_age_s, job_at(fold(events), 15.0).epoch_age_s) == (5.0, None)
        assert job_at(fold([*events, started]), 18.0).epoch_age_s == 4.0
        assert job_at(fold([*events, started, result]), 33.0).epoch_age_s == 3.0

    @pytest.mark.parametrize(
        "again",
        [
            RunResumed(t_s=3711.0, down_s=3600.0),
            JobRetried(t_s=3711.0, job_id="a", attempt=1, error="lost"),
            decided(3711.0, (Action.RESIZE, "a", on_nodes({"0": 1})), first=2),
        ],
        ids=lambda event: str(event.kind),
    )
    def test_what_was_done_of_an_epoch_is_void_when_a_job_begins_anew(self, again: Event) -> None:
        events: list[Event] = [submitted("a"), decided(10.0, (Action.START, "a", HERE))]
        events.append(JobReported(t_s=17.0, job_id="a", work_done=0.1, epoch=0, resize_s=4.0))
        job = job_at(fold([*events, again]), 3715.0)
        assert (job.start_age_s, job.epoch_age_s) == (4.0, None)
        started = JobReported(t_s=3722.0, job_id="a", work_done=0.1, epoch=0, resize_s=10.0)
        assert job_at(fold([*events, again, started]), 3722.0).epoch_age_s == 1.0

    def test_restarts_exclude_the_first_start_and_batch_changes(self) -> None:
        told = [
            (Action.START, "a", HERE),
            (Action.SET_BATCH, "a", HERE),
            (Action.RESIZE, "a", on_nodes({"0": 1})),
            (Action.PARK, "a", NOTHING),
            (Action.START, "a", HERE),
        ]
        restarts = []
        events: list[Event] = [submitted("a")]
        for i, one in enumerate(told):
            events.append(decided(float(i), one, first=1 + i))
            restarts.append(job_at(fold(events), 9.0).restarts)
        assert restarts == [0, 0, 1, 1, 2]

    @pytest.mark.parametrize(
        "loss", [WorkerLost(t_s=10.0, job_id="a", node="0"), NodeLost(t_s=10.0, node_id="0")]
    )
    def test_what_was_lost_is_no_longer_held(self, loss: Event) -> None:
        job = job_at(fold([submitted("a"), decided(0.0, (Action.START, "a", HERE)), loss]), 50.0)
        assert job.allocation == NOTHING
        assert job.batch is None
        assert job.attained_gpu_s == 20.0

    def test_a_lost_node_takes_only_its_own_jobs(self) -> None:
        there = on_nodes({"1": 2})
        start = decided(0.0, (Action.START, "a", HERE), (Action.START, "b", there))
        state = fold([submitted("a"), submitted("b"), start, NodeLost(t_s=5.0, node_id="0")])
        assert [job.allocation for job in state.view(9.0).jobs] == [NOTHING, there]


class TestNodes:
    def test_the_view_shows_where_something_may_be_placed(self) -> None:
        added = [NodeAdded(t_s=0.0, node=node) for node in gpu_nodes(3, 4)]
        events: list[Event] = [*added, NodeDraining(t_s=1.0, node_id="1"), NodeLost(t_s=2.0, node_id="2")]
        assert [node.id for node in fold(events).view(3.0).nodes] == ["0"]
        back = NodeAdded(t_s=4.0, node=make_node("1", gpu=8))
        assert [node.gpus for node in fold([*events, back]).view(5.0).nodes] == [4, 8]
        lost_and_back: list[Event] = [NodeLost(t_s=3.0, node_id="1"), back]
        assert [node.id for node in fold([*events, *lost_and_back]).view(5.0).nodes] == ["0", "1"]

    def test_what_was_refused_lost_or_drains_is_not_expected_any_more(self) -> None:
        rented = [replace(make_node(name, gpu=4), instance="four") for name in ("a", "b", "c")]
        wished = replace(decided(0.0), wish=Wish((("four", 5), ("own", 1))))
        refused = NodeRefused(t_s=2.0, instance="four", count=2, why="full")
        came = [NodeAdded(t_s=1.0, node=node, queue_s=1.0) for node in rented]
        state = fold([wished, *came, refused])
        assert state.wish == Wish((("four", 3), ("own", 1)))
        assert (state.view(3.0).refused, state.view(3.0).arrivals) == ((refused,), tuple(came))
        for event, left in (
            (NodeDraining(t_s=3.0, node_id="a"), 2),
            (NodeLost(t_s=4.0, node_id="a"), 2),
            (NodeLost(t_s=5.0, node_id="b"), 1),
        ):
            state.apply(event)
            assert state.wish == Wish((("four", left), ("own", 1)))
        state.apply(replace(decided(6.0), wish=Wish((("four", 0),), ("c",))))
        state.apply(NodeReleased(t_s=7.0, node_id="c"))
        assert state.wish == Wish((("four", 0),))


class TestJobs:
    def test_reports_add_up(self) -> None:
        speed = SpeedSample(nodes=1, workers=2, servers=0, atomic=64, step_s=0.4, sync_s=0.1)
        reports = [
            JobReported(t_s=1.0, job_id="a", work_done=5.0, epoch=0, speeds=(speed,), resize_s=20.0),
            JobReported(
                t_s=2.0,
                job_id="a",
                work_done=9.0,
                epoch=1,
                speeds=(replace(speed, step_s=0.6),),
                noise=NoiseSample(1.0, 2.0),
                losses=(LossPoint(1, 0.5),),
            ),
        ]
        state = fold([submitted("a"), *reports, CheckpointSaved(t_s=3.0, job_id="a", work_done=9.0)])
        job, observed = job_at(state, 3.0), state.jobs["a"].observed
        assert (job.work_done, job.epoch, job.belief.noise) == (9.0, 1, NoiseSample(1.0, 2.0))
        assert [sample.step_s for sample in observed.speeds.values()] == [0.5]
        assert observed.losses == [LossPoint(1, 0.5)]
        assert (observed.resizes.count, observed.resizes.sum_s) == (1, 20.0)

    @pytest.mark.parametrize(
        "end", [JobFinished(t_s=5.0, job_id="a"), JobFailed(t_s=5.0, job_id="a", error="no")]
    )
    def test_a_job_that_ended_is_gone(self, end: Event) -> None:
        state = fold([submitted("a"), submitted("b"), end])
        assert list(state.jobs) == ["b"]


class TestPriors:
    SPEED = SpeedSample(nodes=1, workers=4, servers=0, atomic=64, step_s=0.4, sync_s=0.1)

    def finished(self, job_id: str, noise: NoiseSample | None) -> list[Event]:
        return [
            submitted(job_id),
            JobReported(
                t_s=1.0,
                job_id=job_id,
                work_done=1.0,
                epoch=0,
                speeds=(self.SPEED,),
                noise=noise,
                resize_s=60.0,
            ),
            JobFinished(t_s=2.0, job_id=job_id),
        ]

    def test_new_jobs_of_the_application_start_from_them(self) -> None:
        noise = NoiseSample(1.0, 8.0)
        events = [*self.finished("a", noise), submitted("b", t_s=3.0), submitted("c", application="other")]
        state = fold(events, share_priors=True)
        told = job_at(state, 3.0, "b").belief
        assert (told.max_workers_seen, told.noise, told.resize.samples) == (4, noise, 1)
        assert told.speed is not None
        assert job_at(state, 3.0, "c").belief.speed is None
        alone = job_at(fold(events), 3.0, "b").belief
        assert (alone.speed, alone.max_workers_seen, alone.resize.samples) == (None, 0, 0)

    def test_before_a_start_was_seen_it_takes_what_the_run_was_told(self) -> None:
        state = RunState(resize_s=5.0)
        state.apply(submitted("a"))
        assert job_at(state, 0.0).belief.resize.expected_s == 5.0
        assert job_at(fold([submitted("a")]), 0.0).belief.resize.expected_s == DEFAULT_RESIZE_S

    def test_a_job_without_gradient_statistics_does_not_erase_them(self) -> None:
        noise = NoiseSample(1.0, 8.0)
        events = [*self.finished("a", noise), *self.finished("b", None), submitted("c")]
        assert job_at(fold(events, share_priors=True), 3.0, "c").belief.noise == noise

    def test_a_failed_job_teaches_nothing(self) -> None:
        events = [*self.finished("a", None)[:-1], JobFailed(t_s=2.0, job_id="a", error="no"), submitted("b")]
        assert job_at(fold(events, share_priors=True), 3.0, "b").belief.speed is None
