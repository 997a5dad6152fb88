"""How long a job takes by itself, by hand for constant speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import make_job
from stretto.core.cluster import gpu_nodes
from stretto.core.job import BatchLimits, Job, Tier
from stretto.core.observations import NoiseSample
from stretto.simulation.jobs import Setup, simulate
from stretto.worlds.ftf import Clock, alone_s
from toy_world import ToyTruth, toy_job, toy_workload

AT_ONCE = Clock(30.0, None)


class TestClock:
    def test_without_rounds_only_the_start_is_waited_for(self) -> None:
        assert AT_ONCE.ready_s(13.5) == 30.0

    @pytest.mark.parametrize(
        ("submit_s", "ready_s"), [(13.5, 46.5 + 30.0), (60.0, 30.0), (61.0, 59.0 + 30.0), (0.0, 60.0 + 30.0)]
    )
    def test_with_rounds_the_next_one_is_waited_for(self, submit_s: float, ready_s: float) -> None:
        assert Clock(30.0, 60.0).ready_s(submit_s) == ready_s


class TestAlone:
    def test_a_rigid_job_takes_its_time_on_any_share(self) -> None:
        """200 units, split over the 2 workers it asked for."""
        for gpus in (1, 2, 16):
            assert alone_s(toy_job("a", 2), ToyTruth(split=True), gpus, 4, AT_ONCE) == 30.0 + 100.0

    @pytest.mark.parametrize(("gpus", "training_s"), [(1, 200.0), (2, 100.0), (4, 50.0), (16, 25.0)])
    def test_an_elastic_job_uses_its_share_up_to_its_limit(self, gpus: int, training_s: float) -> None:
        assert alone_s(toy_job("a", most=8), ToyTruth(split=True), gpus, 4, AT_ONCE) == 30.0 + training_s

    def test_workers_are_packed_on_whole_nodes(self) -> None:
        shapes = []

        class Noting(ToyTruth):
            def step_time(self, allocation, atomic):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                shapes.append(allocation.shape)
                return super().step_time(allocation, atomic)

        alone_s(toy_job("a", most=8), Noting(), 6, 4, AT_ONCE)
        assert set(shapes) == {(4, 2)}

    def test_an_elastic_job_never_has_more_workers_than_examples(self) -> None:
        limits = BatchLimits(initial=4, requested=4, max=4, per_gpu_min=2, per_gpu_max=4)
        job = make_job("a", least=1, most=8, batch=limits)
        assert alone_s(job, ToyTruth(split=True), 8, 4, AT_ONCE) == 30.0 + 100.0

    def adaptive(self) -> Job:
        limits = BatchLimits(initial=128, requested=128, max=256, per_gpu_min=32, per_gpu_max=256)
        return make_job("a", 2, least=1, most=2, tier=Tier.ADAPTIVE, batch=limits)

    def test_an_adaptive_job_uses_the_best_batch(self) -> None:
        """The step takes 1 s at any batch, and gain(2) = (1 + 3) / (3/2 + 1) = 1.6."""
        truth = ToyTruth(noise=NoiseSample(1.0, 3.0))
        assert alone_s(self.adaptive(), truth, 2, 4, AT_ONCE) == pytest.approx(30.0 + 200.0 / 1.6)
        assert alone_s(replace(self.adaptive(), tier=Tier.ELASTIC), truth, 2, 4, AT_ONCE) == 30.0 + 200.0

    def test_a_larger_batch_is_not_used_where_it_does_not_pay(self) -> None:
        truth = ToyTruth(step_s=0.0, example_s=1 / 64, noise=NoiseSample(1.0, 0.0))
        assert alone_s(self.adaptive(), truth, 2, 4, AT_ONCE) == pytest.approx(30.0 + 200.0)

    @pytest.mark.parametrize("rounds", [False, True])
    @pytest.mark.parametrize("submit_s", [0.0, 45.0, 60.0])
    def test_a_job_alone_in_a_simulation_takes_just_that_long(self, rounds: bool, submit_s: float) -> None:
        workload = toy_workload(toy_job("a", 4, submit_s=submit_s))
        run = simulate(workload, "fifo", Setup(nodes=gpu_nodes(1, 4), rounds=rounds))
        assert run.metrics.worst_ftf == pytest.approx(1.0)
