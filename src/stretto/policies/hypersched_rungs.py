"""HyperSched's rungs: what every trial showed when it first came to each, and who holds its own.

Retrospective: a trial that passed a rung is held to that rung's present cut-off, the (1 - 1/eta) quantile
of all that was recorded there, so that a better cohort can still push it below. Otherwise a trial must be
among the best floor(n/eta) of the last rung it came to, as in asynchronous halving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stretto.search.halving import Rung
from stretto.search.study import Study


def rung_epochs(study: Study) -> tuple[int, ...]:
    """The study's rungs and, eta times as far each, further ones until one lies beyond the last epoch."""
    epochs = list(study.rungs)
    while epochs and epochs[-1] <= study.max_epochs:
        epochs.append(epochs[-1] * study.eta)
    return tuple(epochs)


@dataclass(slots=True)
class Rungs:
    """All rungs of a study, the lowest first."""

    epochs: tuple[int, ...]
    eta: int
    retrospective: bool
    rungs: list[Rung]

    @classmethod
    def load(cls, study: Study, *, retrospective: bool, memory: Any) -> Rungs:
        """From plain data as `dump` gives it; None: nothing was recorded yet."""
        epochs = rung_epochs(study)
        if memory is None:
            return cls(epochs, study.eta, retrospective, [Rung([], []) for _ in epochs])
        return cls(epochs, study.eta, retrospective, [Rung.from_memory(rung) for rung in memory])

    def dump(self) -> list[Any]:
        return [{"trials": rung.trials, "scores": rung.scores} for rung in self.rungs]

    def record(self, trial: str, epoch: int, score: float) -> None:
        """Note a trial's score at every rung it has come to for the first time."""
        for place, milestone in enumerate(self.epochs):
            if epoch < milestone:
                break
            self.rungs[place] = self.rungs[place].add(trial, score)

    def record_diverged(self, trial: str) -> None:
        """Count a trial among those of the next rung, which it will not see."""
        place = self.last(trial) + 1
        if place < len(self.rungs):
            self.rungs[place] = self.rungs[place].add(trial, None)

    def last(self, trial: str) -> int:
        """The highest rung a trial came to; -1 before the first."""
        return max((place for place, rung in enumerate(self.rungs) if trial in rung.trials), default=-1)

    def fallen_at(self, trial: str) -> int | None:
        """The highest rung at which a trial does not hold its own; None if there is none."""
        for place in range(len(self.rungs) - 1, -1, -1):
            if trial in self.rungs[place].trials:
                if trial in self._below(place):
                    return place
                if not self.retrospective:
                    return None
        return None

    def fallen(self) -> set[str]:
        """Trials that do not hold their own at some rung they came to."""
        seen: set[str] = set()
        fallen: set[str] = set()
        for place in range(len(self.rungs) - 1, -1, -1):
            below = self._below(place)
            fallen.update(below if self.retrospective else (one for one in below if one not in seen))
            seen.update(self.rungs[place].trials)
        return fallen

    def holding(self) -> list[str]:
        """Trials that hold their own at every rung they came to, the farthest first, then the best there."""
        fallen = self.fallen()
        farthest_first = dict.fromkeys(trial for rung in reversed(self.rungs) for trial in rung.trials)
        return [trial for trial in farthest_first if trial not in fallen]

    def cutoff(self, place: int) -> float | None:
        """What a trial must have shown at a rung; None: nobody is cut, or, looking ahead only, all are."""
        rung = self.rungs[place]
        if self.retrospective:
            return rung.cutoff(self.eta)
        through = rung.going_on(self.eta)
        return rung.scores[len(through) - 1] if through else None

    def _below(self, place: int) -> list[str]:
        """The trials of a rung that do not hold their own there."""
        rung = self.rungs[place]
        if not self.retrospective:
            return list(rung.trials[len(rung.going_on(self.eta)) :])
        cut = rung.cutoff(self.eta)
        if cut is None:
            return []
        first = next((i for i, score in enumerate(rung.scores) if score is None or score < cut), len(rung))
        return list(rung.trials[first:])
