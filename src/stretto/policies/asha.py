"""Asynchronous successive halving (ASHA): a trial that reaches a rung is judged by those that came before it.

- `promote`: the trial is promoted if it is among the best floor(n / eta) of the n trials at its rung,
  otherwise it is paused. A free GPU goes to the paused trial that can be promoted now from the highest rung,
  or else to a new trial.
- `stop`: the trial continues unless it is below the (1 - 1/eta) quantile of its rung; then it is stopped.

Spare GPUs that neither a paused nor a new trial can use stay free, or are shared among the running trials
(`share`). Shares are set when the trials or the GPUs to share change, and a running trial takes its new share
at its next result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from stretto.core.decision import Decision
from stretto.policies.base import ClusterView, JobView, Memory
from stretto.policies.trials import (
    TrialPolicy,
    decide_counts,
    is_diverged,
    metric_text,
    quiet_note,
    share_with_unseen,
    why_waits,
    within,
)
from stretto.search.halving import Rung, finite_score, hopeless, order, promotable, score_at

Variant = Literal["promote", "stop"]
"""What happens to a trial that is not among the best of its rung: it is paused, or stopped."""


@dataclass(frozen=True, kw_only=True)
class Asha(TrialPolicy):
    """Asynchronous successive halving."""

    name: ClassVar[str] = "asha"
    variant: Variant = "promote"

    def decide_trials(self, trials: ClusterView, memory: Memory) -> tuple[Decision, Memory]:
        return AsynchronousTurn(self, trials, memory, self.tuning.study.rungs, self.variant).decide()


class AsynchronousTurn:
    """One decision: results are recorded and judged, then free GPUs are used.

    `epochs` are those of the rungs. Without rungs every trial runs to its end.
    """

    def __init__(
        self, policy: TrialPolicy, view: ClusterView, memory: Memory, epochs: Sequence[int], variant: Variant
    ) -> None:
        self._view = view
        self._tuning = policy.tuning
        self._study = policy.tuning.study
        self._epochs = epochs
        self._variant = variant
        self._share = policy.share
        if memory is None:
            rungs = [Rung().to_memory() for _ in epochs]
            memory = {"begun": 0, "rungs": rungs, "passed": {}, "paused": {}, "shares": {}}
        self._trials = {job.id: job for job in view.jobs}
        self._here = {*self._trials, *view.paused}
        self._begun: int = memory["begun"]
        self._rungs = [Rung.from_memory(rung) for rung in memory["rungs"]]
        self._passed = self._of_those_here(memory["passed"])
        """How many rungs each started trial has passed."""
        self._paused = self._of_those_here(memory["paused"])
        """The index of the rung at which each paused trial is."""
        self._shares: dict[str, Any] = memory["shares"]
        self._stops: dict[str, str] = {}
        self._why: dict[str, str] = {}

    def _of_those_here(self, remembered: dict[str, int]) -> dict[str, int]:
        gone = remembered.keys() - self._here
        return {trial: number for trial, number in remembered.items() if trial not in gone}

    def _trial(self, trial: str) -> JobView:
        return self._trials.get(trial) or self._view.paused[trial]

    def decide(self) -> tuple[Decision, dict[str, Any]]:
        self._cut_diverged()
        while reached := self._reached():
            self._record(reached)
            for trial in reached:
                self._judge(trial)
        self._give_up_hopeless()
        counts = self._counts()
        for job in self._view.jobs:
            self._why.setdefault(job.id, self._otherwise(job, counts))
        memory = {
            "begun": self._begun,
            "rungs": [rung.to_memory() for rung in self._rungs],
            "passed": self._passed,
            "paused": self._paused,
            "shares": self._shares,
            "quiet": quiet_note(self._view, self._stops, self._watch(counts)),
        }
        return decide_counts(self._view, counts, self._why, stops=self._stops), memory

    def _racing(self) -> list[str]:
        """Trials that have started and are neither paused nor stopped."""
        return [trial for trial in self._passed if trial not in self._paused]

    def _stop(self, trial: str, why: str) -> None:
        self._stops[trial] = why
        del self._passed[trial]
        self._paused.pop(trial, None)

    def _cut_diverged(self) -> None:
        for trial in self._racing():
            job, passed = self._trial(trial), self._passed[trial]
            if is_diverged(job):
                self._stop(trial, f"Its metric is not a number after epoch {job.epoch}.")
                if passed < len(self._rungs):
                    self._rungs[passed] = self._rungs[passed].add(trial, None)

    def _reached(self) -> list[str]:
        """Trials that have reached their next rung."""
        return [
            trial
            for trial in self._racing()
            if self._passed[trial] < len(self._epochs)
            and self._trial(trial).epoch >= self._epochs[self._passed[trial]]
        ]

    def _record(self, trials: Sequence[str]) -> None:
        """Record the scores of all trials that reached a rung, before any of them is judged."""
        for trial in trials:
            at = self._passed[trial]
            score = score_at(self._study, self._trial(trial).results, self._epochs[at])
            self._rungs[at] = self._rungs[at].add(trial, score)
            self._passed[trial] = at + 1

    def _judge(self, trial: str) -> None:
        at = self._passed[trial] - 1
        rung, eta = self._rungs[at], self._study.eta
        score = rung.score(trial)
        if self._variant == "promote":
            if trial not in rung.going_on(eta):
                self._paused[trial] = at
                self._why[trial] = f"With {metric_text(self._study, score)} {self._standing(trial, at)}"
            return
        cutoff = rung.cutoff(eta)
        if score is None or (cutoff is not None and score < cutoff):
            shown, least = metric_text(self._study, score), metric_text(self._study, cutoff)
            self._stop(trial, f"At epoch {self._epochs[at]} with {shown}; the cut-off is {least}.")

    def _standing(self, trial: str, at: int) -> str:
        rung = self._rungs[at]
        return (
            f"rank {rung.rank(trial)} of {len(rung)} at epoch {self._epochs[at]}; "
            f"the best {len(rung) // self._study.eta} are promoted."
        )

    def _give_up_hopeless(self) -> None:
        if not self._paused:
            return
        to_come = self._study.trials - self._begun
        lost = hopeless(self._rungs, self._paused, self._passed, to_come, self._study.eta)
        for trial, most in lost.items():
            at = self._paused[trial]
            rank = self._rungs[at].rank(trial)
            self._stop(
                trial, f"Rank {rank} at epoch {self._epochs[at]}; at most {most} can still be promoted."
            )

    def _counts(self) -> dict[str, int]:
        """GPUs of each trial: first running trials, then interrupted, promoted and new ones."""
        gpus = self._view.total_gpus
        held = {job.id: job.allocation.worker_count for job in self._view.jobs if job.allocation}
        racing = self._racing()
        counts = within(gpus, {trial: held[trial] for trial in racing if trial in held})
        running = [trial for trial in racing if trial in counts]
        interrupted = [trial for trial in racing if trial not in counts]
        fresh = [trial for trial in self._trials if trial not in self._passed and trial not in self._stops]
        queue = [*interrupted, *promotable(self._rungs, self._paused, self._study.eta), *fresh]
        if not racing and not queue:
            for trial, at in list(self._paused.items()):
                self._stop(trial, f"No trial is left to compare it with: {self._standing(trial, at)}")
        if self._share != "none":
            self._set_shares(running, queue, self._study.trials - self._begun - len(fresh))
        return self._sized(counts, running, queue)

    def _sized(self, counts: dict[str, int], running: Sequence[str], queue: Sequence[str]) -> dict[str, int]:
        """In this order: running trials shrink, trials in the queue start, running trials grow."""
        reported = [trial for trial in running if self._may_resize(trial)]
        for trial in reported:
            if self._target(trial) < counts[trial]:
                counts[trial] = self._target(trial)
                self._why[trial] = f"Its share of the slots is down to {counts[trial]}."
        free = self._view.total_gpus - sum(counts.values())
        for trial in queue:
            if free:
                counts[trial] = min(self._target(trial), free)
                free -= counts[trial]
                self._start(trial)
        for trial in reported:
            more = self._target(trial) - counts[trial]
            if 0 < more <= free:
                counts[trial] += more
                free -= more
                self._why[trial] = f"No other trial can use them: its share of the slots is {counts[trial]}."
        return counts

    def _start(self, trial: str) -> None:
        if trial in self._paused:
            self._why[trial] = f"Now {self._standing(trial, self._paused.pop(trial))}"
        elif trial in self._passed:
            self._why[trial] = "It was interrupted, and a slot is free to continue."
        else:
            self._begun += 1
            self._passed[trial] = 0
            self._why[trial] = f"Trial {self._begun} of {self._study.trials}: a slot is free for it."

    def _set_shares(self, running: Sequence[str], queue: Sequence[str], unseen: int) -> None:
        """Set the shares again if the trials that share, or their GPUs, have changed."""
        gpus = self._view.total_gpus
        crowd = [*running, *queue[: gpus - len(running)]]
        names, expected = sorted(crowd), min(unseen, gpus - len(crowd))
        basis = [gpus, expected]
        if self._shares and self._shares["crowd"] == names and self._shares["basis"] == basis:
            return
        best_first = sorted(crowd, key=self._latest_order)
        self._shares = {
            "crowd": names,
            "basis": basis,
            "gpus": share_with_unseen(self._tuning, best_first, expected, gpus, self._share),
            "since": {trial: self._trial(trial).epoch for trial in names},
        }

    def _latest_order(self, trial: str) -> tuple[bool, float, str]:
        results = self._trial(trial).results
        return order(finite_score(self._study, results[-1].value) if results else None, trial)

    def _target(self, trial: str) -> int:
        return int(self._shares["gpus"].get(trial, 1)) if self._shares else 1

    def _may_resize(self, trial: str) -> bool:
        """Whether the trial has reported a result since the shares were set."""
        return bool(self._shares) and self._trial(trial).epoch > self._shares["since"][trial]

    def _watch(self, counts: dict[str, int]) -> dict[str, int]:
        """The epoch at which each running trial needs a decision: at its next rung, or for a resize."""
        watch = {}
        for trial, count in counts.items():
            passed = self._passed.get(trial)
            if passed is not None:
                rung = self._epochs[passed] if passed < len(self._epochs) else self._study.max_epochs
                watch[trial] = rung if self._target(trial) == count else self._trial(trial).epoch + 1
        return watch

    def _otherwise(self, job: JobView, counts: dict[str, int]) -> str:
        if job.id in counts:
            return "Its nodes go away."
        if job.allocation:
            return "There are fewer slots than running trials."
        return why_waits(job)
