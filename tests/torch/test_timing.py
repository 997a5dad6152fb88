"""Times of steps: by the clock of the card, which the processor runs ahead of."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stretto.core.observations import SpeedSample
from stretto.torch import Run
from stretto.torch.step_layout import StepLayout
from stretto.torch.timing import CpuEvent, SpeedMeter, SplitCost, timing_event

ONE = StepLayout(total=64)


@dataclass
class Card:
    """Work is given to it and done later; a mark is where the work was when it was made."""

    given_s: float = 0.0
    done_s: float = 0.0

    def mark(self) -> FakeMark:
        return FakeMark(self, self.given_s)

    def give(self, seconds: float) -> None:
        self.given_s += seconds

    def do_all(self) -> None:
        self.done_s = self.given_s


@dataclass(frozen=True)
class FakeMark:
    card: Card = field(repr=False)
    at_s: float

    @property
    def is_over(self) -> bool:
        return self.card.done_s >= self.at_s

    def since_s(self, earlier: FakeMark) -> float:
        assert self.is_over, "somebody would have to wait"
        return self.at_s - earlier.at_s


def train(meter: SpeedMeter, card: Card, steps_s: list[float], layout: StepLayout = ONE) -> None:
    for step_s in steps_s:
        card.give(step_s)
        meter.boundary(layout, 1, (), usual=True)


def test_a_step_counts_when_the_card_has_done_it() -> None:
    card = Card()
    meter = SpeedMeter(card.mark)
    train(meter, card, [0.1, 0.2, 0.3])
    assert meter.take() == ()
    card.do_all()
    train(meter, card, [0.4])
    (sample,) = meter.take()  # the first has no beginning, the last is not done
    assert sample.step_s == pytest.approx(0.25)


def test_what_was_given_before_a_change_counts_for_what_it_was() -> None:
    card = Card()
    meter = SpeedMeter(card.mark)
    train(meter, card, [0.1] * 4)
    meter.skip()
    train(meter, card, [0.5] * 3, StepLayout(total=128))
    card.do_all()
    meter.skip()
    train(meter, card, [9.0])
    assert {sample.atomic: sample.step_s for sample in meter.take()} == pytest.approx({64: 0.1, 128: 0.5})


def test_a_pass_of_several_takes_its_part_of_the_step() -> None:
    card = Card()
    meter = SpeedMeter(card.mark)
    for _ in range(3):
        card.give(0.4)
        began = card.mark()
        card.give(0.1)
        waits = [(began, card.mark())]
        meter.boundary(StepLayout(total=64, workers=2, passes=2), 1, waits, usual=True)
        card.do_all()
    meter.skip()
    meter.boundary(ONE, 1, (), usual=True)
    (sample,) = meter.take()
    assert sample.atomic == 16
    assert (sample.step_s, sample.sync_s) == pytest.approx((0.3, 0.1))


def test_unusual_steps_are_left_out() -> None:
    card = Card()
    meter = SpeedMeter(card.mark)
    for step_s, usual in ((0.1, True), (0.1, True), (7.0, False), (0.1, True)):
        card.give(step_s)
        card.do_all()
        meter.boundary(ONE, 1, (), usual=usual)
    assert meter.step_s == pytest.approx(0.1)
    assert meter.take(3) == ()
    assert [sample.step_s for sample in meter.take(2)] == pytest.approx([0.1])


def test_few_steps_of_a_size_wait_for_more() -> None:
    card = Card()
    meter = SpeedMeter(card.mark)
    for layout, steps in ((ONE, 8), (StepLayout(total=128), 3)):
        meter.skip()
        card.do_all()
        train(meter, card, [0.1] * steps, layout)
    card.do_all()
    meter.skip()
    train(meter, card, [0.1], ONE)
    assert [sample.atomic for sample in meter.take(5)] == [64]
    assert [sample.atomic for sample in meter.take(5)] == []
    assert [sample.atomic for sample in meter.take()] == [128]


def test_what_happens_between_two_steps_may_be_left_out() -> None:
    card = Card()
    meter = SpeedMeter(card.mark)
    train(meter, card, [0.1, 0.1])
    card.give(5.0)
    meter.begin()
    train(meter, card, [0.1])
    meter.skip()
    meter.begin()
    card.do_all()
    train(meter, card, [9.0])
    assert [sample.step_s for sample in meter.take()] == pytest.approx([0.1])


def split_at(cost: SplitCost, card: Card, step: int, batch: int, took_s: tuple[float, float]) -> None:
    """Two plain steps and a split one, and how long the last two took."""
    for number, passed_s in ((step - 2, 5.0), (step - 1, took_s[0]), (step, took_s[1])):
        card.give(passed_s)
        card.do_all()
        cost.boundary(number, batch, split=number == step)


def test_a_split_step_is_compared_with_the_one_before() -> None:
    card = Card()
    cost = SplitCost(card.mark)
    split_at(cost, card, 8, 64, (1.0, 9.0))  # loads code
    assert cost.in_steps is None
    for step in (16, 24, 32):
        split_at(cost, card, step, 64, (1.0, 1.5))
    assert cost.in_steps == pytest.approx(0.5)


def test_a_new_batch_costs_what_the_last_did_until_it_is_known() -> None:
    card = Card()
    cost = SplitCost(card.mark)
    for step in (8, 16, 24):
        split_at(cost, card, step, 64, (1.0, 2.0))
    for step in (32, 40):
        split_at(cost, card, step, 128, (1.0, 1.1))
    assert cost.in_steps == pytest.approx(1.0)
    split_at(cost, card, 48, 128, (1.0, 1.1))
    assert cost.in_steps == pytest.approx(0.1)


@pytest.mark.parametrize(("earlier", "skips"), [(5, False), (2, True)], ids=["a gap", "something between"])
def test_only_neighbouring_steps_are_compared(earlier: int, skips: bool) -> None:
    card = Card()
    cost = SplitCost(card.mark)
    for step in (8, 16, 24):
        for number in (step - earlier, step - 1, step):
            if skips and number == step:
                cost.skip()
            card.give(1.0)
            card.do_all()
            cost.boundary(number, 64, split=number == step)
    assert cost.in_steps is None


def test_a_split_that_takes_no_longer_costs_nothing() -> None:
    card = Card()
    cost = SplitCost(card.mark)
    for step in (8, 16, 24):
        split_at(cost, card, step, 64, (1.0, 0.9))
    assert cost.in_steps == 0.0


def test_a_split_step_counts_when_the_card_has_done_it() -> None:
    card = Card()
    cost = SplitCost(card.mark)
    for first in (8, 16, 24):
        for step, step_s in ((first - 2, 0.1), (first - 1, 0.1), (first, 0.18)):
            card.give(step_s)
            cost.boundary(step, 64, split=step == first)
    assert cost.in_steps is None
    card.do_all()
    cost.boundary(30, 64, split=False)
    assert cost.in_steps == pytest.approx(0.8)


def test_looking_for_a_better_batch_is_no_part_of_a_step() -> None:
    card, looks = Card(), []
    samples: list[SpeedSample] = []

    def look(*_: object) -> None:
        looks.append(card.given_s)
        card.give(50.0)

    run, model = Run(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = DataLoader(TensorDataset(torch.ones(4000, 1)), batch_size=4)
    _, _, loader = run.prepare(model, optimizer, data, adaptive=True)
    engine = run._engine
    engine._tuning_meter = SpeedMeter(card.mark)
    engine.batching.observe = samples.extend  # type: ignore[method-assign, assignment]
    engine.batching.tune = look  # type: ignore[method-assign, assignment]
    for _ in run.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            optimizer.step()
            card.give(0.1)
            card.do_all()
    assert len(looks) > 1
    assert len(samples) > 1
    assert [sample.step_s for sample in samples] == pytest.approx([0.1] * len(samples))


def test_without_a_card_marks_are_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing_event() is CpuEvent
    seconds = iter((3.0, 5.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    first, second = CpuEvent(), CpuEvent()
    assert first.is_over
    assert second.since_s(first) == 2.5


class FakeEvent:
    """Recorded in a stream, which here is the moment that its work will be done."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing, "else its times cannot be told"
        self.at_ms = math.nan

    def record(self, stream_ms: float) -> None:
        self.at_ms = stream_ms

    def query(self) -> bool:
        return self.at_ms < 100.0

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_with_a_card_marks_are_of_the_one_it_was_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    streams_ms = {0: 7.0, 1: 40.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", streams_ms.__getitem__)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    make = timing_event()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first = make()
    streams_ms[1] = 90.0
    second = make()
    assert (first.is_over, second.is_over) == (True, True)
    assert second.since_s(first) == pytest.approx(0.05)
    streams_ms[1] = 130.0
    assert not make().is_over
