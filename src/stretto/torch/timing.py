"""How long steps take, by configuration, by the clock of the device that does the work."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch

from stretto.core.observations import SpeedSample
from stretto.torch.step_layout import StepLayout


class TimingEvent(Protocol):
    """A moment in the course of the work; times between two of the same kind can be told."""

    @property
    def is_over(self) -> bool:
        """Whether the work has come so far."""

    def since_s(self, earlier: Self) -> float:
        """Seconds from an earlier one to this one; both must be over."""


Wait = tuple[TimingEvent, TimingEvent]
"""When one began and when it was over."""


class CpuEvent:
    """Now, by the processor's clock."""

    is_over = True

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def since_s(self, earlier: CpuEvent) -> float:
        return self._at_s - earlier._at_s


class CudaEvent:
    """When the card has done what it was given until now.

    The processor runs ahead of it, by more of the short steps than of the long ones, so that its own clock
    says little of single steps, and makes the first ones of a larger batch look cheap.
    """

    def __init__(self, device: int) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    @property
    def is_over(self) -> bool:
        return bool(self._event.query())

    def since_s(self, earlier: CudaEvent) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def timing_event() -> Callable[[], TimingEvent]:
    """What makes marks in this process: of the card that is the present one now, if there is one."""
    return (
        functools.partial(CudaEvent, torch.cuda.current_device()) if torch.cuda.is_available() else CpuEvent
    )


Configuration = tuple[int, int, int, int]
"""(nodes, workers, atomic batch, passes)."""


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    seconds: float = 0.0
    sync_s: float = 0.0
    passes: int = 1


class _Step(NamedTuple):
    """Cheap to make, as there is one for every step."""

    configuration: Configuration
    waits: tuple[Wait, ...]
    begin: TimingEvent
    end: TimingEvent

    @property
    def is_over(self) -> bool:
        if not (self.begin.is_over and self.end.is_over):
            return False
        return not self.waits or all(
            mark.is_over for wait in self.waits for mark in wait
        )  # streams may differ


class SpeedMeter:
    """Adds up the time from one step boundary to the next: a card's is read once it is over, not waited for.

    With p passes a step takes p * pass + sync, so that one pass and the wait come to
    (seconds - sync) / p + sync: what a step without accumulation would take.
    """

    def __init__(self, event_now: Callable[[], TimingEvent] | None = None) -> None:
        self._event_now = event_now or timing_event()
        self._since: TimingEvent | None = None
        self._pending: deque[_Step] = deque()
        self._sums: dict[Configuration, _Sum] = {}
        self._layout: StepLayout | None = None
        """Of the last step, and its configuration: kept, as every step asks."""
        self._key: Configuration = (0, 0, 0, 0)

    def skip(self) -> None:
        """What happens until the next boundary is not an ordinary step."""
        self._since = None

    def begin(self) -> None:
        """What happened since the last boundary is no part of the next step."""
        if self._since is not None:
            self._since = self._event_now()

    def boundary(self, layout: StepLayout, nodes: int, waits: Iterable[Wait], *, usual: bool) -> None:
        """A step is over; `usual` if it had the examples and passes that a step should have.

        It has waited for other workers so and so often.
        """
        since, self._since = self._since, self._event_now()
        if since is not None and usual:
            if layout is not self._layout or nodes != self._key[0]:
                self._layout = layout
                self._key = (nodes, layout.workers, layout.atomic, layout.passes)
            self._pending.append(_Step(self._key, tuple(waits), since, self._since))
        while self._pending and self._pending[0].is_over:
            self._add(self._pending.popleft())

    def _add(self, step: _Step) -> None:
        seconds = step.end.since_s(step.begin)
        entry = self._sums.get(step.configuration)
        if entry is None:
            entry = self._sums[step.configuration] = _Sum(passes=step.configuration[-1])
        entry.steps += 1
        entry.seconds += seconds
        if step.waits:
            entry.sync_s += min(sum(end.since_s(begin) for begin, end in step.waits), seconds)

    @property
    def step_s(self) -> float | None:
        """Mean time of a whole step of the newest configuration since the last `take`."""
        newest = list(self._sums.values())[-1:]
        return newest[0].seconds / newest[0].steps if newest and newest[0].steps else None

    def take(self, fewest_steps: int = 1) -> tuple[SpeedSample, ...]:
        """What was measured since the last time; what has fewer steps goes on being added up."""
        sums = {key: one for key, one in self._sums.items() if one.steps >= fewest_steps}
        self._sums = {key: one for key, one in self._sums.items() if key not in sums}
        return tuple(
            SpeedSample(
                nodes=nodes,
                workers=workers,
                servers=0,
                atomic=atomic,
                step_s=(one.seconds - one.sync_s) / one.steps / one.passes + one.sync_s / one.steps,
                sync_s=one.sync_s / one.steps,
            )
            for (nodes, workers, atomic, _), one in sums.items()
        )


FEWEST_SPLITS = 3
"""So many split steps tell what one costs by their median: a first one may have to load code."""
RECENT_SPLITS = 9


class SplitCost:
    """What a step in two passes takes more than the step before it, which was made in one."""

    def __init__(self, event_now: Callable[[], TimingEvent] | None = None) -> None:
        self._event_now = event_now or timing_event()
        self._batch = 0
        self._ends: deque[tuple[int, TimingEvent]] = deque(maxlen=3)
        """Of the latest steps."""
        self._pending: deque[tuple[TimingEvent, TimingEvent, TimingEvent]] = deque()
        self._ratios: deque[float] = deque(maxlen=RECENT_SPLITS)
        self._before: float | None = None
        """Of the batch before: a larger one's splits hardly cost more."""

    def skip(self) -> None:
        """The latest step was no ordinary one, or something else comes before the next."""
        self._ends.clear()

    def boundary(self, step: int, batch: int, *, split: bool) -> None:
        """A step of so many examples is over: one that was split, or one of the two before such a step."""
        if batch != self._batch:
            self._batch, self._before = batch, self.in_steps
            self._pending.clear()
            self._ratios.clear()
        self._ends.append((step, self._event_now()))
        if split and [number for number, _ in self._ends] == [step - 2, step - 1, step]:
            before, between, after = (mark for _, mark in self._ends)
            self._pending.append((before, between, after))
        self._read()

    @property
    def in_steps(self) -> float | None:
        """In plain steps, median of the latest; None while there are too few to tell."""
        if len(self._ratios) < FEWEST_SPLITS:
            return self._before
        return max(statistics.median(self._ratios) - 1.0, 0.0)

    def _read(self) -> None:
        while self._pending and all(mark.is_over for mark in self._pending[0]):
            before, between, after = self._pending.popleft()
            plain_s, split_s = between.since_s(before), after.since_s(between)
            if plain_s > 0:
                self._ratios.append(split_s / plain_s)
