"""Where a run is: its epoch, its loop over a loader or its counted steps, and how much work that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Protocol

from stretto.torch.data import DataPosition, DataSource
from stretto.torch.step_layout import CurrentStep

_APART = 1_000_003
"""Shuffles of an epoch's loops are so far apart that they are never the same."""
_ROUNDING = 1e-6
_BESIDE = 1_000
"""Loops beside others count from here on."""


class DataLoop(Protocol):
    """A pass over the data, by a loader or by counting."""

    position: DataPosition
    asked_length: bool
    """Somebody has asked for its length while it went on."""

    @property
    def source(self) -> DataSource: ...

    @property
    def left(self) -> int:
        """Examples of it that are still to be trained on."""


class TrainingProgress:
    """The place in the user's loops. A newcomer runs them from the top and skips what was done without it.

    A loop is one pass over the data. With an adaptive batch, an epoch's first loop over the data that counts
    is the work of one pass at the initial batch instead, and goes on where that of the last epoch ended.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.units = 0.0
        """Adaptive batch: steps at the initial batch that the work done so far is worth."""
        self.in_epoch = False
        self.counted: DataSource | None = None
        """Adaptive batch: the data that counts."""
        self.counts = False
        """Whether the present loop is the epoch's one that counts."""
        self._has_counted = False
        """Whether the epoch's loop that counts has begun."""
        self._counted_at: DataPosition | None = None
        """Where in the data that counts the run is."""
        self._first: DataSource | None = None
        """What an epoch's first loop is over."""
        self._loop = -1
        """Which of the epoch's loops over a loader is going on, or was last."""
        self._loops: dict[int, DataPosition] = {}
        self._done_loops = -1
        """Loops of the epoch up to this one were over when this worker came."""
        self._beside: dict[int, DataPosition] = {}
        """Where the loops beside the present one are, by the numbers of their loaders."""
        self._begun_beside = 0
        """Loops beside others that the epoch has had."""
        self._mid_epoch = False
        """The state that was taken up lies within an epoch."""
        self._epoch_began_s: float | None = None

    @property
    def loop(self) -> int:
        """Which of the epoch's loops over a loader is going on, or was last."""
        return self._loop

    @property
    def epoch_s(self) -> float | None:
        """Since the present epoch began; None once it was interrupted."""
        return None if self._epoch_began_s is None else time.monotonic() - self._epoch_began_s

    def interrupt(self) -> None:
        """The time that this epoch takes says nothing about others."""
        self._epoch_began_s = None

    def begin_epoch(self) -> None:
        self.in_epoch = True
        self._loop = -1
        self._has_counted = False
        self._epoch_began_s = None if self._mid_epoch else time.monotonic()
        self._mid_epoch = False

    def enter_loop(self, loader: DataLoop) -> None:
        self._loop += 1
        if self._loop == 0:
            self._first = loader.source
        self.counts = loader.source is self.counted and not self._has_counted
        self._has_counted = self._has_counted or self.counts

    def find_place(self, loader: DataLoop) -> bool:
        """Put the loader where this loop is; False if nothing is left of it."""
        if self._loop <= self._done_loops:
            return False
        begun = self._counted_at if self.counts else self._loops.get(self._loop)
        if begun is not None:
            loader.position = DataPosition(begun.pass_number, begun.examples)
        elif self.counts:
            loader.position = DataPosition()
        else:
            loader.position = DataPosition(self.epoch + _APART * self._loop)
        self.advance(loader)
        return True

    def enter_beside(self, number: int, loader: DataLoop) -> None:
        """A loop begins beside the present one, or is the one that goes on there already."""
        if number not in self._beside:
            self._beside[number] = DataPosition(self.epoch + _APART * (_BESIDE + self._begun_beside))
            self._begun_beside += 1
        loader.position = self._beside[number]

    def leave_beside(self, number: int) -> None:
        self._beside.pop(number, None)

    def advance(self, loader: DataLoop) -> None:
        """A step is done."""
        if self.counts:
            self._counted_at = loader.position
        else:
            self._loops[self._loop] = loader.position

    def is_over(self, loader: DataLoop) -> bool:
        if not self.counts:
            return loader.left == 0
        return self.units >= (self.epoch + 1) * _units_per_epoch(loader.source) - 1e-9

    def steps_by(self, worth: float) -> int:
        """Whole steps that so much more work completes, of as many an epoch as at the initial batch."""
        assert self.counted is not None
        source = self.counted
        of_a_pass = source.examples / source.batch_size
        steps = int(of_a_pass) if source.drop_last else ceil(of_a_pass)
        before, after = (units * steps / of_a_pass for units in (self.units, self.units + worth))
        return floor(after + _ROUNDING) - floor(before + _ROUNDING)

    def end_epoch(self) -> None:
        self.epoch += 1
        self.in_epoch = False
        self._loops, self._done_loops = {}, -1
        self._beside, self._begun_beside = {}, 0
        if self.counted is not None:
            # An epoch that the user ended early is over all the same: the next one does not catch up.
            self.units = max(self.units, self.epoch * _units_per_epoch(self.counted))

    @property
    def examples(self) -> int:
        """Done by the first loop of the present epoch."""
        begun = self._loops.get(0)
        return 0 if begun is None else begun.examples

    @property
    def has_looped(self) -> bool:
        """Whether the present epoch has had a loop over a loader."""
        return self._loop >= 0

    @property
    def epochs_done(self) -> float:
        """Epochs done, the present one in part."""
        if self.counted is not None:
            return self.units / _units_per_epoch(self.counted)
        begun = self._loops.get(0) if self.in_epoch else None
        if begun is None or self._first is None:
            return float(self.epoch)
        return self.epoch + min(begun.examples / max(self._first.examples, 1), 1.0)

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "units": self.units,
            "in_epoch": self.in_epoch,
            "loop": self._loop,
            "loops": {loop: _as_list(at) for loop, at in self._loops.items()},
            "beside": {number: _as_list(at) for number, at in self._beside.items()},
            "begun_beside": self._begun_beside,
            "counted": None if self._counted_at is None else _as_list(self._counted_at),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.units = state["epoch"], state["units"]
        self._loops = {loop: DataPosition(*at) for loop, at in state["loops"].items()}
        self._counted_at = None if state["counted"] is None else DataPosition(*state["counted"])
        self._beside = {number: DataPosition(*at) for number, at in state.get("beside", {}).items()}
        self._begun_beside = state.get("begun_beside", 0)
        self._mid_epoch = state["in_epoch"]
        self._done_loops = state["loop"] - 1 if self._mid_epoch else -1


