"""The batch tuner in a world whose step times and noise are known; learning-rate rules; memory bounds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from stretto.core.allocation import BatchChoice
from stretto.core.errors import InputError
from stretto.core.job import BatchLimits
from stretto.core.observations import NoiseSample, SpeedSample
from stretto.models.noise import GradientNoise
from stretto.models.speed import AllReduceSpeed
from stretto.torch import Run
from stretto.torch.adaptive import (
    LOOK_STEPS,
    MOST_GROWTH,
    WARM_UP_STEPS,
    BatchChange,
    BatchTuner,
    GpuMemory,
    MemoryModel,
)
from stretto.torch.rules import RULES, Rule, lr_factor, progress_of_step

LIMITS = BatchLimits(initial=64, requested=64, max=4096, per_gpu_min=8, per_gpu_max=4096, accumulation=True)
CARD = AllReduceSpeed(0.004, 4e-6, 1e-8, 1e-8, 0.001, 1e-5, 2.0)


@dataclass
class World:
    """A run whose steps take a known time, give or take 2 %, and whose gradients have a known noise."""

    limits: BatchLimits
    speed: AllReduceSpeed
    noise_scale: float
    workers: int = 1
    batch: BatchChoice = field(default_factory=lambda: BatchChoice(64))
    changes: list[tuple[int, BatchChange]] = field(default_factory=list)

    def goodput(self, batch: BatchChoice) -> float:
        noise = GradientNoise(1.0, self.noise_scale / self.limits.initial, self.limits.initial)
        step_s = self.speed.step_s(1, self.workers, batch.atomic, batch.accumulation)
        return float(self.limits.initial * noise.gain(batch.total(self.workers)) / step_s)

    def best_goodput(self) -> float:
        most = min(self.limits.max // self.workers, self.limits.per_gpu_max)
        least = max(math.ceil(self.limits.initial / self.workers), self.limits.per_gpu_min)
        return max(self.goodput(BatchChoice(atomic)) for atomic in range(least, most + 1))

    def train(self, steps: int, seed: int = 0) -> None:
        chance = random.Random(seed)
        tuner = BatchTuner(self.limits)
        for step in range(steps):
            if step % 10 == 9:
                tuner.observe([self._timed(chance)])
            sqr = chance.gauss(1.0, 0.03)
            noise = NoiseSample(sqr=sqr, var=self.noise_scale / self.limits.initial)
            change = tuner.propose(noise, nodes=1, workers=self.workers, current=self.batch, step=step)
            if change is not None:
                self.changes.append((step, change))
                assert change.batch.total(self.workers) <= MOST_GROWTH * self.batch.total(self.workers)
                self.batch = change.batch

    def _timed(self, chance: random.Random) -> SpeedSample:
        step_s = float(self.speed.step_s(1, self.workers, self.batch.atomic)) * chance.uniform(0.98, 1.02)
        sync_s = min(float(self.speed.sync_s(1, self.workers)), step_s / 2) if self.workers > 1 else 0.0
        return SpeedSample(1, self.workers, 0, self.batch.atomic, step_s, sync_s)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("noise_scale", [100.0, 1000.0, 20000.0])
def test_reaches_about_the_best_batch(workers: int, noise_scale: float) -> None:
    world = World(LIMITS, CARD, noise_scale, workers, BatchChoice(64 // workers))
    world.train(1500)
    assert world.goodput(world.batch) >= 0.93 * world.best_goodput()


@pytest.mark.parametrize("seed", range(3))
def test_does_not_flap(seed: int) -> None:
    world = World(LIMITS, CARD, 1000.0)
    world.train(5000, seed)
    assert 1 <= len(world.changes) <= 8
    assert not [step for step, _ in world.changes if step > 1500]


def test_stays_where_a_larger_batch_is_no_faster() -> None:
    world = World(LIMITS, AllReduceSpeed(1e-6, 1e-3, 1e-8, 1e-8, 1e-8, 1e-8, 1.0), 50.0)
    world.train(1000)
    assert world.batch.total(1) <= 2 * LIMITS.initial
    assert world.goodput(world.batch) >= 0.7 * world.best_goodput()


def test_no_change_while_warming_up() -> None:
    world = World(LIMITS, CARD, 20000.0)
    world.train(WARM_UP_STEPS)
    assert not world.changes
    world.train(WARM_UP_STEPS + LOOK_STEPS)
    assert world.changes


def test_waits_until_the_present_batch_was_timed() -> None:
    tuner = BatchTuner(LIMITS)
    noise = NoiseSample(sqr=1.0, var=100.0)
    assert tuner.propose(noise, nodes=1, workers=1, current=BatchChoice(64), step=500) is None
    tuner.observe([SpeedSample(1, 1, 0, 64, 0.01, 0.0)])
    change = tuner.propose(noise, nodes=1, workers=1, current=BatchChoice(64), step=516)
    assert change is not None
    assert tuner.propose(noise, nodes=1, workers=1, current=change.batch, step=600) is None


def test_looks_again_only_when_something_is_new() -> None:
    tuner = BatchTuner(LIMITS)
    tuner.observe([SpeedSample(1, 1, 0, 64, 0.01, 0.0)])
    looks = []
    tuner._change = lambda *_: looks.append(1)  # type: ignore[method-assign]

    def propose(noise: NoiseSample, step: int) -> int:
        tuner.propose(noise, nodes=1, workers=1, current=BatchChoice(64), step=step)
        return len(looks)

    assert propose(NoiseSample(1.0, 2.0), 500) == 1
    assert propose(NoiseSample(1.0, 2.0), 600) == 1
    assert propose(NoiseSample(1.0, 3.0), 600 + LOOK_STEPS) == 2
    tuner.observe([SpeedSample(1, 1, 0, 64, 0.02, 0.0)])
    assert propose(NoiseSample(1.0, 3.0), 600 + 2 * LOOK_STEPS) == 3


def test_one_example_a_step_becomes_two_whatever_its_noise() -> None:
    """It cannot be split, so nothing would ever be known of it."""
    tuner = BatchTuner(replace(LIMITS, initial=1, requested=1, per_gpu_min=1))
    tuner.observe([SpeedSample(1, 1, 0, 1, 0.01, 0.0)])
    change = tuner.propose(None, nodes=1, workers=1, current=BatchChoice(1), step=500)
    assert change is not None
    assert change.batch.total(1) == 2


def test_a_batch_that_may_not_grow_is_not_looked_at() -> None:
    tuner = BatchTuner(replace(LIMITS, max=LIMITS.initial))
    assert not tuner.is_due(10**6)
    assert BatchTuner(LIMITS).is_due(WARM_UP_STEPS)


def test_says_nothing_without_noise() -> None:
    tuner = BatchTuner(LIMITS)
    tuner.observe([SpeedSample(1, 1, 0, 64, 0.01, 0.0)])
    assert tuner.propose(None, nodes=1, workers=1, current=BatchChoice(64), step=500) is None


def test_the_reason_has_the_numbers() -> None:
    world = World(LIMITS, CARD, 1000.0)
    world.train(1000)
    trial, change = world.changes[0][1], world.changes[-1][1]
    assert trial.reason.startswith("batch 64 becomes 128 to see how long a step then takes")
    assert f" becomes {change.batch.total(1)}: at a gradient noise scale of " in change.reason
    assert "goodput rises from" in change.reason


def tuner_that_saw(steps_s: dict[int, float]) -> BatchTuner:
    tuner = BatchTuner(LIMITS)
    tuner.observe([SpeedSample(1, 1, 0, atomic, step_s, 0.0) for atomic, step_s in steps_s.items()])
    return tuner


def proposed(tuner: BatchTuner, noise_scale: float, atomic: int) -> int | None:
    noise = NoiseSample(sqr=1.0, var=noise_scale / LIMITS.initial)
    change = tuner.propose(noise, nodes=1, workers=1, current=BatchChoice(atomic), step=500)
    return None if change is None else change.batch.total(1)


def test_times_that_are_all_alike_are_no_reason_to_stay() -> None:
    """A difference of 20 % between two of them, if it went on like this, would forbid a larger batch."""
    assert proposed(tuner_that_saw({64: 0.010, 128: 0.012}), 60.0, 128) == 256
    assert proposed(tuner_that_saw({64: 0.010, 128: 0.018}), 60.0, 128) == 64


def test_changes_that_take_each_other_back_become_rare() -> None:
    """Where the truth seems to alternate, as it does on a machine that others use."""
    times_s = {64: 0.010, 128: 0.012, 256: 0.030}
    tuner = tuner_that_saw(times_s)
    changed: list[int] = []
    batch = BatchChoice(64)
    for step in range(500, 5000):
        noise = NoiseSample(sqr=1.0, var=20.0 if len(changed) % 2 == 0 else 0.1)
        change = tuner.propose(noise, nodes=1, workers=1, current=batch, step=step)
        if change is not None:
            changed.append(step)
            batch = change.batch
            tuner.observe([SpeedSample(1, 1, 0, batch.atomic, times_s[batch.atomic], 0.0)])
    gaps = [after - before for before, after in itertools.pairwise(changed)]
    assert 3 <= len(gaps) <= 9
    assert all(after >= 2 * before for before, after in itertools.pairwise(gaps[1:]))


def test_a_size_that_was_timed_is_not_tried_again() -> None:
    assert proposed(tuner_that_saw({64: 0.0100, 128: 0.0101, 256: 0.0102}), 4.0, 128) is None


def test_times_bend_upwards_beyond_those_seen() -> None:
    """A line through these three would make 512 look worthwhile, the last 128 examples do not."""
    seen = {64: 0.0093, 128: 0.0095, 256: 0.0130}
    assert proposed(tuner_that_saw(seen), 186.0, 256) is None
    assert proposed(tuner_that_saw(seen), 2000.0, 256) == 512


def course_of(noise_scale: float, times_s: dict[int, float]) -> tuple[list[int], str]:
    """Batch sizes one after another, and why the last one was taken."""
    tuner, current, step, seen, told = BatchTuner(LIMITS), 64, 100, [64], ""
    for _ in range(60):
        tuner.observe([SpeedSample(1, 1, 0, current, times_s[current], 0.0)])
        noise = NoiseSample(sqr=1.0, var=noise_scale / LIMITS.initial + 1e-6 * step)
        change = tuner.propose(noise, nodes=1, workers=1, current=BatchChoice(current), step=step)
        if change is not None:
            current, told = change.batch.total(1), change.reason
            seen.append(current)
        step += LOOK_STEPS
    return seen, told


KNEE_S = {64: 0.0100, 128: 0.0102, 256: 0.0142, 512: 0.0242, 1024: 0.0455}
"""The knee of these times lies between 128 and 256, so that they promise too much of 512."""


def test_what_was_timed_takes_as_long_as_it_took() -> None:
    """A line through these times has 256 at 0.0138 s: as fast as to make 512 look no better."""
    assert proposed(tuner_that_saw({64: 0.0100, 128: 0.0102, 256: 0.0142}), 1000.0, 256) == 512


def test_a_size_that_turns_out_no_better_is_left_again() -> None:
    seen, told = course_of(1150.0, KNEE_S)
    assert seen == [64, 128, 256, 512, 256]
    assert told.startswith("batch 512 becomes 256 again: goodput is ")


def test_a_size_that_gains_less_than_foreseen_is_kept_if_it_gains() -> None:
    seen, _ = course_of(1300.0, KNEE_S)
    assert seen == [64, 128, 256, 512]


@pytest.mark.parametrize(
    ("workers", "limits", "totals"),
    [
        (1, LIMITS, [64, 128, 256, 512, 1024, 2048, 4096]),
        (1, replace(LIMITS, max=1000), [64, 128, 256, 512, 1000]),
        (3, replace(LIMITS, max=300), [66, 129, 258, 300]),
        (2, replace(LIMITS, per_gpu_max=100, accumulation=False), [64, 128, 200]),
        (2, replace(LIMITS, max=512, per_gpu_max=100), [64, 128, 256, 510]),
        (4, replace(LIMITS, max=512, per_gpu_min=32), [128, 256, 512]),
    ],
)
def test_sizes_are_doubled_ones_and_the_largest(workers: int, limits: BatchLimits, totals: list[int]) -> None:
    choices = list(BatchTuner(limits)._choices(workers, limits))
    assert sorted(choice.total(workers) for choice in choices) == totals
    assert all(limits.per_gpu_min <= choice.atomic <= limits.per_gpu_max for choice in choices)


@st.composite
def limits_of_users(draw: st.DrawFn) -> BatchLimits:
    initial, least = draw(st.integers(1, 300)), draw(st.integers(1, 64))
    return BatchLimits(
        initial=initial,
        requested=initial,
        max=initial * draw(st.integers(1, 40)),
        per_gpu_min=least,
        per_gpu_max=least + draw(st.integers(0, 500)),
        accumulation=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None)
@given(
    limits=limits_of_users(),
    workers=st.integers(1, 6),
    noise=st.builds(NoiseSample, sqr=st.floats(0, 10), var=st.floats(1e-6, 100)),
    constant_s=st.floats(1e-4, 1.0),
    example_s=st.floats(1e-7, 1e-2),
)
def test_obeys_every_bound(
    limits: BatchLimits, workers: int, noise: NoiseSample, constant_s: float, example_s: float
) -> None:
    tuner = BatchTuner(limits)
    current = BatchChoice(max(math.ceil(limits.initial / workers), 1))
    for step in range(500, 900, 50):
        step_s = constant_s + example_s * current.atomic
        tuner.observe([SpeedSample(1, workers, 0, current.atomic, step_s, 0.0)])
        change = tuner.propose(noise, nodes=1, workers=workers, current=current, step=step)
        if change is None:
            continue
        batch = change.batch
        assert batch.total(workers) <= limits.max
        assert batch.total(workers) <= max(MOST_GROWTH * current.total(workers), limits.initial)
        assert limits.per_gpu_min <= batch.atomic <= limits.per_gpu_max
        assert limits.accumulation or not batch.accumulation
        current = batch


def test_rules_at_their_limits() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    all_noise, no_noise = NoiseSample(0.0, 1.0), NoiseSample(1.0, 0.0)
    assert lr_factor("adascale", sgd, all_noise, 8.0) == pytest.approx(8.0)
    assert lr_factor("adascale", sgd, no_noise, 8.0) == pytest.approx(1.0)
    assert lr_factor("auto", sgd, all_noise, 8.0) == pytest.approx(8.0)
    assert lr_factor("auto", adam, all_noise, 9.0) == pytest.approx(3.0)
    assert lr_factor("sqrt", sgd, None, 9.0) == pytest.approx(3.0)
    assert lr_factor("linear", adam, None, 9.0) == pytest.approx(9.0)
    assert lr_factor("auto", sgd, None, 9.0) == pytest.approx(1.0)


@given(
    sqr=st.floats(0, 1e3),
    var=st.floats(1e-6, 1e3),
    scale=st.floats(1, 1e3),
    rule=st.sampled_from(RULES),
)
def test_no_rule_goes_beyond_the_batch(sqr: float, var: float, scale: float, rule: Rule) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    factor = lr_factor(rule, sgd, NoiseSample(sqr, var), scale)
    assert 1.0 - 1e-9 <= factor <= scale * (1 + 1e-9)
    assert progress_of_step(NoiseSample(sqr, var), 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("examples", "batch", "factors"),
    [(16, 8, [2.0, 2.0]), (22, 8, [2.0, 2.0, 1.5]), (17, 8, [2.0, 1.25, 1.0]), (6, 5, [1.0, 1.0])],
)
def test_what_is_left_of_a_pass_steps_at_the_rate_of_its_own_size(
    examples: int, batch: int, factors: list[float]
) -> None:
    """A gradient of few examples is too noisy for the rate of many; the user's own rate it has at least."""
    run = Run()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    loader = DataLoader(TensorDataset(torch.ones(examples, 2)), batch_size=4)
    run._engine.batching.order = BatchChoice(batch)
    *_, elastic = run.prepare(model, optimizer, loader, adaptive=True, lr_rule="linear", max_batch_size=8)
    for _ in run.epochs(1):
        for (x,) in elastic:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()
    assert [rate / 0.01 for rate in rates[: len(factors)]] == pytest.approx(factors)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_step_outside_a_loader_has_the_rate_of_the_batch() -> None:
    run = Run()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    run._engine.batching.order = BatchChoice(8)
    *_, elastic = run.prepare(model, optimizer, loader, adaptive=True, lr_rule="linear")
    for _ in run.epochs(1):
        for _ in elastic:
            torch.autograd.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
    optimizer.step()
    assert [rate / 0.01 for rate in rates] == pytest.approx([2.0] * len(rates))


