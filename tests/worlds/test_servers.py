"""The world of parameter-server jobs: speeds, placement, convergence, and claim O10."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.core.allocation import Allocation
from stretto.core.errors import InputError
from stretto.core.observations import LossPoint
from stretto.core.resources import Resources
from stretto.core.seeds import child_rng
from stretto.models.convergence import fit_convergence
from stretto.worlds.servers import LOCAL, TYPES, ServerTruth, crossing, server_nodes, server_workload

RESNET = next(kind for kind in TYPES if kind.name == "resnet-50")


def truth(*, synchronous: bool = True) -> ServerTruth:
    return ServerTruth(
        kind=RESNET, synchronous=synchronous, worker_batch=32, units_per_epoch=10.0, losses=(2.0, 1.0)
    )


def apart(workers: int, servers: int) -> Allocation:
    """Every worker on one node, every server on another."""
    return Allocation((("0", workers),), (("1", servers),))


def steps_per_s(one: ServerTruth, workers: int, servers: int) -> float:
    return 1.0 / one.step_time(apart(workers, servers), -(-RESNET.batch // workers)).step_s


def test_the_formulas_by_hand() -> None:
    """4 workers, 2 servers, all apart: a batch of 128 takes 2.2 s, a quarter of it 0.55 s."""
    exchange_s, tasks_s = 0.25 * 4 / 2, 4 * 0.01 + 2 * 0.01
    step = truth().step_time(apart(4, 2), 32)
    assert step.step_s == pytest.approx(0.55 + 0.2 + exchange_s + tasks_s)
    assert step.sync_s == pytest.approx(exchange_s + tasks_s)
    loose = truth(synchronous=False).step_time(apart(4, 2), 8)
    assert loose.step_s == pytest.approx((0.55 + 0.2 + exchange_s + tasks_s) / 4)


@pytest.mark.parametrize(
    ("workers", "servers", "part"),
    [
        ({"0": 2}, {"0": 2}, 0.0),
        ({"0": 2}, {"1": 2}, 1.0),
        ({"0": 2, "1": 2}, {"0": 2, "1": 2}, 1 / 2),
        ({"0": 1, "1": 1, "2": 1, "3": 1}, {"0": 1, "1": 1, "2": 1, "3": 1}, 3 / 4),
        ({"0": 3, "1": 1}, {"0": 1, "1": 3}, 3 / 4),
    ],
)
def test_what_crosses(workers: dict[str, int], servers: dict[str, int], part: float) -> None:
    allocation = Allocation(tuple(workers.items()), tuple(servers.items()))
    assert crossing(allocation) == pytest.approx(LOCAL + (1 - LOCAL) * part)


@pytest.mark.parametrize("synchronous", [True, False])
def test_o10_speed_has_an_inner_best_and_falls_past_a_point(synchronous: bool) -> None:
    one = truth(synchronous=synchronous)
    of_twenty = [steps_per_s(one, workers, 20 - workers) for workers in range(1, 20)]
    assert 0 < int(np.argmax(of_twenty)) < 18
    if synchronous:
        assert int(np.argmax(of_twenty)) + 1 == 8
        equal = [steps_per_s(one, count, count) for count in range(1, 33)]
        best = int(np.argmax(equal))
        assert 0 < best < 15
        assert equal[31] < 0.9 * equal[best]


def test_jobs_end_where_their_own_criterion_says() -> None:
    """A fit to the losses of the whole run, noise and spikes included, comes near the true end on average."""
    workload = server_workload(child_rng(0, "test"), jobs=40)
    errors = []
    for job in workload.jobs:
        one = workload.truths[job.id]
        assert job.work.epochs is None
        assert job.work.convergence is not None
        fit = fit_convergence([LossPoint(k, one.loss_at(k)) for k in range(1, one.epochs + 1)])
        assert fit is not None
        errors.append(fit.epochs_to_converge(job.work.convergence, 500).expected / one.epochs - 1)
    assert abs(np.mean(errors)) < 0.05
    assert np.mean(np.abs(errors)) < 0.1


def test_a_workload_is_its_seed_and_its_jobs_fit_the_nodes() -> None:
    one, again = (server_workload(child_rng(3, "test"), jobs=30) for _ in range(2))
    assert one == again
    assert one != server_workload(child_rng(4, "test"), jobs=30)
    assert len({job.application for job in one.jobs}) > 9
    assert max(job.submit_s for job in one.jobs) <= 12_000
    node = server_nodes()[0].capacity
    assert node == Resources(gpu=2, cpu=16, memory_gib=48)
    for job in one.jobs:
        assert job.server is not None
        assert (job.worker.demand + job.server.demand).fits_in(node)


@pytest.mark.parametrize("wrong", [{"jobs": 0}, {"slots": 0}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        server_workload(child_rng(0, "test"), **wrong)  # type: ignore[arg-type]


def test_epochs_out_of_range_are_refused() -> None:
    with pytest.raises(IndexError):
        truth().units_at(3)
    with pytest.raises(IndexError):
        truth().loss_at(0)
