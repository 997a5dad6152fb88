"""What HyperSched remembers between decisions: rungs, who is to run, what starts and epochs took."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from stretto.core.observations import Result
from stretto.policies.base import JobView, Memory
from stretto.policies.hypersched_rungs import Rungs
from stretto.search.halving import finite_score
from stretto.search.study import Study

KEPT = 16
"""So many epoch times on one GPU are kept, and so many speed-ups of each number of GPUs, the newest."""
KEPT_OF_TRIAL = 5
"""So many of a trial's own epoch times on one GPU are kept, the newest."""


@dataclass(slots=True)
class Notes:
    """The memory of a study in progress, open for one decision."""

    rungs: Rungs
    heard: dict[str, list[int]]
    """Of each trial that has shown something: how many results and start times were taken in."""
    live: dict[str, int]
    """Trials that are to run, and how many more results each must show before it may be resized."""
    starts_s: list[float]
    """What starts and resizes took, ascending."""
    singles_s: list[float]
    """Newest epoch times on one GPU."""
    own_s: dict[str, list[float]]
    """The same of each trial."""
    speedups: dict[str, list[float]]
    """Newest speed-ups by number of GPUs: of each epoch over the same trial's on one GPU.

    Trials differ in speed, so that the epochs of one say nothing about the scaling of another.
    """
    longest_s: float
    """The longest time any trial has held GPUs."""
    farthest: int
    """The most epochs any trial has shown."""
    closed_for_s: float | None
    """The deadline before which a newcomer would have too little time; None: the door is open."""

    @classmethod
    def load(cls, study: Study, *, retrospective: bool, memory: Memory) -> Notes:
        """A copy of what was remembered; the memory itself stays as it is."""
        if memory is None:
            rungs = Rungs.load(study, retrospective=retrospective, memory=None)
            return cls(rungs, {}, {}, [], [], {}, {}, 0.0, 0, closed_for_s=None)
        return cls(
            rungs=Rungs.load(study, retrospective=retrospective, memory=memory["rungs"]),
            heard=dict(memory["heard"]),
            live=dict(memory["live"]),
            starts_s=list(memory["starts_s"]),
            singles_s=memory["singles_s"],
            own_s=dict(memory["own_s"]),
            speedups=dict(memory["speedups"]),
            longest_s=memory["longest_s"],
            farthest=memory.get("farthest", 0),  # unknown to a run that an earlier version began
            closed_for_s=memory["closed_for_s"],
        )

    @property
    def admitting(self) -> bool:
        return self.closed_for_s is None

    def dump(self) -> dict[str, Any]:
        return {
            "rungs": self.rungs.dump(),
            "heard": self.heard,
            "live": self.live,
            "starts_s": self.starts_s,
            "singles_s": self.singles_s,
            "own_s": self.own_s,
            "speedups": self.speedups,
            "longest_s": self.longest_s,
            "farthest": self.farthest,
            "closed_for_s": self.closed_for_s,
        }

    def has_news(self, job: JobView) -> bool:
        heard = self.heard.get(job.job.id)
        return len(job.results) > (heard[0] if heard else 0)

    def hear(self, job: JobView, study: Study, window: int) -> bool:
        """Take in a trial's new results; False if it diverged."""
        trial = job.job.id
        results, starts = self.heard.get(trial, (0, 0))
        for start_s in job.start_times_s[starts:]:
            insort(self.starts_s, start_s)
        for place in range(results, len(job.results)):
            self._hear_epoch(trial, job.results[place])
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
        """A trial is over; what it showed at rungs stays."""
        self.heard.pop(trial, None)
        self.live.pop(trial, None)
        self.own_s.pop(trial, None)

    def single_epoch_s(self, believed_s: float) -> float:
        """The median epoch on one GPU; what is believed, if none was seen."""
        return median(self.singles_s) if self.singles_s else believed_s

    def own_epoch_s(self, trial: str, believed_s: float) -> float:
        """The median epoch of a trial on one GPU; that of all trials, if it showed none."""
        own_s = self.own_s.get(trial)
        return median(own_s) if own_s else self.single_epoch_s(believed_s)

    def _hear_epoch(self, trial: str, result: Result) -> None:
        if result.epoch_s is None:
            return
        own_s = self.own_s.get(trial, ())
        if result.workers == 1:
            self.singles_s = [*self.singles_s[1 - KEPT :], result.epoch_s]
            self.own_s[trial] = [*own_s[1 - KEPT_OF_TRIAL :], result.epoch_s]
        elif own_s:
            key = str(result.workers)
            self.speedups[key] = [*self.speedups.get(key, ())[1 - KEPT :], median(own_s) / result.epoch_s]


def mean_score(study: Study, results: Sequence[Result], window: int) -> float | None:
    """The mean score of the last `window` results; None if there are none or one is not a number."""
    scores = [finite_score(study, result.value) for result in results[-window:]]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None
