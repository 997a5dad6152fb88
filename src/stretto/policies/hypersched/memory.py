"""What HyperSched remembers between decisions: rungs with scores, live trials, times of starts and epochs.

Each rung has a cut-off, the (1 - 1/eta) quantile of all scores recorded there. With `retrospective`, a trial
must reach the current cut-off of every rung it passed, so better trials that come later can push it below.
Without it, a trial must be among the best floor(n/eta) of its last rung, as in asynchronous halving.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from stretto.core.observations import Result
from stretto.policies.base import JobView, Memory
from stretto.search.halving import Rung, finite_score
from stretto.search.study import Study

KEPT = 16
"""How many of the newest epoch times on one GPU are kept, and speed-ups of each number of GPUs."""
KEPT_OF_TRIAL = 5
"""How many of a trial's own newest epoch times on one GPU are kept."""


@dataclass(slots=True)
class StudyMemory:
    """The memory of one study, as a copy that one decision changes."""

    rungs: Rungs
    heard: dict[str, list[int]] = field(default_factory=dict)
    """For each trial that reported: how many of its results and start times are included here."""
    live: dict[str, int] = field(default_factory=dict)
    """Trials that should run, and how many more results each must report before it may be resized."""
    starts_s: list[float] = field(default_factory=list)
    """How long starts and resizes took, ascending."""
    singles_s: list[float] = field(default_factory=list)
    """Newest epoch times on one GPU."""
    own_s: dict[str, list[float]] = field(default_factory=dict)
    """The same, by trial."""
    speedups: dict[str, list[float]] = field(default_factory=dict)
    """Newest speed-ups by number of GPUs: each compares an epoch with the same trial's epochs on one GPU.

    Trials differ in speed, so an epoch is never compared with another trial's.
    """
    longest_s: float = 0.0
    """The longest time any trial has held GPUs."""
    farthest: int = 0
    """The most epochs any trial has completed."""
    closed_for_s: float | None = None
    """The deadline for which admission is closed, as a newcomer has too little time; None: it is open."""

    @classmethod
    def load(cls, study: Study, *, retrospective: bool, memory: Memory) -> StudyMemory:
        """A copy of the memory, which itself stays unchanged."""
        remembered = memory or {"rungs": None}
        rungs = Rungs.load(study, retrospective=retrospective, memory=remembered["rungs"])
        return cls(rungs, **{name: copy(value) for name, value in remembered.items() if name != "rungs"})

    @property
    def admitting(self) -> bool:
        return self.closed_for_s is None

    def dump(self) -> dict[str, Any]:
        remembered = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**remembered, "rungs": self.rungs.dump()}

    def has_news(self, job: JobView) -> bool:
        heard = self.heard.get(job.job.id)
        return len(job.results) > (heard[0] if heard else 0)

    def read(self, job: JobView, study: Study, window: int) -> bool:
        """Add a trial's new results; False if it diverged."""
        trial = job.job.id
        results, starts = self.heard.get(trial, (0, 0))
        for start_s in job.start_times_s[starts:]:
            insort(self.starts_s, start_s)
        for place in range(results, len(job.results)):
            self._read_epoch(trial, job.results[place])
            score = mean_score(study, job.results[max(0, place + 1 - window) : place + 1], window)
            if score is None:
                self.rungs.record_diverged(trial)
                return False
            self.rungs.record(trial, job.results[place].epoch, score)
        self.heard[trial] = [len(job.results), len(job.start_times_s)]
        self.farthest = max(self.farthest, job.epoch)
        self.longest_s = max(self.longest_s, job.held_s)
        return True

    def forget(self, trial: str) -> None:
        """Drop a trial that is over; its scores at rungs stay."""
        self.heard.pop(trial, None)
        self.live.pop(trial, None)
        self.own_s.pop(trial, None)

    def single_epoch_s(self, believed_s: float) -> float:
        """The median epoch on one GPU; `believed_s` if none was measured."""
        return median(self.singles_s) if self.singles_s else believed_s

    def own_epoch_s(self, trial: str, believed_s: float) -> float:
        """The median epoch of a trial on one GPU; that of all trials if it has none."""
        own_s = self.own_s.get(trial)
        return median(own_s) if own_s else self.single_epoch_s(believed_s)

    def _read_epoch(self, trial: str, result: Result) -> None:
        if result.epoch_s is None:
            return
        own_s = self.own_s.get(trial, ())
        if result.workers == 1:
            self.singles_s = [*self.singles_s[1 - KEPT :], result.epoch_s]
            self.own_s[trial] = [*own_s[1 - KEPT_OF_TRIAL :], result.epoch_s]
        elif own_s:
            key = str(result.workers)
            self.speedups[key] = [*self.speedups.get(key, ())[1 - KEPT :], median(own_s) / result.epoch_s]


