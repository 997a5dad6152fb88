"""How far a run has got: its epoch, its place in each loop, and the work done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Protocol

from stretto.torch.data import DataPosition, DataSource
from stretto.torch.step_layout import CurrentStep

_APART = 1_000_003
"""Pass numbers of one epoch's loops differ by this much, so that no two shuffles are equal."""
_ROUNDING = 1e-6
_BESIDE = 1_000
"""Loops beside a leading one are numbered from here on."""


class DataLoop(Protocol):
    """A loop over data: an elastic loader's, or that of `run.steps`."""

    position: DataPosition
    asked_length: bool
    """Whether the user's code called len() within the loop."""

    @property
    def source(self) -> DataSource: ...

    @property
    def left(self) -> int:
        """Examples left in the current pass."""


class TrainingProgress:
    """The place in the user's loops. A new worker runs the loops from the top and skips what is done.

    Usually a loop is one pass over the data. With an adaptive batch, the epoch's first loop over the adaptive
    data source is longer or shorter: it does as much work as one pass at the initial batch size. The next
    epoch continues in the data where this loop ended.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.units = 0.0
        """With an adaptive batch: the work done, in steps at the initial batch size."""
        self.in_epoch = False
        self.counted: DataSource | None = None
        """The adaptive data source, if there is one."""
        self.counts = False
        """Whether the current loop is the epoch's adaptive one."""
        self._has_counted = False
        """Whether the epoch's adaptive loop has begun."""
        self._counted_at: DataPosition | None = None
        """The position in the adaptive data source."""
        self._first: DataSource | None = None
        """The data source of the epoch's first loop."""
        self.loop = -1
        """The number of the epoch's current or latest loop over a loader."""
        self._loops: dict[int, DataPosition] = {}
        self._done_loops = -1
        """The epoch's loops up to this number were finished before this worker joined."""
        self._beside: dict[int, DataPosition] = {}
        """Positions of the loops beside the leading one, by the numbers of their loaders."""
        self._begun_beside = 0
        """Loops beside others that this epoch has had."""
        self._mid_epoch = False
        """Whether the restored state lies within an epoch."""
        self._epoch_began_s: float | None = None

    @property
    def epoch_s(self) -> float | None:
        """Seconds since the current epoch began; None if it was interrupted."""
        return None if self._epoch_began_s is None else time.monotonic() - self._epoch_began_s

    def interrupt(self) -> None:
        """Do not time this epoch: a resize has disturbed it."""
        self._epoch_began_s = None

    def begin_epoch(self) -> None:
        self.in_epoch = True
        self.loop = -1
        self._has_counted = False
        self._epoch_began_s = None if self._mid_epoch else time.monotonic()
        self._mid_epoch = False

    def enter_loop(self, loader: DataLoop) -> None:
        self.loop += 1
        if self.loop == 0:
            self._first = loader.source
        self.counts = loader.source is self.counted and not self._has_counted
        self._has_counted = self._has_counted or self.counts

    def find_place(self, loader: DataLoop) -> bool:
        """Set the loader's position for this loop; False if the loop is already finished."""
        if self.loop <= self._done_loops:
            return False
        begun = self._counted_at if self.counts else self._loops.get(self.loop)
        if begun is not None:
            loader.position = DataPosition(begun.pass_number, begun.examples)
        elif self.counts:
            loader.position = DataPosition()
        else:
            loader.position = DataPosition(self.epoch + _APART * self.loop)
        self.advance(loader)
        return True

    def enter_beside(self, number: int, loader: DataLoop) -> None:
        """A loop begins or resumes beside the leading one."""
        if number not in self._beside:
            self._beside[number] = DataPosition(self.epoch + _APART * (_BESIDE + self._begun_beside))
            self._begun_beside += 1
        loader.position = self._beside[number]

    def leave_beside(self, number: int) -> None:
        self._beside.pop(number, None)

    def advance(self, loader: DataLoop) -> None:
        """Record the loader's position after a step."""
        if self.counts:
            self._counted_at = loader.position
        else:
            self._loops[self.loop] = loader.position

    def is_over(self, loader: DataLoop) -> bool:
        if not self.counts:
            return loader.left == 0
        return self.units >= (self.epoch + 1) * _units_per_epoch(loader.source) - 1e-9

    def steps_by(self, worth: float) -> int:
        """How many scheduler steps `worth` more work completes; as many per epoch as at the initial batch."""
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
            # If the user's code ended the epoch early, the next epoch does not make up for it.
            self.units = max(self.units, self.epoch * _units_per_epoch(self.counted))

    @property
    def examples(self) -> int:
        """Examples done by the epoch's first loop."""
        begun = self._loops.get(0)
        return 0 if begun is None else begun.examples

    @property
    def has_looped(self) -> bool:
        """Whether this epoch has had a loop over a loader."""
        return self.loop >= 0

    @property
    def epochs_done(self) -> float:
        """Epochs done, with the done part of the current one."""
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
            "loop": self.loop,
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
    """The arguments of `run.steps`."""

    batch_size: int
    """Examples of a step, over all workers."""
    report_every: int
    """Steps of an epoch."""

    @property
    def source(self) -> DataSource:
        """One epoch as a data source: the numbers of its examples."""
        numbers = range(self.report_every * self.batch_size)
        return DataSource(dataset=numbers, batch_size=self.batch_size, shuffle=False)  # type: ignore[arg-type]


class StepLoop:
    """The steps of one epoch of `run.steps`. The engine passes in these callbacks:

    `before(loop)` runs when the epoch's steps begin; False if they were finished before this worker joined.
    `after_step(loop)` runs after each complete step, `after()` when the epoch's steps are over.
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
        """The number of steps at which training ends."""
        self._current = current
        self._before = before
        self._after_step = after_step
        self._after = after
        self._steps = 0

    @property
    def left(self) -> int:
        """Examples left in the epoch."""
        return self._steps * self._counting.batch_size - self.position.examples

    @property
    def is_at_last_step(self) -> bool:
        return self.left <= self._counting.batch_size

    def epoch(self) -> Iterator[int]:
        """The rest of the epoch: yields the number of each step, once per pass."""
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
