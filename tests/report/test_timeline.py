"""Runs over time, and where jobs are drawn, on histories small enough to work out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import make_job, make_node
from stretto.core.allocation import Allocation, BatchChoice, on_nodes
from stretto.core.job import BatchLimits, Work
from stretto.core.observations import NoiseSample
from stretto.journal.folds.history import History, Hold, JobHistory, ProgressPoint
from stretto.report.figures.gantt import Stay, rows_of, stays_of
from stretto.report.figures.jobs import Span, cell_means, sample, time_grid

NOISE = NoiseSample(sqr=1.0, var=1.0)
"""At twice the initial batch a step is worth 4/3 steps, so that efficiency is 2/3."""
LIMITS = BatchLimits(initial=100, requested=100, max=400, per_gpu_min=1, per_gpu_max=400)


def hold(
    start_s: float, end_s: float, allocation: Allocation, atomic: int = 100, ready_s: float = 0.0
) -> Hold:
    return Hold(start_s, end_s, allocation, BatchChoice(atomic), ready_s)


def one_job() -> JobHistory:
    """Waits 100 s; 1 GPU at batch 100 for 100 s, parked for 100 s, then 2 GPUs at batch 200 for 200 s."""
    return JobHistory(
        make_job("a", batch=LIMITS, most=4),
        holds=[hold(100, 200, on_nodes({"0": 1})), hold(300, 500, on_nodes({"0": 2}), ready_s=350)],
        progress=[ProgressPoint(200, 40.0, NOISE), ProgressPoint(500, 100.0, NOISE)],
        finished_s=500,
    )


def history(*jobs: JobHistory, end_s: float = 500) -> History:
    return History({job.job.id: job for job in jobs}, [], end_s)


def test_numbers_of_one_job() -> None:
    line = sample(history(one_job()), [make_node("0", gpu=4)], time_grid(500, 10))
    assert line.waiting == pytest.approx([1, 1, 0, 0, 1, 1, 0, 0, 0, 0])
    assert line.gpus_held == pytest.approx([0, 0, 1, 1, 0, 0, 2, 2, 2, 2])
    assert line.utilisation == pytest.approx(line.gpus_held / 4)
    # 40 % of the job in 100 s, then 60 % in the 150 s after the start was over.
    goodput = np.array([0, 0, 0.004, 0.004, 0, 0, 0, 0.004, 0.004, 0.004]) * 3600
    assert line.goodput == pytest.approx(goodput)
    assert line.throughput == pytest.approx(goodput * [1, 1, 1, 1, 1, 1, 1, 1.5, 1.5, 1.5])
    assert line.efficiency[[2, 3, 7, 8, 9]] == pytest.approx([1, 1, 2 / 3, 2 / 3, 2 / 3])
    assert np.isnan(line.efficiency[[0, 1, 4, 5, 6]]).all()
    assert line.batch_scale[[2, 3, 6, 9]] == pytest.approx([1, 1, 2, 2])


def test_goodput_adds_up_to_the_jobs_done() -> None:
    edges_s = time_grid(500, 7)
    line = sample(history(one_job()), [make_node("0", gpu=4)], edges_s)
    assert (line.goodput * np.diff(edges_s)).sum() / 3600 == pytest.approx(1.0)


def test_a_job_that_says_nothing_of_gradients_has_no_efficiency() -> None:
    job = one_job()
    job.progress = [ProgressPoint(200, 40.0, None), ProgressPoint(500, 100.0, NoiseSample(math.nan, 1.0))]
    line = sample(history(job), [make_node("0", gpu=4)], time_grid(500, 5))
    assert np.isnan(line.efficiency).all()
    assert line.throughput == pytest.approx(line.goodput)


def test_unfinished_jobs_count_by_the_work_they_asked_for_or_are_named() -> None:
    asked, open_ended = one_job(), one_job()
    asked.finished_s = open_ended.finished_s = None
    asked.job = make_job("asked", batch=LIMITS, work=Work(units_per_epoch=100, epochs=2))
    open_ended.job = make_job("open", batch=LIMITS, work=Work(units_per_epoch=100))
    edges_s = time_grid(500, 5)
    line = sample(history(asked, open_ended), [make_node("0", gpu=8)], edges_s)
    assert line.uncounted == ("open",)
    assert (line.goodput * np.diff(edges_s)).sum() / 3600 == pytest.approx(0.5)


def test_a_cluster_without_gpus_has_no_utilisation() -> None:
    line = sample(history(one_job()), [make_node("0", cpu=4)], time_grid(500, 5))
    assert np.isnan(line.utilisation).all()


@given(
    spans=st.lists(
        st.builds(
            lambda start, length, value: Span(start, start + length, value),
            st.floats(0, 900),
            st.floats(0.01, 100),
            st.floats(-5, 5),
        ),
        max_size=12,
    ),
    cells=st.integers(1, 50),
)
def test_means_keep_the_area(spans: list[Span], cells: int) -> None:
    edges_s = time_grid(1000, cells)
    area = sum((span.end_s - span.start_s) * span.value for span in spans)
    assert (cell_means(spans, edges_s) * np.diff(edges_s)).sum() == pytest.approx(area, abs=1e-6)


def stays(*jobs: JobHistory, gpus: int = 4, nodes: int = 1) -> list[Stay]:
    past = history(*jobs)
    return stays_of(past, rows_of([make_node(str(i), gpu=gpus) for i in range(nodes)], past))


def job_of(job_id: str, *holds: Hold) -> JobHistory:
    return JobHistory(make_job(job_id, most=8), holds=list(holds))


def places(found: list[Stay], job_id: str) -> list[tuple[float, float, int, int]]:
    return [(one.start_s, one.end_s, one.first_row, one.rows) for one in found if one.job.id == job_id]


def test_a_job_keeps_its_slots_while_it_holds_them() -> None:
    first = job_of("a", hold(0, 100, on_nodes({"0": 1})))
    second = job_of("b", hold(0, 100, on_nodes({"0": 2})), hold(100, 200, on_nodes({"0": 1})))
    third = job_of("c", hold(100, 200, on_nodes({"0": 3})))
    found = stays(first, second, third)
    assert places(found, "b") == [(0, 100, 1, 2), (100, 200, 1, 1)]
    assert places(found, "c") == [(100, 200, 0, 1), (100, 200, 2, 2)]


def test_a_new_batch_size_is_no_new_stay() -> None:
    job = job_of("a", hold(0, 50, on_nodes({"0": 2}), 100), hold(50, 90, on_nodes({"0": 2}), 200))
    (stay,) = stays(job)
    assert (stay.start_s, stay.end_s, stay.gpus, stay.batches) == (0, 90, 2, (200, 400))


def test_whole_nodes_side_by_side_are_one_rectangle() -> None:
    job = job_of("a", hold(0, 50, on_nodes({"0": 4, "1": 4})))
    assert places(stays(job, nodes=2), "a") == [(0, 50, 0, 8)]


def test_nodes_that_came_later_have_rows_too() -> None:
    job = job_of("a", hold(0, 50, on_nodes({"9": 2})))
    past = history(job)
    rows = rows_of([make_node("0", gpu=1)], past)
    assert (rows.nodes, rows.first, rows.count) == (("0", "9"), (0, 1), 3)
    assert places(stays_of(past, rows), "a") == [(0, 50, 1, 2)]


@given(st.data())
def test_no_two_jobs_are_drawn_on_one_another(data: st.DataObject) -> None:
    gpus, jobs = 8, [f"j{i}" for i in range(4)]
    holds: dict[str, list[Hold]] = {job_id: [] for job_id in jobs}
    for step in range(data.draw(st.integers(1, 8))):
        free = gpus
        for job_id in jobs:
            count = data.draw(st.integers(0, free))
            free -= count
            if count:
                holds[job_id].append(hold(10.0 * step, 10.0 * step + 10, on_nodes({"0": count})))
    found = stays(*(job_of(job_id, *ones) for job_id, ones in holds.items()), gpus=gpus)
    taken = [
        (row, tick)
        for stay in found
        for row in range(stay.first_row, stay.first_row + stay.rows)
        for tick in range(round(stay.start_s / 10), round(stay.end_s / 10))
    ]
    assert len(set(taken)) == len(taken)
    assert all(0 <= row < gpus for row, _ in taken)
    held = sum(one.allocation.worker_count for ones in holds.values() for one in ones)
    assert len(taken) == held
