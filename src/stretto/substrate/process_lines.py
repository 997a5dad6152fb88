"""The values of a report line, each checked as it is asked for."""

from __future__ import annotations

import math
from typing import Any

MOST_EPOCHS = 10**6
"""Nobody trains longer; what counts further counts something else."""
MOST_WORK = 1e15
"""Steps; every smaller number of them is exact."""
LONGEST_S = 1e9
"""Of a step."""
LARGEST_GRADIENT = 1e30
"""Of a squared norm, so that no sum of them overflows."""


class Line:
    """The values of one line; whatever is wrong with them is collected."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.problems: list[str] = []
        self.wrong = ""
        """Why its epoch or what it shows does not count, where people should know."""

    def has(self, key: str) -> bool:
        return key in self._values

    def gives(self, key: str) -> bool:
        """Whether it has the key with anything but null."""
        return self._values.get(key) is not None

    def shown(self, key: str) -> str:
        """What it has there, as people are told."""
        return repr(str(self._values[key])[:40])

    def number(self, key: str, rule: str, *, least: float = 0.0, most: float = math.inf) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        as_float = _as_float(value)
        if as_float is None or not math.isfinite(as_float) or not least <= as_float <= most:
            self.problems.append(f"{key} is {self.shown(key)}; it must be {rule}")
            return None
        return as_float

    def epoch(self) -> int | None:
        """Epochs that are completed; None, and `wrong`, if that makes no sense."""
        rule = f"a whole number from 0 to {MOST_EPOCHS}"
        epoch = self.number("epoch", rule, most=MOST_EPOCHS)
        if epoch is not None and epoch.is_integer():
            return int(epoch)
        if epoch is not None:
            self.problems.append(f"epoch is {self.shown('epoch')}; it must be {rule}")
        if self.gives("epoch"):
            self.wrong = self.problems[-1]
        return None

    def go_back(self, epoch: int, last: int) -> None:
        """Its epoch is one that the same start has passed."""
        self.wrong = f"epochs count up, and epoch {epoch} came after epoch {last}"
        self.problems.append("epochs that count down")

    def measured(self, key: str) -> tuple[float | None, ...]:
        """What was measured, None if it came out as no number; empty if it makes no sense."""
        value = self._values[key]
        as_float = _as_float(value)
        if as_float is None and value is not None:
            self.problems.append(f"{key} is {self.shown(key)}; it must be a number or null")
            return ()
        if isinstance(value, int) and as_float is not None and math.isinf(as_float):
            self.wrong = f"{key} is {self.shown(key)}, too large for a number, and counts as none"
            self.problems.append(self.wrong)
        return (as_float if as_float is not None and math.isfinite(as_float) else None,)


def _as_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
