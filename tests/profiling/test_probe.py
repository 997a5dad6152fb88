"""The probe on simulated machines whose truth is known."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.cluster import Node, Wish
from stretto.core.errors import InputError
from stretto.core.events import Event, JobFailed, JobFinished, JobReported
from stretto.core.instructions import Action, Instruction
from stretto.core.job import BatchLimits, Job, Tier
from stretto.core.observations import Result
from stretto.core.resources import Resources
from stretto.driving.local_target import ThisMachine
from stretto.driving.target import scratch
from stretto.inputs.jobs import BatchSpec, JobSpec
from stretto.inputs.profile import FailedConfig, MeasuredProfile, believe
from stretto.inputs.work import check_command, find_entry, sample_job
from stretto.launch.describe import describe_entries
from stretto.models.speed import AllReduceSpeed
from stretto.planning.profile import Latency, Profile, Scaling
from stretto.profiling.probe import measure, probe
from stretto.profiling.probe_data import (
    LOADING_S,
    Copy,
    Imported,
    Measurements,
    ProbeProgress,
    ProbeSpec,
    probe_time,
)
from stretto.search.space import Config
from stretto.substrate.sim.substrate import Physics, SimSubstrate
from stretto.worlds.applications import ModelTruth, NoiseCurve
from stretto.worlds.curves import FAMILIES
from stretto.worlds.trials import StudyWorld
from stretto.worlds.truth import Truth

START_S = 0.5
LIMITS = BatchLimits(initial=64, requested=64, max=512, per_gpu_min=8, per_gpu_max=256)
SPEED = AllReduceSpeed(0.002, 1e-4, 1e-3, 1e-4, 1e-3, 1e-4, 1.0)


def configs(count: int) -> tuple[Config, ...]:
    return tuple((("lr", 0.01 * (n + 1)), ("momentum", 0.9)) for n in range(count))


def truths(slots: int, latency: Latency, scaling: Scaling) -> Callable[[Job], Truth]:
    """How fast a job trains depends on its configuration, as in reality, and not on its name."""
    node = Node("local", Resources(gpu=slots))
    world = StudyWorld(FAMILIES[0], Profile(latency=latency, scaling=scaling), nodes=(node,))
    return lambda job: world.truth_of(replace(job, id=str(job.config)))


def machine(slots: int, latency: Latency, scaling: Scaling) -> SimSubstrate:
    return SimSubstrate(truths(slots, latency, scaling), physics=Physics(restart_s=START_S))


class Watched(SimSubstrate):
    """Keeps account of what is held, and of what was asked."""

    def __init__(self, truth_of: Callable[[Job], Truth], slots: int, restart_s: float = START_S) -> None:
        super().__init__(truth_of, physics=Physics(restart_s=restart_s, report_s=1.0))
        self.slots = slots
        self.held: dict[str, int] = {}
        self.asked: list[Instruction] = []

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            self.asked.append(one)
            self.held[one.job_id] = one.allocation.worker_count
            assert sum(self.held.values()) <= self.slots
        super().apply(instructions)

    def next_event(self, until_s: float) -> Event | None:
        event = super().next_event(until_s)
        if isinstance(event, JobFinished):
            self.held[event.job_id] = 0
        return event


def trials(slots: int, latency: Latency, scaling: Scaling) -> Watched:
    return Watched(truths(slots, latency, scaling), slots)


def test_the_probe_finds_the_truth() -> None:
    scaling = Scaling(((1, 1.0), (2, 1.7), (4, 2.5)))
    latency = Latency(epoch_s=2.0, trial_sd=0.2, epoch_sd=0.02)
    spec = ProbeSpec(what="it", configs=configs(8), epochs=50)
    measured = measure(spec, machine(4, latency, scaling), slots=4, time_s=120.0)
    assert dict(measured.scaling.points) == pytest.approx({1: 1.0, 2: 1.7, 4: 2.5}, rel=0.05)
    assert measured.not_measured == ()
    assert set(measured.starts_s) == {START_S}
    assert set(measured.gang_starts_s) == {START_S}, "of several workers, apart from those of one"
    assert set(measured.resizes_s) == {START_S}
    assert measured.warm_up_s == START_S
    believed = believe(measured)
    assert believed.latency.epoch_s == pytest.approx(2.0, rel=0.3)
    assert believed.latency.epoch_sd < 0.06
    assert {one.config for one in measured.epochs} == set(range(8))


def started_second(substrate: Watched) -> Instruction:
    return next(one for one in substrate.asked if one.job_id == "probe-001")


def test_one_worker_is_timed_with_the_machine_to_itself() -> None:
    substrate = trials(3, Latency(epoch_s=1.0), Scaling(((1, 1.0), (2, 1.5), (3, 2.0))))
    measured = measure(ProbeSpec(what="it", configs=configs(2), epochs=99), substrate, slots=3, time_s=90.0)
    lone = [one for one in measured.epochs if one.lone]
    assert len(lone) >= 3
    assert {one.workers for one in lone} == {1}
    assert set(measured.lone_starts_s) == {START_S}
    assert measured.lone_epoch == pytest.approx(1.0)
    alone = [one.job_id for one in substrate.asked[: substrate.asked.index(started_second(substrate))]]
    assert set(alone) == {"probe-000"}, "nothing else runs meanwhile"
    assert [one.action for one in substrate.asked].count(Action.PARK) >= 2, "trials go on after a pause, too"


def test_what_comes_between_two_epochs_is_part_of_them() -> None:
    spec = ProbeSpec(what="it")
    seen, copy = Measurements(spec, 1, lambda _: None), Copy(sample_job("a"), 0, 1, "start")
    for number, t_s in enumerate((1.5, 2.6, 3.8), start=1):
        result = Result(epoch=number, value=0.5, epoch_s=1.0, workers=1, nodes=1)
        event = JobReported(t_s=t_s, job_id="a", work_done=number, epoch=number, results=(result,))
        seen.take(event, copy)
    assert seen.times_of(0, 1) == pytest.approx([1.0, 1.1, 1.2])
    copy.begin(1, "start")
    seen.take(replace(event, t_s=9.0), copy)
    assert seen.times_of(0, 1)[-1] == 1.0, "a start lies in between"


def command_reports(start_s: float, epochs_s: Sequence[float]) -> list[JobReported]:
    """As of a command that prints when epochs end: the first is not told from its start."""
    t_s, told = start_s, []
    for number, epoch_s in enumerate(epochs_s, start=1):
        t_s += epoch_s
        first = number == 1
        result = Result(epoch=number, value=0.5, epoch_s=None if first else epoch_s, workers=1, nodes=1)
        event = JobReported(t_s=t_s, job_id="a", work_done=number, epoch=number, results=(result,))
        told.append(replace(event, resize_s=t_s if first else None))
    return told


def seen_of_command(*, start_s: float, epochs_s: Sequence[float]) -> MeasuredProfile:
    seen = Measurements(ProbeSpec(what="it", shows_epochs_only=True), 1, lambda _: None)
    copy = Copy(sample_job("a"), 0, 1, "start")
    for event in command_reports(start_s, epochs_s):
        seen.take(event, copy)
    return seen.profile(slots=1, measured_s=60.0, given_s=60.0, cut_short=False)


def test_the_start_of_a_command_is_without_its_first_epoch() -> None:
    measured = seen_of_command(start_s=0.25, epochs_s=(5.0, 5.0, 5.0))
    assert measured.starts_s == pytest.approx((0.25,))
    assert measured.start_s == pytest.approx(0.25)
    assert measured.epoch_times_s(1) == [5.0, 5.0]


def test_a_first_epoch_with_its_start_is_better_than_none() -> None:
    measured = seen_of_command(start_s=1.0, epochs_s=(50.0,))
    assert measured.epoch_times_s(1) == [51.0]
    assert measured.start_s == 0.0, "it is not counted twice"
    assert "an epoch without the start before it" in measured.not_measured
    assert measured.tells_epochs


class Printing(Watched):
    """As of a command: the first that is heard of a start is the end of its first epoch."""

    def next_event(self, until_s: float) -> Event | None:
        event = super().next_event(until_s)
        if not isinstance(event, JobReported) or event.resize_s is None or not event.results:
            return event
        (result,) = event.results
        took_s = event.resize_s + (result.epoch_s or 0.0)
        return replace(event, results=(replace(result, epoch_s=None),), resize_s=took_s)


def command(epoch_s: float, slots: int) -> Printing:
    return Printing(truths(slots, Latency(epoch_s=epoch_s), Scaling(((1, 1.0),))), slots)


def command_spec(epochs: int = 9) -> ProbeSpec:
    return ProbeSpec(
        what="it",
        configs=configs(2),
        epochs=epochs,
        tier=Tier.RIGID,
        max_workers=1,
        shows_epochs_only=True,
    )


@pytest.mark.parametrize("slots", [1, 2])
def test_a_first_epoch_may_take_longer_than_all_else(slots: int) -> None:
    said: list[ProbeProgress] = []
    substrate = command(100.0, slots)
    measured = measure(
        command_spec(), substrate, slots=slots, time_s=20.0, first_epoch_s=450.0, on_progress=said.append
    )
    assert measured.epoch_times_s(1) == [pytest.approx(100.0)]
    assert measured.start_s == pytest.approx(START_S)
    assert measured.measured_s == pytest.approx(200.0 + START_S), "and no longer"
    assert (measured.given_s, measured.cut_short) == (20.0, True)
    assert (said[-1].time_s, said[-1].since) == (450.0, "in all")
    assert "first epoch" in said[-1].doing
    assert not any(substrate.held.values())


def test_a_training_of_one_epoch_is_not_waited_for_in_vain() -> None:
    measured = measure(command_spec(1), command(100.0, 1), slots=1, time_s=20.0, first_epoch_s=4000.0)
    assert measured.measured_s < 300.0
    assert measured.epoch_times_s(1)[0] == pytest.approx(100.0 + START_S)


def test_how_long_a_first_epoch_was_waited_for_is_told() -> None:
    spec = ProbeSpec(what="it", configs=configs(2), epochs=9, tier=Tier.RIGID)
    with pytest.raises(InputError, match="first epoch did not end within 7m 30s"):
        measure(
            spec,
            machine(1, Latency(epoch_s=1e4), Scaling(((1, 1.0),))),
            slots=1,
            time_s=20.0,
            first_epoch_s=450.0,
        )


@pytest.mark.parametrize(
    ("spec", "imported", "why"),
    [
        (command_spec(), None, "the command has printed no epoch yet"),
        (ProbeSpec(what="it", epochs=9), lambda _: False, "the training code is being imported"),
        (
            ProbeSpec(what="it", epochs=9),
            lambda _: True,
            "the training function has taken no batch of its loader",
        ),
    ],
)
def test_training_that_shows_nothing_is_waited_for_no_longer_than_a_deadline_allows(
    spec: ProbeSpec, imported: Imported | None, why: str
) -> None:
    said: list[ProbeProgress] = []
    within = probe_time(100.0)
    with pytest.raises(InputError, match=f"first epoch did not end within 1m 15s: {why}"):
        measure(
            spec,
            command(1e4, 1),
            slots=1,
            time_s=within.usual_s,
            first_epoch_s=within.first_epoch_s,
            loading_s=within.loading_s,
            imported=imported,
            on_progress=said.append,
        )
    assert [one.now_s for one in said[1:]] == [10.0, 20.0, 40.0]
    assert all(why in one.doing for one in said[1:]), "and that is said while it is waited for"


def test_a_deadline_bounds_all_of_a_probe() -> None:
    for deadline_s in (1.0, 20.0, 400.0, 1e6):
        within = probe_time(deadline_s)
        assert within.loading_s + within.usual_s < deadline_s
        assert within.first_epoch_s < deadline_s
        assert within.loading_s <= LOADING_S


def test_a_probe_that_came_to_its_own_end_was_not_cut_short() -> None:
    substrate = trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0), (2, 1.5))))
    spec = ProbeSpec(what="it", configs=configs(2), epochs=99)
    measured = measure(spec, substrate, slots=2, time_s=600.0)
    assert (measured.given_s, measured.cut_short) == (600.0, False)


def test_where_a_training_has_one_slot_no_gang_is_timed() -> None:
    substrate = trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0), (2, 1.5))))
    spec = ProbeSpec(what="it", configs=configs(2), epochs=99, tier=Tier.RIGID, max_workers=1)
    measured = measure(spec, substrate, slots=2, time_s=60.0)
    assert max(one.allocation.worker_count for one in substrate.asked) == 1
    assert measured.most_workers == 1
    assert {one.lone for one in measured.epochs} == {True, False}
    assert not any("2 workers" in text for text in measured.not_measured)


def test_a_worker_that_does_not_pay_is_seen() -> None:
    scaling = Scaling(((1, 1.0), (2, 0.8)))
    spec = ProbeSpec(what="it", configs=configs(2), epochs=50)
    measured = measure(spec, machine(2, Latency(epoch_s=1.0), scaling), slots=2, time_s=60.0)
    assert measured.speedup(2) == pytest.approx(0.8)
    assert measured.scaling.most_gpus == 1


def test_a_short_time_leaves_things_out_and_names_them() -> None:
    measured = measure(
        ProbeSpec(what="it", configs=configs(2), epochs=50),
        trials(2, Latency(epoch_s=10.0), Scaling(((1, 1.0), (2, 1.5)))),
        slots=2,
        time_s=8.0,
    )
    assert measured.measured_s <= START_S + 10.0 + 8.0
    assert measured.epochs
    assert "whole epochs with 2 workers" in measured.not_measured


def test_one_slot_and_one_configuration_are_enough() -> None:
    substrate = trials(1, Latency(epoch_s=1.0), Scaling(((1, 1.0),)))
    measured = measure(ProbeSpec(what="it", configs=configs(1), epochs=50), substrate, slots=1, time_s=30.0)
    assert measured.starts_s == (START_S,), "a start is measured by parking and starting again"
    assert measured.not_measured == ("how much configurations differ",)
    assert [one.first for one in measured.epochs] == [True, False, False, True]


def test_a_rigid_training_is_started_anew_with_more_workers() -> None:
    substrate = trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0), (2, 1.5))))
    spec = ProbeSpec(what="it", configs=configs(2), epochs=50, tier=Tier.RIGID)
    measured = measure(spec, substrate, slots=2, time_s=60.0)
    assert measured.speedup(2) == pytest.approx(1.5)
    assert all(one.action is not Action.RESIZE for one in substrate.asked)
    capped = ProbeSpec(what="it", configs=configs(2), epochs=50, tier=Tier.RIGID, max_workers=1)
    alone = measure(capped, trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0),))), slots=2, time_s=60.0)
    assert alone.worker_counts == (1,)


def test_a_training_that_ends_early_is_begun_again() -> None:
    substrate = trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0), (2, 1.5))))
    measured = measure(ProbeSpec(what="it", configs=configs(3), epochs=2), substrate, slots=2, time_s=60.0)
    assert measured.speedup(2) == pytest.approx(1.5)
    assert all(len(measured.epoch_times_s(1, config)) >= 1 for config in range(3))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 6), st.floats(0.05, 20.0), st.floats(1.0, 60.0))
def test_whatever_the_machine_everything_is_stopped_and_no_slot_is_held_twice(
    slots: int, count: int, epoch_s: float, time_s: float
) -> None:
    substrate = trials(slots, Latency(epoch_s=epoch_s, epoch_sd=0.1), Scaling(((1, 1.0), (4, 3.0))))
    spec = ProbeSpec(what="it", configs=configs(count), epochs=5)
    measured = measure(spec, substrate, slots=slots, time_s=time_s)
    assert not any(substrate.held.values())
    assert substrate.now_s() <= START_S + 2 * epoch_s + time_s, "its time counts from the first epoch"
    assert measured.epochs
    assert all(1 <= one.workers <= slots for one in measured.epochs)


def adaptive(slots: int) -> Watched:
    def truth_of(job: Job) -> Truth:
        return ModelTruth(
            epochs=10**5,
            units_per_epoch=job.work.units_per_epoch,
            initial_batch=64,
            speed=SPEED,
            noise=(NoiseCurve(64, (100.0,)),),
            losses=(1.0, 0.5),
        )

    return Watched(truth_of, slots)


def test_batch_sizes_are_tried_where_the_batch_may_change() -> None:
    spec = ProbeSpec(what="it", configs=configs(1), tier=Tier.ADAPTIVE, batch=LIMITS)
    measured = measure(spec, adaptive(2), slots=2, time_s=60.0)
    tried = {(one.workers, one.atomic) for one in measured.speeds}
    assert {(1, 32), (1, 64), (1, 128), (1, 256), (2, 32), (2, 64)} <= tried
    assert measured.speed is not None
    for one in measured.speeds:
        fitted_s = float(measured.speed.step_s(one.nodes, one.workers, one.atomic))
        assert fitted_s == pytest.approx(one.step_s, rel=0.05)


class Broken:
    """A substrate on which training fails, or ends without a word."""

    changes_batch_in_place = True

    def __init__(self, kind: type[JobFailed | JobFinished], *, broken: Callable[[Job], bool]) -> None:
        self._inner = trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0), (2, 1.5))))
        self._kind = kind
        self._broken = broken
        self._jobs: dict[str, Job] = {}
        self._to_come: list[Event] = []

    def now_s(self) -> float:
        return self._inner.now_s()

    def admit(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._inner.admit(job)

    def apply(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            if not self._broken(self._jobs[one.job_id]):
                self._inner.apply([one])
            elif one.action is Action.START:
                end = (
                    JobFailed(t_s=self.now_s(), job_id=one.job_id, error="Traceback\nValueError: no")
                    if self._kind is JobFailed
                    else JobFinished(t_s=self.now_s(), job_id=one.job_id)
                )
                self._to_come.append(end)

    def provision(self, wish: Wish) -> None: ...

    def next_event(self, until_s: float) -> Event | None:
        return self._to_come.pop(0) if self._to_come else self._inner.next_event(until_s)

    def recover(self, history: Iterable[Event]) -> None: ...

    def close(self) -> None: ...


def test_training_that_fails_is_told_with_its_own_error() -> None:
    with pytest.raises(InputError, match="ValueError: no"):
        measure(
            ProbeSpec(what="it", configs=configs(2), epochs=9),
            Broken(JobFailed, broken=lambda _: True),
            slots=2,
            time_s=30.0,
        )


def test_one_configuration_that_fails_does_not_end_the_probe() -> None:
    bad = configs(3)[1]
    measured = measure(
        ProbeSpec(what="it", configs=configs(3), epochs=9),
        Broken(JobFailed, broken=lambda job: job.config == bad),
        slots=2,
        time_s=60.0,
    )
    assert {one.config for one in measured.epochs} == {0, 2}
    assert measured.failed == (FailedConfig(config=1, error="ValueError: no"),)


@pytest.mark.parametrize("kept", [True, False])
def test_the_log_of_a_configuration_that_failed_is_kept_beside_the_profile(
    tmp_path: Path, *, kept: bool
) -> None:
    script = """
