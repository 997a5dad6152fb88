"""Measures how long steps take, per configuration, by the clock of the device that computes."""

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
    """A point in the device's work, such as the end of a step."""

    @property
    def is_over(self) -> bool:
        """Whether the device has reached it."""

    def since_s(self, earlier: Self) -> float:
        """Seconds since an earlier event; both must be over."""


Wait = tuple[TimingEvent, TimingEvent]
"""Beginning and end of a wait."""


class CpuEvent:
    """The current time, by the CPU's clock."""

    is_over = True

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def since_s(self, earlier: CpuEvent) -> float:
        return self._at_s - earlier._at_s


class CudaEvent:
    """The time when the GPU has finished all work queued so far.

    The CPU queues work ahead of the GPU, more short steps than long ones. So the CPU's clock is wrong for
    single steps, and makes the first steps of a larger batch look cheap.
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
    """The constructor of timing events in this process: on the current GPU, if there is one."""
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
    """A timed step. A tuple, because one is made for every step and must be cheap."""

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
    """Sums the times between step boundaries, without waiting for the GPU.

    A step of p passes takes p * pass + sync. We report the time of a step without accumulation:
    (seconds - sync) / p + sync.
    """

    def __init__(self, event_now: Callable[[], TimingEvent] | None = None) -> None:
        self._event_now = event_now or timing_event()
        self._since: TimingEvent | None = None
        self._pending: deque[_Step] = deque()
        self._sums: dict[Configuration, _Sum] = {}
        self._layout: StepLayout | None = None
        """The last step's layout; with `_key`, a cache."""
        self._key: Configuration = (0, 0, 0, 0)

    def skip(self) -> None:
        """Do not time the step until the next boundary."""
        self._since = None

    def begin(self) -> None:
        """Do not count the time since the last boundary."""
        if self._since is not None:
            self._since = self._event_now()

    def boundary(self, layout: StepLayout, nodes: int, waits: Iterable[Wait], *, usual: bool) -> None:
        """A step is over; `usual` if it had the usual examples and passes. `waits`: for other workers."""
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
        """Mean time of a step in the newest configuration since the last `take`."""
        newest = list(self._sums.values())[-1:]
        return newest[0].seconds / newest[0].steps if newest and newest[0].steps else None

    def take(self, fewest_steps: int = 1) -> tuple[SpeedSample, ...]:
        """Take the measurements so far; configurations with fewer steps than `fewest_steps` stay."""
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
"""Split steps needed for the median; the first ones may be slow because code is loaded."""
RECENT_SPLITS = 9


class SplitCost:
    """The extra time of a step split in two passes, compared with the step before it."""

    def __init__(self, event_now: Callable[[], TimingEvent] | None = None) -> None:
        self._event_now = event_now or timing_event()
        self._batch = 0
        self._ends: deque[tuple[int, TimingEvent]] = deque(maxlen=3)
        """The ends of the latest steps."""
        self._pending: deque[tuple[TimingEvent, TimingEvent, TimingEvent]] = deque()
        self._ratios: deque[float] = deque(maxlen=RECENT_SPLITS)
        self._before: float | None = None
        """The cost at the previous batch size, used until the new one is measured."""

    def skip(self) -> None:
        """Do not use the latest step, nor the time until the next one."""
        self._ends.clear()

    def boundary(self, step: int, batch: int, *, split: bool) -> None:
        """A step of `batch` examples is over: a split step, or one of the two before it."""
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
        """The median cost in plain steps; None while there are too few samples."""
        if len(self._ratios) < FEWEST_SPLITS:
            return self._before
        return max(statistics.median(self._ratios) - 1.0, 0.0)

    def _read(self) -> None:
        while self._pending and all(mark.is_over for mark in self._pending[0]):
            before, between, after = self._pending.popleft()
            plain_s, split_s = between.since_s(before), after.since_s(between)
            if plain_s > 0:
                self._ratios.append(split_s / plain_s)
