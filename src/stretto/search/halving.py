"""Successive halving: rungs, Hyperband's brackets, and promotion from a rung.

All classes here are immutable: recording a score returns a new object. Each has a plain JSON form.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from stretto.core.errors import InputError
from stretto.core.observations import Result
from stretto.search.study import Study

Spacing = Literal["geometric", "additive"]


def make_rungs(spacing: Spacing, *, min_epochs: int, eta: int, max_epochs: int) -> tuple[int, ...]:
    """Cumulative epochs of all comparisons before `max_epochs`.

    geometric: r, r eta, r eta^2, ..; additive: each stage is r eta^i epochs long, so r, r + r eta, ..
    """
    _check(min_epochs, eta)
    rungs: list[int] = []
    stage_epochs = reached = min_epochs
    while reached < max_epochs:
        rungs.append(reached)
        stage_epochs *= eta
        reached = stage_epochs if spacing == "geometric" else reached + stage_epochs
    return tuple(rungs)


def check_rungs(rungs: Sequence[int], max_epochs: int, *, where: str = "") -> tuple[int, ...]:
    """Rungs as written, if they ascend from 1 or more and end below `max_epochs`."""
    last = 0
    for rung in rungs:
        if not last < rung < max_epochs:
            raise InputError(
                f"rung {rung} does not lie above {last} and below max_epochs {max_epochs}.",
                where=where,
                remedy="Write cumulative epochs in ascending order.",
            )
        last = rung
    return tuple(rungs)


def halving_epochs(trials: int, *, min_epochs: int, eta: int) -> int:
    """Cumulative epochs of SHA(n, r, eta) with additive rungs, up to the end of its last survivor.

    Stage i has n / eta^i trials, rounded down, for r eta^i more epochs.
    """
    _check(min_epochs, eta)
    stage_epochs = reached = min_epochs
    while trials > 1:
        trials //= eta
        stage_epochs *= eta
        reached += stage_epochs
    return reached


class Bracket(NamedTuple):
    """A part of a study's trials, and the rung where they are first compared."""

    trials: int
    first_rung: int
    """Index in the study's rungs. If it is their number, trials are never compared and train to the end."""


