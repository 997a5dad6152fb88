"""Shortest remaining time first: the order by hand, and who gives way to whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from builders import BATCH, RESIZE, believing, make_cluster, make_job, make_node, make_view, steady_speed
from stretto.core.allocation import NOTHING, on_nodes
from stretto.core.cluster import gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.job import Convergence, Role, Work
from stretto.core.observations import NoiseSample
from stretto.core.resources import Resources
from stretto.models.belief import StatedBelief
from stretto.models.convergence import ConvergenceFit
from stretto.models.parameter_server import ServerSpeed, ServerSpeedFit
from stretto.policies.base import ClusterView, JobView
from stretto.policies.common import remaining_s
from stretto.policies.gangs import EmptyCluster
from stretto.policies.srtf import Srtf

EMPTY = EmptyCluster(gpu_nodes(2, 4))
SECOND_A_STEP = believing(steady_speed(1.0))


def decide(view: ClusterView) -> Decision:
    return Srtf().decide(view, None, np.random.default_rng(0))[0]


def with_left(job_id: str, workers: int, left_s: float, held: str = "", gpus_each: int = 1) -> JobView:
    """A job with that many seconds left, holding all its workers on one node if that is given."""
    work = Work(units_per_epoch=left_s, epochs=1)
    job = make_job(job_id, workers, demand=Resources(gpu=gpus_each), work=work)
    return make_view(job, on_nodes({held: workers}) if held else NOTHING, belief=SECOND_A_STEP)


def test_remaining_time_of_an_all_reduce_job() -> None:
    belief = believing(steady_speed(1.0, sync_s=0.5, network_s=3.0))
    # 1000 units, one a step: two workers on one node step in 1.5 s, eight on two nodes in 4 s.
    half_done = make_view(make_job("a", 2), belief=belief, work_done=500.0)
    assert remaining_s(half_done, EMPTY) == pytest.approx(750.0)
    assert remaining_s(make_view(make_job("a", 8), belief=belief), EMPTY) == pytest.approx(4000.0)


def test_remaining_time_counts_what_a_larger_batch_is_worth() -> None:
    belief = replace(SECOND_A_STEP, noise=NoiseSample(sqr=1.0, var=3.0))
    job = make_job("a", 2, batch=replace(BATCH, requested=256))
    # Twice the initial batch: gain (3 + 1) / (3/2 + 1) = 1.6 units a step; 1000 / 1.6 steps.
    assert remaining_s(make_view(job, belief=belief), EMPTY) == pytest.approx(625.0)


def test_remaining_time_until_convergence() -> None:
    # l(k) = 1/k falls by 1/20 in epoch 5 and by less from epoch 6: with patience 3 epoch 8 is the last.
    belief = replace(SECOND_A_STEP, convergence=ConvergenceFit(b0=1.0, b1=0.0, b2=0.0, scale=1.0))
    work = Work(units_per_epoch=100.0, convergence=Convergence(threshold=0.05, patience=3))
    job = make_view(make_job("a", work=work), belief=belief, work_done=300.0)
    assert remaining_s(job, EMPTY) == pytest.approx(500.0)
    assert remaining_s(replace(job, belief=SECOND_A_STEP), EMPTY) is None


def test_remaining_time_of_a_parameter_server_job() -> None:
    # 1/f = 0.01 * 128/2 + 0.2 + 0.16 * 2/1 = 1.16 s a step.
    model = ServerSpeed(thetas=(0.01, 0.2, 0.16, 0.0, 0.0), synchronous=True, total_batch=128)
    belief = StatedBelief(server_speed=ServerSpeedFit(model=model, identified=True), resize=RESIZE)
    job = make_job("a", 2, server=Role(demand=Resources(cpu=1)))
    assert remaining_s(make_view(job, belief=belief), EMPTY) == pytest.approx(1160.0)
    assert remaining_s(make_view(job, belief=SECOND_A_STEP), EMPTY) is None


def test_shortest_first_and_longer_ones_that_fit() -> None:
    jobs = [with_left("a", 1, 900), with_left("b", 2, 600), with_left("c", 4, 700), with_left("d", 1, 500)]
    decision = decide(make_cluster(gpu_nodes(1, 4), jobs))
    # d (1 GPU) and b (2) leave one GPU: c does not fit beside them, a does.
    assert set(decision.allocations) == {"a", "b", "d"}
    assert decision.reasons["c"].code is ReasonCode.WAITS
    assert decision.reasons["c"].text == ("11m 40s left: 4 workers do not fit beside jobs with less left.")


def test_unknown_jobs_go_first_in_order_of_submission() -> None:
    jobs = [with_left("short", 2, 1), make_view(make_job("u", 2)), make_view(make_job("v", 2))]
    decision = decide(make_cluster(gpu_nodes(1, 4), jobs))
    assert set(decision.allocations) == {"u", "v"}


def test_the_longest_gives_way_and_the_others_stay() -> None:
    jobs = [
        with_left("long", 4, 5000, held="0"),
        with_left("middle", 4, 3000, held="1"),
        with_left("new", 2, 1000),
    ]
    decision = decide(make_cluster(gpu_nodes(2, 4), jobs))
    assert decision.allocations == {"middle": on_nodes({"1": 4}), "new": on_nodes({"0": 2})}
    assert decision.reasons["long"].code is ReasonCode.PREEMPTED
    assert "middle" not in decision.reasons


def test_who_would_give_way_for_nothing_stays() -> None:
    """Only node 1 can be cleared for the new job: the last in line keeps its place on node 0.

    The job between them then finds three free GPUs on node 2 only.
    """
    jobs = [
        with_left("last", 1, 9000, held="0"),
        with_left("in the way", 4, 8000, held="1"),
        with_left("first", 1, 500, held="0"),
        with_left("new", 1, 1000, gpus_each=4),
        with_left("between", 1, 2000, gpus_each=3),
    ]
    nodes = [make_node("0", 4), make_node("1", 4), make_node("2", 3)]
    assert decide(make_cluster(nodes, jobs)).allocations == {
        "first": on_nodes({"0": 1}),
        "new": on_nodes({"1": 1}),
        "between": on_nodes({"2": 1}),
        "last": on_nodes({"0": 1}),
    }


def test_a_job_that_may_not_be_preempted_stays_whatever_its_time() -> None:
    pinned = with_left("pinned", 3, 9000, held="0")
    pinned = replace(pinned, job=replace(pinned.job, preemptible=False))
    decision = decide(make_cluster(gpu_nodes(1, 4), [pinned, with_left("new", 2, 10)]))
    assert decision.allocations == {"pinned": pinned.allocation}


def test_a_running_job_of_another_size_is_brought_to_its_request() -> None:
    job = make_view(make_job("a", 4, least=1, most=8), on_nodes({"0": 2}), belief=SECOND_A_STEP)
    decision = decide(make_cluster(gpu_nodes(1, 4), [job]))
    assert decision.allocations == {"a": on_nodes({"0": 4})}
    assert decision.reasons["a"].code is ReasonCode.GREW
