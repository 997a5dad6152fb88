"""Synchronous successive halving (SHA): when all trials of a stage reach its rung, one in eta is promoted.

If a stage has more trials than GPUs, they take turns. Spare GPUs stay free, or are shared among the trials
that start (`share`). A trial changes its size only when a stage begins. With `sized`, the study is limited to
the most trials whose halving is expected to end by the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stretto.core.cluster import Node
from stretto.core.decision import Decision
from stretto.core.errors import InputError
from stretto.core.units import counted
from stretto.planning.tuning import Tuning
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.trials import (
    Share,
    TrialPolicy,
    decide_counts,
    is_diverged,
    metric_text,
    most_useful_gpus,
    quiet_note,
    share_out,
    share_with_unseen,
    why_waits,
    within,
)
from stretto.search.halving import Bracket, Halving, open_halving, score_at
from stretto.search.study import halving_stages


@dataclass(frozen=True, kw_only=True)
class Sha(TrialPolicy):
    """Synchronous successive halving."""

    name: ClassVar[str] = "sha"
    sized: bool = False
    """Whether to draw only as many trials as are expected to end by the deadline."""

    def __post_init__(self) -> None:
        if self.sized and self.tuning.limits.deadline_s is None:
            raise InputError(
                "sha.sized=true needs a deadline to size the study for.", remedy="Give one: --deadline 2h."
            )

    def decide_trials(self, trials: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        if memory is None:
            memory = no_halving(self._limit(trials))
        return SynchronousTurn(self, trials, memory, (Bracket(memory["limit"], 0),)).decide()

    def _limit(self, view: ClusterView) -> int:
        if not self.sized:
            return self.tuning.study.trials
        return fitting_trials(self.tuning, view.nodes, view.now_s, self.share)


def fitting_trials(tuning: Tuning, nodes: Sequence[Node], now_s: float, share: Share) -> int:
    """The most trials whose halving is expected to end by the deadline; at least one."""
    deadline_s = tuning.limits.deadline_s
    assert deadline_s is not None
    gpus = sum(node.gpus for node in nodes)
    speeds = {instance.name: instance.speed for instance in tuning.instances}
    left_s = (deadline_s - now_s) * min(speeds.get(node.instance, 1.0) for node in nodes)
    fits, too_many = 1, tuning.study.trials + 1
    while too_many - fits > 1:  # more trials never take less time
        trials = (fits + too_many) // 2
        if believed_s(tuning, trials, gpus, share) <= left_s:
            fits = trials
        else:
            too_many = trials
    return fits


def believed_s(tuning: Tuning, trials: int, gpus: int, share: Share) -> float:
    """The expected time of halving this many trials; every trial starts again in every stage."""
    profile, most = tuning.profile, most_useful_gpus(tuning, gpus)
    total_s = 0.0
    for stage in halving_stages(tuning.study, trials):
        waves = -(-stage.trials // gpus)
        places = [str(place) for place in range(min(stage.trials, gpus))]
        least = min(share_out(places, gpus, most, share).values())
        train_s = stage.epochs * profile.latency.epoch_s / profile.scaling.speedup(least)
        total_s += waves * (profile.start_s + train_s)
    return total_s


def no_halving(limit: int) -> dict[str, Any]:
    """The memory before any trial has started; at most `limit` trials will."""
    return {"limit": limit, "begun": 0, "opened": 0, "halvings": []}


class SynchronousTurn:
    """One decision: results are recorded, complete stages are followed by the next, free GPUs are used.

    Brackets are opened in order, again and again, each when those before it have all their trials.
    """

    def __init__(
        self, policy: TrialPolicy, view: ClusterView, memory: Memory, brackets: Sequence[Bracket]
    ) -> None:
        self._view = view
        self._tuning = policy.tuning
        self._study = policy.tuning.study
        self._brackets = brackets
        self._share = policy.share
        self._limit: int = memory["limit"]
        self._begun: int = memory["begun"]
        self._opened: int = memory["opened"]
        self._halvings = [Halving.from_memory(one) for one in memory["halvings"]]
        self._trials = {job.id: job for job in view.jobs}
        self._here = {*self._trials, *view.paused}
        self._stops: dict[str, str] = {}
        self._why: dict[str, str] = {}
        self._moving_on: set[str] = set()
        """Trials whose stage begins now, so that they may change their size."""
        members = {trial for halving in self._halvings for trial in halving.members}
        self._fresh = [trial for trial in self._trials if trial not in members]

    def decide(self) -> tuple[Decision, dict[str, Any]]:
        self._turn_away()
        self._halvings = [after for one in self._halvings if (after := self._advance(one)) is not None]
        counts = self._counts()
        for job in self._view.including(counts).jobs:
            self._why.setdefault(job.id, self._otherwise(job, counts))
        watch = {
            trial: halving.rungs[0] if halving.rungs else self._study.max_epochs
            for halving in self._halvings
            for trial in halving.members
            if trial in counts
        }
        memory = {
            "limit": self._limit,
            "begun": self._begun,
            "opened": self._opened,
            "halvings": [halving.to_memory() for halving in self._halvings],
            "quiet": quiet_note(self._view, self._stops, watch),
        }
        return decide_counts(self._view, counts, self._why, stops=self._stops), memory

    def _turn_away(self) -> None:
        """Stop trials beyond the limit, which ends the drawing of more."""
        wanted = self._limit - self._begun
        for trial in self._fresh[wanted:]:
            self._stops[trial] = f"The study is limited to {self._limit} trials, which have all begun."
        del self._fresh[wanted:]

    def _advance(self, halving: Halving) -> Halving | None:
        """Record results and begin the next stage if the current one is complete; None if halving is over."""
        while True:
            halving = self._record(halving)
            complete = not halving.racing and (halving.is_full or not self._fresh)
            if not complete:
                self._give_up_lost(halving)
                return halving
            if not halving.rungs:
                return None
            halving = self._next_stage(halving)
            if not halving.members:
                return None

    def _record(self, halving: Halving) -> Halving:
        for trial in halving.racing:
            job = self._trials.get(trial)
            if job is None and trial in self._here:
                if trial not in self._moving_on:
                    continue  # it has reported nothing since the last decision
                job = self._view.paused[trial]
            if job is None:
                halving = halving.record(trial, None)
            elif is_diverged(job):
                self._stops[trial] = f"Its metric is not a number after epoch {job.epoch}."
                halving = halving.record(trial, None)
            elif halving.rungs and job.epoch >= halving.rungs[0]:
                score = score_at(self._study, job.results, halving.rungs[0])
                halving = halving.record(trial, score)
                self._why[trial] = (
                    f"At epoch {halving.rungs[0]} with {metric_text(self._study, score)}; "
                    "it waits for the other trials of its stage."
                )
        return halving

    def _give_up_lost(self, halving: Halving) -> None:
        most = max(halving.size // self._study.eta, 1)
        for trial in halving.lost(self._study.eta):
            if trial in self._here and trial not in self._stops:
                self._stops[trial] = self._standing(halving, trial, most)

    def _next_stage(self, halving: Halving) -> Halving:
        after = halving.next_stage(self._study.eta)
        for trial in halving.rung.trials:
            if trial not in self._here or trial in self._stops:
                continue
            text = self._standing(halving, trial, halving.survivors(self._study.eta))
            if trial in after.members:
                self._why[trial] = text
            else:
                self._stops[trial] = text
        self._moving_on.difference_update(halving.members)
        self._moving_on.update(after.members)
        return after

    def _standing(self, halving: Halving, trial: str, most: int) -> str:
        rung = halving.rung
        return (
            f"Rank {rung.rank(trial)} of {len(rung)} at epoch {halving.rungs[0]} with "
            f"{metric_text(self._study, rung.score(trial))}; {most} of {halving.size} are promoted."
        )

    def _counts(self) -> dict[str, int]:
        """GPUs of each trial: trials within a stage keep theirs, and older brackets come first."""
        held = {job.id: job.allocation.worker_count for job in self._view.jobs if job.allocation}
        racing = [trial for halving in self._halvings for trial in halving.racing]
        staying = [trial for trial in racing if trial in held and trial not in self._moving_on]
        gpus = self._view.total_gpus
        counts = within(gpus, {trial: held[trial] for trial in staying})
        free = gpus - sum(counts.values())
        starting = [trial for trial in racing if trial not in counts]
        starting += self._join(free - len(starting))
        unseen = self._limit - self._begun - len(self._fresh)
        return counts | share_with_unseen(self._tuning, starting, unseen, free, self._share)

    def _join(self, seats: int) -> list[str]:
        """Add this many new trials, opening brackets as needed."""
        joining = self._fresh[: max(seats, 0)]
        del self._fresh[: len(joining)]
        for trial in joining:
            self._begun += 1
            place = next((i for i, halving in enumerate(self._halvings) if not halving.is_full), None)
            if place is None:
                self._open()
                place = len(self._halvings) - 1
            self._halvings[place] = self._halvings[place].join(trial)
            self._why[trial] = f"Trial {self._begun} of {self._limit}: a slot is free for it."
        return joining

    def _open(self) -> None:
        bracket = self._brackets[self._opened % len(self._brackets)]
        left = self._limit - self._begun + 1
        self._halvings.append(
            open_halving(self._study.rungs[bracket.first_rung :], min(bracket.trials, left))
        )
        self._opened += 1

    def _otherwise(self, job: JobView, counts: dict[str, int]) -> str:
        if job.id not in counts:
            if job.allocation:
                return "There are fewer slots than running trials."
            return why_waits(job)
        if job.allocation:
            return "Its nodes go away."
        return f"There is room on {counted(counts[job.id], 'slot')} to continue after epoch {job.epoch}."
