"""Optimus: what it gives to whom and says about it, and its sample runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RESIZE, believing, make_cluster, make_job, make_node, make_view, steady_speed
from stretto.allocate.free import FreeCapacity, place_packed
from stretto.control.instruct import check
from stretto.core.allocation import NOTHING, Allocation, on_nodes
from stretto.core.cluster import Node, gpu_nodes
from stretto.core.decision import Decision, ReasonCode
from stretto.core.errors import InputError
from stretto.core.job import Convergence, Job, Role, Tier, Work
from stretto.core.observations import LossPoint, SpeedSample
from stretto.core.resources import Resources
from stretto.models.belief import StatedBelief
from stretto.models.convergence import fit_convergence
from stretto.models.parameter_server import ServerSpeed, ServerSpeedFit, fit_server_speed
from stretto.models.speed import AllReduceSpeed
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.gangs import GangSize, held_gang
from stretto.policies.optimus.policy import Optimus
from stretto.policies.optimus.samples import PATTERN

TRUE = ServerSpeed(thetas=(2.2 / 128, 0.2, 0.25, 0.01, 0.01), synchronous=True, total_batch=128)
KNOWN = ServerSpeedFit(model=TRUE, identified=True)
NODES = tuple(make_node(str(i), gpu=2, cpu=16, memory_gib=48) for i in range(6))
CONVERGENCE = Convergence(threshold=0.005, patience=5)


def served(job_id: str, *, most: int = 16, work: Work | None = None, preemptible: bool = True) -> Job:
    return make_job(
        job_id,
        1,
        demand=Resources(gpu=1, cpu=2, memory_gib=8),
        most=most,
        server=Role(demand=Resources(cpu=3, memory_gib=9), max=most),
        tier=Tier.ELASTIC,
        work=work,
        preemptible=preemptible,
    )


def knowing(job: Job, fit: ServerSpeedFit | None, allocation: Allocation = NOTHING) -> JobView:
    return make_view(job, allocation, belief=StatedBelief(server_speed=fit, resize=RESIZE))


def decide(view: ClusterView, memory: Memory = None, **options: object) -> tuple[Decision, Memory]:
    decision, memory = Optimus(**options).decide(view, memory, np.random.default_rng(0))  # type: ignore[arg-type]
    check(view, decision)
    return decision, json.loads(json.dumps(memory))


def gangs(decision: Decision) -> dict[str, GangSize]:
    return {job_id: held_gang(allocation) for job_id, allocation in decision.allocations.items()}


def measured(*samples: GangSize) -> ServerSpeedFit | None:
    return fit_server_speed(
        [
            SpeedSample(
                1, gang.workers, gang.servers, 1, 1 / float(TRUE.steps_per_s(gang.servers, gang.workers)), 0
            )
            for gang in samples
        ],
        synchronous=True,
        total_batch=128,
    )


def test_more_work_left_gets_more() -> None:
    long = knowing(served("long", work=Work(units_per_epoch=100, epochs=100)), KNOWN)
    short = knowing(served("short", work=Work(units_per_epoch=100, epochs=5)), KNOWN)
    decision, _ = decide(make_cluster(NODES, [short, long]), samples=0)
    got = gangs(decision)
    assert got["long"].workers > got["short"].workers >= 1
    assert "100.0 epochs left" in decision.reasons["long"].text
    assert "one more worker would save" in decision.reasons["long"].text


def test_a_job_alone_is_not_given_what_slows_it_down() -> None:
    nodes = [make_node(str(i), gpu=8, cpu=64, memory_gib=256) for i in range(8)]
    decision, _ = decide(make_cluster(nodes, [knowing(served("a"), KNOWN)]), samples=0)
    workers, servers = gangs(decision)["a"]
    speed = float(TRUE.steps_per_s(servers, workers))
    assert speed > float(TRUE.steps_per_s(16, 16))
    grid = TRUE.steps_per_s(np.arange(1, 17)[:, None], np.arange(1, 17))
    assert speed >= 0.99 * float(grid.max())


def test_sample_runs_step_through_counts_off_the_diagonal_and_end_in_a_model() -> None:
    job = served("a")
    view = make_cluster(NODES, [knowing(job, None)])
    memory: Memory = None
    seen: list[GangSize] = []
    for _ in range(5):
        decision, memory = decide(view, memory, samples=5)
        assert decision.wake_at_s is not None
        seen.append(gangs(decision)["a"])
        assert "Sample run" in decision.reasons["a"].text
        done = knowing(job, measured(*seen), decision.allocations["a"])
        view = replace(view, now_s=decision.wake_at_s, jobs=(done,))
    assert len(set(seen)) == 5
    assert sum(gang.workers != gang.servers for gang in seen) >= 3
    fit = measured(*seen)
    assert fit is not None
    assert fit.identified
    decision, memory = decide(view, memory, samples=5)
    assert decision.wake_at_s is None
    assert memory["models"]["a"] == pytest.approx(TRUE.thetas, rel=1e-6)


def test_a_sample_run_goes_on_until_its_time_is_over() -> None:
    job = served("a")
    view = make_cluster(NODES, [knowing(job, None)])
    decision, memory = decide(view)
    early = knowing(job, measured(gangs(decision)["a"]), decision.allocations["a"])
    again, _ = decide(replace(view, now_s=10.0, jobs=(early,)), memory)
    assert again.allocations == decision.allocations
    assert again.wake_at_s == decision.wake_at_s


def test_between_rounds_only_sample_runs_and_newcomers_change() -> None:
    settled, new = served("settled", work=Work(units_per_epoch=100, epochs=1)), served("new")
    view = make_cluster(NODES, [knowing(settled, KNOWN), knowing(new, None)])
    first, memory = decide(view, interval_s=600.0, samples=3)
    assert first.wake_at_s is not None
    # Meanwhile it turns out that the settled job has far more to do: it stays until the next round.
    more = replace(settled, work=Work(units_per_epoch=100, epochs=1000))
    held = knowing(more, KNOWN, first.allocations["settled"])
    sampled = knowing(new, measured(gangs(first)["new"]), first.allocations["new"])
    late = knowing(served("late"), None)
    meanwhile = replace(view, now_s=first.wake_at_s, jobs=(held, sampled, late))
    second, _ = decide(meanwhile, memory, interval_s=600.0, samples=3)
    assert second.allocations["settled"] == first.allocations["settled"]
    assert second.allocations["new"] != first.allocations["new"]
    third, _ = decide(replace(meanwhile, now_s=600.0), memory, interval_s=600.0, samples=3)
    assert gangs(third)["settled"] != gangs(first)["settled"]


def test_a_job_of_a_known_application_skips_samples_and_keeps_the_model_until_it_has_its_own() -> None:
    job = served("a")
    prior = measured(*PATTERN[:6])
    decision, memory = decide(make_cluster(NODES, [knowing(job, prior)]))
    assert decision.wake_at_s is None
    started = gangs(decision)["a"]
    assert started.workers > 1
    own = knowing(job, measured(started), decision.allocations["a"])
    later, memory = decide(make_cluster(NODES, [own]), memory)
    assert later.allocations == decision.allocations
    assert memory["models"]["a"]


def test_an_uncertain_model_says_so() -> None:
    diagonal = measured(GangSize(1, 1), GangSize(2, 2), GangSize(3, 3))
    decision, _ = decide(make_cluster(NODES, [knowing(served("a"), diagonal)]), samples=3)
    assert "cannot tell apart" in decision.reasons["a"].text


def test_unknown_speed_without_samples_means_the_smallest_size() -> None:
    decision, _ = decide(make_cluster(NODES, [knowing(served("a"), None)]), samples=0)
    assert gangs(decision) == {"a": GangSize(1, 1)}
    assert "until its speed is known" in decision.reasons["a"].text


def test_remaining_work_from_the_loss_curve_with_its_interval() -> None:
    losses = [LossPoint(k, 1 / (0.2 * k + 0.8) + 0.1) for k in range(1, 9)]
    belief = StatedBelief(server_speed=KNOWN, convergence=fit_convergence(losses), resize=RESIZE)
    work = Work(units_per_epoch=100, convergence=CONVERGENCE)
    job = make_view(served("a", work=work), belief=belief, work_done=800.0, epoch=8)
    text = decide(make_cluster(NODES, [job]), samples=0)[0].reasons["a"].text
    assert "epochs left by its loss curve, which ends at" in text
    blind = replace(job, belief=StatedBelief(server_speed=KNOWN, resize=RESIZE))
    text = decide(make_cluster(NODES, [blind]), samples=0)[0].reasons["a"].text
    assert "no loss curve yet, 20 epochs left assumed" in text


def test_the_young_factor_decides_between_equals() -> None:
    """Two alike but for their age: the odd worker goes to the older, without the factor to the first."""
    losses = [LossPoint(k, 1 / (0.2 * k + 0.8)) for k in range(1, 40)]
    work = Work(units_per_epoch=100, convergence=CONVERGENCE)
    curve = fit_convergence(losses)
    assert curve is not None
    belief = StatedBelief(server_speed=KNOWN, convergence=curve, resize=RESIZE)
    young = make_view(served("young", most=3, work=work), belief=belief, work_done=900.0, epoch=9)
    old = make_view(served("old", most=3, work=work), belief=belief, work_done=900.0, epoch=10)
    view = make_cluster([make_node("0", gpu=3, cpu=64, memory_gib=256)], [young, old])
    fair, _ = decide(view, samples=0, young_factor=1.0)
    assert gangs(fair)["young"].workers == 2
    decision, _ = decide(view, samples=0)
    assert gangs(decision)["old"].workers == 2


def test_rigid_jobs_get_their_request_and_pinned_ones_keep_what_they_have() -> None:
    rigid = make_view(make_job("rigid", 3))
    pinned = make_view(make_job("pinned", most=8, preemptible=False), on_nodes({"0": 2}))
    elastic = make_view(make_job("e", most=8), belief=believing(steady_speed(1.0)))
    decision, _ = decide(make_cluster(gpu_nodes(2, 4), [elastic, rigid, pinned]))
    got = gangs(decision)
    assert decision.allocations["pinned"] == pinned.allocation
    assert got["rigid"] == GangSize(3, 0)
    assert got["e"].workers >= 1


def test_all_reduce_jobs_are_packed_and_grow_to_twice_what_was_seen() -> None:
    speed = AllReduceSpeed(0.1, 0.01, 0.05, 0.002, 0.01, 0.001, 1.0)
    belief = StatedBelief(speed=speed, resize=RESIZE, max_workers_seen=2)
    job = make_view(make_job("a", most=16), belief=belief)
    decision, _ = decide(make_cluster(gpu_nodes(4, 4), [job]))
    assert decision.allocations["a"] == on_nodes({"0": 4})
    fresh = make_view(make_job("b", most=16))
    assert gangs(decide(make_cluster(gpu_nodes(4, 4), [fresh]))[0]) == {"b": GangSize(1, 0)}


@pytest.mark.parametrize(("epochs", "gpus", "stays"), [(1, 2, True), (1, 1, False), (1000, 2, False)])
def test_a_job_that_leaves_room_unused_is_told_why(epochs: int, gpus: int, *, stays: bool) -> None:
    """A resize of 30 s does not pay for one epoch more; of a thousand epochs it does."""
    speed = AllReduceSpeed(0.1, 0.01, 0.05, 0.002, 0.01, 0.001, 1.0)
    belief = StatedBelief(speed=speed, resize=RESIZE, max_workers_seen=1)
    job = make_job("a", most=2, work=Work(units_per_epoch=10, epochs=epochs))
    decision, _ = decide(
        make_cluster(gpu_nodes(1, gpus), [make_view(job, on_nodes({"0": 1}), belief=belief)])
    )
    said = {job_id: reason for job_id, reason in decision.reasons.items() if reason.code is ReasonCode.KEPT}
    assert bool(said) is stays
    if stays:
        text = "Stays with 1 worker: another worker would save it less time than a resize takes."
        assert said["a"].text == text


def test_who_does_not_fit_waits_with_the_reason() -> None:
    jobs = [knowing(served(f"j{i}"), KNOWN) for i in range(3)]
    decision, _ = decide(make_cluster(NODES[:1], jobs), samples=0)
    assert decision.reasons["j2"].code is ReasonCode.WAITS
    assert "and less is free" in decision.reasons["j2"].text
    huge = make_view(make_job("huge", 99))
    assert "even on the empty cluster" in decide(make_cluster(NODES, [huge]))[0].reasons["huge"].text


def test_small_changes_of_belief_change_nothing() -> None:
    jobs = [served(f"j{i}", work=Work(units_per_epoch=100, epochs=20 + 3 * i)) for i in range(4)]
    first, memory = decide(make_cluster(NODES, [knowing(job, KNOWN) for job in jobs]), samples=0)
    drifted = [
        replace(knowing(job, KNOWN, first.allocations[job.id]), work_done=10.0 * i)
        for i, job in enumerate(jobs)
    ]
    view = replace(make_cluster(NODES, drifted), now_s=60.0)
    assert decide(view, memory, samples=0)[0].allocations == first.allocations


@pytest.mark.parametrize(
    "wrong",
    [
        {"placement": "tight"},
        {"young_factor": 0.0},
        {"samples": -1},
        {"sample_s": 0.0},
        {"young_epochs": -1},
        {"assumed_epochs": 0},
        {"resize_weight": -1.0},
    ],
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"optimus\.{next(iter(wrong))}=.* is not valid"):
        Optimus(**wrong)  # type: ignore[arg-type]


nodes = st.lists(
    st.builds(lambda gpu, cpu: (gpu, cpu), st.integers(0, 4), st.integers(1, 16)), min_size=1, max_size=4
)
fits = st.sampled_from([None, KNOWN, measured(GangSize(1, 1)), measured(*PATTERN[:5])])


@given(
    nodes,
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), fits), min_size=1, max_size=6),
    st.sampled_from(["theorem", "packed"]),
)
@settings(max_examples=80, deadline=None)
def test_every_decision_can_be_carried_out(
    sizes: list[tuple[int, int]],
    kinds: list[tuple[bool, bool, bool, ServerSpeedFit | None]],
    placement: str,
) -> None:
    """Also the second one, with everything running and a node gone."""
    cluster = [Node(str(i), Resources(gpu=gpu, cpu=cpu, memory_gib=64)) for i, (gpu, cpu) in enumerate(sizes)]
    jobs = []
    for i, (servers, preemptible, rigid, fit) in enumerate(kinds):
        job = served(f"j{i}", preemptible=preemptible) if servers else make_job(f"j{i}", most=4)
        if rigid:
            job = replace(job, tier=Tier.RIGID, worker=replace(job.worker, requested=2, max=16))
        belief = StatedBelief(speed=steady_speed(1.0), server_speed=fit, resize=RESIZE, max_workers_seen=1)
        jobs.append(make_view(job, belief=belief))
    first, memory = decide(make_cluster(cluster, jobs), placement=placement)
    running = [replace(job, allocation=first.allocations.get(job.id, NOTHING)) for job in jobs]
    there = {node.id for node in cluster[1:]}
    movable = [job for job in running if job.job.preemptible or there.issuperset(job.allocation.nodes)]
    decide(replace(make_cluster(cluster[1:], movable), now_s=60.0), memory, placement=placement)


def test_packed_placement_is_the_packer() -> None:
    job = served("a")
    view = make_cluster(NODES, [knowing(job, KNOWN)])
    decision, _ = decide(view, samples=0, placement="packed")
    gang = gangs(decision)["a"]
    assert decision.allocations["a"] == place_packed(job, *gang, FreeCapacity(NODES))


def test_a_minimum_that_fits_in_total_but_on_no_nodes_waits() -> None:
    nodes = [make_node("a", gpu=3, cpu=14), make_node("b", gpu=4, cpu=4)]
    job = make_job("x", 7, demand=Resources(gpu=1, cpu=2.5), least=7, most=8, tier=Tier.ELASTIC)
    view = make_cluster(nodes, [make_view(job, belief=believing(steady_speed(1.0)))])
    decision, _ = decide(view)
    assert decision.allocations == {}
    assert "even on the empty cluster" in decision.reasons["x"].text
