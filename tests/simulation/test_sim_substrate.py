"""The simulated substrate: what every substrate must do, and its arithmetic by hand."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import make_job
from stretto.core.allocation import NOTHING, Allocation, BatchChoice, on_nodes
from stretto.core.events import Event, JobFinished, JobReported
from stretto.core.instructions import Action, Instruction
from stretto.core.observations import NoiseSample
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.testing.substrates import Sketch, SubstrateCase, SubstrateConformance
from stretto.worlds.truth import Truth
from toy_world import ToyTruth

ONE, TWO = on_nodes({"0": 1}), on_nodes({"0": 2})
BATCH = BatchChoice(128)
FOREVER_S = 1e6


class TestConformance(SubstrateConformance):
    def open(self, sketches: tuple[Sketch, ...], folder: Path) -> SubstrateCase:
        del folder
        if any(sketch.fails for sketch in sketches):
            raise unittest.SkipTest("jobs of a simulation do not fail")
        truth = ToyTruth(epochs=8, units_per_epoch=10.0, example_s=3.0 / 128)
        return SubstrateCase(
            substrate=SimSubstrate(lambda _: truth, physics=Physics(noise=0.1)),
            jobs={sketch.id: make_job(sketch.id, most=2, least=1) for sketch in sketches},
            small=ONE,
            large=TWO,
            batch=BATCH,
            other_batch=BatchChoice(256),
            tick_s=65.0,
            patience_s=2000.0,
        )


class Sim:
    """A substrate that is told things at given times."""

    def __init__(self, truths: Mapping[str, Truth] | Truth, physics: Physics | None = None) -> None:
        by_id = truths if isinstance(truths, Mapping) else {"a": truths}
        self.substrate = SimSubstrate(lambda job: by_id[job.id], physics=physics or Physics())
        self.events: list[Event] = []
        self._numbers = itertools.count(1)
        for job_id in by_id:
            self.substrate.admit(make_job(job_id, least=1, most=8))

    def wait(self, until_s: float = FOREVER_S) -> None:
        while (event := self.substrate.next_event(until_s)) is not None:
            self.events.append(event)

    def tell(
        self,
        t_s: float,
        action: Action,
        allocation: Allocation = ONE,
        batch: BatchChoice = BATCH,
        job_id: str = "a",
    ) -> None:
        self.wait(t_s)
        self.substrate.apply([Instruction(next(self._numbers), action, job_id, allocation, batch)])

    def reports(self, job_id: str = "a") -> list[JobReported]:
        return [event for event in self.events if isinstance(event, JobReported) and event.job_id == job_id]

    def finishes(self) -> dict[str, float]:
        self.wait()
        return {event.job_id: event.t_s for event in self.events if isinstance(event, JobFinished)}


class TestProgress:
    def test_one_job_of_two_epochs(self) -> None:
        """30 s to start, then 100 units at one a second, twice."""
        sim = Sim(ToyTruth())
        sim.tell(0.0, Action.START)
        assert sim.finishes() == {"a": 230.0}
        assert [(one.t_s, one.work_done, one.epoch) for one in sim.reports()] == [
            (60.0, 30.0, 0),
            (90.0, 60.0, 0),
            (120.0, 90.0, 0),
            (150.0, 120.0, 1),
            (180.0, 150.0, 1),
            (210.0, 180.0, 1),
            (230.0, 200.0, 2),
        ]
        assert [one.resize_s for one in sim.reports()] == [30.0] + 6 * [None]
        assert [(p.epoch, p.loss) for one in sim.reports() for p in one.losses] == [(1, 1.0), (2, 0.5)]
        assert {one.speeds[0].step_s for one in sim.reports()} == {1.0}

    def test_a_resize_in_mid_epoch_costs_a_restart_and_keeps_the_work(self) -> None:
        """50 units by 80 s; still until 110 s; the other 150 at two a second."""
        sim = Sim(ToyTruth(split=True))
        sim.tell(0.0, Action.START)
        sim.tell(80.0, Action.RESIZE, TWO)
        assert sim.finishes() == {"a": 185.0}
        assert [(one.t_s, one.work_done) for one in sim.reports()][1:3] == [(120.0, 70.0), (150.0, 130.0)]
        assert [(s.workers, s.step_s) for s in sim.reports()[1].speeds] == [(1, 1.0), (2, 0.5)]

    def test_a_batch_change_costs_no_time(self) -> None:
        """gain(2) = (1 + 1) / (1/2 + 1) = 4/3 and a step of 2 s: the last 150 units take 225 s."""
        sim = Sim(ToyTruth(step_s=0.0, example_s=1 / 128, noise=NoiseSample(1.0, 1.0)))
        sim.tell(0.0, Action.START)
        sim.tell(80.0, Action.SET_BATCH, ONE, BatchChoice(256))
        assert sim.finishes() == {"a": pytest.approx(305.0)}

    def test_accumulated_passes_do_not_wait_for_gradients(self) -> None:
        """Two passes of 64: 0.5 s with the exchange, 0.4 s without."""
        sim = Sim(ToyTruth(step_s=0.0, example_s=1 / 128, sync_s=0.1))
        sim.tell(0.0, Action.START, ONE, BatchChoice(64, 1))
        assert sim.finishes() == {"a": pytest.approx(30.0 + 200 * 0.9)}
        assert {(s.step_s, s.sync_s) for one in sim.reports() for s in one.speeds} == {(0.5, 0.1)}

    def test_a_parked_job_pays_for_its_next_start(self) -> None:
        sim = Sim(ToyTruth())
        sim.tell(0.0, Action.START)
        sim.tell(80.0, Action.PARK, NOTHING)
        sim.tell(1000.0, Action.START)
        assert sim.finishes() == {"a": 1000.0 + 30.0 + 150.0}

    def test_a_start_cut_short_makes_no_progress(self) -> None:
        sim = Sim(ToyTruth())
        sim.tell(0.0, Action.START)
        sim.tell(20.0, Action.RESIZE, TWO)
        assert sim.finishes() == {"a": 20.0 + 30.0 + 200.0}

    def test_the_restart_cost_is_a_setting(self) -> None:
        sim = Sim(ToyTruth(), Physics(restart_s=0.0))
        sim.tell(0.0, Action.START)
        assert sim.finishes() == {"a": 200.0}

    def test_whole_seconds_round_the_rest_of_every_epoch(self) -> None:
        """Epochs of 33.3 s from 30 s on; at the report of 60 s 3.3 s are left of the first."""
        exact, rounded = (
            Sim(ToyTruth(step_s=0.333), Physics(report_s=60.0, whole_seconds=whole))
            for whole in (False, True)
        )
        for sim in (exact, rounded):
            sim.tell(0.0, Action.START)
        assert exact.finishes() == {"a": pytest.approx(96.6)}
        assert rounded.finishes() == {"a": 60.0 + 3.0 + 33.0}

    def test_being_told_something_after_a_rounded_end_does_not_turn_back_time(self) -> None:
        """An epoch of 10.6 s counts as 11 s; after 10.9 s, when it is full, steps become ten times longer."""
        truth = ToyTruth(epochs=1, units_per_epoch=10.6, step_s=0.0, example_s=1 / 128)
        sim = Sim(truth, Physics(whole_seconds=True))
        sim.tell(0.0, Action.START)
        sim.tell(40.9, Action.SET_BATCH, ONE, BatchChoice(1280))
        assert sim.finishes() == {"a": 40.9}
        assert sim.reports()[-1].work_done == 10.6


class TestInterference:
    def sim(self, interference: float, place: Allocation) -> Sim:
        """Job a of 200 units on nodes 0 and 1, and b of 300 as placed."""
        sim = Sim({"a": ToyTruth(), "b": ToyTruth(epochs=3)}, Physics(interference=interference))
        sim.tell(0.0, Action.START, on_nodes({"0": 1, "1": 1}))
        sim.tell(0.0, Action.START, place, job_id="b")
        return sim

    def test_jobs_that_span_a_common_node_slow_each_other_down(self) -> None:
        """At half speed 200 units take 400 s; when a is done b has 100 left, at full speed."""
        assert self.sim(0.5, on_nodes({"1": 1, "2": 1})).finishes() == {"a": 430.0, "b": 530.0}

    @pytest.mark.parametrize(
        ("interference", "place"), [(0.0, {"1": 1, "2": 1}), (0.5, {"1": 1}), (0.5, {"2": 1, "3": 1})]
    )
    def test_others_do_not(self, interference: float, place: dict[str, int]) -> None:
        assert self.sim(interference, on_nodes(place)).finishes() == {"a": 230.0, "b": 330.0}

    def test_a_neighbour_that_leaves_or_comes_changes_the_speed_at_once(self) -> None:
        sim = self.sim(0.5, on_nodes({"1": 1, "2": 1}))
        sim.tell(130.0, Action.PARK, NOTHING, job_id="b")  # a has done 50 units
        sim.tell(180.0, Action.START, on_nodes({"1": 1, "2": 1}), job_id="b")  # and now 100
        assert sim.finishes()["a"] == 180.0 + 200.0


class TestNoise:
    def finished(self, noise: float, sync_s: float = 0.3) -> Sim:
        sim = Sim(ToyTruth(sync_s=sync_s, noise=NoiseSample(1.0, 2.0)), Physics(noise=noise))
        sim.tell(0.0, Action.START)
        sim.wait()
        return sim

    def test_reports_are_noisy_and_the_truth_is_not(self) -> None:
        exact, noisy = self.finished(0.0), self.finished(0.2)
        assert noisy.finishes() == exact.finishes()
        progress = [[(one.t_s, one.work_done, one.epoch) for one in sim.reports()] for sim in (exact, noisy)]
        assert progress[0] == progress[1]
        assert {s.step_s for one in exact.reports() for s in one.speeds} == {1.0}
        times_s = [s.step_s for one in noisy.reports() for s in one.speeds]
        assert len(set(times_s)) == len(times_s)
        assert all(0.4 < step_s < 2.5 for step_s in times_s)
        assert all(one.noise not in {None, NoiseSample(1.0, 2.0)} for one in noisy.reports())
        assert [p.loss for one in noisy.reports() for p in one.losses] != [1.0, 0.5]

    def test_the_wait_stays_a_part_of_the_step(self) -> None:
        samples = [s for one in self.finished(0.5, sync_s=0.99).reports() for s in one.speeds]
        assert all(0.0 <= s.sync_s <= s.step_s for s in samples)

    def test_the_same_seed_reads_the_same(self) -> None:
        assert self.finished(0.3).events == self.finished(0.3).events


orders = st.lists(
    st.tuples(
        st.floats(0.0, 70.0),
        st.sampled_from(["a", "b"]),
        st.sampled_from([0, 1, 2, 4]),
        st.sampled_from([32, 128, 256]),
    ),
    min_size=1,
    max_size=12,
)


class TestConservation:
    @settings(max_examples=60, deadline=None)
    @given(orders, st.booleans(), st.sampled_from([0.0, 0.25]))
    def test_work_is_never_lost_and_no_job_finishes_early(
        self, told: list[tuple[float, str, int, int]], whole: bool, interference: float
    ) -> None:
        truth = ToyTruth(epochs=3, units_per_epoch=47.3, step_s=0.1, example_s=1 / 200, split=True)
        physics = Physics(whole_seconds=whole, interference=interference, restart_s=7.7)
        sim = Sim({"a": truth, "b": truth}, physics)
        holds = {"a": NOTHING, "b": NOTHING}
        now_s = 0.0
        for after_s, job_id, workers, atomic in [*told, (0.0, "a", 1, 128), (0.0, "b", 1, 128)]:
            now_s += after_s
            sim.wait(now_s)
            if any(isinstance(event, JobFinished) and event.job_id == job_id for event in sim.events):
                continue
            new = on_nodes({"0": min(workers, 1), "1": workers // 2})
            action = Action.RESIZE if holds[job_id] else Action.START
            if not new:
                if not holds[job_id]:
                    continue
                action = Action.PARK
            elif new == holds[job_id]:
                action = Action.SET_BATCH
            sim.tell(now_s, action, new, BatchChoice(atomic), job_id=job_id)
            holds[job_id] = new
        assert set(sim.finishes()) == {"a", "b"}
        times_s = [event.t_s for event in sim.events]
        assert times_s == sorted(times_s)
        for job_id in ("a", "b"):
            reports = sim.reports(job_id)
            for before, after in itertools.pairwise(reports):
                assert before.work_done <= after.work_done
                assert before.epoch <= after.epoch
            assert all(
                truth.units_at(one.epoch) <= one.work_done <= truth.units_at(min(one.epoch + 1, 3)) + 1e-9
                for one in reports
            )
            assert (reports[-1].epoch, reports[-1].work_done) == (3, truth.units_at(3))
            losses = [point.epoch for one in reports for point in one.losses]
            assert losses == [1, 2, 3]

    def test_time_passes_without_jobs(self) -> None:
        sim = Sim({})
        sim.wait(50.0)
        assert sim.substrate.now_s() == 50.0
        assert not sim.events
