"""A loop that counts steps, for code that gets its data without an elastic loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.torch.data import Position, Source
from stretto.torch.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """How a run counts its steps."""

    batch_size: int
    """Examples of a step, over all workers."""
    report_every: int
    """Steps of an epoch: after these, what was reported counts."""

    @property
    def source(self) -> Source:
        """An epoch as data: the numbers of its examples."""
        numbers = range(self.report_every * self.batch_size)
        return Source(dataset=numbers, batch_size=self.batch_size, shuffle=False)  # type: ignore[arg-type]


class StepLoop:
    """The steps of one epoch after the other, as an elastic loader gives batches.

    `before(loop)` is asked when an epoch's steps begin: False if they were over when this worker came.
    `after_step(loop)` is told when a step is complete, and `after()` when the epoch's steps are over.
    """

    def __init__(
        self,
        counting: Counting,
        last: int,
        turn: Turn,
        *,
        before: Callable[[StepLoop], bool],
        after_step: Callable[[StepLoop], object],
        after: Callable[[], None],
    ) -> None:
        self.source = counting.source
        self.position = Position()
        self.asked_length = False
        self._counting = counting
        self._last = last
        """Where training ends, in steps."""
        self._turn = turn
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
        begun = self._turn.updates - self.position.examples // self._counting.batch_size
        self._steps = min(self._counting.report_every, self._last - begun)
        try:
            while self.left > 0:
                number, layout = self._turn.updates, self._turn.base
                for share in layout.shares(layout.total):
                    self._turn.share = share
                    yield number
                self.position.examples += layout.total
                self._after_step(self)
        finally:
            self._after()
