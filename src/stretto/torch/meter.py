"""How long steps take, by configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from stretto.core.observations import SpeedSample
from stretto.torch.turn import Layout


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    seconds: float = 0.0
    sync_s: float = 0.0
    passes: int = 1


class SpeedMeter:
    """Adds up the time from one step boundary to the next.

    With p passes a step takes p * pass + sync, so that one pass and the wait come to
    (seconds - sync) / p + sync: what a step without accumulation would take.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._sums: dict[tuple[int, int, int, int], _Sum] = {}

    def skip(self) -> None:
        """What happens until the next boundary is not an ordinary step."""
        self._since_s = None

    def boundary(self, layout: Layout, nodes: int, sync_s: float, *, usual: bool) -> None:
        """A step is over; `usual` if it had the examples and passes that a step should have."""
        now_s = self._clock()
        since_s, self._since_s = self._since_s, now_s
        if since_s is None or not usual:
            return
        key = (nodes, layout.workers, layout.atomic, layout.passes)
        entry = self._sums.setdefault(key, _Sum(passes=layout.passes))
        entry.steps += 1
        entry.seconds += now_s - since_s
        entry.sync_s += min(sync_s, now_s - since_s)

    @property
    def steps(self) -> int:
        """Measured since the last `take`."""
        return sum(one.steps for one in self._sums.values())

    @property
    def step_s(self) -> float | None:
        """Mean time of a whole step of the newest configuration since the last `take`."""
        newest = list(self._sums.values())[-1:]
        return newest[0].seconds / newest[0].steps if newest and newest[0].steps else None

    def take(self) -> tuple[SpeedSample, ...]:
        """What was measured since the last time."""
        sums, self._sums = self._sums, {}
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