def test_progress_without_noise_is_a_step_at_most() -> None:
    assert progress_of_step(None, 4.0) == 1.0
    assert progress_of_step(None, 0.25) == 0.25


def test_memory_is_linear_in_the_batch() -> None:
    memory = MemoryModel()
    assert memory.most(1000) is None
    memory.observe(10, 200)
    assert memory.most(1000) == 50
    memory.observe(20, 300)
    assert memory.most(1000) == 90
    memory.observe(20, 280)
    assert memory.most(1000) == 90
    assert memory.most(250) == 20


def test_memory_that_does_not_grow_is_no_bound() -> None:
    memory = MemoryModel()
    memory.observe(10, 200)
    memory.observe(20, 200)
    assert memory.most(1000) is None


class SmallCard(GpuMemory):
    def measure(self, atomic: int) -> bool:
        del atomic
        return True

    def most(self) -> int | None:
        return 100


def test_the_card_bounds_the_batch() -> None:
    tuner = BatchTuner(replace(LIMITS, accumulation=False), SmallCard())
    current = BatchChoice(64)
    for step in range(500, 1000, 50):
        tuner.observe([SpeedSample(1, 1, 0, current.atomic, 0.01, 0.0)])
        change = tuner.propose(NoiseSample(0.0, 1.0), nodes=1, workers=1, current=current, step=step)
        current = change.batch if change else current
    assert 64 < current.atomic <= 100