import json, sys, time
if sys.argv[1] == "2":
    raise SystemExit("2 is too much")
for epoch in range(10**6):
    time.sleep(0.02)
    print(json.dumps(dict(epoch=epoch + 1)), flush=True)
"""
    command = check_command((sys.executable, "-c", script, "{lr}"), ("lr",))
    log = tmp_path / "failed.log"
    tried = [(("lr", 1),), (("lr", 2),)]
    measured = probe(command, tried, slots=2, time_s=3.0, log=log if kept else None)
    (failed,) = measured.failed
    assert (failed.config, failed.error) == (1, "2 is too much")
    assert failed.log == (str(log) if kept else "")
    assert measured.failure.endswith(f"with lr = 2: 2 is too much{f'; log: {log}' if kept else ''}")
    assert not kept or "2 is too much" in log.read_text()


def test_training_that_reports_nothing_is_told_how_to() -> None:
    with pytest.raises(InputError, match=r"run\.report"):
        measure(
            ProbeSpec(what="it", configs=configs(1), epochs=9),
            Broken(JobFinished, broken=lambda _: True),
            slots=1,
            time_s=30.0,
        )


class Slow(Watched):
    """Epochs that never end in time, of which parts are reported."""

    def next_event(self, until_s: float) -> Event | None:
        event = super().next_event(min(until_s, self.now_s() + 1.0))
        running = [job_id for job_id, held in self.held.items() if held]
        if event is None and self.now_s() < until_s and running:
            progress = self.now_s() / 1000.0
            return JobReported(t_s=self.now_s(), job_id=running[0], work_done=progress, epoch=0)
        return event


def test_part_of_an_epoch_says_how_long_a_whole_one_takes() -> None:
    node = Node("local", Resources(gpu=1))
    world = StudyWorld(
        FAMILIES[0], Profile(latency=Latency(epoch_s=1e4), scaling=Scaling(((1, 1.0),))), nodes=(node,)
    )
    spec = ProbeSpec(what="it", configs=configs(1), epochs=9)
    measured = measure(spec, Slow(world.truth_of, 1), slots=1, time_s=100.0)
    assert [one.epoch_s for one in measured.epochs] == [pytest.approx(1000.0, rel=0.01)]
    assert "whole epochs with 1 worker" in measured.not_measured
    assert "what an epoch with 1 worker does after its last step" in measured.not_measured


@pytest.mark.parametrize(("slots", "time_s"), [(0, 10.0), (2, 0.0), (2, float("nan")), (2, float("inf"))])
def test_nonsense_is_refused(slots: int, time_s: float) -> None:
    substrate = trials(2, Latency(epoch_s=1.0), Scaling(((1, 1.0),)))
    with pytest.raises(InputError):
        measure(ProbeSpec(what="it", epochs=9), substrate, slots=slots, time_s=time_s)


TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(config, run):
    torch.set_num_threads(1)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(TensorDataset(x), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(10**6):
        for (a,) in loader:
            optimizer.zero_grad()
            model(a).square().mean().backward()
            optimizer.step()
        run.report(loss=0.0)
"""