def hyperband_brackets(rungs: Sequence[int], eta: int, trials: int | None = None) -> tuple[Bracket, ...]:
    """Hyperband's brackets, those with the most comparisons first.

    A bracket with s comparisons has ceil((K + 1) / (s + 1) eta^s) trials, where K is the number of rungs.
    With `trials`, this many are shared out in these proportions; brackets that get none are left out.
    """
    most = len(rungs)
    sizes = [-(-(most + 1) * eta**ahead // (ahead + 1)) for ahead in range(most, -1, -1)]
    if trials is not None:
        sizes = _share(trials, sizes)
    return tuple(Bracket(size, index) for index, size in enumerate(sizes) if size)


def _share(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of `total` in proportion, the largest remainders rounded up first."""
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _check(min_epochs: int, eta: int) -> None:
    if min_epochs < 1 or eta < 2:
        raise InputError(
            f"rungs cannot start at {min_epochs} epochs and grow by a factor of {eta}.",
            remedy="min_epochs is 1 or more, eta 2 or more.",
        )


def finite_score(study: Study, value: float | None) -> float | None:
    """The metric, with its sign changed if less is better; None if it is not a finite number."""
    return study.score(value) if value is not None and math.isfinite(value) else None


def score_at(study: Study, results: Sequence[Result], epoch: int) -> float | None:
    """The score of the first result at or past an epoch; None if there is none or it is not a number."""
    place = bisect_left(results, epoch, key=lambda result: result.epoch)
    return finite_score(study, results[place].value) if place < len(results) else None


def order(score: float | None, trial: str) -> tuple[bool, float, str]:
    """Sort key: the best first, missing scores last, equal ones by id."""
    return (True, 0.0, trial) if score is None else (False, -score, trial)


@dataclass(frozen=True, slots=True)
class Rung:
    """The trials that reached a rung and their scores there, the best first."""

    trials: list[str] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.trials)

    def add(self, trial: str, score: float | None) -> Rung:
        """The rung with one more record; a recorded trial keeps its first score."""
        if trial in self.trials:
            return self
        place = bisect_left(
            range(len(self)), order(score, trial), key=lambda i: order(self.scores[i], self.trials[i])
        )
        return Rung(
            [*self.trials[:place], trial, *self.trials[place:]],
            [*self.scores[:place], score, *self.scores[place:]],
        )

    def best(self, count: int) -> Sequence[str]:
        """The best `count` trials; fewer if fewer have a score."""
        while count and self.scores[count - 1] is None:
            count -= 1
        return self.trials[:count]

    def going_on(self, eta: int) -> Sequence[str]:
        """The best floor(n / eta) of the n trials that reached the rung so far."""
        return self.best(len(self) // eta)

    def cutoff(self, eta: int) -> float | None:
        """The (1 - 1/eta) quantile of the scores, linear between two scores; None if there are less than two.

        If the lower of the two is missing, the quantile is the upper one.
        """
        if len(self) < 2:
            return None
        place = (len(self) - 1) / eta  # counted from the best
        above, part = int(place), place - int(place)
        high, low = self.scores[above], self.scores[min(above + 1, len(self) - 1)]
        if high is None or low is None or part == 0.0:
            return high
        return high * (1.0 - part) + low * part

    def rank(self, trial: str) -> int:
        """A trial's rank; 1 is the best."""
        return self.trials.index(trial) + 1

    def score(self, trial: str) -> float | None:
        return self.scores[self.rank(trial) - 1]

    def to_memory(self) -> dict[str, Any]:
        return {"trials": self.trials, "scores": self.scores}

    @classmethod
    def from_memory(cls, memory: Mapping[str, Any]) -> Rung:
        return cls(memory["trials"], memory["scores"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving:
    """Synchronous halving: all trials of a stage reach its rung before the best are promoted."""

    rungs: Sequence[int]
    """Cumulative epochs of the remaining comparisons; without any, members train to the end."""
    size: int
    """The number of trials in the current stage once all have joined."""
    members: Sequence[str] = ()
    """The trials of the current stage, in order of service."""
    rung: Rung = Rung()
    """The trials that have ended the stage."""

    @property
    def is_full(self) -> bool:
        return len(self.members) >= self.size

    @property
    def racing(self) -> list[str]:
        """Members that have not ended the stage."""
        ended = set(self.rung.trials)
        return [trial for trial in self.members if trial not in ended]

    def join(self, trial: str) -> Halving:
        return replace(self, members=[*self.members, trial])

    def record(self, trial: str, score: float | None) -> Halving:
        return replace(self, rung=self.rung.add(trial, score))

    def survivors(self, eta: int) -> int:
        """How many trials of the stage are promoted: one in eta, at least one."""
        return max(len(self.rung) // eta, 1)

    def lost(self, eta: int) -> Sequence[str]:
        """Trials that will not be promoted, whatever the other trials of the stage score."""
        return self.rung.trials[max(self.size // eta, 1) :]

    def next_stage(self, eta: int) -> Halving:
        """The stage of the promoted trials: up to the next rung; a single trial trains to the end."""
        kept = self.rung.best(self.survivors(eta))
        return Halving(rungs=self.rungs[1:] if len(kept) > 1 else (), size=len(kept), members=kept)

    def to_memory(self) -> dict[str, Any]:
        return {
            "rungs": list(self.rungs),
            "size": self.size,
            "members": list(self.members),
            "rung": self.rung.to_memory(),
        }

    @classmethod
    def from_memory(cls, memory: Mapping[str, Any]) -> Halving:
        return cls(
            rungs=memory["rungs"],
            size=memory["size"],
            members=memory["members"],
            rung=Rung.from_memory(memory["rung"]),
        )


def open_halving(rungs: Sequence[int], size: int) -> Halving:
    """Halving of `size` trials that have not joined yet. A single trial is never compared."""
    return Halving(rungs=rungs if size > 1 else (), size=size)


def promotable(rungs: Sequence[Rung], paused: Mapping[str, int], eta: int) -> list[str]:
    """Paused trials that are now among the best floor(n / eta) of their rung, the highest rung first.

    `paused` has the index of each trial's rung.
    """
    found: list[str] = []
    for at in range(len(rungs) - 1, -1, -1):
        found += _paused_at(at, rungs[at].going_on(eta), paused)
    return found


def _paused_at(at: int, best_first: Sequence[str], paused: Mapping[str, int]) -> list[str]:
    """The trials of `best_first` that are paused at a rung, in the same order."""
    somewhere = paused.keys() & best_first  # most trials of a rung are over, so no loop over all of them
    return [trial for trial in best_first if trial in somewhere and paused[trial] == at] if somewhere else []


def hopeless(
    rungs: Sequence[Rung], paused: Mapping[str, int], passed: Mapping[str, int], to_come: int, eta: int
) -> dict[str, int]:
    """Paused trials that can no longer be promoted, even if all trials still to reach their rung do worse.

    `passed` has the number of rungs that each live trial was recorded at; `to_come` more trials may be drawn.
    For each of these trials the result has the most trials that can be promoted from its rung.
    """
    lost: dict[str, int] = {}
    for at, rung in enumerate(rungs):
        below = sum(count <= at for trial, count in passed.items() if trial not in lost)
        most = (len(rung) + below + to_come) // eta
        lost.update(dict.fromkeys(_paused_at(at, rung.trials[most:], paused), most))
    return lost