@dataclass(slots=True)
class Rungs:
    """All rungs of a study, the lowest first."""

    epochs: tuple[int, ...]
    eta: int
    retrospective: bool
    rungs: list[Rung]

    @classmethod
    def load(cls, study: Study, *, retrospective: bool, memory: Any) -> Rungs:
        """The rungs in the plain data that `dump` returns; None: nothing was recorded yet."""
        epochs = rung_epochs(study)
        if memory is None:
            return cls(epochs, study.eta, retrospective, [Rung([], []) for _ in epochs])
        return cls(epochs, study.eta, retrospective, [Rung.from_memory(rung) for rung in memory])

    def dump(self) -> list[Any]:
        return [{"trials": rung.trials, "scores": rung.scores} for rung in self.rungs]

    def record(self, trial: str, epoch: int, score: float) -> None:
        """Record a trial's score at every rung that it reached with this epoch."""
        for place, milestone in enumerate(self.epochs):
            if epoch < milestone:
                break
            self.rungs[place] = self.rungs[place].add(trial, score)

    def record_diverged(self, trial: str) -> None:
        """Record a diverged trial at its next rung, as the worst there."""
        place = self.last(trial) + 1
        if place < len(self.rungs):
            self.rungs[place] = self.rungs[place].add(trial, None)

    def last(self, trial: str) -> int:
        """The highest rung a trial reached; -1 before the first."""
        return max((place for place, rung in enumerate(self.rungs) if trial in rung.trials), default=-1)

    def fallen_at(self, trial: str) -> int | None:
        """The highest rung where a trial is below the cut-off; None if there is none."""
        for place in range(len(self.rungs) - 1, -1, -1):
            if trial in self.rungs[place].trials:
                if trial in self._below(place):
                    return place
                if not self.retrospective:
                    return None
        return None

    def fallen(self) -> set[str]:
        """Trials below the cut-off of some rung that they reached."""
        seen: set[str] = set()
        fallen: set[str] = set()
        for place in range(len(self.rungs) - 1, -1, -1):
            below = self._below(place)
            fallen.update(below if self.retrospective else (one for one in below if one not in seen))
            seen.update(self.rungs[place].trials)
        return fallen

    def holding(self) -> list[str]:
        """Trials at or above the cut-off of every rung they reached: the farthest first, then the best."""
        fallen = self.fallen()
        farthest_first = dict.fromkeys(trial for rung in reversed(self.rungs) for trial in rung.trials)
        return [trial for trial in farthest_first if trial not in fallen]

    def cutoff(self, place: int) -> float | None:
        """The score a trial needs at a rung; None while too few trials reached it to compare them."""
        rung = self.rungs[place]
        if self.retrospective:
            return rung.cutoff(self.eta)
        through = rung.going_on(self.eta)
        return rung.scores[len(through) - 1] if through else None

    def _below(self, place: int) -> list[str]:
        """The trials of a rung that are below its cut-off."""
        rung = self.rungs[place]
        if not self.retrospective:
            return list(rung.trials[len(rung.going_on(self.eta)) :])
        cut = rung.cutoff(self.eta)
        if cut is None:
            return []
        first = next((i for i, score in enumerate(rung.scores) if score is None or score < cut), len(rung))
        return list(rung.trials[first:])


def rung_epochs(study: Study) -> tuple[int, ...]:
    """The study's rungs, and further ones, each eta times as far, until one is beyond the last epoch."""
    epochs = list(study.rungs)
    while epochs and epochs[-1] <= study.max_epochs:
        epochs.append(epochs[-1] * study.eta)
    return tuple(epochs)


def mean_score(study: Study, results: Sequence[Result], window: int) -> float | None:
    """The mean score of the last `window` results; None if there are none or one is not a number."""
    scores = [finite_score(study, result.value) for result in results[-window:]]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None