def test_real_training_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "train.py").write_text(TRAIN)
    lrs: list[Config] = [(("lr", 0.1),), (("lr", 0.2),)]
    measured = probe(find_entry("train.py:train", tmp_path), lrs, slots=2, time_s=60.0)
    assert measured.examples == 64
    assert measured.worker_counts == (1, 2)
    assert {one.config for one in measured.epochs if one.workers == 1} == {0, 1}
    assert measured.starts_s
    assert measured.resizes_s
    assert measured.warm_up_s is not None
    assert {one.workers * one.atomic for one in measured.speeds} == {8}
    assert not list(tmp_path.glob("stretto-probe-*")), "nothing is left behind"


def test_a_command_may_be_told_how_many_epochs_there_are() -> None:
    script = """
import json, sys, time
for epoch in range(int(sys.argv[1])):
    time.sleep(0.05)
    print(json.dumps(dict(epoch=epoch + 1)), flush=True)
"""
    command = check_command((sys.executable, "-c", script, "{epochs}"), ())
    measured = probe(command, [()], slots=1, time_s=3.0)
    assert fmean(measured.epoch_times_s(1)) >= 0.05


@pytest.mark.parametrize("kept", [True, False])
def test_of_training_that_fails_nothing_is_left_but_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kept: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = check_command((sys.executable, "-c", "print('my data is gone'); raise SystemExit(3)"), ())
    log = tmp_path / "run" / "failed.log"
    with pytest.raises(InputError, match="my data is gone") as told:
        probe(command, [()], slots=1, time_s=60.0, log=log if kept else None)
    assert str(told.value).endswith(f"log: {log}" if kept else "my data is gone")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == ([log] if kept else [])
    assert not list(tmp_path.glob("stretto-probe-*"))
    assert not kept or log.read_text() == "my data is gone\n"


