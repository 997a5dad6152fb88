"""The truth about trials: how fast they are where, what they show, and how nodes come."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from stretto.core.allocation import Allocation, BatchChoice, on_nodes
from stretto.core.cluster import Node, Wish, gpu_nodes, node_name
from stretto.core.errors import InputError, PolicyError
from stretto.core.events import JobReported, NodeAdded, NodeLaunched
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Role, Tier, Work
from stretto.core.resources import Resources
from stretto.planning.profile import Latency, Profile, Scaling, Spread
from stretto.pricing.instances import Instance
from stretto.search.space import Config
from stretto.search.study import Direction
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.worlds.cloud import RentalCloud, instance_of, lognormal
from stretto.worlds.curves import RESNET, CurveTable, make_table
from stretto.worlds.trials import StudyWorld
from stretto.worlds.truth import TrialTruth

SCALING = Scaling(((1, 1.0), (2, 1.8), (4, 3.2), (8, 5.0)), spanning=0.2)
EXACT = Profile(latency=Latency(epoch_s=40.0), scaling=SCALING)
VARIED = Profile(
    latency=Latency(epoch_s=40.0, trial_sd=0.2, node_sd=0.1, epoch_sd=0.05),
    scaling=SCALING,
    queue_s=Spread(40.0, 10.0),
    init_s=Spread(30.0, 8.0),
)
SMALL = Instance(name="p3.8-large", gpus=4, usd_per_hour=12.0)
FAST = Instance(name="fast", gpus=8, usd_per_hour=30.0, speed=2.0)
BATCH = BatchLimits(initial=1024, requested=1024, max=1024, per_gpu_min=1, per_gpu_max=1024)


def table(epoch_s: list[float] | None = None) -> CurveTable:
    return make_table(
        name="t",
        metric="accuracy",
        direction=Direction.MAX,
        hyperparameters=[(("lr", 0.1),), (("lr", 1.0),)],
        values=np.array([[0.1, 0.2, 0.3, 0.4], [0.5, math.nan, math.nan, math.nan]]),
        epoch_s=epoch_s,
    )


def trial(number: int, config: Config, epochs: int = 4) -> Job:
    return Job(
        id=f"trial-{number:03d}",
        application="s",
        submit_s=0.0,
        worker=Role(demand=Resources(gpu=1), max=8),
        tier=Tier.ELASTIC,
        batch=BATCH,
        work=Work(units_per_epoch=1.0, epochs=epochs),
        study="s",
        config=config,
    )


def epoch_s(world: StudyWorld, allocation: Allocation, number: int = 0) -> float:
    return world.truth_of(trial(number, (("row", 0),))).step_time(allocation, 1).step_s


@pytest.mark.parametrize(
    ("held", "expected_s"),
    [
        ({"p3.8-large-1": 1}, 40.0),
        ({"p3.8-large-1": 4}, 40.0 / 3.2),
        ({"p3.8-large-1": 2, "p3.8-large-2": 2}, 40.0 / (3.2 * 0.8)),  # on more nodes than needed
        ({"p3.8-large-1": 4, "p3.8-large-2": 4}, 40.0 / 5.0),  # on as few as hold it
        ({"p3.8-large-1": 4, "p3.8-large-2": 3, "p3.8-large-3": 1}, 40.0 / (5.0 * 0.8)),
        ({"fast-7": 2}, 40.0 / (1.8 * 2.0)),
        ({"fast-7": 1, "p3.8-large-2": 1}, 40.0 / (1.8 * 0.8)),  # the slower GPU sets the pace
    ],
)
def test_time_of_an_epoch(held: dict[str, int], expected_s: float) -> None:
    world = StudyWorld(table(), EXACT, instances=(SMALL, FAST))
    assert epoch_s(world, on_nodes(held)) == pytest.approx(expected_s)


def test_fixed_nodes_are_what_they_are() -> None:
    nodes = (*gpu_nodes(2, 2), Node("x", Resources(gpu=8), "fast"))
    world = StudyWorld(table(), EXACT, instances=(FAST,), nodes=nodes)
    assert epoch_s(world, on_nodes({"0": 1, "1": 1})) == pytest.approx(40.0 / (1.8 * 0.8))
    assert epoch_s(world, on_nodes({"0": 2, "1": 2})) == pytest.approx(40.0 / 3.2)
    assert epoch_s(world, on_nodes({"x": 8})) == pytest.approx(40.0 / (5.0 * 2.0))
    with pytest.raises(LookupError, match="unheard-of-1"):
        epoch_s(world, on_nodes({"unheard-of-1": 1}))


def test_what_a_trial_shows() -> None:
    world = StudyWorld(table(), EXACT, nodes=gpu_nodes(1, 8))
    good, bad = (world.truth_of(trial(row, (("row", row),), 3)) for row in (0, 1))
    assert isinstance(good, TrialTruth)
    assert good.epochs == 3
    assert [good.units_at(epoch) for epoch in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert [good.result_at(epoch) for epoch in (1, 2, 3)] == [0.1, 0.2, 0.3]
    assert [bad.result_at(epoch) for epoch in (1, 2, 3)] == [0.5, None, None]
    assert good.noise_at(1024, 0) is None
    assert good.loss_at(1) is None
    for epoch in (0, 4):
        with pytest.raises(IndexError):
            good.result_at(epoch)


def test_studies_that_do_not_fit_a_table_are_refused() -> None:
    world = StudyWorld(table(), EXACT)
    with pytest.raises(InputError, match="5 epochs on t, whose curves have 4"):
        world.truth_of(trial(0, (("row", 0),), 5))
    for config in ((("lr", 0.1),), (("row", 2),), (("row", -1),), (("row", "0"),)):
        with pytest.raises(InputError, match="is not in t"):
            world.truth_of(trial(0, config))
    assert StudyWorld(RESNET, EXACT).check_epochs(5000) == 5000


def test_factors_have_mean_one_and_the_given_spread() -> None:
    """Trials by 20 %, nodes by 10 %, epochs by 5 %."""
    world = StudyWorld(RESNET, VARIED, instances=(SMALL,))
    one = on_nodes({"p3.8-large-1": 1})
    truths = [world.truth_of(trial(number, (), 50)) for number in range(1500)]
    times = np.array([truth.step_time(one, 1).step_s for truth in truths]) / 40.0
    assert times.mean() == pytest.approx(1.0, abs=0.02)
    assert times.std() == pytest.approx(0.2, abs=0.02)
    epochs = np.array([[truth.slowness_at(e, one) for e in range(50)] for truth in truths[:200]])
    node = epochs.mean()
    assert (epochs / node).std() == pytest.approx(0.05, abs=0.002)
    nodes = [truths[0].slowness_at(0, on_nodes({f"p3.8-large-{i}": 1})) for i in range(1500)]
    by_node = np.array(nodes) / epochs[0, 0] * node
    assert by_node.mean() == pytest.approx(1.0, abs=0.02)
    assert by_node.std() == pytest.approx(0.1, abs=0.01)
    both = on_nodes({"p3.8-large-0": 1, "p3.8-large-1": 1})
    assert truths[0].slowness_at(0, both) == max(nodes[0], nodes[1])


def test_the_order_of_questions_does_not_matter() -> None:
    first, second = (StudyWorld(RESNET, VARIED, instances=(SMALL,), seed=3) for _ in range(2))
    one, two = on_nodes({"p3.8-large-1": 1}), on_nodes({"p3.8-large-2": 1})
    config: Config = (("lr", 0.1),)
    early = first.truth_of(trial(0, config, 20))
    second.truth_of(trial(1, config, 20)).slowness_at(3, two)
    late = second.truth_of(trial(0, config, 20))
    longer = second.truth_of(trial(0, config, 40))
    assert early.step_time(one, 1) == late.step_time(one, 1)
    for epoch in (19, 0, 7):
        assert early.slowness_at(epoch, one) == late.slowness_at(epoch, one)
        assert early.slowness_at(epoch, one) == longer.slowness_at(epoch, one)
        assert early.result_at(epoch + 1) == late.result_at(epoch + 1)


def test_another_seed_is_another_world() -> None:
    one = on_nodes({"p3.8-large-1": 1})
    worlds = [StudyWorld(RESNET, VARIED, instances=(SMALL,), seed=seed) for seed in (0, 1)]
    truths = [world.truth_of(trial(0, (("lr", 0.1),))) for world in worlds]
    assert truths[0].step_time(one, 1) != truths[1].step_time(one, 1)
    assert truths[0].slowness_at(0, one) != truths[1].slowness_at(0, one)
    assert truths[0].result_at(1) != truths[1].result_at(1)


def test_a_measured_clock_replaces_the_drawn_factor() -> None:
    world = StudyWorld(table([10.0, 30.0]), VARIED, nodes=gpu_nodes(1, 4))
    times = [world.truth_of(trial(0, (("row", row),))).step_time(on_nodes({"0": 1}), 1) for row in (0, 1)]
    assert [time.step_s for time in times] == pytest.approx([20.0, 60.0])


def test_in_the_simulated_substrate() -> None:
    """Two GPUs: an epoch takes 40 / 1.8 s, after a start of 60 s; the third result is not a number."""
    curves = make_table(
        name="t",
        metric="accuracy",
        direction=Direction.MAX,
        hyperparameters=[()],
        values=np.array([[0.1, 0.2, math.nan]]),
    )
    world = StudyWorld(curves, EXACT, nodes=gpu_nodes(1, 4))
    substrate = SimSubstrate(world.truth_of, physics=Physics(restart_s=60.0))
    job = trial(0, (("row", 0),), 3)
    substrate.admit(job)
    substrate.apply([Instruction(1, Action.START, job.id, on_nodes({"0": 2}), BatchChoice(512))])
    reports = [substrate.next_event(1000.0) for _ in range(3)]
    results = [report.results[0] for report in reports if isinstance(report, JobReported)]
    assert [report.t_s for report in reports if report] == pytest.approx(
        [60.0 + epoch * 40.0 / 1.8 for epoch in (1, 2, 3)]
    )
    assert [result.value for result in results] == [0.1, 0.2, None]
    assert [result.epoch_s for result in results] == pytest.approx([40.0 / 1.8] * 3)


def test_rented_nodes_say_their_type() -> None:
    assert instance_of(node_name("p3.8-large", 12)) == "p3.8-large"
    world = StudyWorld(table(), EXACT, instances=(SMALL,))
    substrate = SimSubstrate(world.truth_of, physics=Physics(), cloud=world.cloud)
    substrate.provision(Wish(nodes=(("p3.8-large", 1),)))
    launched, added = substrate.next_event(100.0), substrate.next_event(100.0)
    assert isinstance(launched, NodeLaunched)
    assert isinstance(added, NodeAdded)
    assert instance_of(added.node.id) == added.node.instance == "p3.8-large"
    assert added.node.gpus == 4


def cloud(seed: int) -> RentalCloud:
    return StudyWorld(table(), VARIED, instances=(SMALL, FAST), seed=seed).cloud


def test_delays_of_a_cloud() -> None:
    launches = [cloud(0).launch("fast", 3, request) for request in range(2000)]
    assert all(len({node.queue_s for node in nodes}) == 1 for nodes in launches)
    assert len({node.init_s for node in launches[0]}) == 3
    assert launches[0][0].capacity == Resources(gpu=8)
    queues = np.array([nodes[0].queue_s for nodes in launches])
    inits = np.array([node.init_s for nodes in launches for node in nodes])
    assert queues.min() > 0.0
    assert (queues.mean(), queues.std()) == pytest.approx((40.0, 10.0), rel=0.06)
    assert (inits.mean(), inits.std()) == pytest.approx((30.0, 8.0), rel=0.05)


def test_a_cloud_answers_the_same_again() -> None:
    assert cloud(0).launch("fast", 2, 5) == cloud(0).launch("fast", 3, 5)[:2]
    assert cloud(0).launch("fast", 2, 5) != cloud(1).launch("fast", 2, 5)
    assert cloud(0).launch("fast", 2, 5) != cloud(0).launch("fast", 2, 6)
    steady = StudyWorld(table(), EXACT, instances=(SMALL,)).cloud
    assert {(node.queue_s, node.init_s) for node in steady.launch("p3.8-large", 4, 0)} == {(0.0, 0.0)}
    with pytest.raises(PolicyError, match="'huge' was wished for"):
        steady.launch("huge", 1, 0)


def test_lognormal_without_spread_is_constant() -> None:
    rng = np.random.default_rng(0)
    assert lognormal(7.0, 0.0, 3, rng).tolist() == [7.0, 7.0, 7.0]
    assert lognormal(0.0, 1.0, 2, rng).tolist() == [0.0, 0.0]


def test_questions_are_answered_in_microseconds() -> None:
    """Some thousand results must not be felt in a simulation of 0.3 s; generous for busy machines."""
    world = StudyWorld(RESNET, VARIED, instances=(SMALL,))
    one = on_nodes({"p3.8-large-1": 1})
    began = time.process_time()
    truths = [world.truth_of(trial(number, (("lr", 0.1),), 200)) for number in range(100)]
    made_s = time.process_time() - began
    began = time.process_time()
    for truth in truths:
        for epoch in range(50):
            truth.step_time(one, 1024)
            truth.slowness_at(epoch, one)
            truth.result_at(epoch + 1)
    asked_s = time.process_time() - began
    assert made_s / 100 < 1e-3
    assert asked_s / 5000 < 2e-5
