"""A study: trials of one training script, compared at rungs, to find the best model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Direction(StrEnum):
    """Whether a larger or a smaller metric is better."""

    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The trials to tune, and the epochs at which they are compared."""

    name: str
    metric: str
    direction: Direction
    trials: int
    """At most this many are drawn."""
    rungs: tuple[int, ...]
    """Cumulative epochs at which trials are compared: ascending, all below `max_epochs`."""
    eta: int
    """One trial in `eta` is promoted at a rung."""
    max_epochs: int
    """A trial is fully trained after this many."""

    def score(self, value: float | None) -> float:
        """The metric, with its sign changed if less is better; the worst score if it is not a number."""
        if value is None:
            return float("-inf")
        return value if self.direction is Direction.MAX else -value

    def value_of(self, score: float) -> float:
        """The metric of a score."""
        return score if self.direction is Direction.MAX else -score


@dataclass(frozen=True, slots=True)
class Stage:
    """The epochs between two comparisons, and the number of trials that train in them."""

    first_epoch: int
    last_epoch: int
    trials: int

    @property
    def epochs(self) -> int:
        return self.last_epoch - self.first_epoch + 1


def halving_stages(study: Study, trials: int | None = None) -> tuple[Stage, ...]:
    """Successive halving: one in eta of the trials of a stage is promoted to the next.

    A single trial needs no comparison, so its stage runs to the last epoch.
    """
    left = study.trials if trials is None else trials
    stages: list[Stage] = []
    begin = 0
    for rung in study.rungs:
        if left == 1:
            break
        stages.append(Stage(begin + 1, rung, left))
        begin, left = rung, max(left // study.eta, 1)
    return (*stages, Stage(begin + 1, study.max_epochs, left))
