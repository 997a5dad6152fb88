"""What became of the jobs of a run, and the numbers it is judged by, all by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from builders import make_job, make_node
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.events import (
    CheckpointSaved,
    Decided,
    Event,
    JobFailed,
    JobFinished,
    JobReported,
    JobSubmitted,
    NodeAdded,
    NodeLost,
    NodeReleased,
    WorkerLost,
)
from stretto.core.instructions import Action, Instruction
from stretto.core.job import Job
from stretto.core.observations import LossPoint
from stretto.core.resources import Resources
from stretto.journal.folds.history import ProgressPoint, history_of
from stretto.simulation.jobs import Metrics, Setup, measure, simulate
from stretto.worlds.ftf import Clock
from stretto.worlds.truth import Truth
from toy_world import ToyTruth, toy_job, toy_workload

ONE, TWO = on_nodes({"0": 1}), on_nodes({"0": 2})
BATCH, OTHER = BatchChoice(64), BatchChoice(128)


def submit(job: Job) -> JobSubmitted:
    return JobSubmitted(t_s=job.submit_s, job=job)


def told(
    t_s: float, action: Action, job_id: str, allocation: Allocation = NOTHING, batch: BatchChoice = BATCH
) -> Decided:
    instruction = Instruction(1, action, job_id, allocation, batch)
    return Decided(t_s=t_s, policy="test", instructions=(instruction,), reasons={}, memory=None)


def ready(t_s: float, job_id: str, resize_s: float | None, work_done: float = 1.0) -> JobReported:
    return JobReported(t_s=t_s, job_id=job_id, work_done=work_done, epoch=0, resize_s=resize_s)


def done(t_s: float, job_id: str) -> JobFinished:
    return JobFinished(t_s=t_s, job_id=job_id)


class TestHistory:
    def test_holds_from_start_to_end(self) -> None:
        events: list[Event] = [
            submit(toy_job("a", most=4, submit_s=5.0)),
            told(10.0, Action.START, "a", ONE),
            ready(60.0, "a", 30.0),
            told(70.0, Action.RESIZE, "a", TWO),
            ready(120.0, "a", 25.0),
            told(130.0, Action.PARK, "a"),
            told(200.0, Action.START, "a", ONE),
            ready(240.0, "a", 30.0),
            done(250.0, "a"),
        ]
        job = history_of(events).jobs["a"]
        assert [(hold.start_s, hold.end_s, hold.allocation, hold.resizing_s) for hold in job.holds] == [
            (10.0, 70.0, ONE, 30.0),
            (70.0, 130.0, TWO, 25.0),
            (200.0, 250.0, ONE, 30.0),
        ]
        assert (job.jct_s, job.restarts, job.end_s) == (245.0, 2, 250.0)
        assert job.gpu_s == 60.0 + 120.0 + 50.0
        assert job.resizing_gpu_s == 30.0 + 50.0 + 30.0

    def test_a_start_is_counted_once_although_the_batch_changes_before_its_report(self) -> None:
        events: list[Event] = [
            submit(toy_job("a")),
            told(0.0, Action.START, "a", ONE),
            told(20.0, Action.SET_BATCH, "a", ONE, OTHER),
            told(45.0, Action.SET_BATCH, "a", ONE, BATCH),
            ready(60.0, "a", 30.0),
            told(90.0, Action.SET_BATCH, "a", ONE, OTHER),
            done(100.0, "a"),
        ]
        job = history_of(events).jobs["a"]
        assert [(hold.batch, hold.resizing_s) for hold in job.holds] == [
            (BATCH, 20.0),
            (OTHER, 10.0),
            (BATCH, 0.0),
            (OTHER, 0.0),
        ]
        assert job.restarts == 0

    def test_a_batch_change_that_restarts_counts_its_own_time(self) -> None:
        events: list[Event] = [
            submit(toy_job("a")),
            told(0.0, Action.START, "a", ONE),
            ready(30.0, "a", 20.0),
            told(50.0, Action.SET_BATCH, "a", ONE, OTHER),
            ready(70.0, "a", 12.0),
            done(100.0, "a"),
        ]
        assert [hold.resizing_s for hold in history_of(events).jobs["a"].holds] == [20.0, 12.0]

    def test_a_start_that_never_reported_is_all_start(self) -> None:
        cut: list[Event] = [
            submit(toy_job("a")),
            told(0.0, Action.START, "a", ONE),
            told(20.0, Action.PARK, "a"),
        ]
        assert history_of(cut).jobs["a"].resizing_gpu_s == 20.0
        assert history_of([*cut, ready(20.0, "a", 15.0)]).jobs["a"].resizing_gpu_s == 15.0

    @pytest.mark.parametrize(
        "loss",
        [
            WorkerLost(t_s=40.0, job_id="a", node="0"),
            NodeLost(t_s=40.0, node_id="0"),
            NodeReleased(t_s=40.0, node_id="0"),
        ],
    )
    def test_what_is_lost_is_held_no_longer(self, loss: Event) -> None:
        events: list[Event] = [
            NodeAdded(t_s=0.0, node=make_node("0", gpu=4)),
            submit(toy_job("a")),
            submit(toy_job("b")),
            told(0.0, Action.START, "a", ONE),
            told(0.0, Action.START, "b", on_nodes({"1": 1})),
            CheckpointSaved(t_s=10.0, job_id="a", work_done=1.0),
            loss,
            done(100.0, "b"),
        ]
        history = history_of(events)
        assert {job_id: job.gpu_s for job_id, job in history.jobs.items()} == {"a": 40.0, "b": 100.0}
        assert history.end_s == 100.0

    def test_unfinished_and_failed_jobs(self) -> None:
        events: list[Event] = [
            submit(toy_job("failed")),
            submit(toy_job("runs")),
            submit(toy_job("waits")),
            told(0.0, Action.START, "failed", ONE),
            told(0.0, Action.START, "runs", ONE),
            JobFailed(t_s=50.0, job_id="failed", error="no"),
            told(80.0, Action.SET_BATCH, "runs", ONE, OTHER),
        ]
        jobs = history_of(events).jobs
        assert [(job.jct_s, job.end_s, job.gpu_s) for job in jobs.values()] == [
            (None, 50.0, 50.0),
            (None, None, 80.0),
            (None, None, 0.0),
        ]

    def test_reports_are_kept(self) -> None:
        report = JobReported(t_s=9.0, job_id="a", work_done=7.0, epoch=1, losses=(LossPoint(1, None),))
        job = history_of([submit(toy_job("a")), report]).jobs["a"]
        assert job.progress == [ProgressPoint(9.0, 7.0, None)]
        assert job.losses == [LossPoint(1, None)]


def metrics(
    events: Sequence[Event],
    nodes: Sequence[Node],
    truths: dict[str, Truth],
    decision_s: Sequence[float] = (),
) -> Metrics:
    return measure(
        history_of(events),
        nodes,
        truths,
        policy="test",
        workload="toy",
        clock=Clock(30.0, None),
        decision_s=decision_s,
        wall_s=1.0,
    )


class TestMetrics:
    def test_by_hand(self) -> None:
        """Two jobs on one node of four GPUs, from 100 s to 500 s."""
        events: list[Event] = [
            submit(toy_job("a", 2, submit_s=100.0)),
            told(100.0, Action.START, "a", TWO),
            ready(160.0, "a", 30.0),
            submit(toy_job("b", 1, submit_s=200.0)),
            told(200.0, Action.START, "b", ONE),
            ready(240.0, "b", 30.0),
            done(300.0, "a"),
            told(300.0, Action.RESIZE, "b", TWO),
            ready(360.0, "b", 50.0),
            done(500.0, "b"),
        ]
        numbers = metrics(
            events, gpu_nodes(1, 4), {"a": ToyTruth(split=True), "b": ToyTruth()}, [0.001, 0.003]
        )
        held_gpu_s = 2 * 200 + 100 + 2 * 200
        assert (numbers.jobs, numbers.completed, numbers.decisions) == (2, 2, 3)
        assert (numbers.mean_jct_s, numbers.median_jct_s) == (250.0, 250.0)
        assert numbers.p90_jct_s == pytest.approx(200 + 0.9 * 100)
        assert numbers.p99_jct_s == pytest.approx(200 + 0.99 * 100)
        assert numbers.makespan_s == 400.0
        assert numbers.gpu_hours == pytest.approx(held_gpu_s / 3600)
        assert numbers.gpu_utilisation == pytest.approx(held_gpu_s / (4 * 400))
        assert numbers.cpu_utilisation is None
        assert numbers.resize_share == pytest.approx((2 * 30 + 30 + 2 * 50) / held_gpu_s)
        assert numbers.restarts_per_job == 0.5
        assert numbers.decision_ms_mean == pytest.approx(2.0)
        # alone, a takes 30 + 100 s with its two workers, and b 30 + 200 s with its one
        assert numbers.worst_ftf == pytest.approx(max(200 / 130, 300 / 230))

    def test_the_fair_share_of_an_elastic_job(self) -> None:
        """A lives 200 s, b all of them, c half: 2.5 active on average, so ceil(8 / 2.5) = 4 GPUs are fair."""
        events: list[Event] = [
            submit(toy_job("a", most=8)),
            submit(toy_job("b", submit_s=0.0)),
            submit(toy_job("c", submit_s=100.0)),
            done(200.0, "a"),
        ]
        truth: Truth = ToyTruth(split=True)
        numbers = metrics(events, gpu_nodes(2, 4), dict.fromkeys("abc", truth))
        assert numbers.worst_ftf == pytest.approx(200 / (30 + 200 / 4))

    def test_a_failed_job_is_not_active_any_more(self) -> None:
        """Active while a lives: a itself, and b for 10 of 200 s: ceil(8 / 1.05) = 8 GPUs are fair."""
        events: list[Event] = [
            submit(toy_job("a", most=8)),
            submit(toy_job("b")),
            JobFailed(t_s=10.0, job_id="b", error="no"),
            done(200.0, "a"),
        ]
        truth: Truth = ToyTruth(split=True)
        numbers = metrics(events, gpu_nodes(2, 4), dict.fromkeys("ab", truth))
        assert numbers.worst_ftf == pytest.approx(200 / (30 + 200 / 8))
        assert (numbers.jobs, numbers.completed, numbers.makespan_s) == (2, 1, None)

    def test_percentiles_are_linear(self) -> None:
        jobs = [toy_job(f"j{i:02}") for i in range(11)]
        events: list[Event] = [
            *map(submit, jobs),
            *(done(10.0 * (i + 1), job.id) for i, job in enumerate(jobs)),
        ]
        truth: Truth = ToyTruth()
        numbers = metrics(events, gpu_nodes(1, 4), {job.id: truth for job in jobs})
        assert (numbers.median_jct_s, numbers.p90_jct_s) == (60.0, 100.0)
        assert numbers.p99_jct_s == pytest.approx(np.interp(9.9, range(11), 10.0 * np.arange(1, 12)))

    def test_cpus_are_counted_where_the_cluster_lists_them(self) -> None:
        job = make_job("a", 2, demand=Resources(gpu=1, cpu=3))
        events: list[Event] = [submit(job), told(0.0, Action.START, "a", TWO), done(50.0, "a")]
        numbers = metrics(events, [make_node("0", gpu=4, cpu=12)], {"a": ToyTruth()})
        assert numbers.cpu_utilisation == pytest.approx(6 / 12)

    def test_nothing_at_all(self) -> None:
        numbers = metrics([], gpu_nodes(1, 4), {})
        assert (numbers.jobs, numbers.restarts_per_job, numbers.gpu_hours) == (0, 0.0, 0.0)
        assert (
            numbers.mean_jct_s is numbers.makespan_s is numbers.gpu_utilisation is numbers.worst_ftf is None
        )

    def test_unfinished_jobs_are_counted_even_if_they_never_came(self) -> None:
        workload = toy_workload(toy_job("a"), toy_job("big", 9), toy_job("late", submit_s=1000.0))
        run = simulate(workload, "fifo", Setup(nodes=gpu_nodes(1, 4), until_s=500.0))
        assert (run.metrics.jobs, run.metrics.completed) == (3, 1)
        assert run.metrics.makespan_s is None
        assert run.metrics.mean_jct_s == 230.0

    def test_a_run_without_the_late_one_is_not_complete_either(self) -> None:
        workload = toy_workload(toy_job("a"), toy_job("late", submit_s=1000.0))
        numbers = simulate(workload, "fifo", Setup(nodes=gpu_nodes(1, 4), until_s=500.0)).metrics
        assert (numbers.jobs, numbers.completed, numbers.makespan_s) == (2, 1, None)