def test_nothing_is_left_of_a_probe_that_a_signal_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), scratch("probe", parent=tmp_path):
        signal.raise_signal(signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("written", [True, False])
def test_an_error_is_told_though_its_log_cannot_be_kept(tmp_path: Path, *, written: bool) -> None:
    """Nor does it name the folder that is thrown away."""
    place = Path("/dev/null/failed.log") if written else tmp_path / "failed.log"

    def fail() -> None:
        with scratch("probe", log=place, parent=tmp_path) as folder:
            if written:
                folder.log("a").parent.mkdir(parents=True)
                folder.log("a").touch()
            raise InputError("it failed.", where=str(folder.path), remedy="no data", log=str(folder.log("a")))

    with pytest.raises(InputError) as told:
        fail()
    assert str(told.value) == "it failed. no data"


def test_the_log_of_code_that_cannot_be_described_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text("def train(config, run):\n    raise OSError('my data is gone')\n")
    spec = JobSpec(
        name="a",
        work=find_entry("train.py:train", tmp_path),
        epochs=1,
        min_workers=1,
        max_workers=None,
        batch=BatchSpec(),
        tier=None,
        submit_s=0.0,
        config=(),
    )
    with pytest.raises(InputError, match="my data is gone") as told:
        describe_entries([spec], ThisMachine(slots=1), tmp_path / "failed.log", tell=lambda _: None)
    assert str(tmp_path / "failed.log") in str(told.value)
    assert (tmp_path / "failed.log").is_file()
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()], "nothing else is left"


def test_what_a_command_prints_is_told_of_one_that_shows_no_epoch() -> None:
    with pytest.raises(InputError) as error:
        measure(
            command_spec(), command(1e4, 1), slots=1, time_s=1.0, loading_s=60.0, more_time="Wait longer."
        )
    assert str(error.value).endswith(
        "the first epoch did not end within 1m 00s: the command has printed no epoch yet "
        '(a command prints {"epoch": 1} when its first epoch ends). Wait longer.'
    )


def test_who_asked_for_a_probe_says_how_it_gets_more_time() -> None:
    slow = machine(1, Latency(epoch_s=1e4), Scaling(((1, 1.0),)))
    spec = ProbeSpec(what="it", configs=configs(1), epochs=50)
    with pytest.raises(InputError, match="Wait longer"):
        measure(spec, slow, slots=1, time_s=1.0, more_time="Wait longer.")