def _as_list(position: DataPosition) -> list[int]:
    return [position.pass_number, position.examples]


def _units_per_epoch(source: DataSource) -> float:
    return source.examples / source.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounting:
    """How a run counts its steps."""

    batch_size: int
    """Examples of a step, over all workers."""
    report_every: int
    """Steps of an epoch: after these, what was reported counts."""

    @property
    def source(self) -> DataSource:
        """An epoch as data: the numbers of its examples."""
        numbers = range(self.report_every * self.batch_size)
        return DataSource(dataset=numbers, batch_size=self.batch_size, shuffle=False)  # type: ignore[arg-type]


class StepLoop:
    """The steps of one epoch after the other, as an elastic loader gives batches.

    `before(loop)` is asked when an epoch's steps begin: False if they were over when this worker came.
    `after_step(loop)` is told when a step is complete, and `after()` when the epoch's steps are over.
    """

    def __init__(
        self,
        counting: StepCounting,
        last: int,
        current: CurrentStep,
        *,
        before: Callable[[StepLoop], bool],
        after_step: Callable[[StepLoop], object],
        after: Callable[[], None],
    ) -> None:
        self.source = counting.source
        self.position = DataPosition()
        self.asked_length = False
        self._counting = counting
        self._last = last
        """Where training ends, in steps."""
        self._current = current
        self._before = before
        self._after_step = after_step
        self._after = after
        self._steps = 0

    @property
    def left(self) -> int:
        """Examples of the epoch that are still to be trained on."""
        return self._steps * self._counting.batch_size - self.position.examples

    @property
    def is_at_last_step(self) -> bool:
        return self.left <= self._counting.batch_size

    def epoch(self) -> Iterator[int]:
        """What is left of the present epoch: the number of each step, once for each of its passes."""
        if not self._before(self):
            return
        begun = self._current.updates - self.position.examples // self._counting.batch_size
        self._steps = min(self._counting.report_every, self._last - begun)
        try:
            while self.left > 0:
                number, layout = self._current.updates, self._current.base
                for share in layout.shares(layout.total):
                    self._current.share = share
                    yield number
                self.position.examples += layout.total
                self._after_step(self)
        finally:
            self._after()