# Schedules


SCHEDULES: list[Callable[[torch.optim.Optimizer, int], Any]] = [
    lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
    lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
    lambda optimizer, steps: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
    lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps),
    lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10),
            lr_scheduler.PolynomialLR(optimizer, total_iters=steps - 10),
        ],
        [10],
    ),
]


@pytest.mark.parametrize("made", SCHEDULES)
@pytest.mark.parametrize("batch", [10, 40])
def test_schedules_come_to_their_end_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch, made: Any, batch: int
) -> None:
    """205 examples are 21 steps at the user's batch of 10, and fewer at a larger one."""
    epochs = 4
    torch.manual_seed(0)
    run, model = Run(), torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = made(optimizer, 21 * epochs)
    data = TensorDataset(torch.randn(205, 3, generator=torch.Generator().manual_seed(1)))
    model, optimizer, scheduler, loader = run.prepare(
        model, optimizer, scheduler, DataLoader(data, batch_size=10), adaptive=True, max_batch_size=40
    )
    run._engine.batching.order = BatchChoice(batch)
    monkeypatch.setattr(run._engine.batching, "worth", lambda _, examples: examples / 10)
    steps = 0
    for _ in run.epochs(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()
            scheduler.step()
            steps += run.step_is_complete
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=4e-3)
    assert 21 * epochs <= scheduler.last_epoch <= 21 * epochs + batch // 10 + 1
    assert steps == (21 if batch == 10 else 6) * epochs


