"""Where a run is: in which epoch, in which of its loops over a loader, and how much work that is."""

from __future__ import annotations

import time
from typing import Any

from stretto.torch.data import ElasticLoader, Position

_APART = 1_000_003
"""Shuffles of an epoch's loops are so far apart that they are never the same."""


class Course:
    """The place in the user's loops. A newcomer runs them from the top and skips what was done without it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.units = 0.0
        """Adaptive batch: steps at the initial batch that the work done so far is worth."""
        self.in_epoch = False
        self.loader: ElasticLoader | None = None
        self._loop = -1
        """Which of the epoch's loops over a loader is going on, or was last."""
        self._loops: dict[int, Position] = {}
        self._done_loops = -1
        """Loops of the epoch up to this one were over when this worker came."""
        self._mid_epoch = False
        """The state that was taken up lies within an epoch."""
        self._epoch_began_s: float | None = None

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
        self._epoch_began_s = None if self._mid_epoch else time.monotonic()
        self._mid_epoch = False

    def enter_loop(self, loader: ElasticLoader) -> None:
        self._loop += 1
        self.loader = loader

    def find_place(self, loader: ElasticLoader, *, adaptive: bool) -> bool:
        """Put the loader where this loop is; False if nothing is left of it."""
        if self._loop <= self._done_loops:
            return False
        saved = self._loops.get(self._loop)
        if saved is not None:
            loader.position = Position(saved.pass_number, saved.examples)
        elif not adaptive:
            loader.position = Position(self.epoch + _APART * self._loop)
        self._loops[self._loop] = loader.position
        return True

    def advance(self, loader: ElasticLoader) -> None:
        """A step is done."""
        self._loops[self._loop] = loader.position

    def is_over(self, loader: ElasticLoader, *, adaptive: bool) -> bool:
        """A plain run's epoch is one pass; an adaptive one's, the work of a pass at the initial batch."""
        if not adaptive:
            return loader.left == 0
        return self.units >= (self.epoch + 1) * _units_per_epoch(loader) - 1e-9

    def end_epoch(self, *, adaptive: bool) -> None:
        self.epoch += 1
        self.in_epoch = False
        self._loops, self._done_loops = {}, -1
        if adaptive and self.loader is not None:
            self._loops[0] = self.loader.position

    def progress(self, *, adaptive: bool) -> float:
        """Epochs done, the present one in part."""
        if self.loader is None:
            return float(self.epoch)
        if adaptive:
            return self.units / _units_per_epoch(self.loader)
        begun = self._loops.get(0) if self.in_epoch else None
        part = begun.examples / max(self.loader.source.examples, 1) if begun else 0.0
        return self.epoch + min(part, 1.0)

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "units": self.units,
            "in_epoch": self.in_epoch,
            "loop": self._loop,
            "loops": {loop: [at.pass_number, at.examples] for loop, at in self._loops.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.units = state["epoch"], state["units"]
        self._loops = {loop: Position(*at) for loop, at in state["loops"].items()}
        self._mid_epoch = state["in_epoch"]
        self._done_loops = state["loop"] - 1 if self._mid_epoch else -1


def _units_per_epoch(loader: ElasticLoader) -> float:
    return loader.source.examples / loader.source.batch_size