def run_with_rates(change: Callable[[Run, torch.optim.Optimizer, int], object], **how: Any) -> None:
    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader, **how)
    for epoch in run.epochs(2):
        optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        for index, (x,) in enumerate(loader):
            change(run, optimizer, index)
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()


def own_schedule(_: Run, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (index + 1)


def by_progress(run: Run, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (1.0 - run.progress)


def test_a_schedule_that_counts_steps_by_itself_is_refused_where_the_batch_adapts() -> None:
    run_with_rates(own_schedule)
    run_with_rates(by_progress, adaptive=True)
    run_with_rates(lambda *_: None, adaptive=True)
    with pytest.raises(InputError, match=r"learning rate changes from .* between two steps.*run\.progress"):
        run_with_rates(own_schedule, adaptive=True)


def test_parameters_that_are_added_are_no_change_of_the_rate() -> None:
    def add(_: Run, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})

    run_with_rates(add, adaptive=True)


def test_a_schedule_that_is_told_where_it_is_is_refused_where_the_batch_adapts() -> None:
    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=8)
    _, scheduler, loader = run.prepare(optimizer, scheduler, loader, adaptive=True)

    def train() -> None:
        for epoch in run.epochs(1):
            for index, (x,) in enumerate(loader):
                torch.autograd.backward(model(x).square().mean())
                optimizer.step()
                if run.step_is_complete:
                    scheduler.step(epoch + index / 8)

    with pytest.raises(InputError, match="was called with arguments"):
        train()
